//! Compressions, media types, sparse files, and images that are the same to the byte.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use imp_storage::blob::digest::Digest;
use imp_storage::image::base::{Error, Refusal, base_key};

use crate::support::{GZIP, TAR, Workplace, ZSTD, image, refusal};
use crate::tar_builder::{Header, Tar};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn tar() -> Vec<u8> {
    Tar::new().file("a", "hello").end()
}

#[test]
fn every_compression_gives_the_same_disk() {
    let tar = tar();
    let diff_id = Some(Digest::of(&tar));
    let (first, second) = tar.split_at(700);
    let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 3).unwrap();
    let skippable = [b"\x53\x2a\x4d\x18\x03\0\0\0abc".as_slice(), &zstd(&tar)].concat();
    let blobs = [
        (TAR, tar.clone()),
        (GZIP, gzip(&tar)),
        (GZIP, [gzip(first), gzip(second)].concat()),
        (ZSTD, zstd(&tar)),
        (ZSTD, [zstd(first), zstd(second)].concat()),
        (ZSTD, skippable),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", gzip(&tar)),
    ];
    let mut disks = Vec::new();
    for (media_type, blob) in blobs {
        let workplace = Workplace::new().blob(media_type, &blob, diff_id);
        assert_eq!(workplace.build().text("a"), "hello");
        disks.push(std::fs::read(workplace.target()).unwrap());
    }
    assert!(disks.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn a_layer_without_known_diff_id_reports_the_one_it_has() {
    let workplace = Workplace::new().blob(GZIP, &gzip(&tar()), None);
    assert_eq!(workplace.try_build().unwrap().diff_ids, [Digest::of(&tar())]);
}

#[test]
fn the_key_depends_on_every_layer_and_their_order() {
    let workplace = Workplace::new().layer(Tar::new().file("a", "1")).layer(Tar::new().file("a", "2"));
    let key = base_key(&workplace.layers);
    let mut reversed = workplace.layers.clone();
    reversed.reverse();
    assert_ne!(key, base_key(&reversed));
    assert_ne!(key, base_key(&workplace.layers[..1]));
    assert_eq!(key, base_key(&workplace.layers));
}

#[test]
fn an_empty_layer_and_no_layer_at_all_make_an_empty_root() {
    assert_eq!(image([Tar::new()]).names_of_all(), Vec::<&str>::new());
    assert_eq!(image([]).names_of_all(), Vec::<&str>::new());
    assert_eq!(Workplace::new().blob(TAR, b"", None).build().names_of_all(), Vec::<&str>::new());
}

#[test]
fn a_media_type_that_the_content_contradicts_is_refused() {
    let error = |media_type, blob: &[u8]| Workplace::new().blob(media_type, blob, None).error();
    assert!(matches!(error("text/plain", b""), Error::MediaType { .. }));
    assert!(matches!(error(TAR, &gzip(&tar())), Error::Compression { found: "gzip", .. }));
    assert!(matches!(
        error(GZIP, &zstd::encode_all(&*tar(), 1).unwrap()),
        Error::Compression { found: "zstd", .. }
    ));
    assert!(matches!(error(ZSTD, &tar()), Error::Compression { declared: "zstd", .. }));
    assert!(matches!(error(GZIP, b"\xfd7zXZ\0"), Error::Compression { found: "xz", .. }));
}

#[test]
fn a_blob_cut_short_is_refused_wherever_it_is_cut() {
    let (packed, diff_id) = (gzip(&tar()), Digest::of(&tar()));
    for length in [0, 1, 5, 20, packed.len() - 9, packed.len() - 1] {
        let error = Workplace::new().blob(GZIP, &packed[..length], Some(diff_id)).error();
        assert!(matches!(error, Error::Inflate { .. } | Error::Compression { .. }), "{length}: {error:?}");
    }
    let packed = zstd::encode_all(&*tar(), 3).unwrap();
    let error = Workplace::new().blob(ZSTD, &packed[..packed.len() - 3], Some(diff_id)).error();
    assert!(matches!(error, Error::Inflate { .. }));
    for length in [100, 512, 515, 700] {
        let cut = &tar()[..length];
        let error = Workplace::new().blob(TAR, cut, Some(diff_id)).error();
        let truncated = matches!(&error, Error::Layer { reason: Refusal::Truncated, .. });
        let truncated = truncated || matches!(&error, Error::Entry { reason: Refusal::Truncated, .. });
        assert!(truncated, "{length}: {error:?}");
    }
    let cut = Workplace::new().blob(TAR, &tar()[..1024], Some(diff_id)).error();
    assert!(matches!(cut, Error::DiffId { .. }), "{cut:?}");
}

#[test]
fn the_diff_id_covers_what_follows_the_end_of_the_tar() {
    let mut bytes = tar();
    let diff_id = Digest::of(&bytes);
    bytes.extend_from_slice(b"more");
    let error = Workplace::new().blob(TAR, &bytes, Some(diff_id)).error();
    assert!(matches!(error, Error::DiffId { expected, .. } if expected == diff_id));
    Workplace::new().blob(TAR, &bytes, Some(Digest::of(&bytes))).build();
}

/// 10 bytes at 0, a hole, 5 bytes at 3 MiB, up to 3 GiB.
const SIZE: u64 = 3 << 30;
const FAR: u64 = 3 << 20;

fn assert_sparse(tar: Tar) {
    let image = image([tar.file("after", "after")]);
    let node = image.node("dir/sparse");
    assert_eq!(node.size, SIZE);
    assert_eq!(image.allocated("dir/sparse"), 8192);
    assert_eq!(image.text("after"), "after", "the reader knows where the next member is");
}

#[test]
fn sparse_files_of_every_format_keep_their_holes() {
    let data = b"0123456789abcde";
    let mut old = Header::new(b'S', "dir/sparse");
    old.put(257, b"ustar  \0").size(15).octal(483, 12, SIZE);
    old.octal(386, 12, 0).octal(398, 12, 10).octal(410, 12, FAR).octal(422, 12, 5);
    assert_sparse(Tar::new().header(&old).data(data));

    let size = SIZE.to_string();
    let far = FAR.to_string();
    let zero: [(&str, &[u8]); 6] = [
        ("GNU.sparse.size", size.as_bytes()),
        ("GNU.sparse.numblocks", b"2"),
        ("GNU.sparse.offset", b"0"),
        ("GNU.sparse.numbytes", b"10"),
        ("GNU.sparse.offset", far.as_bytes()),
        ("GNU.sparse.numbytes", b"5"),
    ];
    assert_sparse(Tar::new().pax(&zero).file("dir/sparse", data));

    let map = format!("0,10,{FAR},5");
    let one: [(&str, &[u8]); 3] = [
        ("GNU.sparse.size", size.as_bytes()),
        ("GNU.sparse.name", b"dir/sparse"),
        ("GNU.sparse.map", map.as_bytes()),
    ];
    assert_sparse(Tar::new().pax(&one).file("dir/GNUSparseFile.1/sparse", data));

    let latest: [(&str, &[u8]); 4] = [
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"dir/sparse"),
        ("GNU.sparse.realsize", size.as_bytes()),
    ];
    let mut content = format!("2\n0\n10\n{FAR}\n5\n").into_bytes();
    content.resize(512, 0);
    content.extend_from_slice(data);
    assert_sparse(Tar::new().pax(&latest).file("dir/GNUSparseFile.1/sparse", content));
}

#[test]
fn an_old_sparse_map_may_go_on_in_further_records() {
    let mut header = Header::new(b'S', "s");
    header.put(257, b"ustar  \0").size(60).octal(483, 12, 1 << 20);
    for pair in 0..4 {
        header.octal(386 + pair * 24, 12, pair as u64 * 4096).octal(398 + pair * 24, 12, 10);
    }
    header.put(482, &[1]);
    let mut more = Header { bytes: [0; 512] };
    more.octal(0, 12, 4 * 4096).octal(12, 12, 10).octal(24, 12, 5 * 4096 + 1).octal(36, 12, 10);
    let mut tar = Tar::new().header(&header);
    tar.bytes.extend_from_slice(&more.bytes);
    let image = image([tar.data(&[b'x'; 60])]);
    let content = image.read("s");
    assert_eq!(content.len(), 1 << 20);
    assert_eq!(content[5 * 4096..5 * 4096 + 12], *b"\0xxxxxxxxxx\0");
}

#[test]
fn a_wrong_sparse_map_is_refused() {
    for map in ["0,10,5,5", "0,10", "0,10,3000,100", "x,1", "0,10,100", "18446744073709551615,15"] {
        let pax: [(&str, &[u8]); 2] = [("GNU.sparse.size", b"3000"), ("GNU.sparse.map", map.as_bytes())];
        let reason = refusal([Tar::new().pax(&pax).file("s", [0; 15])]);
        assert!(matches!(reason, Refusal::SparseMap | Refusal::Number(_)), "{map}: {reason:?}");
    }
}
