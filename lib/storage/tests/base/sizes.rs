//! Many files, deep trees, large directories and large files.

use std::io::Write;
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::support::{GZIP, Workplace, image};
use crate::tar_builder::{Header, Tar};

#[test]
fn fifty_thousand_small_files_in_one_directory_are_found_by_name() {
    let tar = (0..50_000).fold(Tar::new(), |tar, n| tar.file(&format!("d/file-{n}"), "x"));
    let workplace = Workplace::new().layer(tar);
    let image = workplace.build();
    assert_eq!(image.paths.len(), 50_002);
    assert_eq!(image.node("d").flags & 0x1000, 0x1000, "the directory has an index");
}

#[test]
fn an_index_of_two_levels_is_sound() {
    // Long names make many blocks: 15 names each.
    let name = |n| format!("d/{n:0>250}");
    let tar = (0..12_000).fold(Tar::new(), |tar, n| tar.file(&name(n), ""));
    assert_eq!(image([tar]).paths.len(), 12_002);
}

#[test]
fn directories_at_the_edge_of_one_block_are_sound() {
    for count in 250..=258 {
        let tar = (0..count).fold(Tar::new(), |tar, n| tar.file(&format!("d/{n:08}"), ""));
        assert_eq!(image([tar]).paths.len(), count + 2);
    }
}

#[test]
fn five_thousand_nested_directories_are_made_and_removed() {
    let deep = vec!["deep"; 5000].join("/");
    let lower = Tar::new().file(&format!("{deep}/file"), "x");
    assert_eq!(image([lower.clone()]).paths.len(), 5002);
    assert_eq!(image([lower, Tar::new().whiteout("deep")]).paths.len(), 1);
}

#[test]
fn more_directories_than_links_can_count_are_fine() {
    let tar = (0..65_100).fold(Tar::new(), |tar, n| tar.directory(&format!("d/{n}")));
    let image = image([tar]);
    assert_eq!(image.node("d").links, 1);
    assert_eq!(image.node("").links, 3);
}

#[test]
fn a_file_with_too_many_names_is_refused() {
    let tar = (0..65_000).fold(Tar::new().file("f", "x"), |tar, n| tar.hard_link(&format!("l{n}"), "f"));
    let reason = crate::support::refusal([tar]);
    assert_eq!(reason, imp_storage::image::base::Refusal::TooManyNames);
}

#[test]
fn a_file_in_many_pieces_has_a_tree_of_extents() {
    // Every other stretch of zeros becomes a hole: 600 pieces need two blocks of extents.
    let piece = [vec![b'x'; 4096], vec![0; 16 * 4096]].concat();
    let content = piece.repeat(600);
    let image = image([Tar::new().file("f", &content).file("g", "g")]);
    assert_eq!(image.read("f"), content);
    assert!(image.allocated("f") < content.len() as u64 / 5);
}

#[test]
fn more_than_two_gibibytes_in_one_layer_keep_size_and_place() {
    // Written through a compressor: zeros, with a mark at the end.
    let size: u64 = (2 << 30) + (200 << 20) + 3;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&Tar::new().header(Header::new(b'0', "large").size(size)).bytes).unwrap();
    let zeros = vec![0; 1 << 20];
    for _ in 0..size >> 20 {
        encoder.write_all(&zeros).unwrap();
    }
    encoder.write_all(&Tar::new().data(b"end").file("after", "after").end()).unwrap();
    let workplace = Workplace::new().blob(GZIP, &encoder.finish().unwrap(), None);
    let image = workplace.build();
    assert_eq!(image.node("large").size, size);
    assert_eq!(image.allocated("large"), 4096);
    assert_eq!(image.text("after"), "after");
    let dump = Command::new("debugfs").args(["-R", "stat /large"]).arg(workplace.target()).output().unwrap();
    assert!(String::from_utf8_lossy(&dump.stdout).contains(&format!("Size: {size}")));
}

#[test]
fn hidden_files_leave_neither_bytes_nor_much_room() {
    use std::os::unix::fs::MetadataExt;
    let secret = b"the password".repeat(400_000);
    let workplace = Workplace::new()
        .layer(Tar::new().file("secret", &secret).file("kept", "kept"))
        .layer(Tar::new().whiteout("secret").file("new", vec![b'n'; 4_000_000]));
    let image = workplace.build();
    assert_eq!(image.names_of_all(), ["kept", "new"]);
    let disk = std::fs::read(workplace.target()).unwrap();
    assert!(!disk.windows(12).any(|bytes| bytes == b"the password"));
    let allocated = std::fs::metadata(workplace.target()).unwrap().blocks() * 512;
    assert!(allocated < 4_400_000, "{allocated}");
}

#[test]
fn an_image_with_more_inodes_than_its_blocks_would_give_is_sound() {
    let tar = (0..40_000).fold(Tar::new(), |tar, n| tar.file(&format!("{}/{n}", n % 100), ""));
    assert_eq!(image([tar]).paths.len(), 40_101);
}
