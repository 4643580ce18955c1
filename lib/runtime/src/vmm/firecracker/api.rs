//! A client of Firecracker's API (its swagger file is src/firecracker/swagger/firecracker.yaml): JSON over HTTP on a unix
//! socket, every wait with a deadline, every answer bounded.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use crate::process::Process;

/// A Firecracker that has not answered by then is stuck. Long, because a call may read or write all of a guest's memory.
const ANSWER: Duration = Duration::from_secs(60);
/// How long a new process may take to listen.
const LISTENS: Duration = Duration::from_secs(20);
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LONGEST_LOOK: Duration = Duration::from_millis(2);
const LONGEST_ANSWER: usize = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot connect to {}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} ended before it took orders; see what it said in {}", program, log.display())]
    Ended { program: &'static str, log: PathBuf },
    #[error("{call} was not sent")]
    Send {
        call: Call,
        #[source]
        source: hyper::Error,
    },
    #[error("no answer to {call} within {} s", ANSWER.as_secs())]
    Late { call: Call },
    #[error("the answer to {call} broke off")]
    Answer {
        call: Call,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{call} was refused: {fault}")]
    Refused { call: Call, fault: String },
    #[error("the answer to {call} is not what Firecracker's API says")]
    Unreadable {
        call: Call,
        #[source]
        source: serde_json::Error,
    },
}

/// What was asked for, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub method: Method,
    pub path: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Get,
    Put,
    Patch,
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let method = match self.method {
            Method::Get => "GET",
            Method::Put => "PUT",
            Method::Patch => "PATCH",
        };
        write!(f, "{method} {}", self.path)
    }
}

/// A call with what it carries.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request {
    pub call: Call,
    pub body: Value,
}

impl Request {
    pub(crate) fn put(path: impl Into<String>, body: Value) -> Self {
        Self { call: Call { method: Method::Put, path: path.into() }, body }
    }

    pub(crate) fn patch(path: impl Into<String>, body: Value) -> Self {
        Self { call: Call { method: Method::Patch, path: path.into() }, body }
    }
}

/// One connection, for calls one after the other.
#[derive(Debug)]
pub(crate) struct Session(SendRequest<Full<Bytes>>);

impl Session {
    pub(crate) async fn open(socket: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Connect { path: socket.to_owned(), source };
        let stream = super::socket::connect(socket).await.map_err(failed)?;
        let (sender, connection) =
            handshake(TokioIo::new(stream)).await.map_err(|error| failed(io::Error::other(error)))?;
        // It ends with its sender.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to Firecracker ended");
            }
        });
        Ok(Self(sender))
    }

    /// Waits for a process that was just started, and notices its end.
    pub(crate) async fn open_new(socket: &Path, process: &Process, log: &Path) -> Result<Self, Error> {
        let deadline = Instant::now() + LISTENS;
        let mut pause = FIRST_LOOK;
        loop {
            match Self::open(socket).await {
                Ok(session) => return Ok(session),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => {}
            }
            tokio::select! {
                () = sleep(pause) => pause = (pause * 2).min(LONGEST_LOOK),
                () = process.gone() => {
                    return Err(Error::Ended { program: "firecracker", log: log.to_owned() });
                }
            }
        }
    }

    pub(crate) async fn make(&mut self, request: Request) -> Result<(), Error> {
        let Request { call, body } = request;
        self.answered(&call, body.to_string()).await.map(drop)
    }

    /// What Firecracker says of itself there.
    pub(crate) async fn ask<T: DeserializeOwned>(&mut self, path: impl Into<String>) -> Result<T, Error> {
        let call = Call { method: Method::Get, path: path.into() };
        let answer = self.answered(&call, String::new()).await?;
        serde_json::from_slice(&answer).map_err(|source| Error::Unreadable { call, source })
    }

    async fn answered(&mut self, call: &Call, body: String) -> Result<Bytes, Error> {
        match timeout(ANSWER, self.exchange(call, body)).await {
            Ok(result) => result,
            Err(_) => Err(Error::Late { call: call.clone() }),
        }
    }

    async fn exchange(&mut self, call: &Call, body: String) -> Result<Bytes, Error> {
        let method = match call.method {
            Method::Get => http::Method::GET,
            Method::Put => http::Method::PUT,
            Method::Patch => http::Method::PATCH,
        };
        let mut request = http::Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = method;
        // Paths are made of names of ours.
        *request.uri_mut() = call.path.parse().unwrap_or_default();
        let headers = request.headers_mut();
        headers.insert(http::header::HOST, http::HeaderValue::from_static("localhost"));
        headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
        let send = |source| Error::Send { call: call.clone(), source };
        self.0.ready().await.map_err(send)?;
        let response = self.0.send_request(request).await.map_err(send)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LONGEST_ANSWER).collect().await;
        let body = body.map_err(|source| Error::Answer { call: call.clone(), source })?.to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        Err(Error::Refused { call: call.clone(), fault: fault(status, &body) })
    }
}

/// What Firecracker says in `fault_message`, on one line.
fn fault(status: http::StatusCode, body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Fault {
        fault_message: String,
    }
    match serde_json::from_slice::<Fault>(body) {
        Ok(fault) => fault.fault_message.split_whitespace().collect::<Vec<_>>().join(" "),
        Err(_) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    /// A server that says these answers in turn; what it was asked is kept.
    fn server(answers: Vec<&str>) -> (tempfile::TempDir, PathBuf, Arc<Mutex<String>>) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let asked = Arc::new(Mutex::new(String::new()));
        let heard = Arc::clone(&asked);
        let answers: Vec<String> = answers.into_iter().map(str::to_owned).collect();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            for answer in answers {
                let mut buffer = vec![0; 64 << 10];
                let count = stream.read(&mut buffer).await.unwrap();
                heard.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..count]));
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            std::future::pending::<()>().await;
        });
        (directory, path, asked)
    }

    const DONE: &str = "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n";
    const REFUSED: &str =
        "HTTP/1.1 400 \r\nContent-Length: 41\r\n\r\n{\"fault_message\":\"Cannot\\n open  it: no\"}";

    fn start() -> Request {
        Request::put("/actions", json!({"action_type": "InstanceStart"}))
    }

    #[tokio::test]
    async fn calls_go_over_one_connection_and_a_refusal_says_what_firecracker_says() {
        let (_directory, path, asked) = server(vec![DONE, REFUSED]);
        let mut session = Session::open(&path).await.unwrap();
        session.make(start()).await.unwrap();
        let error = session.make(Request::patch("/vm", json!({"state": "Paused"}))).await.unwrap_err();
        assert_eq!(error.to_string(), "PATCH /vm was refused: Cannot open it: no");
        let asked = asked.lock().unwrap().to_lowercase();
        assert!(
            asked.starts_with("put /actions http/1.1\r\n") && asked.contains("content-length: 31"),
            "{asked}"
        );
        assert!(
            asked.contains("patch /vm http/1.1\r\n") && asked.ends_with("{\"state\":\"paused\"}"),
            "{asked}"
        );
    }

    #[tokio::test]
    async fn what_firecracker_says_is_read_and_nonsense_is_an_error() {
        let state = "HTTP/1.1 200 \r\nContent-Length: 23\r\n\r\n{\"state\":\"Not started\"}";
        let (_directory, path, asked) = server(vec![state, DONE]);
        let mut session = Session::open(&path).await.unwrap();
        let said: Value = session.ask("/").await.unwrap();
        assert_eq!(said, json!({"state": "Not started"}));
        let error = session.ask::<Value>("/balloon").await.unwrap_err();
        assert!(error.to_string().contains("GET /balloon"), "{error}");
        let asked = asked.lock().unwrap().to_lowercase();
        assert!(
            asked.starts_with("get / http/1.1\r\n") && asked.contains("get /balloon http/1.1"),
            "{asked}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_firecracker_that_does_not_answer_is_given_up() {
        let (_directory, path, _asked) = server(vec![""]);
        let mut session = Session::open(&path).await.unwrap();
        assert!(matches!(session.make(start()).await, Err(Error::Late { .. })));
    }

    #[tokio::test]
    async fn an_answer_that_is_too_long_is_given_up() {
        let flood =
            format!("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{}", "x".repeat(2 * LONGEST_ANSWER));
        let (_directory, path, _asked) = server(vec![&flood]);
        let mut session = Session::open(&path).await.unwrap();
        assert!(matches!(session.make(start()).await, Err(Error::Answer { .. })));
    }

    #[tokio::test]
    async fn a_process_that_ends_before_it_listens_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = rustix::process::Pid::from_raw(child.id().cast_signed()).unwrap();
        let process = Process::of_child(pid).unwrap();
        let socket = directory.path().join("api.sock");
        let error = Session::open_new(&socket, &process, Path::new("/log")).await.unwrap_err();
        assert!(matches!(error, Error::Ended { .. }), "{error}");
        child.wait().unwrap();
    }
}
