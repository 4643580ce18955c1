//! Gives lanes of VMs to clients, on a socket of their own: a lane is a descriptor, which no gRPC call can carry.

use std::time::Duration;

use imp_protocol::lane::{LONGEST_ID, give};
use imp_runtime::{Lane, Runtime, VmId};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use crate::caller::is_user;

/// How long a client may take to say which VM it means.
const FIRST_WORD: Duration = Duration::from_secs(10);
/// Pause after a connection that was not accepted.
const PAUSE: Duration = Duration::from_millis(100);

pub(crate) async fn serve(listener: UnixListener, runtime: Runtime) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => drop(tokio::spawn(one_client(client, runtime.clone()))),
            Err(error) => {
                tracing::error!(%error, "cannot accept");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Hangs up on a client that there is no lane for, and keeps others from the lane for as long as this one is there.
async fn one_client(mut client: UnixStream, runtime: Runtime) {
    if !is_user(&client) {
        return;
    }
    let Ok(Some(id)) = tokio::time::timeout(FIRST_WORD, vm(&mut client)).await else { return };
    let lane = match runtime.lane(&id).await {
        Ok(Some(lane)) => lane,
        Ok(None) => return,
        Err(error) => return tracing::debug!(vm = %id, %error, "no lane"),
    };
    let Lane { stream, number, .. } = &lane;
    if let Err(error) = give(&client, stream, *number) {
        return tracing::debug!(vm = %id, %error, "a client did not wait for its lane");
    }
    // Whatever else it says, until it hangs up.
    let mut said = [0; 64];
    while client.read(&mut said).await.is_ok_and(|count| count > 0) {}
    drop(lane);
}

async fn vm(client: &mut UnixStream) -> Option<VmId> {
    let mut line = Vec::new();
    let mut reader = BufReader::new(client.take(LONGEST_ID as u64 + 1));
    reader.read_until(b'\n', &mut line).await.ok()?;
    let id = line.strip_suffix(b"\n")?;
    std::str::from_utf8(id).ok()?.parse().ok()
}
