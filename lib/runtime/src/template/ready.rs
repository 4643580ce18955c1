//! Waits until a guest is ready to be made a template of.

use std::num::NonZeroU16;
use std::time::Duration;

use bytes::Bytes;
use imp_protocol::connection::Connection;
use imp_protocol::guest::ports_client::PortsClient;
use imp_protocol::guest::{ForwardInput, OpenPort, forward_input, forward_output};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;

use super::guest::{self, End};
use super::{Probe, Readiness};
use crate::id::VmId;
use crate::logs::{LogEnd, LogQuery, LogReader, LogStream};
use crate::runtime::{self, Runtime};
use crate::spec::MainProcess;

/// Between two looks.
const AGAIN: Duration = Duration::from_millis(50);
/// What one look may take.
const LOOK: Duration = Duration::from_secs(10);
/// The longest first line of an HTTP answer that is read.
const LONGEST_LINE: usize = 4 << 10;
/// The longest line of a log that is looked at.
const LONGEST_LOG_LINE: usize = 64 << 10;

/// Why it is not ready, as it was last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NotReady(pub String);

/// Looks again and again, each time over the connection that there is then.
pub(super) async fn wait(
    runtime: &Runtime,
    id: &VmId,
    readiness: &Readiness,
    main: &MainProcess,
) -> Result<(), NotReady> {
    if let Probe::Log(text) = &readiness.probe {
        let query = LogQuery { end: LogEnd::Follow, ..LogQuery::default() };
        let printed =
            async { printed(runtime.logs(id, query).await.map_err(not_seen)?, text.as_bytes()).await };
        let late = || NotReady(format!("the main process did not print {text:?}"));
        return timeout(readiness.at_most, printed).await.map_err(|_| late())?;
    }
    let deadline = Instant::now() + readiness.at_most;
    let mut last = NotReady("it did not answer".to_owned());
    loop {
        let look = deadline.saturating_duration_since(Instant::now()).min(LOOK);
        let seen = async {
            let hold = runtime.connected(id).await.map_err(not_seen)?;
            probe(&readiness.probe, &hold.connection(), main, look).await
        };
        match timeout(look, seen).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(seen)) => last = seen,
            // One that was cut short says less than the one before.
            Err(_) => {}
        }
        if Instant::now() >= deadline {
            return Err(last);
        }
        sleep(AGAIN).await;
    }
}

fn not_seen(error: runtime::Error) -> NotReady {
    NotReady(error.to_string())
}

async fn probe(
    probe: &Probe,
    connection: &Connection,
    main: &MainProcess,
    at_most: Duration,
) -> Result<(), NotReady> {
    match probe {
        Probe::Command(arguments) => {
            let done = guest::run(connection, arguments, main, at_most).await;
            match done.end {
                End::Code(0) => Ok(()),
                end => Err(NotReady(format!("{arguments}: {end}: {}", done.output))),
            }
        }
        Probe::Port(port) => talk(connection, *port, None).await.map(drop),
        Probe::Http { port, path } => {
            let request = format!(
                "GET {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: imp\r\nConnection: close\r\n\r\n"
            );
            let line = talk(connection, *port, Some(request.into())).await?;
            answer(&line)
        }
        // Waited for, not looked at.
        Probe::Log(_) => Ok(()),
    }
}

/// Connects to a port of the guest; the first line of the answer to `say`.
async fn talk(connection: &Connection, port: NonZeroU16, say: Option<Bytes>) -> Result<Vec<u8>, NotReady> {
    let lost = |status: tonic::Status| NotReady(status.message().to_owned());
    let (input, inputs) = mpsc::channel(2);
    let open = OpenPort { port: port.get().into(), address: String::new() };
    // Room for both: the queue is empty.
    let _ = input.try_send(ForwardInput { input: Some(forward_input::Input::Open(open)) });
    let wants_answer = say.is_some();
    if let Some(say) = say {
        let _ = input.try_send(ForwardInput { input: Some(forward_input::Input::Data(say)) });
    }
    let forwarded = PortsClient::new(connection.clone()).forward(ReceiverStream::new(inputs)).await;
    let mut outputs = forwarded.map_err(lost)?.into_inner();
    let mut line = Vec::new();
    while let Some(output) = outputs.message().await.map_err(lost)? {
        match output.output {
            Some(forward_output::Output::Opened(_)) if !wants_answer => return Ok(line),
            Some(forward_output::Output::Data(data)) => {
                line.extend_from_slice(&data);
                if line.contains(&b'\n') || line.len() > LONGEST_LINE {
                    return Ok(line);
                }
            }
            Some(forward_output::Output::Opened(_)) | None => {}
        }
    }
    Ok(line)
}

fn answer(line: &[u8]) -> Result<(), NotReady> {
    let line = line.split(|byte| *byte == b'\r' || *byte == b'\n').next().unwrap_or_default();
    let text = String::from_utf8_lossy(line);
    let mut words = text.split(' ');
    let is_http = words.next().is_some_and(|version| version.starts_with("HTTP/1."));
    let status = words.next().and_then(|status| status.parse::<u16>().ok());
    match status {
        Some(200..=399) if is_http => Ok(()),
        Some(_) | None => Err(NotReady(format!("it answered {text:?}"))),
    }
}

async fn printed(mut log: LogReader, text: &[u8]) -> Result<(), NotReady> {
    let mut line = Vec::new();
    while let Some(entry) = log.next().await.map_err(|error| NotReady(error.to_string()))? {
        if entry.stream == LogStream::Note {
            continue;
        }
        for piece in entry.data.split_inclusive(|byte| *byte == b'\n') {
            line.extend_from_slice(piece);
            if line.windows(text.len().max(1)).any(|window| window == text) {
                return Ok(());
            }
            if piece.ends_with(b"\n") {
                line.clear();
            }
            let excess = line.len().saturating_sub(LONGEST_LOG_LINE);
            line.drain(..excess);
        }
    }
    Err(NotReady("the main process ended without having printed it".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_that_means_success_is_ready() {
        for (line, ready) in [
            ("HTTP/1.1 200 OK\r\nx", true),
            ("HTTP/1.0 302 Found\r\n", true),
            ("HTTP/1.1 500 Oh\r\n", false),
            ("HTTP/1.1 404\r\n", false),
            ("SSH-2.0-OpenSSH 200\r\n", false),
            ("", false),
        ] {
            assert_eq!(answer(line.as_bytes()).is_ok(), ready, "{line:?}");
        }
    }
}
