//! Artifacts that are no images: their manifests and blobs, fetched and pushed whole, from and to one repository.

use std::sync::Arc;

use bytes::Bytes;
use reqwest::header::LOCATION;
use reqwest::{Method, StatusCode, Url};
use tokio::runtime::Runtime;

use super::attempts::{Attempts, Resort};
use super::endpoint::{endpoints, is_allowed};
use super::error::Error;
use super::session::{Access, Session};
use super::settings::RegistrySettings;
use super::transport::{Send, Transport};
use crate::blob::digest::Digest;
use crate::blob::{self};
use crate::image::manifest::LARGEST;
use crate::image::reference::Reference;
use crate::progress::Progress;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Whether a blob had to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushed {
    Sent,
    WasThere,
}

/// A repository. To be made, used and dropped on threads that run no async code.
pub(crate) struct Repository<'a> {
    runtime: Runtime,
    transport: Arc<Transport>,
    /// The servers to ask, in order; the last is the registry itself.
    sessions: Vec<Session>,
    reference: &'a Reference,
    progress: &'a dyn Progress,
}

impl<'a> Repository<'a> {
    /// To read from, mirrors first.
    pub(crate) fn to_pull(
        reference: &'a Reference,
        settings: &RegistrySettings,
        progress: &'a dyn Progress,
    ) -> Result<Self, Error> {
        Self::new(reference, settings, Access::Pull, progress)
    }

    /// To write to, which no mirror is for.
    pub(crate) fn to_push(
        reference: &'a Reference,
        settings: &RegistrySettings,
        progress: &'a dyn Progress,
    ) -> Result<Self, Error> {
        Self::new(reference, settings, Access::Push, progress)
    }

    fn new(
        reference: &'a Reference,
        settings: &RegistrySettings,
        access: Access,
        progress: &'a dyn Progress,
    ) -> Result<Self, Error> {
        let mut servers = endpoints(reference, settings)?;
        if access == Access::Push {
            servers.drain(..servers.len().saturating_sub(1));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(Error::Runtime)?;
        let transport = {
            let _entered = runtime.enter();
            Arc::new(Transport::new(settings)?)
        };
        let session =
            |endpoint| Session::new(Arc::clone(&transport), endpoint, reference.repository(), access);
        let sessions = servers.into_iter().map(session).collect();
        Ok(Self { runtime, transport, sessions, reference, progress })
    }

    /// The manifest that the reference means, verified if the reference has a digest.
    pub(crate) fn manifest(&self) -> Result<Vec<u8>, Error> {
        let digest = self.reference.digest().map(Digest::to_string);
        let name = digest.as_deref().or(self.reference.tag()).unwrap_or_default().to_owned();
        let bytes = self.first(&format!("manifest {name}"), async |session: &Session| {
            let response = session.get(&format!("manifests/{name}"), Some(MANIFEST), 0).await?;
            self.transport.read(response, LARGEST).await
        });
        match bytes {
            Err(Error::Status { code: 404, .. }) => {
                Err(Error::NotFound { reference: self.reference.clone() })
            }
            Ok(bytes) => {
                let found = Digest::of(&bytes);
                match self.reference.digest().filter(|expected| **expected != found) {
                    None => Ok(bytes),
                    Some(expected) => Err(Error::WrongManifest {
                        host: self.reference.domain().to_owned(),
                        reference: Box::new(self.reference.clone()),
                        expected: *expected,
                        found,
                    }),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// A blob of exactly so many bytes, from the first server that has it, verified.
    pub(crate) fn blob(&self, digest: &Digest, size: u64) -> Result<Vec<u8>, Error> {
        self.first(&format!("blob {}", digest.short()), async |session: &Session| {
            let response = session.get(&format!("blobs/{digest}"), None, 0).await?;
            let bytes = self.transport.read(response, size).await?;
            let found = bytes.len() as u64;
            if found < size {
                return Err(blob::Error::Truncated { digest: *digest, expected: size, found }.into());
            }
            let found = Digest::of(&bytes);
            if found == *digest {
                Ok(bytes)
            } else {
                Err(blob::Error::WrongDigest { expected: *digest, found }.into())
            }
        })
    }

    /// Asks one server after the other, each as often as is worth it.
    fn first<T>(&self, what: &str, ask: impl AsyncFn(&Session) -> Result<T, Error>) -> Result<T, Error> {
        let mut last = None;
        for (position, session) in self.sessions.iter().enumerate() {
            let resort = if position + 1 < self.sessions.len() { Resort::Another } else { Resort::Last };
            match self.repeated(what, resort, async || ask(session).await) {
                Ok(found) => return Ok(found),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| Error::NotFound { reference: self.reference.clone() }))
    }

    fn repeated<T>(
        &self,
        what: &str,
        resort: Resort,
        ask: impl AsyncFn() -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.runtime.block_on(async {
            let settings = self.transport.settings();
            let mut attempts = Attempts::new(settings, resort, what.to_owned(), self.progress);
            loop {
                match ask().await {
                    Ok(done) => return Ok(done),
                    Err(error) => attempts.failed(error).await?,
                }
            }
        })
    }

    /// Sends a blob, unless it is there.
    pub(crate) fn push_blob(&self, digest: &Digest, bytes: Bytes) -> Result<Pushed, Error> {
        let session = self.registry()?;
        self.repeated(&format!("blob {}", digest.short()), Resort::Last, async || {
            let head = Send { method: Method::HEAD, content_type: None, body: Bytes::new() };
            match session.send(&head, session.url(&format!("blobs/{digest}"))?).await {
                // Who says where else it is has it.
                Ok(_) | Err(Error::Status { code: 300..400, .. }) => return Ok(Pushed::WasThere),
                Err(Error::Status { code: 404, .. }) => {}
                Err(error) => return Err(error),
            }
            let begin = Send { method: Method::POST, content_type: None, body: Bytes::new() };
            let begun = session.send(&begin, session.url("blobs/uploads/")?).await?;
            let mut to = self.upload(session, &begun)?;
            to.query_pairs_mut().append_pair("digest", &digest.to_string());
            let kind = Some("application/octet-stream");
            let put = Send { method: Method::PUT, content_type: kind, body: bytes.clone() };
            let sent = session.send(&put, to).await?;
            if sent.status() == StatusCode::CREATED {
                Ok(Pushed::Sent)
            } else {
                Err(self.transport.refusal(sent).await)
            }
        })
    }

    /// Where a registry that was asked wants a blob sent.
    fn upload(&self, session: &Session, begun: &reqwest::Response) -> Result<Url, Error> {
        let no_upload = || Error::NoUpload { host: session.host().to_owned() };
        let location = begun.headers().get(LOCATION).and_then(|value| value.to_str().ok());
        let to = begun.url().join(location.ok_or_else(no_upload)?).map_err(|_| no_upload())?;
        if is_allowed(&to, self.transport.settings()) {
            Ok(to)
        } else {
            let to = format!("{}://{}", to.scheme(), to.host_str().unwrap_or_default());
            Err(Error::Redirect { host: session.host().to_owned(), to })
        }
    }

    /// Gives the artifact its name; all its blobs must be there.
    pub(crate) fn push_manifest(&self, bytes: Vec<u8>) -> Result<(), Error> {
        let session = self.registry()?;
        let digest = Digest::of(&bytes).to_string();
        let name = self.reference.tag().unwrap_or(&digest);
        let body = Bytes::from(bytes);
        self.repeated(&format!("manifest {name}"), Resort::Last, async || {
            let put = Send { method: Method::PUT, content_type: Some(MANIFEST), body: body.clone() };
            session.send(&put, session.url(&format!("manifests/{name}"))?).await.map(drop)
        })
    }

    fn registry(&self) -> Result<&Session, Error> {
        self.sessions.last().ok_or_else(|| Error::NotFound { reference: self.reference.clone() })
    }
}
