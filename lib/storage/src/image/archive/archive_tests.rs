use std::fs;

use proptest::prelude::*;

use super::files::Files;
use super::*;

/// A tar of these files and symbolic links.
fn tar(files: &[(&str, &[u8])], links: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, name, *content).unwrap();
    }
    for (name, to) in links {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        builder.append_link(&mut header, name, to).unwrap();
    }
    builder.into_inner().unwrap()
}

fn opened(bytes: &[u8]) -> Result<Files, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.tar");
    fs::write(&path, bytes).unwrap();
    Files::tar(&path, folder.path())
}

#[test]
fn files_are_found_by_name_and_through_links_within_the_archive() {
    let bytes = tar(
        &[("./a/layer.tar", b"first"), ("a/layer.tar", b"second"), ("b", b"b")],
        &[
            ("c/layer.tar", "../a/layer.tar"),
            ("d", "c/layer.tar"),
            ("circle", "circle"),
            ("out", "../../etc/passwd"),
        ],
    );
    let files = opened(&bytes).unwrap();
    for name in ["a/layer.tar", "c/layer.tar", "d"] {
        assert_eq!(files.read(name, 10).unwrap(), b"second", "{name}");
    }
    for name in ["circle", "out", "none", "", "../b", "/b"] {
        assert!(matches!(files.read(name, 10), Err(Error::MissingFile { .. })), "{name}");
    }
    assert!(matches!(files.read("d", 5), Err(Error::TooLarge { .. })));
}

#[test]
fn a_member_that_claims_more_than_the_file_has_is_refused() {
    let bytes = tar(&[("a", &[7; 4000])], &[]);
    assert!(matches!(opened(&bytes[..2000]), Err(Error::Tar { .. })));
}

proptest! {
    #[test]
    fn a_tar_changed_anywhere_is_read_or_refused(at in 0usize..3000, byte: u8, length in 0usize..4000) {
        let mut bytes = tar(&[("manifest.json", b"[]"), ("b/c", b"content")], &[("l", "b/c")]);
        bytes.truncate(length.max(1));
        let at = at % bytes.len();
        bytes[at] = byte;
        if let Ok(files) = opened(&bytes) {
            for name in ["manifest.json", "b/c", "l"] {
                let _ = files.read(name, 1 << 20);
            }
        }
    }

    /// Under a checksum that is right, so that the reader does not stop there.
    #[test]
    fn a_tar_with_any_field_changed_is_read_or_refused(
        field in prop::sample::select(vec![0usize, 100, 124, 136, 156, 157, 257, 263, 345, 482]),
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 1..12),
            prop::sample::select([&b"77777777777"[..], b"-1\0", b"\x80\0\0\0\0\0\0\x01", b"../x\0", b"/", b"\xff", b"S", b"L", b"x"].map(<[u8]>::to_vec).to_vec()),
        ],
        entry in 0usize..3,
    ) {
        // Three entries: a header and a block each, but for the link's.
        let mut archive = tar(&[("manifest.json", b"[]"), ("b/c", b"content")], &[("l", "b/c")]);
        let header = &mut archive[entry * 1024..][..512];
        header[field..field + bytes.len()].copy_from_slice(&bytes);
        let mut sealed = tar::Header::new_old();
        sealed.as_mut_bytes().copy_from_slice(header);
        sealed.set_cksum();
        header.copy_from_slice(sealed.as_bytes());
        if let Ok(files) = opened(&archive) {
            for name in ["manifest.json", "b/c", "l", "../x", "x"] {
                let _ = files.read(name, 1 << 20);
            }
        }
    }
}

#[test]
fn a_name_that_is_longer_than_any_is_refused_before_it_is_in_memory() {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::GNULongName);
    header.set_size(16 << 20);
    header.set_cksum();
    let mut bytes = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    io::Write::write_all(&mut bytes, header.as_bytes()).unwrap();
    io::copy(&mut io::repeat(b'a').take(16 << 20), &mut bytes).unwrap();
    io::Write::write_all(&mut bytes, &tar(&[("x", b"x")], &[])).unwrap();
    let error = opened(&bytes.finish().unwrap()).unwrap_err();
    assert!(
        matches!(&error, Error::Tar { source, .. } if source.kind() == io::ErrorKind::InvalidData),
        "{error:?}"
    );
}
