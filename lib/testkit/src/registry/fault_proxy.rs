//! An HTTP proxy that passes requests on to a registry, or does to them what tests want to see survived.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Longest head of a request or an answer.
const LONGEST_HEAD: usize = 64 << 10;
/// How often a stalled answer looks whether its client has gone.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A request as the proxy saw it.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub path: String,
    /// Names are lower case.
    pub headers: Vec<(String, String)>,
    head: String,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn is_blob(&self) -> bool {
        self.path.contains("/blobs/")
    }

    pub fn is_manifest(&self) -> bool {
        self.path.contains("/manifests/")
    }
}

/// What happens to a request. Positions count bytes of the body.
#[derive(Debug, Clone)]
pub enum Reaction {
    /// The registry answers.
    Forward,
    /// The registry answers another request than was made: the same without `Range`.
    ForwardWhole,
    /// The registry never hears of it.
    Answer { status: u16, headers: Vec<(String, String)>, body: Vec<u8> },
    /// The connection ends within the body.
    Cut { after: usize },
    /// One byte of the body is another.
    Corrupt { at: usize },
    /// The answer stops within the body, and the connection stays open.
    Stall { after: usize },
    /// The answer is complete, and so much longer than promised.
    Append { bytes: usize },
    /// A header of the answer has another value.
    Header { name: String, value: String },
}

impl Reaction {
    pub fn status(status: u16, headers: &[(&str, &str)], body: &str) -> Self {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Self::Answer { status, headers, body: body.as_bytes().to_vec() }
    }
}

/// The proxy, on a port of its own of 127.0.0.1. It ends with this value.
#[derive(Debug)]
pub struct FaultProxy {
    address: String,
    seen: Arc<Mutex<Vec<Request>>>,
    stopped: Arc<AtomicBool>,
}

impl FaultProxy {
    /// `react` is asked for every request, in its order of arrival.
    pub fn start(
        registry: &str,
        react: impl Fn(&Request) -> Reaction + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let stopped = Arc::new(AtomicBool::new(false));
        let (registry, react) = (registry.to_owned(), Arc::new(react));
        let proxy = Self { address, seen: Arc::clone(&seen), stopped: Arc::clone(&stopped) };
        thread::spawn(move || {
            for client in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(client) = client else { continue };
                let (registry, react) = (registry.clone(), Arc::clone(&react));
                let (seen, stopped) = (Arc::clone(&seen), Arc::clone(&stopped));
                // A client that goes away is no failure of the proxy.
                thread::spawn(move || drop(serve(client, &registry, &*react, &seen, &stopped)));
            }
        });
        Ok(proxy)
    }

    /// HOST:PORT
    pub fn address(&self) -> &str {
        &self.address
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        // Wakes the listener, so that it sees the end.
        drop(TcpStream::connect(&self.address));
    }
}

fn serve(
    mut client: TcpStream,
    registry: &str,
    react: &dyn Fn(&Request) -> Reaction,
    seen: &Mutex<Vec<Request>>,
    stopped: &AtomicBool,
) -> io::Result<()> {
    let Some((head, sent)) = read_head(&mut client)? else {
        client.write_all(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")?;
        return finish(client);
    };
    let Some(request) = parse(head) else { return Ok(()) };
    seen.lock().unwrap_or_else(PoisonError::into_inner).push(request.clone());
    let reaction = react(&request);
    if let Reaction::Answer { status, headers, body } = reaction {
        let mut head =
            format!("HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
        head.extend(headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")));
        client.write_all(format!("{head}\r\n").as_bytes())?;
        client.write_all(&body)?;
        return finish(client);
    }
    let mut upstream = TcpStream::connect(registry)?;
    let mut head = forwarded(&request.head, registry);
    if matches!(reaction, Reaction::ForwardWhole) {
        head = replaced(&head, "range", None);
    }
    upstream.write_all(head.as_bytes())?;
    upstream.write_all(&sent)?;
    let length: u64 = request.header("content-length").and_then(|value| value.parse().ok()).unwrap_or(0);
    io::copy(&mut Read::by_ref(&mut client).take(length.saturating_sub(sent.len() as u64)), &mut upstream)?;
    let Some((head, body)) = read_head(&mut upstream)? else { return Ok(()) };
    let body = body.as_slice().chain(upstream);
    match reaction {
        Reaction::Forward | Reaction::ForwardWhole | Reaction::Answer { .. } => {
            copy(head, body, &mut client)?
        }
        Reaction::Cut { after } => copy(head, body.take(after as u64), &mut client)?,
        Reaction::Corrupt { at } => {
            client.write_all(head.as_bytes())?;
            let mut body = body;
            io::copy(&mut body.by_ref().take(at as u64), &mut client)?;
            let mut byte = [0];
            body.read_exact(&mut byte)?;
            client.write_all(&[byte[0] ^ 0xff])?;
            io::copy(&mut body, &mut client)?;
        }
        Reaction::Stall { after } => {
            copy(head, body.take(after as u64), &mut client)?;
            client.set_read_timeout(Some(LOOK_AGAIN))?;
            while !stopped.load(Ordering::SeqCst) && !matches!(client.read(&mut [0]), Ok(0)) {}
        }
        Reaction::Append { bytes } => {
            let head = replaced(&head, "content-length", None);
            copy(head, body.chain(io::repeat(b'+').take(bytes as u64)), &mut client)?;
        }
        Reaction::Header { name, value } => copy(replaced(&head, &name, Some(&value)), body, &mut client)?,
    }
    finish(client)
}

/// Ends the connection only after what was sent has been read: closing with unread input would reset it.
fn finish(mut client: TcpStream) -> io::Result<()> {
    client.shutdown(Shutdown::Write)?;
    client.set_read_timeout(Some(Duration::from_secs(5)))?;
    io::copy(&mut client, &mut io::sink()).map(drop)
}

fn copy(head: String, mut body: impl Read, client: &mut TcpStream) -> io::Result<()> {
    client.write_all(head.as_bytes())?;
    io::copy(&mut body, client).map(drop)
}

/// Reads up to the empty line; what came after it is returned beside it.
fn read_head(stream: &mut TcpStream) -> io::Result<Option<(String, Vec<u8>)>> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    while bytes.len() < LONGEST_HEAD {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let rest = bytes.split_off(end + 4);
            return Ok(String::from_utf8(bytes).ok().map(|head| (head, rest)));
        }
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            return Ok(None);
        }
        bytes.extend(buffer.iter().take(count));
        // Whoever begins like this speaks TLS, and waits for an answer before it says more.
        if !bytes.first().is_some_and(u8::is_ascii_uppercase) {
            return Ok(None);
        }
    }
    Ok(None)
}

fn parse(head: String) -> Option<Request> {
    let mut lines = head.lines();
    let mut words = lines.next()?.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let headers = lines.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    });
    let headers = headers.collect();
    Some(Request { method, path, headers, head })
}

fn forwarded(head: &str, registry: &str) -> String {
    replaced(&replaced(head, "host", Some(registry)), "connection", Some("close"))
}

/// The head with another value for one header, or without it.
fn replaced(head: &str, name: &str, value: Option<&str>) -> String {
    let is_other =
        |line: &&str| !line.split_once(':').is_some_and(|(known, _)| known.eq_ignore_ascii_case(name));
    let mut lines: Vec<String> = head.trim_end().lines().filter(is_other).map(str::to_owned).collect();
    lines.extend(value.map(|value| format!("{name}: {value}")));
    format!("{}\r\n\r\n", lines.join("\r\n"))
}
