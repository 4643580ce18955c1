//! `imp port-forward`

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use imp_protocol::connection::Connection;
use imp_protocol::guest::machine_client::MachineClient;
use imp_protocol::guest::ports_client::PortsClient;
use imp_protocol::guest::{CloseStdin, ForwardInput, OpenPort, PingRequest, forward_input, forward_output};
use imp_runtime::status::State;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Largest piece of a connection that is sent at once.
const CHUNK: usize = 32 << 10;
/// Pieces on their way.
const QUEUE: usize = 8;
/// Pause after a connection that could not be accepted, as when too many files are open.
const REST: Duration = Duration::from_millis(100);

/// Lead ports of this machine to ports of a VM, as long as this command runs
#[derive(Debug, Args)]
pub(crate) struct PortForward {
    /// Name, id, or the beginning of an id
    vm: String,
    /// The port here and the one in the guest; `PORT` alone means the same port, `:GUEST-PORT` a free one here
    #[arg(required = true, value_name = "[LOCAL]:GUEST-PORT")]
    ports: Vec<Pair>,
    /// Address of this machine to listen on
    #[arg(long, value_name = "ADDRESS", default_value_t = Ipv4Addr::LOCALHOST.into())]
    address: IpAddr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pair {
    local: u16,
    guest: NonZeroU16,
}

#[derive(Debug, thiserror::Error)]
#[error("write LOCAL:GUEST-PORT, :GUEST-PORT or PORT, from 1 to 65535")]
struct NotAPair;

impl FromStr for Pair {
    type Err = NotAPair;

    fn from_str(text: &str) -> Result<Self, NotAPair> {
        let (local, guest) = text.split_once(':').unwrap_or((text, text));
        let guest = guest.parse().map_err(|_| NotAPair)?;
        let local = if local.is_empty() { 0 } else { local.parse().map_err(|_| NotAPair)? };
        Ok(Self { local, guest })
    }
}

impl PortForward {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        context.block_on(async {
            let owner = context.owner().await?;
            let vm = owner.inspect(&self.vm).await?;
            let connection = owner.guest(&vm.id);
            // Asked for something, so that a VM which cannot be reached says why before anything is promised.
            MachineClient::new(connection.clone()).ping(PingRequest::default()).await.map_err(|status| refused(&status))?;
            let mut listeners = tokio::task::JoinSet::new();
            for pair in self.ports {
                let address = SocketAddr::new(self.address, pair.local);
                let listener =
                    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
                output::print(&format!("{} -> {}:{}\n", listener.local_addr()?, self.vm, pair.guest))?;
                listeners.spawn(accept(listener, connection.clone(), pair.guest));
            }
            tokio::select! {
                vm_ended = owner.wait(vm.id.as_str(), State::Stopped) => Err(match vm_ended {
                    Ok(vm) => anyhow::anyhow!("{} has stopped, and its ports with it", vm.name),
                    Err(error) => error.into(),
                }.into()),
                () = connection.closed() => Err(anyhow::anyhow!("the owner of the VMs has ended; run the command again").into()),
                _ = listeners.join_next() => Err(anyhow::anyhow!("cannot accept connections any more").into()),
            }
        })?
    }
}

async fn accept(listener: TcpListener, connection: Connection, port: NonZeroU16) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                output::warn(&format!("port {port}: a connection was not accepted: {error}"));
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let connection = connection.clone();
        tokio::spawn(async move {
            if let Err(error) = forward(stream, connection, port).await {
                output::warn(&format!("port {port}: {error:#}"));
            }
        });
    }
}

/// One connection, until both sides have said all.
async fn forward(stream: TcpStream, connection: Connection, port: NonZeroU16) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let (read, write) = stream.into_split();
    let (inputs, input) = mpsc::channel(QUEUE);
    let open = OpenPort { port: port.get().into(), address: String::new() };
    inputs.send(ForwardInput { input: Some(forward_input::Input::Open(open)) }).await?;
    let mut client = PortsClient::new(connection);
    let outputs =
        client.forward(ReceiverStream::new(input)).await.map_err(|status| refused(&status))?.into_inner();
    let out = tokio::spawn(to_guest(read, inputs));
    let result = from_guest(outputs, write).await;
    out.abort();
    result
}

fn refused(status: &tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}

async fn to_guest(mut read: OwnedReadHalf, inputs: mpsc::Sender<ForwardInput>) {
    let mut buffer = vec![0; CHUNK];
    loop {
        let input = match read.read(&mut buffer).await {
            Ok(0) | Err(_) => forward_input::Input::ShutDownWrite(CloseStdin {}),
            Ok(read) => forward_input::Input::Data(bytes::Bytes::copy_from_slice(
                buffer.get(..read).unwrap_or_default(),
            )),
        };
        let last = matches!(input, forward_input::Input::ShutDownWrite(_));
        if inputs.send(ForwardInput { input: Some(input) }).await.is_err() {
            return;
        }
        if last {
            // The end of the inputs would be taken for the end of the connection.
            inputs.closed().await;
            return;
        }
    }
}

async fn from_guest(
    mut outputs: tonic::Streaming<imp_protocol::guest::ForwardOutput>,
    mut write: OwnedWriteHalf,
) -> anyhow::Result<()> {
    while let Some(output) = outputs.message().await.map_err(|status| refused(&status))? {
        if let Some(forward_output::Output::Data(data)) = output.output {
            write.write_all(&data).await?;
        }
    }
    write.shutdown().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_ports_are_written_as_for_kubectl() {
        let pair = |text: &str| text.parse::<Pair>().ok().map(|pair| (pair.local, pair.guest.get()));
        assert_eq!(pair("8080:80"), Some((8080, 80)));
        assert_eq!(pair("80"), Some((80, 80)));
        assert_eq!(pair(":80"), Some((0, 80)));
        for bad in ["", ":", "80:", "x:1", "1:0", "70000:1", "1:2:3"] {
            assert_eq!(pair(bad), None, "{bad}");
        }
    }
}
