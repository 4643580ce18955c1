//! What a snapshot from elsewhere is taken on, and the base disk that it needs and does not bring.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use imp_storage::blob::digest::Digest;
use imp_storage::image::reference::{Reference, Source};
use imp_storage::progress::Event;
use imp_storage::snapshots::base::Error as BaseError;
use imp_storage::snapshots::manifest::Manifest;
use imp_storage::snapshots::{BaseImage, Error, Keeping, Snapshot, Unwanted};
use imp_storage::store::{PruneScope, PullPolicy, Store};
use imp_testkit::oci::{Image, Layer};
use imp_testkit::registry::Registry;

use crate::fixture::{assert_same, commit, description, draft, layout, leftovers, options, store};

/// A registry with an image, and a machine with a template of it.
struct Place {
    folder: tempfile::TempDir,
    registry: Registry,
    ours: Store,
    made: Snapshot,
}

impl Place {
    fn new() -> Self {
        let (folder, registry) = (tempfile::tempdir().unwrap(), Registry::start().unwrap());
        let image = folder.path().join("image");
        let layer = Layer::new().file("hello", 0o644, b"hello\n");
        let host = imp_storage::image::platform::Platform::host();
        Image::new().platform(&host.os, &host.architecture).layer(layer).write_layout(&image, "1").unwrap();
        registry.push(&image, "1", "app").unwrap();
        let ours = Store::open(folder.path().join("ours"), options(&[registry.address()])).unwrap();
        let name: Reference = format!("{}/app:1", registry.address()).parse().unwrap();
        let pulled = ours.pull(&name, PullPolicy::Missing, &()).unwrap();
        let base = ours.base_disk(&pulled, &[], &()).unwrap();
        let mut of_image = description();
        of_image.base = base.key;
        let made = ours.snapshots().commit(draft(&ours, 1), of_image, Keeping::Durable).unwrap();
        assert_eq!(made.manifest.image, Some(BaseImage { digest: pulled.digest, name: Some(name) }));
        Self { folder, registry, ours, made }
    }

    fn theirs(&self) -> Store {
        Store::open(self.folder.path().join("theirs"), options(&[self.registry.address()])).unwrap()
    }
}

#[test]
fn a_snapshot_that_nobody_wants_is_refused_before_a_chunk_of_it_comes() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, root) = (store(&folder.path().join("ours")), folder.path().join("theirs"));
    let made = commit(&ours, 1);
    let archive = layout(&folder.path().join("layout"), None);
    ours.snapshots().export(&made.digest, &archive, &()).unwrap();
    let theirs = store(&root);
    let asked = AtomicUsize::new(0);
    let judge = |digest: &Digest, manifest: &Manifest| -> Result<(), Unwanted> {
        asked.fetch_add(1, Ordering::Relaxed);
        assert_eq!((*digest, manifest), (made.digest, &made.manifest));
        if asked.load(Ordering::Relaxed) == 1 { Err("not today".into()) } else { Ok(()) }
    };
    let untouched = |event: Event| panic!("{event:?}");
    let refused = theirs.snapshots().judged_by(&judge).import(&archive, &untouched);
    let Err(Error::Unwanted { source, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(source.to_string(), "not today");
    assert!(fs::read_dir(root.join("arriving")).unwrap().next().is_none());
    let arrival = theirs.snapshots().judged_by(&judge).import(&archive, &()).unwrap();
    assert_same(&made, &arrival.snapshot);
    // Also when it is there already.
    theirs.snapshots().judged_by(&judge).import(&archive, &()).unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 3);
    drop(arrival);
    assert!(leftovers(&root).is_empty());
}

#[test]
fn the_base_disk_is_found_or_made_of_the_image_that_is_there_or_is_pulled() {
    let place = Place::new();
    let manifest = &place.made.manifest;
    let here = place.ours.snapshots().base_disk(manifest, PullPolicy::Never, &()).unwrap();
    assert_eq!(here.key, manifest.description.base);
    let theirs = place.theirs();
    let refused = theirs.snapshots().base_disk(manifest, PullPolicy::Never, &()).unwrap_err();
    let BaseError::NotHere { image } = &refused else { panic!("{refused:?}") };
    let digest = image.digest;
    let way_out = format!("imp image pull {}/app@{digest}", place.registry.address());
    assert!(refused.to_string().contains(&way_out), "{refused}");
    let pulled = theirs.snapshots().base_disk(manifest, PullPolicy::Missing, &()).unwrap();
    assert_eq!(fs::read(&pulled.path).unwrap(), fs::read(&here.path).unwrap());
    // The image is there, and its disk has gone.
    let path = pulled.path.clone();
    drop(pulled);
    fs::remove_file(&path).unwrap();
    theirs.snapshots().base_disk(manifest, PullPolicy::Never, &()).unwrap();
    assert!(path.exists());
}

#[test]
fn an_image_without_a_registry_or_of_another_disk_is_told_of() {
    let place = Place::new();
    let theirs = place.theirs();
    let refusal = |change: fn(&mut Manifest)| {
        let mut manifest = place.made.manifest.clone();
        change(&mut manifest);
        theirs.snapshots().base_disk(&manifest, PullPolicy::Missing, &()).unwrap_err()
    };
    let image = |manifest: &mut Manifest| manifest.image.clone().unwrap();
    let unknown = refusal(|manifest| manifest.image = None);
    assert!(matches!(unknown, BaseError::Unknown { .. }), "{unknown}");
    let nameless = refusal(|manifest| manifest.image.as_mut().unwrap().name = None);
    assert!(matches!(nameless, BaseError::Nameless { .. }), "{nameless}");
    let gone = refusal(|manifest| manifest.image.as_mut().unwrap().digest = Digest::of(b"gone"));
    assert!(matches!(gone, BaseError::Pull { .. }), "{gone}");
    let other = refusal(|manifest| manifest.description.base = Digest::of(b"another builder"));
    let BaseError::Differs { expected, .. } = other else { panic!("{other}") };
    assert_eq!(expected, Digest::of(b"another builder"));
    assert!(image(&mut place.made.manifest.clone()).to_string().contains("/app@sha256:"));
}

#[test]
fn a_snapshot_that_was_brought_stays_until_it_is_asked_to_go() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (store(&folder.path().join("ours")), store(&folder.path().join("theirs")));
    let (kept, other) = (commit(&ours, 1), commit(&ours, 2));
    for (name, made) in [("kept", &kept), ("other", &other)] {
        let archive = layout(&folder.path().join("layout"), Some(name));
        ours.snapshots().export(&made.digest, &archive, &()).unwrap();
        theirs.snapshots().import(&archive, &()).unwrap();
    }
    theirs.snapshots().keep(&kept.digest).unwrap();
    theirs.prune(PruneScope::Unnamed).unwrap();
    let left = theirs.snapshots().list().unwrap();
    assert_eq!(left.iter().map(|summary| summary.digest).collect::<Vec<_>>(), [kept.digest]);
    // What it says of itself is still no proof.
    assert!(left[0].templates.is_empty());
    assert_eq!(theirs.snapshots().find(&description().template.unwrap()).unwrap(), None);
    theirs.snapshots().remove(&kept.digest).unwrap();
    assert!(fs::read_dir(folder.path().join("theirs/templates")).unwrap().next().is_none());
    let nothing = theirs.snapshots().keep(&kept.digest);
    assert!(matches!(nothing, Err(Error::NoSnapshot(_))), "{nothing:?}");
}

#[test]
fn what_an_interrupted_arrival_left_can_be_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let theirs = store(folder.path());
    let arriving = folder.path().join("arriving").join(Digest::of(b"x").hex());
    fs::create_dir(&arriving).unwrap();
    fs::write(arriving.join("memory"), b"half").unwrap();
    theirs.snapshots().give_up_arrivals().unwrap();
    assert!(!arriving.exists());
}

#[test]
fn the_image_of_a_snapshot_crosses_the_manifest_unchanged() {
    let Ok(Source::Registry(name)) = "registry.example/team/app:1".parse() else { panic!() };
    let image = BaseImage { digest: Digest::of(b"image"), name: Some(name) };
    assert_eq!(image.to_string(), format!("registry.example/team/app@{}", image.digest));
    let text = serde_json::to_string(&image).unwrap();
    assert_eq!(serde_json::from_str::<BaseImage>(&text).unwrap(), image);
    assert!(serde_json::from_str::<BaseImage>(&text.replace("team", "TEAM")).is_err());
}
