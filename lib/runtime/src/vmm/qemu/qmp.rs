//! QEMU's control protocol (docs/interop/qmp-spec of QEMU): JSON lines, every wait with a deadline, every line bounded.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_util::codec::{FramedRead, LinesCodec, LinesCodecError};

/// A QEMU that has not answered by then is stuck. Long, because a machine under load may stop it for seconds.
const ANSWER: Duration = Duration::from_secs(30);
const LONGEST_LINE: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no answer to {command} within {} s", ANSWER.as_secs())]
    Late { command: &'static str },
    #[error("the control connection was closed before {command} was answered")]
    Closed { command: &'static str },
    #[error("{command} was refused: {class}: {description}")]
    Refused { command: &'static str, class: String, description: String },
    #[error("the control connection failed")]
    Connection(#[from] io::Error),
    #[error("a line on the control connection could not be read")]
    Line(#[from] LinesCodecError),
    #[error("the control connection began with {line:?} instead of a greeting")]
    NoGreeting { line: String },
}

/// Why the guest stopped, when QEMU said so before it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shutdown {
    PoweredOff,
    Reset,
}

/// How a migration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Migration {
    Completed,
    Failed,
}

/// Sees the end of a migration that begins later.
#[derive(Debug)]
pub(crate) struct Outcome(watch::Receiver<Option<Migration>>);

impl Outcome {
    pub(crate) async fn ended(
        &mut self,
        command: &'static str,
        patience: Duration,
    ) -> Result<Migration, Error> {
        let ended = async {
            loop {
                self.0.changed().await.map_err(|_| Error::Closed { command })?;
                if let Some(end) = *self.0.borrow_and_update() {
                    return Ok(end);
                }
            }
        };
        timeout(patience, ended).await.map_err(|_| Error::Late { command })?
    }
}

/// A control connection after its handshake. It ends with its last clone.
#[derive(Debug, Clone)]
pub(crate) struct Qmp {
    commands: mpsc::Sender<Request>,
    shutdown: watch::Receiver<Option<Shutdown>>,
    migration: watch::Receiver<Option<Migration>>,
    resets: watch::Receiver<u32>,
}

#[derive(Debug)]
struct Request {
    command: &'static str,
    arguments: Value,
    answer: oneshot::Sender<Result<Value, Refusal>>,
}

#[derive(Debug)]
struct Refusal {
    class: String,
    description: String,
}

type Waiting = Arc<Mutex<HashMap<u64, oneshot::Sender<Result<Value, Refusal>>>>>;

impl Qmp {
    pub(crate) async fn handshake(stream: UnixStream) -> Result<Self, Error> {
        let (read, write) = stream.into_split();
        let mut lines = FramedRead::new(read, LinesCodec::new_with_max_length(LONGEST_LINE));
        let greeting = timeout(ANSWER, lines.next())
            .await
            .map_err(|_| Error::Late { command: "the connection" })?
            .ok_or(Error::Closed { command: "the connection" })??;
        let is_greeting = serde_json::from_str::<Value>(&greeting).is_ok_and(|v| v.get("QMP").is_some());
        if !is_greeting {
            return Err(Error::NoGreeting { line: greeting.chars().take(80).collect() });
        }
        let waiting = Waiting::default();
        let (commands, requests) = mpsc::channel(8);
        let (announce, shutdown) = watch::channel(None);
        let (moved, migration) = watch::channel(None);
        tokio::spawn(write_requests(write, requests, Arc::clone(&waiting)));
        let (reset, resets) = watch::channel(0);
        tokio::spawn(read_answers(
            lines,
            waiting,
            Events { shutdown: announce, migration: moved, resets: reset },
        ));
        let qmp = Self { commands, shutdown, migration, resets };
        qmp.execute("qmp_capabilities").await?;
        Ok(qmp)
    }

    /// Executes a command without arguments.
    pub(crate) async fn execute(&self, command: &'static str) -> Result<Value, Error> {
        self.execute_with(command, json!({})).await
    }

    pub(crate) async fn execute_with(&self, command: &'static str, arguments: Value) -> Result<Value, Error> {
        let (answer, answered) = oneshot::channel();
        let whole = async {
            let request = Request { command, arguments, answer };
            self.commands.send(request).await.map_err(|_| Error::Closed { command })?;
            answered.await.map_err(|_| Error::Closed { command })
        };
        let result = timeout(ANSWER, whole).await.map_err(|_| Error::Late { command })??;
        result.map_err(|Refusal { class, description }| Error::Refused { command, class, description })
    }

    /// What becomes of the migration that is started next; its events have to be switched on.
    pub(crate) fn migration(&self) -> Outcome {
        let mut receiver = self.migration.clone();
        receiver.mark_unchanged();
        Outcome(receiver)
    }

    /// Waits until the guest has been reset so often; false if the connection was closed before.
    pub(crate) async fn reset(&self, times: u32) -> bool {
        self.resets.clone().wait_for(|resets| *resets >= times).await.is_ok()
    }

    /// Waits until QEMU has closed the connection; says why the guest stopped if that was announced.
    pub(crate) async fn closed(&self) -> Option<Shutdown> {
        let mut shutdown = self.shutdown.clone();
        while shutdown.changed().await.is_ok() {}
        *shutdown.borrow()
    }
}

async fn write_requests(mut write: OwnedWriteHalf, mut requests: mpsc::Receiver<Request>, waiting: Waiting) {
    let mut id = 0_u64;
    while let Some(Request { command, arguments, answer }) = requests.recv().await {
        id += 1;
        lock(&waiting).insert(id, answer);
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments, "id": id}));
        if let Err(error) = write.write_all(line.as_bytes()).await {
            tracing::debug!(%error, "control connection ended");
            lock(&waiting).clear();
            return;
        }
    }
}

/// Where each kind of event goes.
struct Events {
    shutdown: watch::Sender<Option<Shutdown>>,
    migration: watch::Sender<Option<Migration>>,
    resets: watch::Sender<u32>,
}

async fn read_answers(mut lines: FramedRead<OwnedReadHalf, LinesCodec>, waiting: Waiting, events: Events) {
    while let Some(line) = lines.next().await {
        let message = match line {
            Ok(line) => serde_json::from_str(&line).unwrap_or(Value::Null),
            Err(error) => {
                tracing::warn!(%error, "control connection broke");
                break;
            }
        };
        match Message::parse(&message) {
            Message::Answer { id, result } => {
                if let Some(answer) = lock(&waiting).remove(&id) {
                    // The asker may have given up.
                    let _ = answer.send(result);
                }
            }
            Message::Shutdown(shutdown) => {
                events.shutdown.send_replace(Some(shutdown));
            }
            Message::Migration(end) => {
                events.migration.send_replace(Some(end));
            }
            Message::Reset => events.resets.send_modify(|resets| *resets = resets.saturating_add(1)),
            Message::Other => {}
        }
    }
    lock(&waiting).clear();
}

fn lock(
    waiting: &Waiting,
) -> std::sync::MutexGuard<'_, HashMap<u64, oneshot::Sender<Result<Value, Refusal>>>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

enum Message {
    Answer { id: u64, result: Result<Value, Refusal> },
    Shutdown(Shutdown),
    Migration(Migration),
    Reset,
    Other,
}

impl Message {
    fn parse(message: &Value) -> Self {
        let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
        if let Some(id) = message.get("id").and_then(Value::as_u64) {
            let result = match (message.get("return"), message.get("error")) {
                (Some(value), _) => Ok(value.clone()),
                (None, error) => {
                    let part = |name| text(error.and_then(|e| e.get(name)));
                    Err(Refusal { class: part("class"), description: part("desc") })
                }
            };
            return Self::Answer { id, result };
        }
        let event = text(message.get("event"));
        let detail = |name| text(message.pointer(name));
        match (event.as_str(), detail("/data/reason").as_str(), detail("/data/status").as_str()) {
            ("SHUTDOWN", "guest-shutdown", _) => Self::Shutdown(Shutdown::PoweredOff),
            ("SHUTDOWN", "guest-reset" | "guest-panic", _) => Self::Shutdown(Shutdown::Reset),
            ("RESET", "guest-reset", _) => Self::Reset,
            ("MIGRATION", _, "completed") => Self::Migration(Migration::Completed),
            ("MIGRATION", _, "failed" | "cancelled") => Self::Migration(Migration::Failed),
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, BufReader};

    use super::*;

    /// A QEMU that greets, answers the handshake, then sends what it is told to for each command.
    fn fake(answers: Vec<String>) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(async move {
            let (read, mut write) = theirs.into_split();
            let mut lines = BufReader::new(read).lines();
            write.write_all(b"{\"QMP\": {\"version\": {}}}\n").await.unwrap();
            let handshake = std::iter::once("{\"return\": {}, \"id\": 1}".to_owned());
            for answer in handshake.chain(answers) {
                if lines.next_line().await.unwrap().is_none() {
                    return;
                }
                write.write_all(answer.as_bytes()).await.unwrap();
                write.write_all(b"\n").await.unwrap();
            }
        });
        ours
    }

    #[tokio::test]
    async fn an_answer_is_found_among_events_and_noise() {
        let answer =
            "{\"event\": \"RTC_CHANGE\"}\nnoise\n{\"return\": 9, \"id\": 77}\n{\"return\": 5, \"id\": 2}";
        let qmp = Qmp::handshake(fake(vec![answer.into()])).await.unwrap();
        assert_eq!(qmp.execute("stop").await.unwrap(), json!(5));
    }

    #[tokio::test]
    async fn a_refusal_says_what_was_refused_and_why() {
        let answer = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}, \"id\": 2}";
        let qmp = Qmp::handshake(fake(vec![answer.into()])).await.unwrap();
        let error = qmp.execute("cont").await.unwrap_err();
        assert_eq!(error.to_string(), "cont was refused: GenericError: no");
    }

    #[tokio::test]
    async fn the_reason_of_a_shutdown_is_kept_until_the_connection_has_closed() {
        for (reason, shutdown) in [
            ("guest-shutdown", Some(Shutdown::PoweredOff)),
            ("guest-reset", Some(Shutdown::Reset)),
            ("host-signal", None),
        ] {
            let event = json!({"event": "SHUTDOWN", "data": {"guest": true, "reason": reason}});
            let qmp = Qmp::handshake(fake(vec![event.to_string()])).await.unwrap();
            assert!(matches!(qmp.execute("stop").await, Err(Error::Closed { command: "stop" })));
            assert_eq!(qmp.closed().await, shutdown, "{reason}");
        }
    }

    #[tokio::test]
    async fn resets_are_counted_until_the_connection_closes() {
        let event = |reason| json!({"event": "RESET", "data": {"guest": true, "reason": reason}}).to_string();
        let events = [event("guest-reset"), event("subsystem-reset"), event("guest-reset")].join("\n");
        let qmp = Qmp::handshake(fake(vec![events])).await.unwrap();
        assert!(matches!(qmp.execute("stop").await, Err(Error::Closed { command: "stop" })));
        assert!(qmp.reset(2).await);
        assert!(!qmp.reset(3).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_is_given_up() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(matches!(Qmp::handshake(ours).await, Err(Error::Late { .. })));
    }

    #[tokio::test]
    async fn a_line_without_end_is_given_up() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let flood = tokio::spawn(async move { while theirs.write_all(&[b'x'; 1 << 16]).await.is_ok() {} });
        assert!(matches!(Qmp::handshake(ours).await, Err(Error::Line(_))));
        flood.await.unwrap();
    }

    #[tokio::test]
    async fn another_protocol_is_named() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"SSH-2.0\n").await.unwrap();
        assert!(matches!(Qmp::handshake(ours).await, Err(Error::NoGreeting { .. })));
    }
}
