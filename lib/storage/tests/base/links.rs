//! Hard links of every kind, and paths that lead through symbolic links.

use imp_storage::image::base::Refusal;

use crate::ext4_reader::{DIRECTORY, FILE, Image};
use crate::support::{image, refusal};
use crate::tar_builder::Tar;

fn assert_same_file(image: &Image, names: &[&str]) {
    for name in names {
        assert_eq!(image.node(name).inode, image.node(names[0]).inode, "{name}");
    }
    assert_eq!(usize::from(image.node(names[0]).links), names.len());
}

#[test]
fn a_hard_link_reaches_a_file_of_a_lower_layer() {
    let image = image([Tar::new().file("a", "one"), Tar::new().hard_link("b", "a").hard_link("c", "./b")]);
    assert_same_file(&image, &["a", "b", "c"]);
    assert_eq!(image.text("c"), "one");
}

#[test]
fn content_stays_when_the_first_name_goes() {
    let image =
        image([Tar::new().file("a", "one"), Tar::new().hard_link("b", "/a"), Tar::new().whiteout("a")]);
    assert_same_file(&image, &["b"]);
    assert_eq!(image.text("b"), "one");
}

#[test]
fn a_hard_link_may_stand_before_its_target_and_before_other_links() {
    let image = image([Tar::new().hard_link("c", "b").hard_link("b", "a").file("a", "one")]);
    assert_same_file(&image, &["a", "b", "c"]);
}

#[test]
fn a_link_that_waits_gives_way_to_what_takes_its_name() {
    let image = image([Tar::new().hard_link("b", "a").file("b", "own").file("a", "one")]);
    assert_eq!(image.text("b"), "own");
    assert_same_file(&image, &["a"]);
}

#[test]
fn a_hard_link_takes_the_place_of_what_was_there() {
    let below =
        Tar::new().file("a", "one").file("file", "x").directory("dir").file("dir/x", "x").symlink("s", "a");
    let links =
        Tar::new().hard_link("file", "a").hard_link("dir", "a").hard_link("s", "a").hard_link("a", "a");
    assert_same_file(&image([below, links]), &["a", "dir", "file", "s"]);
}

#[test]
fn a_hard_link_may_take_the_place_of_the_directory_of_its_target() {
    let image = image([Tar::new().file("d/only", "one"), Tar::new().hard_link("d", "d/only")]);
    assert_same_file(&image, &["d"]);
    assert_eq!(image.text("d"), "one");
}

#[test]
fn overwriting_one_of_two_names_leaves_the_other() {
    let image = image([Tar::new().file("a", "one").hard_link("b", "a"), Tar::new().file("a", "two")]);
    assert_eq!((image.text("a").as_str(), image.text("b").as_str()), ("two", "one"));
    assert_same_file(&image, &["b"]);
}

#[test]
fn a_symbolic_link_can_have_two_names() {
    assert_same_file(&image([Tar::new().symlink("s", "x").hard_link("t", "s")]), &["s", "t"]);
}

#[test]
fn a_hard_link_to_nothing_or_to_a_directory_is_refused() {
    assert_eq!(refusal([Tar::new().hard_link("b", "a")]), Refusal::NoTarget("a".into()));
    assert_eq!(refusal([Tar::new().hard_link("b", "b")]), Refusal::NoTarget("b".into()));
    assert_eq!(
        refusal([Tar::new().directory("d").hard_link("b", "d")]),
        Refusal::LinkToDirectory("d".into())
    );
}

#[test]
fn files_land_where_a_directory_link_leads_and_the_link_stays() {
    let image =
        image([Tar::new().directory("usr/bin").symlink("bin", "usr/bin"), Tar::new().file("bin/foo", "foo")]);
    assert_eq!(image.text("usr/bin/foo"), "foo");
    assert_eq!(image.target("bin"), "usr/bin");
}

#[test]
fn files_land_in_the_directory_that_their_own_layer_puts_in_the_place_of_a_link() {
    let base = || Tar::new().directory("x").symlink("s", "x");
    for upper in [Tar::new().file("s/1", "1").directory("s"), Tar::new().directory("s").file("s/1", "1")] {
        assert_eq!(image([base(), upper]).names_of_all(), ["s", "s/1", "x"]);
    }
}

#[test]
fn a_link_to_a_path_of_the_host_leads_inside_the_image() {
    let image =
        image([Tar::new().symlink("a", "/etc").file("a/x", "x").symlink("up", "../../..").file("up/y", "y")]);
    assert_eq!(image.text("etc/x"), "x");
    assert_eq!(image.text("y"), "y");
}

#[test]
fn targets_are_kept_as_they_are() {
    let long = "x/".repeat(1500);
    let targets = ["/../../a/b", "..//./b", "a", &"y".repeat(59), &"y".repeat(60), &"y".repeat(101), &long];
    let tar =
        targets.iter().enumerate().fold(Tar::new(), |tar, (n, target)| tar.symlink(&format!("l{n}"), target));
    let image = image([tar]);
    for (n, target) in targets.iter().enumerate() {
        assert_eq!(image.target(&format!("l{n}")), *target);
    }
}

#[test]
fn links_in_a_circle_are_refused_as_a_way_but_kept_as_files() {
    let circle = || Tar::new().symlink("a", "b").symlink("b", "a");
    assert_eq!(image([circle()]).target("a"), "b");
    assert_eq!(refusal([circle().file("a/x", "x")]), Refusal::SymlinkLoop);
}

#[test]
fn a_directory_takes_the_place_of_a_link_and_a_file_that_of_a_directory() {
    let below = Tar::new().directory("t").symlink("l", "t").directory("d/e").file("f", "f").file("g", "g");
    let above = Tar::new().directory("l").file("d", "d").directory("f").file("g/x", "x");
    let image = image([below, above]);
    assert_eq!(image.node("l").kind(), DIRECTORY);
    assert_eq!(image.node("d").kind(), FILE);
    assert_eq!(image.node("f").kind(), DIRECTORY);
    assert_eq!(image.text("g/x"), "x", "a file of a lower layer gives way to a directory that has no entry");
}

#[test]
fn a_path_through_a_file_of_its_own_layer_is_refused() {
    assert_eq!(refusal([Tar::new().file("a", "a").file("a/b", "b")]), Refusal::NotADirectory("a".into()));
}

#[test]
fn a_cached_directory_is_forgotten_when_its_path_changes_meaning() {
    let base = Tar::new().directory("x").directory("y").symlink("s", "y").hard_link("t", "s");
    let upper = Tar::new().symlink("s", "x").file("s/1", "1").directory("s").file("s/2", "2");
    let image = image([base, upper]);
    assert_eq!(image.names_of_all(), ["s", "s/2", "t", "x", "x/1", "y"]);
}
