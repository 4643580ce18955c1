//! Gives snapshots that are pinned here to peers that may have them.

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use super::PeerName;
use super::tls::{self, Credentials};
use crate::blob::digest::Digest;
use crate::snapshots::artifact::Wanted;
use crate::snapshots::error::Error;
use crate::snapshots::leaving::Leaving;
use crate::snapshots::manifest::Part;
use crate::snapshots::packed::pack;
use crate::snapshots::{Snapshot, stored};
use crate::store::{Store, pins};

/// Connections at once; more wait until one ends.
const MOST_CONNECTIONS: usize = 64;
/// Chunks that are read and compressed at once; who asks for more is told to come again.
const MOST_READS: usize = 8;
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Longest silence between two requests, within the head of one, and of a peer that does not read its answer.
const SILENCE: Duration = Duration::from_secs(30);
/// A connection ends after so long, whoever keeps it busy.
const LONGEST: Duration = Duration::from_secs(3600);
/// More than any head of a request that is understood.
const LARGEST_HEAD: usize = 16 << 10;
/// After a connection could not be taken, because there are too many files, say.
const REST: Duration = Duration::from_millis(100);

/// A server for peers.
pub struct Server {
    store: Arc<Store>,
    tls: TlsAcceptor,
    authorised: Vec<PeerName>,
    /// Given away besides those that are pinned; they stay as long as the server.
    offered: Vec<Snapshot>,
    reads: Semaphore,
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    Template(Digest),
    Manifest(Digest),
    Index(Digest, Part),
    Chunk(Digest, Part, u64),
}

/// The snapshot that a connection asked for last: its files stay open, and it stays in the store.
type Last = Mutex<Option<Arc<Leaving>>>;

impl Server {
    /// `authorised`: names of which a peer's certificate must have one.
    pub fn new(
        store: Arc<Store>,
        credentials: &Credentials,
        authorised: Vec<PeerName>,
    ) -> Result<Arc<Self>, tls::Error> {
        Self::offering(store, credentials, authorised, Vec::new())
    }

    /// As `new`, and gives these away, too, pinned or not.
    pub fn offering(
        store: Arc<Store>,
        credentials: &Credentials,
        authorised: Vec<PeerName>,
        offered: Vec<Snapshot>,
    ) -> Result<Arc<Self>, tls::Error> {
        let tls = TlsAcceptor::from(Arc::new(credentials.server()?));
        Ok(Arc::new(Self { store, tls, authorised, offered, reads: Semaphore::new(MOST_READS) }))
    }

    /// Serves until it is dropped; what was begun on a connection then ends with it.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        let connections = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        let mut tasks = tokio::task::JoinSet::new();
        loop {
            let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
            while tasks.try_join_next().is_some() {}
            match listener.accept().await {
                Ok((stream, from)) => {
                    let server = Arc::clone(&self);
                    tasks.spawn(async move {
                        if let Err(error) = tokio::time::timeout(LONGEST, server.connection(stream)).await {
                            tracing::debug!(%from, %error, "a peer's connection lasted too long");
                        }
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a peer's connection could not be taken");
                    tokio::time::sleep(REST).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let shaken = tokio::time::timeout(HANDSHAKE, self.tls.accept(stream)).await;
        let stream = match shaken.map_err(io::Error::from).flatten() {
            Ok(stream) => stream,
            Err(error) => return tracing::info!(%error, "a peer was refused"),
        };
        let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let may_ask = certificate.is_some_and(|certificate| tls::has_name(certificate, &self.authorised));
        if !may_ask {
            tracing::info!("a peer was refused: its certificate has none of the names that may ask");
        }
        let last: Arc<Last> = Arc::default();
        let service = service_fn(|request: Request<Incoming>| {
            let (server, last) = (Arc::clone(&self), Arc::clone(&last));
            async move {
                let answer = if may_ask { server.answer(&request, last).await } else { Err(Refusal::Name) };
                Ok::<_, Infallible>(response(answer))
            }
        });
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(SILENCE));
        let served = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(SILENCE)
            .max_buf_size(LARGEST_HEAD)
            .serve_connection(TokioIo::new(Box::pin(stream)), service)
            .await;
        if let Err(error) = served {
            tracing::debug!(%error, "a peer's connection was cut");
        }
    }

    async fn answer<B>(self: Arc<Self>, request: &Request<B>, last: Arc<Last>) -> Result<Vec<u8>, Refusal> {
        if request.method() != Method::GET {
            return Err(Refusal::Method);
        }
        let wish = parse(request.uri().path()).ok_or(Refusal::NotThere)?;
        let Ok(_reading) = self.reads.try_acquire() else { return Err(Refusal::Busy) };
        let server = Arc::clone(&self);
        let read = tokio::task::spawn_blocking(move || server.read(wish, &last)).await;
        read.unwrap_or(Err(Refusal::Failed))
    }

    fn read(&self, wish: Wish, last: &Last) -> Result<Vec<u8>, Refusal> {
        match wish {
            Wish::Template(template) => {
                let found = stored::find(&self.store.layout, &template).map_err(failed)?;
                let found = found.ok_or(Refusal::NotThere)?;
                self.pinned(&found)?;
                Ok(found.to_string().into_bytes())
            }
            Wish::Manifest(digest) => Ok(self.leaving(&digest, last)?.manifest.clone()),
            Wish::Index(digest, part) => {
                let leaving = self.leaving(&digest, last)?;
                let index = leaving.indexes.iter().find(|(known, _)| *known == part);
                index.map(|(_, index)| index.bytes()).ok_or(Refusal::NotThere)
            }
            Wish::Chunk(digest, part, number) => {
                let leaving = self.leaving(&digest, last)?;
                let index = leaving.indexes.iter().find(|(known, _)| *known == part);
                let chunk = index.and_then(|(_, index)| index.get(number)).ok_or(Refusal::NotThere)?;
                let wanted =
                    Wanted { digest: chunk.digest, length: chunk.length, part, offset: chunk.offset };
                let content = leaving.read(&wanted).map_err(failed)?;
                pack(&content).map_err(|_| Refusal::Failed)
            }
        }
    }

    fn leaving(&self, digest: &Digest, last: &Last) -> Result<Arc<Leaving>, Refusal> {
        self.pinned(digest)?;
        let known = last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(known) = known.filter(|known| known.snapshot.digest == *digest) {
            return Ok(known);
        }
        let opened = Arc::new(Leaving::open(&self.store, digest).map_err(failed)?);
        *last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&opened));
        Ok(opened)
    }

    /// Only what is kept here on purpose is given away.
    fn pinned(&self, digest: &Digest) -> Result<(), Refusal> {
        if self.offered.iter().any(|snapshot| snapshot.digest == *digest) {
            return Ok(());
        }
        let pins = pins::list(&self.store.layout).map_err(|error| failed(error.into()))?;
        if pins.iter().any(|pin| pin.key == *digest) { Ok(()) } else { Err(Refusal::NotThere) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    Name,
    Method,
    NotThere,
    Busy,
    Failed,
}

fn failed(error: Error) -> Refusal {
    match error {
        Error::NoSnapshot(_) | Error::Local { .. } => Refusal::NotThere,
        error => {
            tracing::warn!(%error, "a snapshot could not be given to a peer");
            Refusal::Failed
        }
    }
}

fn response(answer: Result<Vec<u8>, Refusal>) -> Response<Full<Bytes>> {
    let (status, body) = match answer {
        Ok(body) => (StatusCode::OK, body),
        Err(Refusal::Name) => (StatusCode::FORBIDDEN, Vec::new()),
        Err(Refusal::Method) => (StatusCode::METHOD_NOT_ALLOWED, Vec::new()),
        Err(Refusal::NotThere) => (StatusCode::NOT_FOUND, Vec::new()),
        Err(Refusal::Busy) => (StatusCode::SERVICE_UNAVAILABLE, Vec::new()),
        Err(Refusal::Failed) => (StatusCode::INTERNAL_SERVER_ERROR, Vec::new()),
    };
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    if status == StatusCode::FORBIDDEN {
        // Who may not ask keeps no other from it.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// What a path means; None if it is none of this server's.
fn parse(path: &str) -> Option<Wish> {
    let mut words = path.strip_prefix("/v1/")?.split('/');
    let mut next = || words.next();
    let (kind, digest) = (next()?, Digest::from_hex(next()?).ok()?);
    let wish = match (kind, next(), next(), next()) {
        ("templates", None, None, None) => Wish::Template(digest),
        ("snapshots", Some("manifest"), None, None) => Wish::Manifest(digest),
        ("snapshots", Some(part), Some("index"), None) => Wish::Index(digest, parse_part(part)?),
        ("snapshots", Some(part), Some("chunks"), Some(number)) => {
            Wish::Chunk(digest, parse_part(part)?, number.parse().ok()?)
        }
        _ => return None,
    };
    words.next().is_none().then_some(wish)
}

fn parse_part(text: &str) -> Option<Part> {
    Part::ALL.into_iter().find(|part| part.name() == text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_mean_what_the_documents_say_and_nothing_else() {
        let digest = Digest::of(b"x");
        let hex = digest.hex();
        for (path, wish) in [
            (format!("/v1/templates/{hex}"), Some(Wish::Template(digest))),
            (format!("/v1/snapshots/{hex}/manifest"), Some(Wish::Manifest(digest))),
            (format!("/v1/snapshots/{hex}/state/index"), Some(Wish::Index(digest, Part::State))),
            (format!("/v1/snapshots/{hex}/memory/chunks/7"), Some(Wish::Chunk(digest, Part::Memory, 7))),
            (format!("/v1/snapshots/{hex}/memory/chunks/7/8"), None),
            (format!("/v1/snapshots/{hex}/memory/chunks/-1"), None),
            (format!("/v1/snapshots/{hex}/memory/chunks/99999999999999999999"), None),
            (format!("/v1/snapshots/{hex}/etc/index"), None),
            (format!("/v1/snapshots/{hex}/../manifest"), None),
            (format!("/v1/snapshots/{}/manifest", &hex[1..]), None),
            (format!("/v2/snapshots/{hex}/manifest"), None),
            ("/".into(), None),
        ] {
            assert_eq!(parse(&path), wish, "{path}");
        }
    }

    #[test]
    fn a_peer_that_may_not_ask_keeps_no_connection() {
        let closes = |refusal| response(Err(refusal)).headers().get(header::CONNECTION).cloned();
        assert_eq!(closes(Refusal::Name), Some(HeaderValue::from_static("close")));
        assert_eq!(closes(Refusal::Busy), None);
    }

    proptest! {
        #[test]
        fn no_path_makes_the_parser_panic(path in "/v1/(snapshots|templates)/[0-9a-f/.]{0,90}|\\PC{0,50}") {
            parse(&path);
        }
    }
}
