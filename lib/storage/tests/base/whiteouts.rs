//! Which names of lower layers an image still has.

use crate::ext4_reader::DIRECTORY;
use crate::support::image;
use crate::tar_builder::{Header, Tar};

fn lower() -> Tar {
    Tar::new()
        .directory("d")
        .file("d/old", "old")
        .directory("d/sub")
        .file("d/sub/deep", "deep")
        .file("top", "top")
}

#[test]
fn a_whiteout_hides_a_file_and_a_whole_directory() {
    let image = image([lower(), Tar::new().whiteout("top").whiteout("d/sub")]);
    assert_eq!(image.names_of_all(), ["d", "d/old"]);
}

#[test]
fn an_opaque_directory_keeps_what_its_own_layer_has_wherever_the_mark_stands() {
    let marks: [fn(Tar) -> Tar; 2] = [
        |tar| tar.opaque("d").file("d/new", "new").file("d/sub/x", "x"),
        |tar| tar.file("d/new", "new").file("d/sub/x", "x").opaque("d"),
    ];
    for mark in marks {
        let image = image([lower(), mark(Tar::new())]);
        assert_eq!(image.names_of_all(), ["d", "d/new", "d/sub", "d/sub/x", "top"]);
    }
}

#[test]
fn a_directory_below_an_opaque_one_forgets_the_attributes_it_had_below() {
    let base = Tar::new().directory("d").header(Header::new(b'5', "d/sub").mode(0o700));
    let image = image([base, Tar::new().file("d/sub/x", "x").opaque("d")]);
    assert_eq!(image.node("d/sub").mode, DIRECTORY | 0o755);
}

#[test]
fn a_file_deleted_and_added_again_in_one_layer_is_there() {
    for upper in
        [Tar::new().whiteout("top").file("top", "again"), Tar::new().file("top", "again").whiteout("top")]
    {
        assert_eq!(image([lower(), upper]).text("top"), "again");
    }
}

#[test]
fn a_file_deleted_in_one_layer_comes_back_in_the_next() {
    let image = image([lower(), Tar::new().whiteout("d"), Tar::new().directory("d").file("d/new", "new")]);
    assert_eq!(image.names_of_all(), ["d", "d/new", "top"]);
}

#[test]
fn a_directory_replaced_in_one_layer_has_only_its_new_content() {
    for upper in [
        Tar::new().whiteout("d").directory("d").file("d/new", "new"),
        Tar::new().directory("d").file("d/new", "new").whiteout("d"),
    ] {
        assert_eq!(image([lower(), upper]).names_of_all(), ["d", "d/new", "top"]);
    }
}

#[test]
fn whiteouts_of_what_is_not_there_mean_nothing() {
    let image = image([Tar::new().whiteout("a").whiteout("b/c").opaque("e").file(".wh..wh.plnk/1", "x")]);
    assert_eq!(image.names_of_all(), Vec::<&str>::new());
}

#[test]
fn a_whiteout_follows_links_in_its_directory_and_stays_inside() {
    let base = Tar::new().directory("usr/bin").file("usr/bin/tool", "x").symlink("bin", "/usr/bin");
    let image = image([base, Tar::new().whiteout("bin/tool")]);
    assert_eq!(image.names_of_all(), ["bin", "usr", "usr/bin"]);
}

/// A directory, a link that leads to it, and a link to that one.
fn linked() -> Tar {
    Tar::new().directory("t").file("t/old", "old").symlink("l", "t").symlink("m", "l")
}

fn in_any_order(entries: &[fn(Tar) -> Tar]) -> Vec<Tar> {
    let forward = entries.iter().fold(Tar::new(), |tar, entry| entry(tar));
    let backward = entries.iter().rev().fold(Tar::new(), |tar, entry| entry(tar));
    vec![forward, backward]
}

#[test]
fn a_file_does_not_land_behind_a_link_that_its_own_layer_hides() {
    for upper in in_any_order(&[|tar| tar.file("l/new", "new"), |tar| tar.whiteout("l")]) {
        let image = image([linked(), upper]);
        assert_eq!(image.names_of_all(), ["l", "l/new", "m", "t", "t/old"]);
        assert_eq!(image.node("l").kind(), DIRECTORY);
    }
}

#[test]
fn a_file_does_not_land_behind_a_link_in_a_directory_that_its_own_layer_empties() {
    let lower = || Tar::new().directory("t").directory("d").symlink("d/l", "../t");
    for upper in in_any_order(&[|tar| tar.file("d/l/new", "new"), |tar| tar.opaque("d")]) {
        assert_eq!(image([lower(), upper]).names_of_all(), ["d", "d/l", "d/l/new", "t"]);
    }
}

#[test]
fn a_mark_in_a_directory_that_replaces_a_link_does_not_empty_what_the_link_led_to() {
    for upper in in_any_order(&[|tar| tar.directory("l"), |tar| tar.opaque("l").whiteout("l/old")]) {
        let image = image([linked(), upper]);
        assert_eq!(image.names_of_all(), ["l", "m", "t", "t/old"]);
        assert_eq!(image.node("l").kind(), DIRECTORY);
    }
}

#[test]
fn a_whiteout_behind_a_link_that_its_own_layer_hides_means_nothing() {
    for upper in in_any_order(&[|tar| tar.whiteout("l/old"), |tar| tar.whiteout("l")]) {
        assert_eq!(image([linked(), upper]).names_of_all(), ["m", "t", "t/old"]);
    }
}

#[test]
fn hard_links_find_a_file_that_their_layer_put_behind_a_link() {
    let upper = Tar::new().file("m/old", "new").hard_link("m/a", "m/old").hard_link("b", "l/old");
    let image = image([linked(), upper]);
    assert_eq!(image.text("t/a"), "new");
    assert_eq!(image.node("b").inode, image.node("t/old").inode);
    assert_eq!(image.target("m"), "l");
}

#[test]
fn of_two_files_behind_a_link_the_later_one_stays() {
    for (upper, text) in [
        (Tar::new().file("l/f", "1").file("l/f", "2"), "2"),
        (Tar::new().file("l/f", "1").file("t/f", "2"), "2"),
        (Tar::new().file("t/f", "1").file("l/f", "2"), "2"),
    ] {
        assert_eq!(image([linked(), upper]).text("t/f"), text);
    }
}

#[test]
fn what_a_later_entry_takes_the_place_of_is_gone_wherever_the_whiteout_stands() {
    let replaced: [fn(Tar) -> Tar; 2] = [|tar| tar.file("l", "x"), |tar| tar.symlink("l", "u")];
    for replaced in replaced {
        for upper in [Tar::new().whiteout("l").file("l/a", "a"), Tar::new().file("l/a", "a").whiteout("l")] {
            assert_eq!(image([linked(), replaced(upper)]).names_of_all(), ["l", "m", "t", "t/old"]);
        }
    }
}
