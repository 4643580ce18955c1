//! Pulls that go well, and pulls of what is not there.

use imp_storage::image::manifest;
use imp_storage::image::registry;
use imp_storage::progress::Event;
use imp_storage::store::{Error, PullPolicy, StoreOptions};
use imp_testkit::oci::{Image, Layer};
use imp_testkit::registry::Reaction;

use crate::fixture::{
    Fixture, Recorder, app, blob_requests, chain, host_architecture, leftovers, options, reference,
};

#[test]
fn a_pulled_image_is_complete_and_says_how_it_runs() {
    let fixture = Fixture::new();
    let host = fixture.registry.address();
    let store = fixture.store(&[host]);
    let image = store.pull(&reference(host, "app:1"), PullPolicy::Missing, &()).unwrap();
    let config = store.inspect(&image).unwrap();
    assert_eq!((config.entrypoint, config.env), (vec!["/app".to_owned()], vec!["A=1".to_owned()]));
    assert_eq!(config.diff_ids.len(), 2);
    let listed = store.images().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].digest, listed[0].names.clone()), (image.digest, vec![reference(host, "app:1")]));
    for text in
        [&image.digest.to_string(), &image.digest.short(), &format!("{host}/app:1"), &image.digest.hex()[..4]]
    {
        assert_eq!(store.resolve(text).unwrap().digest, image.digest);
    }
    assert!(matches!(store.resolve("nothing"), Err(Error::NoImage(_))));
    drop(image);
    assert_eq!(leftovers(&fixture.root()), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_present_image_is_not_asked_for_again_unless_always() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|_| Reaction::Forward);
    let (store, name) = (fixture.store(&[proxy.address()]), reference(proxy.address(), "app:1"));
    assert!(matches!(store.pull(&name, PullPolicy::Never, &()), Err(Error::NotPresent { .. })));
    assert_eq!(proxy.requests().len(), 0);
    let first = store.pull(&name, PullPolicy::Missing, &()).unwrap();
    let asked = proxy.requests().len();
    for policy in [PullPolicy::Missing, PullPolicy::Never] {
        assert_eq!(store.pull(&name, policy, &()).unwrap().digest, first.digest);
    }
    assert_eq!(proxy.requests().len(), asked);
    store.pull(&name, PullPolicy::Always, &()).unwrap();
    assert_eq!(proxy.requests().len(), asked + 1, "the manifest and no blob");
}

#[test]
fn a_tag_that_moved_is_followed_only_by_always_and_a_digest_never_moves() {
    let fixture = Fixture::new();
    let host = fixture.registry.address();
    let (store, name) = (fixture.store(&[host]), reference(host, "app:1"));
    let old = store.pull(&name, PullPolicy::Missing, &()).unwrap();
    app("linux", &host_architecture()).env("B=2").write_layout(&fixture.layout(), "1").unwrap();
    fixture.push("1");
    assert_eq!(store.pull(&name, PullPolicy::Missing, &()).unwrap().digest, old.digest);
    let new = store.pull(&name, PullPolicy::Always, &()).unwrap();
    assert_ne!(new.digest, old.digest);
    let pinned = reference(host, &format!("app:1@{}", old.digest));
    assert_eq!(store.pull(&pinned, PullPolicy::Always, &()).unwrap().digest, old.digest);
    assert_eq!(store.images().unwrap().len(), 2);
}

#[test]
fn the_platform_of_this_machine_is_picked_and_a_missing_one_names_what_exists() {
    let fixture = Fixture::new();
    let other = if host_architecture() == "arm64" { "s390x" } else { "arm64" };
    Image::new().platform("linux", other).layer(Layer::new()).write_layout(&fixture.layout(), "2").unwrap();
    fixture.push("2");
    let host = fixture.registry.address();
    let store = fixture.store(&[host]);
    let wrong = store.pull(&reference(host, "app:2"), PullPolicy::Missing, &()).unwrap_err();
    assert!(chain(&wrong).contains(&format!("linux/{other}")), "{}", chain(&wrong));
    assert!(store.images().unwrap().is_empty());
    let elsewhere = StoreOptions { platform: format!("linux/{other}").parse().unwrap(), ..options(&[host]) };
    let store = imp_storage::store::Store::open(fixture.folder.path().join("other"), elsewhere).unwrap();
    store.pull(&reference(host, "app:2"), PullPolicy::Missing, &()).unwrap();
}

#[test]
fn an_index_within_an_index_leads_to_the_image_and_a_circle_ends() {
    let fixture = Fixture::new();
    let manifest = app("linux", &host_architecture()).write_layout(&fixture.layout(), "3").unwrap().manifest;
    let index = |to: &str, size: usize, kind: &str, arch: &str| {
        format!(
            r#"{{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{{"mediaType":"application/vnd.oci.image.{kind}.v1+json","digest":"{to}","size":{size},"platform":{{"os":"linux","architecture":"{arch}"}}}}]}}"#
        )
    };
    let digest = |text: &str| imp_storage::blob::digest::Digest::of(text.as_bytes());
    let inner = index(&manifest, 100, "manifest", &host_architecture());
    let outer = index(&digest(&inner).to_string(), inner.len(), "index", &host_architecture());
    let mut deep = vec![outer.clone()];
    for _ in 0..5 {
        let below = deep.last().unwrap();
        deep.push(index(&digest(below).to_string(), below.len(), "index", &host_architecture()));
    }
    let mut documents = deep.clone();
    documents.push(inner);
    let top = deep.last().unwrap().clone();
    let proxy = fixture.proxy(move |request| {
        let answer = |text: &str| {
            Reaction::status(200, &[("content-type", "application/vnd.oci.image.index.v1+json")], text)
        };
        match request.path.rsplit('/').next().unwrap() {
            "nested" => answer(&outer),
            "deep" => answer(&top),
            name => match documents.iter().find(|text| digest(text).to_string() == name) {
                Some(text) => answer(text),
                None => Reaction::Forward,
            },
        }
    });
    let store = fixture.store(&[proxy.address()]);
    store.pull(&reference(proxy.address(), "app:nested"), PullPolicy::Missing, &()).unwrap();
    let deep = store.pull(&reference(proxy.address(), "app:deep"), PullPolicy::Missing, &()).unwrap_err();
    assert!(matches!(manifest_error(&deep), Some(manifest::Error::TooDeep)), "{}", chain(&deep));
}

#[test]
fn many_pulls_of_one_image_at_once_download_each_blob_once() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|_| Reaction::Forward);
    let name = reference(proxy.address(), "app:1");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let store = fixture.store(&[proxy.address()]);
            let name = &name;
            scope.spawn(move || store.pull(name, PullPolicy::Missing, &()).unwrap());
        }
    });
    let requests = blob_requests(&proxy);
    let mut once = requests.clone();
    once.dedup();
    assert_eq!((requests.len(), requests), (3, once));
}

#[test]
fn what_is_not_there_and_what_is_no_image_are_told_apart() {
    let fixture = Fixture::new();
    let proxy = fixture.proxy(|request| match request.path.rsplit('/').next().unwrap() {
        "old" => Reaction::status(
            200,
            &[("content-type", "application/vnd.docker.distribution.manifest.v1+prettyjws")],
            r#"{"schemaVersion":1}"#,
        ),
        "odd" => Reaction::status(200, &[("content-type", "application/vnd.odd")], r#"{"schemaVersion":2}"#),
        "huge" => Reaction::status(200, &[], &" ".repeat(5 << 20)),
        _ => Reaction::Forward,
    });
    let store = fixture.store(&[proxy.address()]);
    let recorder = Recorder::default();
    let pull = |name: &str| {
        store.pull(&reference(proxy.address(), name), PullPolicy::Missing, &recorder).unwrap_err()
    };
    for name in ["app:none", "nothing:1"] {
        assert!(matches!(pull_error(&pull(name)), registry::Error::NotFound { .. }), "{name}");
    }
    assert!(matches!(manifest_error(&pull("app:old")), Some(manifest::Error::Schema1)));
    assert!(matches!(manifest_error(&pull("app:odd")), Some(manifest::Error::UnknownType(_))));
    assert!(matches!(pull_error(&pull("app:huge")), registry::Error::TooLarge { .. }));
    assert_eq!(recorder.retries(), 0, "none of these gets better by trying again");
    assert_eq!(recorder.count(|event| matches!(event, Event::Stored { .. })), 0);
}

#[test]
fn a_pull_works_on_a_thread_that_runs_async_code() {
    let fixture = Fixture::new();
    let host = fixture.registry.address();
    let store = fixture.store(&[host]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { store.pull(&reference(host, "app:1"), PullPolicy::Missing, &()).unwrap() });
}

fn pull_error(error: &Error) -> &registry::Error {
    match error {
        Error::Pull { source, .. } => source,
        other => panic!("{other:?}"),
    }
}

fn manifest_error(error: &Error) -> Option<&manifest::Error> {
    match pull_error(error) {
        registry::Error::Manifest { source, .. } => Some(source),
        _ => None,
    }
}
