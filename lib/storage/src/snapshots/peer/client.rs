//! Finds and gets snapshots at a peer. What it sends is verified like everything that comes from elsewhere.

use tokio::runtime::Runtime;

use super::Peer;
use crate::blob::digest::Digest;
use crate::image::registry;
use crate::image::registry::attempts::{Attempts, Resort};
use crate::image::registry::transport::{Get, Transport};
use crate::progress::Progress;
use crate::snapshots::arriving::{Incoming, receive};
use crate::snapshots::artifact::Wanted;
use crate::snapshots::error::Error;
use crate::snapshots::manifest::{self, Part};
use crate::snapshots::packed::{largest_packed, unpack};
use crate::snapshots::{Arrival, Snapshots, apart, chunks, incoming};
use crate::store::Store;

/// Chunks that are asked for at once.
const PARALLEL: usize = 4;
/// More than any digest has, bytes.
const LONGEST_DIGEST: u64 = 100;

pub(in crate::snapshots) fn fetch(
    snapshots: &Snapshots<'_>,
    digest: &Digest,
    from: &Peer,
    progress: &dyn Progress,
) -> Result<Arrival, Error> {
    apart(|| {
        let connection = Connection::new(snapshots.store, from, progress)?;
        let name = from.name.to_string();
        let bytes = connection.get(&format!("snapshots/{}/manifest", digest.hex()), manifest::LARGEST)?;
        let manifest = incoming::manifest(&name, digest, &bytes)?;
        let index = |part: Part| {
            let path = format!("snapshots/{}/{part}/index", digest.hex());
            incoming::index(&name, &manifest, part, &connection.get(&path, chunks::MOST * 32)?)
        };
        let indexes = [index(Part::Memory)?, index(Part::State)?, index(Part::Scratch)?];
        let sizes = indexes.each_ref().map(|(part, index)| (*part, index.chunk_size()));
        let fetch = |wanted: &Wanted| {
            let size = sizes.iter().find(|(part, _)| *part == wanted.part).map_or(1, |(_, size)| *size);
            let path =
                format!("snapshots/{}/{}/chunks/{}", digest.hex(), wanted.part, wanted.offset / size.max(1));
            let packed = connection.get(&path, largest_packed(wanted.length))?;
            let wrong = || Error::WrongChunk { from: name.clone(), part: wanted.part, at: wanted.offset };
            unpack(&packed, wanted.length).ok_or_else(wrong)
        };
        let incoming = Incoming {
            digest: *digest,
            manifest: manifest.clone(),
            bytes,
            indexes,
            from: name.clone(),
            fetch: &fetch,
            parallel: PARALLEL,
        };
        receive(snapshots, &incoming, progress)
    })
}

/// The snapshot to which a template's digest leads at a peer; None if there is none, or it gives none away.
pub(in crate::snapshots) fn find(
    store: &Store,
    template: &Digest,
    at: &Peer,
    progress: &dyn Progress,
) -> Result<Option<Digest>, Error> {
    apart(|| {
        let connection = Connection::new(store, at, progress)?;
        let answer = match connection.get(&format!("templates/{}", template.hex()), LONGEST_DIGEST) {
            Err(Error::NotThere { .. }) => return Ok(None),
            answer => answer?,
        };
        let digest = std::str::from_utf8(&answer).ok().and_then(|text| text.parse().ok());
        digest.map(Some).ok_or_else(|| Error::NoDigest { peer: at.name.to_string() })
    })
}

/// To be made, used and dropped on threads that run no async code.
struct Connection<'a> {
    runtime: Runtime,
    transport: Transport,
    peer: &'a Peer,
    progress: &'a dyn Progress,
}

impl<'a> Connection<'a> {
    fn new(store: &Store, peer: &'a Peer, progress: &'a dyn Progress) -> Result<Self, Error> {
        let failed = |source| Error::Peer { peer: peer.name.to_string(), source: Box::new(source) };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|source| failed(registry::Error::Runtime(source)))?;
        let tls = peer.credentials.client()?;
        let transport = {
            let _entered = runtime.enter();
            let settings = &store.options.registries;
            Transport::to_peer(settings, tls, peer.name.as_str(), peer.address).map_err(failed)?
        };
        Ok(Self { runtime, transport, peer, progress })
    }

    /// What the peer has below this path, of at most so many bytes.
    fn get(&self, path: &str, limit: u64) -> Result<Vec<u8>, Error> {
        let (name, port) = (self.peer.name.as_str(), self.peer.address.port());
        let text = format!("https://{name}:{port}/v1/{path}");
        let got = self.runtime.block_on(async {
            let settings = self.transport.settings();
            let mut attempts =
                Attempts::new(settings, Resort::Last, format!("{name}: {path}"), self.progress);
            loop {
                match self.once(&text, limit).await {
                    Ok(bytes) => return Ok(bytes),
                    Err(error) => attempts.failed(error).await?,
                }
            }
        });
        let peer = || self.peer.name.to_string();
        got.map_err(|error| match error {
            registry::Error::Status { code: 403, .. } => Error::NotAuthorised { peer: peer() },
            registry::Error::Status { code: 404, .. } => Error::NotThere { peer: peer() },
            source => Error::Peer { peer: peer(), source: Box::new(source) },
        })
    }

    async fn once(&self, text: &str, limit: u64) -> Result<Vec<u8>, registry::Error> {
        let url = reqwest::Url::parse(text)
            .map_err(|_| registry::Error::Address(text.chars().take(200).collect()))?;
        let answer = self.transport.get(url, &Get::default()).await?;
        if answer.redirected || !answer.response.status().is_success() {
            return Err(self.transport.refusal(answer.response).await);
        }
        self.transport.read(answer.response, limit).await
    }
}
