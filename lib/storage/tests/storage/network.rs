//! What goes wrong between a store and a registry, and what is never sent where.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use imp_storage::blob;
use imp_storage::image::registry;
use imp_storage::store::{Error, PullPolicy, Store, StoreOptions};
use imp_testkit::registry::{FaultProxy, Reaction, Request};

use crate::fixture::{Fixture, LARGE, Recorder, blob_requests, chain, leftovers, options, reference};

/// A reaction for the first `times` requests that fit; all others are forwarded.
fn at_first(
    times: usize,
    fits: impl Fn(&Request) -> bool + Send + Sync + 'static,
    reaction: Reaction,
) -> impl Fn(&Request) -> Reaction + Send + Sync + 'static {
    let seen = AtomicUsize::new(0);
    move |request| {
        if fits(request) && seen.fetch_add(1, Ordering::SeqCst) < times {
            reaction.clone()
        } else {
            Reaction::Forward
        }
    }
}

fn pull(fixture: &Fixture, proxy: &FaultProxy, recorder: &Recorder) -> Result<(), Error> {
    let store = fixture.store(&[proxy.address()]);
    store.pull(&reference(proxy.address(), "app:1"), PullPolicy::Missing, recorder).map(drop)
}

/// The registry's own answer is the last resort of every one of these.
#[test]
fn what_may_pass_is_tried_again_until_it_does() {
    let fixture = Fixture::new();
    let wait = [("retry-after", "0")];
    for (what, reaction) in [
        ("too many requests", Reaction::status(429, &wait, "")),
        ("unavailable", Reaction::status(503, &[], "")),
        ("a bad gateway", Reaction::status(502, &wait, "")),
        ("a cut manifest", Reaction::Cut { after: 10 }),
        ("nothing at all", Reaction::Cut { after: 0 }),
    ] {
        let proxy = fixture.proxy(at_first(2, Request::is_manifest, reaction.clone()));
        let recorder = Recorder::default();
        pull(&fixture, &proxy, &recorder).unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
        assert_eq!(recorder.retries(), 2, "{what}");
        std::fs::remove_dir_all(fixture.root()).unwrap();

        let proxy = fixture.proxy(at_first(2, Request::is_blob, reaction));
        let recorder = Recorder::default();
        pull(&fixture, &proxy, &recorder).unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
        assert_eq!(recorder.retries(), 2, "{what} in a blob");
        std::fs::remove_dir_all(fixture.root()).unwrap();
    }
}

#[test]
fn a_registry_that_asks_for_a_long_pause_is_believed_and_given_up() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|_| {
        Reaction::status(
            429,
            &[("retry-after", "100000")],
            r#"{"errors":[{"code":"X","message":"slow down"}]}"#,
        )
    });
    let recorder = Recorder::default();
    let error = pull(&fixture, &proxy, &recorder).unwrap_err();
    assert!(chain(&error).contains("429: slow down"), "{}", chain(&error));
    assert_eq!((recorder.retries(), proxy.requests().len()), (0, 1));
}

#[test]
fn a_registry_that_stays_broken_is_given_up_after_so_many_tries() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|_| Reaction::status(500, &[], ""));
    let error = pull(&fixture, &proxy, &Recorder::default()).unwrap_err();
    assert!(chain(&error).contains("answered 500"), "{}", chain(&error));
    assert_eq!(proxy.requests().len(), 5);
}

#[test]
fn a_cut_blob_is_continued_where_it_ended() {
    let fixture = Fixture::new();
    let is_start = |request: &Request| request.is_blob() && request.header("range").is_none();
    let proxy =
        fixture.proxy(
            move |request| {
                if is_start(request) { Reaction::Cut { after: LARGE / 2 } } else { Reaction::Forward }
            },
        );
    pull(&fixture, &proxy, &Recorder::default()).unwrap();
    let ranges: Vec<String> =
        proxy.requests().iter().filter_map(|request| request.header("range").map(str::to_owned)).collect();
    assert_eq!(ranges, [format!("bytes={}-", LARGE / 2)]);
}

#[test]
fn a_registry_that_ignores_ranges_is_no_obstacle() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|request| match (request.is_blob(), request.header("range")) {
        (true, None) => Reaction::Cut { after: LARGE / 2 },
        (true, Some(_)) => Reaction::ForwardWhole,
        _ => Reaction::Forward,
    });
    pull(&fixture, &proxy, &Recorder::default()).unwrap();
}

#[test]
fn a_stalled_blob_is_continued_after_the_longest_silence() {
    let fixture = Fixture::new();
    let large = |request: &Request| request.is_blob() && request.header("range").is_none();
    let proxy =
        fixture.proxy(
            move |request| {
                if large(request) { Reaction::Stall { after: LARGE / 2 } } else { Reaction::Forward }
            },
        );
    let mut options = options(&[proxy.address()]);
    options.registries.idle_timeout = Duration::from_millis(300);
    let store = Store::open(fixture.root(), options).unwrap();
    let recorder = Recorder::default();
    store.pull(&reference(proxy.address(), "app:1"), PullPolicy::Missing, &recorder).unwrap();
    assert!(recorder.retries() >= 1);
}

#[test]
fn wrong_bytes_and_too_many_bytes_are_typed_errors_and_leave_nothing() {
    let fixture = Fixture::new();
    let proxy = fixture
        .proxy(|request| if request.is_blob() { Reaction::Corrupt { at: 7 } } else { Reaction::Forward });
    let error = pull(&fixture, &proxy, &Recorder::default()).unwrap_err();
    assert!(matches!(error, Error::Blob(blob::Error::WrongDigest { .. })), "{error:?}");
    let proxy = fixture
        .proxy(|request| if request.is_blob() { Reaction::Append { bytes: 9 } } else { Reaction::Forward });
    let error = pull(&fixture, &proxy, &Recorder::default()).unwrap_err();
    assert!(matches!(error, Error::Blob(blob::Error::Oversize { .. })), "{error:?}");
    let store = fixture.store(&[]);
    assert!(store.images().unwrap().is_empty());
    assert_eq!(leftovers(&fixture.root()), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_manifest_with_another_digest_than_promised_is_refused() {
    let fixture = Fixture::new();
    let other = format!("sha256:{}", "0".repeat(64));
    let proxy = fixture
        .proxy(move |_| Reaction::Header { name: "Docker-Content-Digest".into(), value: other.clone() });
    let error = pull(&fixture, &proxy, &Recorder::default()).unwrap_err();
    let is_wrong = |source: &registry::Error| matches!(source, registry::Error::WrongManifest { .. });
    assert!(matches!(error, Error::Pull { ref source, .. } if is_wrong(source)), "{error:?}");
    // Without the header a tag means what comes; a digest means what it says.
    let proxy = fixture
        .proxy(|request| if request.is_manifest() { Reaction::Corrupt { at: 1 } } else { Reaction::Forward });
    let store = fixture.store(&[fixture.registry.address(), proxy.address()]);
    let image =
        store.pull(&reference(fixture.registry.address(), "app:1"), PullPolicy::Missing, &()).unwrap();
    let name = reference(proxy.address(), &format!("app@{}", image.digest));
    let error = store.pull(&name, PullPolicy::Always, &()).unwrap_err();
    assert!(matches!(error, Error::Pull { ref source, .. } if is_wrong(source)), "{error:?}");
}

#[test]
fn a_redirect_to_another_host_is_followed_without_credentials_and_only_where_allowed() {
    let fixture = Fixture::new();
    let storage = fixture.proxy(|_| Reaction::Forward);
    let to = storage.address().to_owned();
    let proxy = fixture.proxy(move |request| {
        if request.header("authorization").is_none() {
            return Reaction::status(401, &[("www-authenticate", "Basic realm=\"x\"")], "");
        }
        match request.is_blob() {
            true => Reaction::status(307, &[("location", &format!("http://{to}{}", request.path))], ""),
            false => Reaction::Forward,
        }
    });
    let config = fixture.folder.path().join("config.json");
    let auths = format!(r#"{{"auths":{{"{}":{{"username":"u","password":"secret"}}}}}}"#, proxy.address());
    std::fs::write(&config, auths).unwrap();
    let mut allowed = options(&[proxy.address(), storage.address()]);
    allowed.registries.docker_config = Some(config.clone());
    let store = Store::open(fixture.root(), allowed.clone()).unwrap();
    store.pull(&reference(proxy.address(), "app:1"), PullPolicy::Missing, &()).unwrap();
    assert_eq!(blob_requests(&storage).len(), 3);
    assert!(storage.requests().iter().all(|request| request.header("authorization").is_none()));

    std::fs::remove_dir_all(fixture.root()).unwrap();
    allowed.registries.insecure.pop();
    let store = Store::open(fixture.root(), allowed).unwrap();
    let error = store.pull(&reference(proxy.address(), "app:1"), PullPolicy::Missing, &()).unwrap_err();
    assert!(chain(&error).contains("redirects to http://"), "{}", chain(&error));
}

#[test]
fn redirects_in_circles_end() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|request| Reaction::status(302, &[("location", &request.path)], ""));
    let error = pull(&fixture, &proxy, &Recorder::default()).unwrap_err();
    assert!(chain(&error).contains("in circles"), "{}", chain(&error));
}

#[test]
fn plain_http_needs_to_be_named_even_on_this_machine() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|_| Reaction::Forward);
    let store = fixture.store(&[]);
    let error = store.pull(&reference(proxy.address(), "app:1"), PullPolicy::Missing, &()).unwrap_err();
    assert!(chain(&error).contains("does not speak TLS"), "{}", chain(&error));
    assert!(proxy.requests().is_empty(), "nothing was said in the clear");
}

#[test]
fn a_registry_over_tls_is_trusted_only_with_its_authority() {
    let fixture = Fixture::over_tls();
    let host = fixture.registry.address();
    let recorder = Recorder::default();
    let pull = |options: StoreOptions| {
        let store = Store::open(fixture.root(), options).unwrap();
        store.pull(&reference(host, "app:1"), PullPolicy::Missing, &recorder).map(drop)
    };
    let error = pull(options(&[])).unwrap_err();
    assert!(chain(&error).contains("is not trusted"), "{}", chain(&error));
    assert_eq!(recorder.retries(), 0);
    let mut trusting = options(&[]);
    trusting.registries.certificate_authorities = vec![fixture.registry.certificate()];
    pull(trusting.clone()).unwrap();
    trusting.registries.certificate_authorities = vec!["/nowhere.pem".into()];
    std::fs::remove_dir_all(fixture.root()).unwrap();
    assert!(chain(&pull(trusting).unwrap_err()).contains("/nowhere.pem"));
}

#[test]
fn a_mirror_is_asked_first_and_the_registry_when_it_fails() {
    let fixture = Fixture::new();
    let mirror_works = Arc::new(AtomicUsize::new(1));
    let switch = Arc::clone(&mirror_works);
    let mirror = fixture.proxy(move |request| match (switch.load(Ordering::SeqCst), request.is_blob()) {
        (0, _) => Reaction::status(404, &[], ""),
        (2, true) => Reaction::Corrupt { at: 1 },
        (3, _) => Reaction::status(503, &[], ""),
        _ => Reaction::Forward,
    });
    let origin = fixture.proxy(|_| Reaction::Forward);
    for (state, asked_at_origin) in [(1, 0), (0, 4), (2, 3), (3, 4)] {
        mirror_works.store(state, Ordering::SeqCst);
        let before = origin.requests().len();
        let mut options: StoreOptions = options(&[mirror.address(), origin.address()]);
        options.registries.mirrors =
            [(origin.address().to_owned(), vec![mirror.address().to_owned()])].into_iter().collect();
        let root = fixture.folder.path().join(format!("store-{state}"));
        let store = Store::open(root, options).unwrap();
        let recorder = Recorder::default();
        store.pull(&reference(origin.address(), "app:1"), PullPolicy::Missing, &recorder).unwrap();
        assert!(recorder.retries() <= 1, "a broken mirror is not waited for");
        assert_eq!(origin.requests().len() - before, asked_at_origin, "mirror in state {state}");
    }
}
