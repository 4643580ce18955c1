//! Snapshots through a real registry.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use imp_storage::image::reference::Reference;
use imp_storage::image::registry;
use imp_storage::progress::Event;
use imp_storage::snapshots::{Error, artifact};
use imp_storage::store::Store;
use imp_testkit::registry::{FaultProxy, Reaction, Registry, Request};

use crate::fixture::{CHUNK, FULL, assert_same, commit, host, layout, leftovers, options};

struct Place {
    folder: tempfile::TempDir,
    registry: Registry,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), registry: Registry::start().unwrap() }
    }

    fn proxy(&self, react: impl Fn(&Request) -> Reaction + Send + Sync + 'static) -> FaultProxy {
        FaultProxy::start(self.registry.address(), react).unwrap()
    }

    fn store(&self, name: &str, host: &str) -> Store {
        Store::open(self.folder.path().join(name), options(&[host])).unwrap()
    }
}

fn reference(host: &str, name: &str) -> Reference {
    format!("{host}/{name}").parse().unwrap()
}

fn count(proxy: &FaultProxy, method: &str, what: fn(&Request) -> bool) -> u64 {
    proxy.requests().iter().filter(|request| request.method == method && what(request)).count() as u64
}

/// Manifest, indexes and chunks; memory and scratch have different ones.
const BLOBS: u64 = 1 + 3 + FULL;

#[test]
fn what_was_pushed_is_pulled_as_the_same_snapshot() {
    let place = Place::new();
    let address = place.registry.address();
    let (ours, theirs) = (place.store("ours", address), place.store("theirs", address));
    let made = commit(&ours, 1);
    let name = reference(address, "team/template:1");
    let digest = ours.snapshots().push(&made.digest, &name, &()).unwrap();
    let arrival = theirs.snapshots().pull(&name, &()).unwrap();
    assert_eq!(arrival.fetched, (FULL - 1) * CHUNK + 5);
    assert_same(&made, &arrival.snapshot);
    theirs.snapshots().open(&made.digest, &host()).unwrap();
    // By digest, too, and what is there is not fetched again.
    let by_digest = reference(address, &format!("team/template@{digest}"));
    assert_eq!(theirs.snapshots().pull(&by_digest, &()).unwrap().fetched, 0);
    drop(arrival);
    assert!(leftovers(&place.folder.path().join("theirs")).is_empty());
}

#[test]
fn nothing_that_is_there_is_sent_again() {
    let place = Place::new();
    let proxy = place.proxy(|_| Reaction::Forward);
    let ours = place.store("ours", proxy.address());
    let (old, new) = (commit(&ours, 1), commit(&ours, 2));
    let name = |tag| reference(proxy.address(), &format!("template:{tag}"));
    ours.snapshots().push(&old.digest, &name("1"), &()).unwrap();
    let sent = || count(&proxy, "PUT", |request| request.path.contains("/blobs/"));
    assert_eq!(sent(), BLOBS);
    ours.snapshots().push(&old.digest, &name("again"), &()).unwrap();
    assert_eq!(sent(), BLOBS);
    // Its manifest, its index of memory, and its own chunk.
    ours.snapshots().push(&new.digest, &name("2"), &()).unwrap();
    assert_eq!(sent(), BLOBS + 3);
    // And of the new one only that is fetched.
    let theirs = place.store("theirs", proxy.address());
    theirs.snapshots().pull(&name("1"), &()).unwrap();
    let asked = || count(&proxy, "GET", Request::is_blob);
    let before = asked();
    let arrival = theirs.snapshots().pull(&name("2"), &()).unwrap();
    assert_eq!(arrival.fetched, CHUNK);
    assert_eq!(asked() - before, 1 + 3 + 1);
    assert_same(&new, &arrival.snapshot);
}

#[test]
fn a_registry_that_says_where_else_a_blob_is_has_it() {
    let place = Place::new();
    let redirects = Arc::new(AtomicBool::new(false));
    let is_on = Arc::clone(&redirects);
    let proxy = place.proxy(move |request| match request.method.as_str() {
        "HEAD" if is_on.load(Ordering::SeqCst) => {
            Reaction::status(307, &[("Location", "https://elsewhere.example/")], "")
        }
        _ => Reaction::Forward,
    });
    let ours = place.store("ours", proxy.address());
    let made = commit(&ours, 1);
    ours.snapshots().push(&made.digest, &reference(proxy.address(), "template:1"), &()).unwrap();
    redirects.store(true, Ordering::SeqCst);
    ours.snapshots().push(&made.digest, &reference(proxy.address(), "template:2"), &()).unwrap();
    assert_eq!(count(&proxy, "PUT", Request::is_blob), BLOBS);
}

#[test]
fn requests_that_fail_for_a_while_are_made_again() {
    let place = Place::new();
    let seen = AtomicUsize::new(0);
    // Each eleventh request fails, in each of the ways in which registries do.
    let proxy = place.proxy(move |request| match (seen.fetch_add(1, Ordering::Relaxed) % 33, request) {
        (4, _) => Reaction::status(503, &[], ""),
        (15, _) => Reaction::status(429, &[("Retry-After", "0")], ""),
        (26, request) if request.method == "GET" => Reaction::Cut { after: 10 },
        (26, _) => Reaction::status(502, &[], ""),
        _ => Reaction::Forward,
    });
    let (ours, theirs) = (place.store("ours", proxy.address()), place.store("theirs", proxy.address()));
    let made = commit(&ours, 1);
    let name = reference(proxy.address(), "template:1");
    let retries = AtomicUsize::new(0);
    let watch = |event: Event| {
        if matches!(event, Event::Retrying { .. }) {
            retries.fetch_add(1, Ordering::Relaxed);
        }
    };
    ours.snapshots().push(&made.digest, &name, &watch).unwrap();
    assert!(retries.load(Ordering::Relaxed) > 2);
    assert_same(&made, &theirs.snapshots().pull(&name, &()).unwrap().snapshot);
}

#[test]
fn a_pull_that_was_cut_off_fetches_only_what_did_not_arrive() {
    let place = Place::new();
    let chunks = AtomicUsize::new(0);
    let proxy = place.proxy(move |request| {
        let is_chunk = request.method == "GET" && request.is_blob();
        match chunks.fetch_add(usize::from(is_chunk), Ordering::Relaxed) {
            9 if is_chunk => Reaction::status(404, &[], ""),
            _ => Reaction::Forward,
        }
    });
    let (ours, theirs) = (place.store("ours", proxy.address()), place.store("theirs", proxy.address()));
    let made = commit(&ours, 1);
    let name = reference(proxy.address(), "template:1");
    ours.snapshots().push(&made.digest, &name, &()).unwrap();
    let failed = theirs.snapshots().pull(&name, &());
    assert!(matches!(failed, Err(Error::Registry { .. })), "{failed:?}");
    assert_eq!(theirs.snapshots().list().unwrap().len(), 0);
    let before = count(&proxy, "GET", Request::is_blob);
    let arrival = theirs.snapshots().pull(&name, &()).unwrap();
    assert!(arrival.resumed > 0);
    let again = count(&proxy, "GET", Request::is_blob) - before;
    assert!(again < BLOBS, "{again}");
    assert_same(&made, &arrival.snapshot);
}

#[test]
fn content_that_a_registry_changed_is_refused() {
    let place = Place::new();
    let proxy = place.proxy(|request| {
        if request.method == "GET" && request.is_blob() {
            Reaction::Corrupt { at: 3 }
        } else {
            Reaction::Forward
        }
    });
    let (ours, theirs) = (place.store("ours", proxy.address()), place.store("theirs", proxy.address()));
    let made = commit(&ours, 1);
    let name = reference(proxy.address(), "template:1");
    ours.snapshots().push(&made.digest, &name, &()).unwrap();
    let refused = theirs.snapshots().pull(&name, &());
    assert!(matches!(refused, Err(Error::Registry { .. })), "{refused:?}");
    assert_eq!(theirs.snapshots().list().unwrap().len(), 0);
}

#[test]
fn a_push_asks_for_a_token_that_allows_it() {
    let place = Place::new();
    let proxy = place.proxy(|request| {
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        let host = request.header("host").unwrap_or_default();
        if path == "/token" {
            let token = if query.contains("push") { "pushing" } else { "pulling" };
            return Reaction::status(200, &[], &format!(r#"{{"token":"{token}"}}"#));
        }
        if request.header("authorization") == Some("Bearer pushing") {
            return Reaction::Forward;
        }
        let challenge =
            format!(r#"Bearer realm="http://{host}/token",service="tests",scope="repository:template:pull""#);
        Reaction::status(401, &[("WWW-Authenticate", &challenge)], "")
    });
    let ours = place.store("ours", proxy.address());
    let made = commit(&ours, 1);
    let name = reference(proxy.address(), "template:1");
    ours.snapshots().push(&made.digest, &name, &()).unwrap();
    // Who only reads asks for less, and this registry wants more.
    let theirs = place.store("theirs", proxy.address());
    let Err(Error::Registry { source, .. }) = theirs.snapshots().pull(&name, &()) else { panic!() };
    assert!(matches!(*source, registry::Error::Unauthorized { .. }), "{source}");
}

#[test]
fn a_registry_that_lets_nobody_push_says_so() {
    let place = Place::new();
    let proxy = place.proxy(|request| match request.method.as_str() {
        "POST" => Reaction::status(403, &[], ""),
        _ => Reaction::Forward,
    });
    let ours = place.store("ours", proxy.address());
    let made = commit(&ours, 1);
    let refused = ours.snapshots().push(&made.digest, &reference(proxy.address(), "template:1"), &());
    let Err(Error::Registry { source, .. }) = refused else { panic!() };
    assert!(matches!(*source, registry::Error::MayNotPush { .. }), "{source}");
}

#[test]
fn an_image_is_no_snapshot() {
    let place = Place::new();
    let images = place.folder.path().join("images");
    imp_testkit::oci::Image::new().write_layout(&images, "1").unwrap();
    place.registry.push(&images, "1", "app").unwrap();
    let theirs = place.store("theirs", place.registry.address());
    let refused = theirs.snapshots().pull(&reference(place.registry.address(), "app:1"), &());
    let expected =
        matches!(&refused, Err(Error::Artifact { source: artifact::Error::NotASnapshot { .. }, .. }));
    assert!(expected, "{refused:?}");
}

#[test]
fn other_tools_carry_snapshots_too() {
    let place = Place::new();
    let address = place.registry.address();
    let (ours, theirs) = (place.store("ours", address), place.store("theirs", address));
    let made = commit(&ours, 1);
    let path = place.folder.path().join("layout");
    ours.snapshots().export(&made.digest, &layout(&path, Some("v1")), &()).unwrap();
    place.registry.push_as(&path, "v1", "template:1").unwrap();
    let arrival = theirs.snapshots().pull(&reference(address, "template:1"), &()).unwrap();
    assert_same(&made, &arrival.snapshot);
}
