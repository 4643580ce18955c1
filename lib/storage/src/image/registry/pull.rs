//! A pull: what a reference means for a platform, then its blobs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::attempts::{Attempts, Resort};
use super::download::{download, places};
use super::endpoint::endpoints;
use super::error::Error;
use super::session::{Access, Session};
use super::settings::RegistrySettings;
use super::transport::Transport;
use crate::blob::BlobStore;
use crate::blob::digest::Digest;
use crate::image::manifest::{self, ACCEPT, DEEPEST, Descriptor, Document, Manifest};
use crate::image::platform::Platform;
use crate::image::reference::Reference;
use crate::progress::Progress;

/// Most downloads at once that settings may ask for.
const MOST_PARALLEL: usize = 16;

/// The image that a reference means on a platform.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    /// What the reference itself names: the image, or an index that leads to it.
    pub(crate) target: Digest,
    /// The manifest, byte for byte.
    pub(crate) bytes: Vec<u8>,
    pub(crate) manifest: Manifest,
    /// Position of the server that knew it.
    server: usize,
}

/// The connections of one pull. To be made, used and dropped on a thread that runs no async code.
pub(crate) struct Pull<'a> {
    runtime: Runtime,
    transport: Arc<Transport>,
    sessions: Vec<Session>,
    reference: &'a Reference,
    progress: &'a dyn Progress,
}

/// A document with the digest it was found to have.
struct Verified {
    digest: Digest,
    bytes: Vec<u8>,
    document: Document,
}

impl<'a> Pull<'a> {
    pub(crate) fn new(
        reference: &'a Reference,
        settings: &RegistrySettings,
        progress: &'a dyn Progress,
    ) -> Result<Self, Error> {
        let servers = endpoints(reference, settings)?;
        // The threads of the downloads do the work; this one only moves the sockets.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(Error::Runtime)?;
        let transport = {
            let _entered = runtime.enter();
            Arc::new(Transport::new(settings)?)
        };
        let session =
            |endpoint| Session::new(Arc::clone(&transport), endpoint, reference.repository(), Access::Pull);
        let sessions = servers.into_iter().map(session).collect();
        Ok(Self { runtime, transport, sessions, reference, progress })
    }

    /// Asks what the reference means; of several servers the first that knows it counts.
    pub(crate) fn resolve(&self, platform: &Platform) -> Result<Found, Error> {
        let mut last = None;
        for (server, session) in self.sessions.iter().enumerate() {
            match self.runtime.block_on(self.resolve_at(session, platform, server)) {
                Ok(found) => return Ok(found),
                Err(error) => {
                    tracing::debug!(host = session.host(), %error, "a server did not give the image");
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or_else(|| Error::NotFound { reference: self.reference.clone() }))
    }

    async fn resolve_at(
        &self,
        session: &Session,
        platform: &Platform,
        server: usize,
    ) -> Result<Found, Error> {
        let mut document = match (self.reference.digest(), self.reference.tag()) {
            (Some(digest), _) => self.manifest(session, &digest.to_string(), Some(digest), "").await?,
            (None, tag) => self.manifest(session, tag.unwrap_or_default(), None, "").await?,
        };
        let target = document.digest;
        for _ in 0..=DEEPEST {
            let index = match document.document {
                Document::Image(manifest) => {
                    return Ok(Found { target, bytes: document.bytes, manifest: *manifest, server });
                }
                Document::Index(index) => index,
            };
            let chosen = index.choose(platform).map_err(|source| self.unusable(source))?;
            let name = chosen.digest.to_string();
            document = self.manifest(session, &name, Some(&chosen.digest), &chosen.media_type).await?;
        }
        Err(self.unusable(manifest::Error::TooDeep))
    }

    /// Fetches and verifies one document. `described` is the media type that a descriptor gave.
    async fn manifest(
        &self,
        session: &Session,
        name: &str,
        expected: Option<&Digest>,
        described: &str,
    ) -> Result<Verified, Error> {
        let is_last = self.sessions.last().is_some_and(|last| std::ptr::eq(last, session));
        let resort = if is_last { Resort::Last } else { Resort::Another };
        let what = format!("manifest {name}");
        let mut attempts = Attempts::new(self.transport.settings(), resort, what, self.progress);
        loop {
            match self.manifest_once(session, name, expected, described).await {
                Err(Error::Status { code: 404, .. }) => {
                    return Err(Error::NotFound { reference: self.reference.clone() });
                }
                Err(error) => attempts.failed(error).await?,
                done => return done,
            }
        }
    }

    async fn manifest_once(
        &self,
        session: &Session,
        name: &str,
        expected: Option<&Digest>,
        described: &str,
    ) -> Result<Verified, Error> {
        let response = session.get(&format!("manifests/{name}"), Some(ACCEPT), 0).await?;
        let header = |name: &str| {
            response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let content_type = header("content-type");
        // A registry that names its content by an algorithm other than ours says nothing that can be checked.
        let promised: Option<Digest> = header("docker-content-digest").parse().ok();
        let bytes = self.transport.read(response, manifest::LARGEST).await?;
        let found = Digest::of(&bytes);
        if let Some(expected) = expected.or(promised.as_ref()).filter(|expected| **expected != found) {
            let (host, reference) = (session.host().to_owned(), Box::new(self.reference.clone()));
            return Err(Error::WrongManifest { host, reference, expected: *expected, found });
        }
        let kind = if described.is_empty() { &content_type } else { described };
        let document = manifest::parse(&bytes, kind).map_err(|source| self.unusable(source))?;
        Ok(Verified { digest: found, bytes, document })
    }

    fn unusable(&self, source: manifest::Error) -> Error {
        Error::Manifest { reference: self.reference.clone(), source: Box::new(source) }
    }

    /// Brings all blobs of the image into the store. The first failure ends the others.
    pub(crate) fn download(&self, found: &Found, store: &BlobStore) -> Result<(), Error> {
        let mut sessions: Vec<&Session> = self.sessions.iter().collect();
        sessions.rotate_left(found.server.min(self.sessions.len()));
        let queue: VecDeque<&Descriptor> =
            [&found.manifest.config].into_iter().chain(&found.manifest.layers).collect();
        let threads = self.transport.settings().parallel_downloads.clamp(1, MOST_PARALLEL).min(queue.len());
        let queue = Mutex::new(queue);
        let first_error = Mutex::new(None);
        let (stop, stopped) = watch::channel(false);
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let work = || {
            while let Some(blob) = next() {
                let mut stopped = stopped.clone();
                let places = places(&sessions, blob);
                let done = self.runtime.block_on(async {
                    tokio::select! {
                        done = download(&places, blob, store, self.progress) => Some(done),
                        _ = stopped.wait_for(|stopped| *stopped) => None,
                    }
                });
                match done {
                    Some(Ok(())) => {}
                    Some(Err(error)) => {
                        first_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        stop.send_replace(true);
                        return;
                    }
                    None => return,
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(work);
            }
        });
        match first_error.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}
