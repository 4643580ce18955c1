//! Disks, pins, removal and the size limit.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Barrier;

use imp_storage::blob;
use imp_storage::blob::digest::Digest;
use imp_storage::image::base::LayerSource;
use imp_storage::image::reference::Source;
use imp_storage::progress::Event;
use imp_storage::store::{Error, Image, Pin, PruneScope, PullPolicy, Removal, Removed, Store, StoreOptions};
use imp_testkit::machine::program;
use imp_testkit::oci::{Compression, Image as OciImage, Layer};

use crate::fixture::{
    Fixture, LARGE, Recorder, app, host_architecture, leftovers, noise, options, reference,
};

#[test]
fn an_image_without_a_disk_takes_no_name_from_one_that_has_it() {
    let local = Local::new();
    let store = local.store(None);
    let good = local.image(&store, "app", 10);
    let layout = local.folder.path().join("app");
    fs::remove_dir_all(&layout).unwrap();
    OciImage::new()
        .platform("linux", &host_architecture())
        .layer(Layer::from_tar(vec![b'x'; 1024]))
        .write_layout(&layout, "1")
        .unwrap();
    let Ok(Source::Archive(archive)) = format!("oci:{}", layout.display()).parse() else { panic!() };
    assert!(matches!(store.import(&archive, &()), Err(Error::Build { .. })));
    assert_eq!(store.resolve("app:1").unwrap().digest, good.digest);
    // What has no name is prunable.
    let removed = store.prune(PruneScope::Unnamed).unwrap();
    assert_eq!((removed.images.len(), local.names(&store)), (1, vec!["app:1".to_owned()]));
}

#[test]
fn a_blob_that_was_damaged_on_the_disk_comes_again_with_the_next_import() {
    let local = Local::new();
    let store = local.store(None);
    let image = local.image(&store, "app", LARGE);
    let Ok(Source::Archive(archive)) = format!("oci:{}", local.folder.path().join("app").display()).parse()
    else {
        panic!()
    };
    let blobs = fs::read_dir(local.root().join("blobs/sha256")).unwrap().map(|blob| blob.unwrap().path());
    let layer = blobs.max_by_key(|blob| fs::metadata(blob).unwrap().len()).unwrap();
    let whole = fs::read(&layer).unwrap();
    let mut damaged = whole.clone();
    damaged[LARGE / 2] ^= 1;
    for broken in [&damaged[..], &whole[..LARGE / 2], &[]] {
        fs::remove_file(&layer).unwrap();
        fs::write(&layer, broken).unwrap();
        if broken.len() == whole.len() {
            store.base_disk(&image, &[], &()).unwrap_err();
            assert!(!layer.exists());
        }
        store.import(&archive, &()).unwrap();
        assert_eq!(fs::read(&layer).unwrap(), whole);
        fs::remove_file(&store.base_disk(&image, &[], &()).unwrap().path).unwrap();
    }
}

/// A store without a registry, and images made for it.
struct Local {
    folder: tempfile::TempDir,
}

impl Local {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    fn store(&self, size_limit: Option<u64>) -> Store {
        Store::open(self.root(), StoreOptions { size_limit, ..options(&[]) }).unwrap()
    }

    /// Imports an image `name:1` of one layer with a file of so many bytes, whose disk is gone again.
    fn image(&self, store: &Store, name: &str, size: usize) -> Image {
        let layout = self.folder.path().join(name);
        let layer = Layer::new().file(&format!("of-{name}"), 0o644, &noise(size));
        OciImage::new()
            .platform("linux", &host_architecture())
            .layer(layer)
            .write_layout(&layout, "1")
            .unwrap();
        let Ok(Source::Archive(archive)) = format!("oci:{}", layout.display()).parse() else { panic!() };
        let image = store.import(&archive, &()).unwrap().remove(0);
        fs::remove_file(&store.base_disk(&image, &[], &()).unwrap().path).unwrap();
        image
    }

    fn names(&self, store: &Store) -> Vec<String> {
        let images = store.images().unwrap();
        let mut names: Vec<String> =
            images.iter().flat_map(|image| &image.names).map(|it| it.familiar()).collect();
        names.sort();
        names
    }
}

fn fsck(path: &std::path::Path) {
    let output = Command::new(program("e2fsck").unwrap()).arg("-fn").arg(path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_disk_is_built_once_by_many_at_once_and_found_after_that() {
    let local = Local::new();
    let image = local.image(&local.store(None), "a", LARGE);
    let (recorder, together) = (Recorder::default(), Barrier::new(4));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let store = local.store(None);
                together.wait();
                let disk = store.base_disk(&image, &[], &recorder).unwrap();
                assert_eq!(fs::metadata(&disk.path).unwrap().len(), disk.size);
            });
        }
    });
    assert_eq!(recorder.count(|event| matches!(event, Event::Built { .. })), 1);
    let disk = local.store(None).base_disk(&image, &[], &recorder).unwrap();
    fsck(&disk.path);
    drop((disk, image));
    assert_eq!(leftovers(&local.root()), Vec::<PathBuf>::new());
}

#[test]
fn further_layers_make_another_disk() {
    let local = Local::new();
    let store = local.store(None);
    let image = local.image(&store, "a", 1000);
    let layout = local.folder.path().join("extra");
    let layer = Layer::new().file("extra", 0o644, b"more").compressed(Compression::None);
    let written = OciImage::new().layer(layer).write_layout(&layout, "1").unwrap();
    let digest: Digest = written.layers[0].parse().unwrap();
    let extra = LayerSource {
        media_type: "application/vnd.oci.image.layer.v1.tar".into(),
        digest,
        diff_id: None,
        path: layout.join("blobs/sha256").join(digest.hex()),
    };
    let plain = store.base_disk(&image, &[], &()).unwrap();
    let stacked = store.base_disk(&image, std::slice::from_ref(&extra), &()).unwrap();
    assert_ne!(plain.key, stacked.key);
    assert_eq!(store.base_disk(&image, &[extra], &()).unwrap().key, stacked.key);
    fsck(&stacked.path);
}

#[test]
fn a_pin_keeps_a_disk_and_an_image_until_it_is_taken_back() {
    let local = Local::new();
    let store = local.store(None);
    let image = local.image(&store, "a", 1000);
    let disk = store.base_disk(&image, &[], &()).unwrap();
    let (digest, key, path) = (image.digest, disk.key, disk.path.clone());
    store.pin(&key, "vm-1").unwrap();
    store.pin(&digest, "vm-2").unwrap();
    drop((image, disk));
    let pin = |owner: &str, key| Pin { owner: owner.into(), key };
    assert_eq!(store.pins().unwrap(), [pin("vm-1", key), pin("vm-2", digest)]);
    assert_eq!(store.prune(PruneScope::Unused).unwrap().disks, []);
    let refused = |removal| match store.remove("a:1", removal) {
        Err(Error::InUse { owners, .. }) => owners,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(Removal::Careful), ["vm-1", "vm-2"]);
    assert_eq!(refused(Removal::Forced), ["vm-2"]);
    store.unpin_all("vm-2").unwrap();
    assert_eq!(refused(Removal::Careful), ["vm-1"]);
    assert_eq!(
        store.prune(PruneScope::Unused).unwrap(),
        Removed::default(),
        "nor does the image of a pinned disk go"
    );
    assert_eq!(store.remove("a:1", Removal::Forced).unwrap().images, [digest]);
    assert!(path.exists(), "the disk of a running VM stays");
    store.unpin(&key, "vm-1").unwrap();
    assert_eq!(store.prune(PruneScope::Unused).unwrap().disks, [key]);
    assert!(!path.exists() && store.pins().unwrap().is_empty());
    assert!(matches!(store.pin(&key, "vm-1"), Err(Error::NothingToPin(_))));
    assert!(matches!(store.pin(&key, "../x"), Err(Error::Owner(_))));
}

#[test]
fn one_of_two_names_is_removed_without_the_image() {
    let local = Local::new();
    let store = local.store(None);
    let image = local.image(&store, "a", 1000);
    let layout = local.folder.path().join("a");
    let second = local.folder.path().join("second");
    fs::rename(layout, &second).unwrap();
    let Ok(Source::Archive(archive)) = format!("oci:{}", second.display()).parse() else { panic!() };
    store.import(&archive, &()).unwrap();
    assert_eq!(local.names(&store), ["a:1", "second:1"]);
    let removed = store.remove("a:1", Removal::Careful).unwrap();
    assert_eq!((removed.names.len(), removed.images.len()), (1, 0));
    assert_eq!(store.resolve("second:1").unwrap().digest, image.digest);
    assert!(matches!(store.remove("a:1", Removal::Careful), Err(Error::NoImage(_))));
    drop(image);
    let removed = store.remove("second:1", Removal::Careful).unwrap();
    assert_eq!(removed.images.len(), 1);
    assert_eq!(fs::read_dir(local.root().join("blobs/sha256")).unwrap().count(), 0);
}

#[test]
fn the_least_recently_used_image_goes_when_the_store_is_full() {
    let local = Local::new();
    // Two images and the disk of one.
    let store = local.store(Some(3_700_000));
    drop(local.image(&store, "a", 1_000_000));
    drop(local.image(&store, "b", 1_000_000));
    drop(store.resolve("a:1").unwrap());
    drop(local.image(&store, "c", 1_000_000));
    assert_eq!(local.names(&store), ["a:1", "c:1"]);
    // What is in use stays, even if that is too much.
    let held = store.resolve("a:1").unwrap();
    let also_held = store.resolve("c:1").unwrap();
    drop(local.image(&store, "d", 1_000_000));
    assert_eq!(local.names(&store), ["a:1", "c:1", "d:1"]);
    drop((held, also_held));
    drop(local.image(&store, "e", 1_000_000));
    assert_eq!(local.names(&store), ["d:1", "e:1"]);
}

#[test]
fn an_image_that_lost_its_name_is_pruned() {
    let local = Local::new();
    let store = local.store(None);
    let old = local.image(&store, "a", 1000).digest;
    let new = local.image(&store, "a", 2000).digest;
    assert_eq!(store.images().unwrap().len(), 2);
    assert_eq!(store.prune(PruneScope::Unnamed).unwrap().images, [old]);
    assert_eq!(store.resolve("a:1").unwrap().digest, new);
}

#[test]
fn an_image_that_lost_a_blob_is_pulled_again() {
    let fixture = Fixture::new();
    let host = fixture.registry.address();
    let (store, name) = (fixture.store(&[host]), reference(host, "app:1"));
    let image = store.pull(&name, PullPolicy::Missing, &()).unwrap();
    let blobs = fixture.root().join("blobs/sha256");
    let lost = fs::read_dir(&blobs)
        .unwrap()
        .map(|it| it.unwrap().path())
        .max_by_key(|it| it.metadata().unwrap().len());
    fs::remove_file(lost.unwrap()).unwrap();
    assert!(matches!(store.pull(&name, PullPolicy::Never, &()), Err(Error::NotPresent { .. })));
    assert_eq!(store.pull(&name, PullPolicy::Missing, &()).unwrap().digest, image.digest);
    store.base_disk(&image, &[], &()).unwrap();
}

#[test]
fn a_store_of_another_format_is_refused_untouched() {
    let local = Local::new();
    drop(local.store(None));
    fs::write(local.root().join("format"), "99").unwrap();
    assert!(
        matches!(Store::open(local.root(), options(&[])), Err(Error::Format { found, .. }) if found == "99")
    );
}

/// A file system of its own, as small as this, until it is dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(folder.path())
            .status()
            .unwrap();
        assert!(mounted.success(), "this test mounts a tmpfs: run it as root");
        Self(folder)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_ends_a_pull_with_words_and_leaves_room() {
    let fixture = Fixture::new();
    let disk = SmallDisk::new("2m");
    let root = disk.0.path().join("store");
    let host = fixture.registry.address();
    let store = Store::open(&root, options(&[host])).unwrap();
    let recorder = Recorder::default();
    let error = store.pull(&reference(host, "app:1"), PullPolicy::Missing, &recorder).unwrap_err();
    assert!(matches!(error, Error::Blob(blob::Error::DiskFull { .. })), "{error:?}");
    assert_eq!(recorder.retries(), 0);
    assert!(store.images().unwrap().is_empty());
    assert_eq!(leftovers(&root), Vec::<PathBuf>::new());
    assert!(store.prune(PruneScope::Unused).unwrap().bytes > 0, "the blobs that had room go when asked");
}

#[test]
fn a_full_disk_ends_a_build_with_words() {
    let disk = SmallDisk::new("5m");
    let (folder, root) = (tempfile::tempdir().unwrap(), disk.0.path().join("store"));
    let layout = folder.path().join("a");
    app("linux", &host_architecture()).write_layout(&layout, "1").unwrap();
    let store = Store::open(&root, options(&[])).unwrap();
    let Ok(Source::Archive(archive)) = format!("oci:{}", layout.display()).parse() else { panic!() };
    let error = store.import(&archive, &()).unwrap_err();
    let is_full = matches!(&error, Error::Build { source, .. }
        if matches!(**source, imp_storage::image::base::Error::DiskFull { .. }));
    assert!(is_full, "{error:?}");
    assert_eq!(leftovers(&root), Vec::<PathBuf>::new());
}
