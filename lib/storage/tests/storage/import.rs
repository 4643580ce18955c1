//! Images from files.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use imp_storage::blob::digest::Digest;
use imp_storage::image::reference::{Archive, Source};
use imp_storage::store::{Error, PullPolicy, Store};
use imp_testkit::machine::program;

use crate::fixture::{app, chain, host_architecture, leftovers, noise, options};

fn archive(text: &str) -> Archive {
    match text.parse().unwrap() {
        Source::Archive(archive) => archive,
        Source::Registry(other) => panic!("{other}"),
    }
}

fn tar(folder: &Path, file: &Path, flags: &str) {
    let status = Command::new("tar").arg(flags).arg(file).arg("-C").arg(folder).arg(".").status().unwrap();
    assert!(status.success());
}

#[test]
fn a_layout_and_archives_of_it_give_the_same_image() {
    let folder = tempfile::tempdir().unwrap();
    let layout = folder.path().join("demo");
    let written = app("linux", &host_architecture()).write_layout(&layout, "1").unwrap();
    tar(&layout, &folder.path().join("demo.tar"), "-cf");
    tar(&layout, &folder.path().join("demo.tar.gz"), "-czf");
    for source in ["oci:demo", "oci:demo:1", "oci-archive:demo.tar", "oci-archive:demo.tar.gz:1"] {
        let (format, rest) = source.split_once(':').unwrap();
        let source = format!("{format}:{}/{rest}", folder.path().display());
        let root = folder.path().join("store");
        let store = Store::open(&root, options(&[])).unwrap();
        let images = store.import(&archive(&source), &()).unwrap();
        assert_eq!(images.len(), 1, "{source}");
        assert_eq!(images[0].digest.to_string(), written.manifest, "{source}");
        let found = store.pull(&"demo:1".parse().unwrap(), PullPolicy::Never, &()).unwrap();
        assert_eq!(found.digest, images[0].digest);
        drop((images, found));
        assert_eq!(leftovers(&root), Vec::<std::path::PathBuf>::new());
        fs::remove_dir_all(root).unwrap();
    }
}

#[test]
fn what_docker_saves_is_imported_with_its_names() {
    let folder = tempfile::tempdir().unwrap();
    let layout = folder.path().join("layout");
    let written = app("linux", &host_architecture()).write_layout(&layout, "1").unwrap();
    // skopeo writes the old form, with layers behind links.
    let saved = folder.path().join("saved.tar");
    let status = Command::new(program("skopeo").unwrap())
        .args(["copy", "--quiet", "--insecure-policy"])
        .arg(format!("oci:{}:1", layout.display()))
        .arg(format!("docker-archive:{}:demo/app:7", saved.display()))
        .status()
        .unwrap();
    assert!(status.success());
    let mine = folder.path().join("mine.tar");
    app("linux", &host_architecture()).write_docker_archive(&mine, "demo/app:8").unwrap();
    let store = Store::open(folder.path().join("store"), options(&[])).unwrap();
    for (file, name) in [(&saved, "demo/app:7"), (&mine, "demo/app:8")] {
        let images = store.import(&archive(&format!("docker-archive:{}", file.display())), &()).unwrap();
        assert_eq!(images.len(), 1);
        let image = store.pull(&name.parse().unwrap(), PullPolicy::Never, &()).unwrap();
        let diff_ids: Vec<String> =
            store.inspect(&image).unwrap().diff_ids.iter().map(Digest::to_string).collect();
        assert_eq!(diff_ids, written.diff_ids, "{name}");
    }
    let named = archive(&format!("docker-archive:{}:demo/app:9", saved.display()));
    let error = store.import(&named, &()).unwrap_err();
    assert!(chain(&error).contains("demo/app:7"), "{}", chain(&error));
}

#[test]
fn a_layout_of_two_images_gives_the_one_that_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let layout = folder.path().join("two");
    app("linux", &host_architecture()).write_layout(&layout, "a").unwrap();
    let second = app("linux", &host_architecture()).env("B=2").write_layout(&layout, "b").unwrap();
    let store = Store::open(folder.path().join("store"), options(&[])).unwrap();
    let images = store.import(&archive(&format!("oci:{}:b", layout.display())), &()).unwrap();
    assert_eq!(images.iter().map(|image| image.digest.to_string()).collect::<Vec<_>>(), [second.manifest]);
    assert_eq!(store.import(&archive(&format!("oci:{}", layout.display())), &()).unwrap().len(), 2);
}

#[test]
fn damaged_archives_are_typed_errors_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (layout, root) = (folder.path().join("layout"), folder.path().join("store"));
    let written = app("linux", &host_architecture()).write_layout(&layout, "1").unwrap();
    let store = Store::open(&root, options(&[])).unwrap();
    let import = |text: String| store.import(&archive(&text), &()).unwrap_err();
    let whole = folder.path().join("whole.tar");
    tar(&layout, &whole, "-cf");
    let bytes = fs::read(&whole).unwrap();
    let short = folder.path().join("short.tar");
    fs::write(&short, &bytes[..bytes.len() / 2]).unwrap();
    assert!(matches!(import(format!("oci-archive:{}", short.display())), Error::Import { .. }));
    fs::write(&short, noise(10_000)).unwrap();
    assert!(matches!(import(format!("oci-archive:{}", short.display())), Error::Import { .. }));
    assert!(matches!(import(format!("docker-archive:{}", short.display())), Error::Import { .. }));
    assert!(matches!(import(format!("oci:{}", folder.path().join("none").display())), Error::Import { .. }));
    let layer = layout.join("blobs/sha256").join(written.layers[1].strip_prefix("sha256:").unwrap());
    let mut content = fs::read(&layer).unwrap();
    content[600] ^= 1;
    fs::write(&layer, content).unwrap();
    assert!(matches!(import(format!("oci:{}", layout.display())), Error::Blob(_)));
    File::options().write(true).open(&layer).unwrap().set_len(100).unwrap();
    assert!(matches!(import(format!("oci:{}", layout.display())), Error::Blob(_)));
    fs::remove_file(&layer).unwrap();
    assert!(matches!(import(format!("oci:{}", layout.display())), Error::Import { .. }));
    // A FIFO would make a careless reader wait for ever.
    assert!(Command::new("mkfifo").arg(&layer).status().unwrap().success());
    assert!(matches!(import(format!("oci:{}", layout.display())), Error::Import { .. }));
    assert!(store.images().unwrap().is_empty());
    assert_eq!(leftovers(&root), Vec::<std::path::PathBuf>::new());
}

#[test]
fn documents_that_name_files_outside_of_the_archive_reach_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("inside");
    fs::create_dir(&inside).unwrap();
    fs::write(folder.path().join("secret"), r#"{"rootfs":{"type":"layers","diff_ids":[]}}"#).unwrap();
    std::os::unix::fs::symlink("../secret", inside.join("link")).unwrap();
    let store = Store::open(folder.path().join("store"), options(&[])).unwrap();
    for config in ["../secret", "/etc/passwd", "link", "./../secret"] {
        fs::write(inside.join("manifest.json"), format!(r#"[{{"Config":"{config}","Layers":[]}}]"#)).unwrap();
        let file = folder.path().join("evil.tar");
        tar(&inside, &file, "-cf");
        let error = store.import(&archive(&format!("docker-archive:{}", file.display())), &()).unwrap_err();
        assert!(chain(&error).contains("does not have the file"), "{config}: {}", chain(&error));
    }
}
