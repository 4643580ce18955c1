//! Brings one blob into the store: one writer per blob, cut connections continued where they ended.

use std::time::Duration;

use reqwest::header::CONTENT_RANGE;
use reqwest::{Response, StatusCode, Url};

use super::attempts::{Attempts, Resort};
use super::error::Error;
use super::session::Session;
use super::transport::{Get, Transport, host};
use crate::blob::{self, Begin, BlobStore, Partial};
use crate::image::manifest::{Descriptor, is_foreign};
use crate::progress::{Event, Progress};

/// How often a blob that someone else downloads is looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// So many bytes after a cut connection show that it was worth continuing: the tries are counted anew.
const WORTHWHILE: u64 = 1 << 20;
/// A blob that comes slower than this, in bytes per second, after the grace is given up.
const SLOWEST: u64 = 4 << 10;
const GRACE: Duration = Duration::from_secs(600);
/// Bytes between two reports of progress.
const REPORT_EVERY: u64 = 256 << 10;

/// One place that has a blob.
pub(super) enum Place<'a> {
    Registry(&'a Session),
    /// An address that a manifest names for a layer that registries may not keep. It never sees credentials.
    Elsewhere(&'a Transport, Url),
}

impl Place<'_> {
    fn transport(&self) -> &Transport {
        match self {
            Self::Registry(session) => session.transport(),
            Self::Elsewhere(transport, _) => transport,
        }
    }

    fn host(&self) -> String {
        match self {
            Self::Registry(session) => session.host().to_owned(),
            Self::Elsewhere(_, url) => host(url),
        }
    }

    async fn get(&self, blob: &Descriptor, from: u64) -> Result<Response, Error> {
        match self {
            Self::Registry(session) => session.get(&format!("blobs/{}", blob.digest), None, from).await,
            Self::Elsewhere(transport, url) => {
                let answer = transport.get(url.clone(), &Get { from, ..Get::default() }).await?;
                if answer.response.status().is_success() {
                    Ok(answer.response)
                } else {
                    Err(transport.refusal(answer.response).await)
                }
            }
        }
    }
}

/// The places to ask for a blob, in order: the servers, then where a foreign layer says that it is.
pub(super) fn places<'a>(sessions: &[&'a Session], blob: &Descriptor) -> Vec<Place<'a>> {
    let mut places: Vec<Place<'a>> = sessions.iter().map(|session| Place::Registry(session)).collect();
    if let (true, Some(session)) = (is_foreign(&blob.media_type), sessions.first()) {
        let urls =
            blob.urls.iter().filter_map(|url| Url::parse(url).ok()).filter(|url| url.scheme() == "https");
        places.extend(urls.map(|url| Place::Elsewhere(session.transport(), url)));
    }
    places
}

/// Makes sure that a blob is in the store; it comes from the first place that has it.
pub(super) async fn download(
    places: &[Place<'_>],
    blob: &Descriptor,
    store: &BlobStore,
    progress: &dyn Progress,
) -> Result<(), Error> {
    let mut last = None;
    for (position, place) in places.iter().enumerate() {
        let resort = if position + 1 < places.len() { Resort::Another } else { Resort::Last };
        let Some(mut partial) = writer(blob, store, progress).await? else { return Ok(()) };
        let deadline = GRACE + Duration::from_secs(blob.size / SLOWEST);
        let fetching = fetch(place, resort, blob, &mut partial, progress);
        let fetched = match tokio::time::timeout(deadline, fetching).await {
            Ok(fetched) => fetched,
            Err(_) => Err(Error::Slow { host: place.host(), blob: blob.digest, after: deadline }),
        };
        match fetched.and_then(|()| Ok(partial.finish()?)) {
            Ok(()) => {
                progress.report(Event::Verified { blob: blob.digest });
                return Ok(());
            }
            Err(error) if error.is_local() => return Err(error),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| Error::Address(String::new())))
}

/// Waits until the blob is in the store (None) or this is its writer.
async fn writer(
    blob: &Descriptor,
    store: &BlobStore,
    progress: &dyn Progress,
) -> Result<Option<Partial>, Error> {
    let mut waiting = false;
    loop {
        match store.begin(&blob.digest, blob.size)? {
            Begin::Present(_) => {
                progress.report(Event::Present { blob: blob.digest });
                return Ok(None);
            }
            Begin::Started(partial) => return Ok(Some(*partial)),
            Begin::Busy(bytes) => {
                if !std::mem::replace(&mut waiting, true) {
                    progress.report(Event::Waiting { digest: blob.digest });
                }
                progress.report(Event::Transferred { blob: blob.digest, bytes, total: blob.size });
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}

async fn fetch(
    place: &Place<'_>,
    resort: Resort,
    blob: &Descriptor,
    partial: &mut Partial,
    progress: &dyn Progress,
) -> Result<(), Error> {
    let what = format!("layer {}", blob.digest.short());
    let mut attempts = Attempts::new(place.transport().settings(), resort, what, progress);
    loop {
        let before = partial.written();
        match fetch_once(place, blob, partial, progress).await {
            Ok(()) => return Ok(()),
            Err(error) => {
                if partial.written() >= before.saturating_add(WORTHWHILE) {
                    attempts.count_anew();
                }
                attempts.failed(error).await?;
            }
        }
    }
}

async fn fetch_once(
    place: &Place<'_>,
    blob: &Descriptor,
    partial: &mut Partial,
    progress: &dyn Progress,
) -> Result<(), Error> {
    let from = partial.written();
    let mut response = match place.get(blob, from).await {
        Err(Error::Status { code, .. }) if from > 0 && code == StatusCode::RANGE_NOT_SATISFIABLE.as_u16() => {
            partial.restart()?;
            return Err(Error::Range { host: place.host(), blob: blob.digest });
        }
        other => other?,
    };
    // A server that does not know ranges sends everything again.
    let mut skip = match (response.status(), continues_at(&response)) {
        (StatusCode::PARTIAL_CONTENT, Some(start)) if start == from => 0,
        (StatusCode::PARTIAL_CONTENT, _) => {
            partial.restart()?;
            return Err(Error::Range { host: place.host(), blob: blob.digest });
        }
        _ => from,
    };
    let mut reported = from;
    while let Some(chunk) = place.transport().chunk(&mut response).await? {
        let skipped = skip.min(chunk.len() as u64);
        skip -= skipped;
        partial.write(chunk.get(skipped as usize..).unwrap_or_default())?;
        if partial.written() >= reported.saturating_add(REPORT_EVERY) {
            reported = partial.written();
            progress.report(Event::Transferred { blob: blob.digest, bytes: reported, total: blob.size });
        }
    }
    if partial.written() < blob.size {
        let (digest, expected, found) = (blob.digest, blob.size, partial.written());
        return Err(blob::Error::Truncated { digest, expected, found }.into());
    }
    progress.report(Event::Transferred { blob: blob.digest, bytes: partial.written(), total: blob.size });
    Ok(())
}

/// The first byte in `Content-Range: bytes FIRST-LAST/TOTAL`.
fn continues_at(response: &Response) -> Option<u64> {
    let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.trim().strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}
