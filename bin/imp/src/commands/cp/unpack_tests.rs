use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use tar::{Builder, Header};

use super::*;

struct Tree {
    outside: tempfile::TempDir,
}

/// A directory to unpack in, with something beside it that must stay as it is.
impl Tree {
    fn new() -> Self {
        let outside = tempfile::tempdir().unwrap();
        std::fs::create_dir(outside.path().join("inside")).unwrap();
        std::fs::write(outside.path().join("secret"), "untouched").unwrap();
        Self { outside }
    }

    fn inside(&self) -> PathBuf {
        self.outside.path().join("inside")
    }

    fn unpack(&self, archive: Builder<Vec<u8>>) -> Result<LeftOut, Error> {
        let bytes = archive.into_inner().unwrap();
        let result = unpack(bytes.as_slice(), &self.inside(), Into::Tree(None), Owners::TheCopiers);
        assert_eq!(std::fs::read_to_string(self.outside.path().join("secret")).unwrap(), "untouched");
        let mut beside: Vec<_> =
            std::fs::read_dir(self.outside.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        beside.sort();
        assert_eq!(beside, ["inside", "secret"]);
        result
    }
}

fn add(archive: &mut Builder<Vec<u8>>, kind: EntryType, name: &str, link: &str, data: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(data.len() as u64);
    header.set_mode(if kind == EntryType::Directory { 0o555 } else { 0o4750 });
    header.set_mtime(1_000_000);
    // The library refuses names like these; a hostile guest does not.
    header.as_gnu_mut().unwrap().name.get_mut(..name.len()).unwrap().copy_from_slice(name.as_bytes());
    header.as_gnu_mut().unwrap().linkname.get_mut(..link.len()).unwrap().copy_from_slice(link.as_bytes());
    header.set_cksum();
    archive.append(&header, data).unwrap();
}

#[test]
fn a_tree_is_unpacked_with_modes_times_and_links() {
    let tree = Tree::new();
    let mut archive = Builder::new(Vec::new());
    add(&mut archive, EntryType::Directory, "./", "", b"");
    add(&mut archive, EntryType::Directory, "a/", "", b"");
    add(&mut archive, EntryType::Regular, "a/file", "", b"content");
    add(&mut archive, EntryType::Link, "a/hard", "a/file", b"");
    add(&mut archive, EntryType::Symlink, "a/soft", "/etc/passwd", b"");
    add(&mut archive, EntryType::Regular, "no/parents/there", "", b"x");
    add(&mut archive, EntryType::Char, "a/device", "", b"");
    let mut device = LeftOut::default();
    device.add(Path::new("a/device"), "a device");
    assert_eq!(tree.unpack(archive).unwrap(), device);
    let a = tree.inside().join("a");
    let file = std::fs::metadata(a.join("file")).unwrap();
    assert_eq!((file.mode() & 0o7777, file.mtime(), file.nlink()), (0o750, 1_000_000, 2));
    assert_eq!(std::fs::read(a.join("hard")).unwrap(), b"content");
    assert_eq!(std::fs::read_link(a.join("soft")).unwrap(), Path::new("/etc/passwd"));
    assert_eq!(std::fs::symlink_metadata(a.join("soft")).unwrap().mtime(), 1_000_000);
    assert_eq!(std::fs::metadata(&a).unwrap().permissions().mode() & 0o777, 0o555);
    assert!(tree.inside().join("no/parents/there").exists() && !a.join("device").exists());
}

#[test]
fn no_member_of_a_hostile_archive_leaves_the_directory() {
    let escapes: [&[(EntryType, &str, &str)]; 7] = [
        &[(EntryType::Regular, "../secret", "")],
        &[(EntryType::Regular, "a/../../secret", "")],
        &[(EntryType::Symlink, "a", ".."), (EntryType::Regular, "a/secret", "")],
        &[(EntryType::Symlink, "a", ".."), (EntryType::Directory, "a/new/", "")],
        &[(EntryType::Symlink, "a", "../secret"), (EntryType::Directory, "a/", "")],
        &[(EntryType::Link, "a", "../secret")],
        &[(EntryType::Symlink, "a", ".."), (EntryType::Link, "b", "a/secret")],
    ];
    for members in escapes {
        let tree = Tree::new();
        let mut archive = Builder::new(Vec::new());
        for (kind, name, link) in members {
            let data: &[u8] = if *kind == EntryType::Regular { b"overwritten" } else { b"" };
            add(&mut archive, *kind, name, link, data);
        }
        assert!(tree.unpack(archive).is_err(), "{members:?}");
    }
}

#[test]
fn an_absolute_name_lands_inside() {
    let tree = Tree::new();
    let mut archive = Builder::new(Vec::new());
    add(&mut archive, EntryType::Regular, "/secret", "", b"x");
    tree.unpack(archive).unwrap();
    assert!(tree.inside().join("secret").exists());
}

#[test]
fn a_file_in_the_place_of_a_link_replaces_the_link_and_not_its_target() {
    let tree = Tree::new();
    symlink("../secret", tree.inside().join("a")).unwrap();
    let mut archive = Builder::new(Vec::new());
    add(&mut archive, EntryType::Regular, "a", "", b"new");
    tree.unpack(archive).unwrap();
    assert!(std::fs::symlink_metadata(tree.inside().join("a")).unwrap().is_file());
}

#[test]
fn a_name_of_a_gigabyte_is_refused_before_it_is_in_memory() {
    let tree = Tree::new();
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(1 << 30);
    header.set_cksum();
    let endless = io::Cursor::new(header.as_bytes().to_vec()).chain(io::repeat(b'a'));
    let error = unpack(endless, &tree.inside(), Into::Tree(None), Owners::TheCopiers).unwrap_err();
    assert!(matches!(error, Error::Archive(_)), "{error}");
}

#[test]
fn a_file_that_gets_a_name_must_be_the_only_member() {
    let tree = Tree::new();
    let mut archive = Builder::new(Vec::new());
    add(&mut archive, EntryType::Regular, "whatever", "", b"1");
    let one = archive.get_ref().clone();
    add(&mut archive, EntryType::Regular, "more", "", b"2");
    let two = archive.into_inner().unwrap();
    let name = Into::Entry(OsStr::new("chosen"));
    unpack(one.as_slice(), &tree.inside(), name, Owners::TheCopiers).unwrap();
    assert_eq!(std::fs::read(tree.inside().join("chosen")).unwrap(), b"1");
    let error = unpack(two.as_slice(), &tree.inside(), name, Owners::TheCopiers).unwrap_err();
    assert!(matches!(error, Error::NotOne(_)), "{error}");
}

#[test]
fn a_new_directory_gets_what_its_source_has_and_is_written_to_before() {
    let tree = Tree::new();
    let mut archive = Builder::new(Vec::new());
    add(&mut archive, EntryType::Regular, "a", "", b"x");
    let bytes = archive.into_inner().unwrap();
    let source = OfSource { mode: 0o6510, modified_nanoseconds: 1_000_000_500_000_000, ..Default::default() };
    unpack(bytes.as_slice(), &tree.inside(), Into::Tree(Some(source)), Owners::TheCopiers).unwrap();
    let inside = std::fs::metadata(tree.inside()).unwrap();
    assert_eq!(
        (inside.mode() & 0o7777, inside.mtime(), inside.mtime_nsec()),
        (0o510, 1_000_000, 500_000_000)
    );
}

#[test]
fn a_time_that_no_header_holds_is_taken_from_its_record() {
    let tree = Tree::new();
    let mut archive = Builder::new(Vec::new());
    archive.append_pax_extensions([("mtime", b"-1.750000000".as_slice())]).unwrap();
    add(&mut archive, EntryType::Regular, "old", "", b"x");
    add(&mut archive, EntryType::Regular, "next", "", b"x");
    tree.unpack(archive).unwrap();
    let time = |name: &str| {
        let metadata = std::fs::metadata(tree.inside().join(name)).unwrap();
        (metadata.mtime(), metadata.mtime_nsec())
    };
    assert_eq!((time("old"), time("next")), ((-2, 250_000_000), (1_000_000, 0)));
}

#[test]
fn a_large_file_takes_the_place_of_another_when_it_is_whole_and_a_torn_one_leaves_nothing() {
    let tree = Tree::new();
    std::fs::write(tree.inside().join("large"), "old").unwrap();
    let mut archive = Builder::new(Vec::new());
    add(&mut archive, EntryType::Regular, "large", "", &[7; BUFFER + 1]);
    let bytes = archive.get_ref().clone();
    let torn = bytes.get(..BUFFER).unwrap();
    assert!(unpack(torn, &tree.inside(), Into::Tree(None), Owners::TheCopiers).is_err());
    assert_eq!(std::fs::metadata(tree.inside().join("large")).unwrap().len(), 3);
    assert_eq!(std::fs::read_dir(tree.inside()).unwrap().count(), 1);
    tree.unpack(archive).unwrap();
    let large = std::fs::metadata(tree.inside().join("large")).unwrap();
    assert_eq!((large.len(), large.mode() & 0o7777, large.mtime()), (BUFFER as u64 + 1, 0o750, 1_000_000));
}

#[test]
fn a_torn_archive_is_an_error() {
    let tree = Tree::new();
    let mut archive = Builder::new(Vec::new());
    add(&mut archive, EntryType::Regular, "a", "", &[7; 2000]);
    let bytes = archive.into_inner().unwrap();
    let torn = bytes.get(..1500).unwrap();
    assert!(unpack(torn, &tree.inside(), Into::Tree(None), Owners::TheCopiers).is_err());
}
