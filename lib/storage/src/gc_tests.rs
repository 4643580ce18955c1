use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn digest(name: &str) -> Digest {
    Digest::of(name.as_bytes())
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// `name last-used blob,blob`; the disk of an image `a` is `disk-a`.
fn image(text: &str) -> ListedImage {
    let mut words = text.split(' ');
    let (name, last_used, blobs) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    ListedImage {
        digest: digest(name),
        is_named: !name.starts_with('_'),
        blobs: blobs.split(',').map(digest).collect(),
        disk: digest(&format!("disk-{name}")),
        last_used: at(last_used.parse().unwrap()),
    }
}

fn listing(images: &[&str], disks: &[(&str, u64)], blobs: &[&str], held: &[&str]) -> Listing {
    let disk = |(name, last_used): &(&str, u64)| ListedDisk {
        key: digest(&format!("disk-{name}")),
        bytes: 100,
        last_used: at(*last_used),
    };
    Listing {
        images: images.iter().map(|text| image(text)).collect(),
        disks: disks.iter().map(disk).collect(),
        snapshots: Vec::new(),
        blobs: blobs.iter().map(|name| (digest(name), 10)).collect(),
        held: held.iter().map(|name| digest(name)).collect(),
    }
}

fn check(listing: &Listing, goal: Goal, gone: &[&str], bytes: u64) {
    let plan = plan(listing, &goal);
    let found: BTreeSet<Digest> =
        [&plan.images, &plan.disks, &plan.blobs].into_iter().flatten().copied().collect();
    assert_eq!(found, gone.iter().map(|name| digest(name)).collect(), "{goal:?}");
    assert_eq!(plan.bytes, bytes, "{goal:?}");
}

#[test]
fn the_least_recently_used_goes_until_the_rest_fits() {
    let all = listing(&["a 1 x,s", "b 2 y,s"], &[("a", 1), ("b", 2)], &["x", "y", "s", "orphan"], &[]);
    check(&all, Goal::Fit { limit: 240 }, &[], 0);
    check(&all, Goal::Fit { limit: 239 }, &["orphan"], 10);
    check(&all, Goal::Fit { limit: 229 }, &["orphan", "disk-a"], 110);
    check(&all, Goal::Fit { limit: 129 }, &["orphan", "disk-a", "a", "x"], 120);
    check(&all, Goal::Fit { limit: 119 }, &["orphan", "disk-a", "a", "x", "disk-b"], 220);
    check(&all, Goal::Fit { limit: 0 }, &["orphan", "disk-a", "a", "x", "disk-b", "b", "y", "s"], 240);
}

#[test]
fn what_is_held_stays_even_if_the_limit_cannot_be_met() {
    let all = listing(
        &["a 1 x,s", "b 2 y,s"],
        &[("a", 1), ("b", 2)],
        &["x", "y", "s", "new"],
        &["a", "disk-b", "new"],
    );
    check(&all, Goal::Fit { limit: 0 }, &["disk-a", "b", "y"], 110);
    check(&all, Goal::Unused, &["disk-a", "b", "y"], 110);
    check(&all, Goal::Without { image: digest("a") }, &[], 0);
}

#[test]
fn pruning_takes_what_no_name_leads_to() {
    let all = listing(
        &["_a 9 x,s", "b 2 y,s"],
        &[("_a", 9), ("b", 2), ("stacked", 9)],
        &["x", "y", "s", "orphan"],
        &[],
    );
    check(&all, Goal::Unnamed, &["_a", "x", "disk-_a", "disk-stacked", "orphan"], 220);
}

#[test]
fn removing_an_image_leaves_what_others_share() {
    let mut all = listing(&["a 1 x,s", "b 2 y,s"], &[("a", 1), ("b", 2)], &["x", "y", "s"], &[]);
    check(&all, Goal::Without { image: digest("a") }, &["a", "disk-a", "x"], 110);
    all.images[1].disk = digest("disk-a");
    check(&all, Goal::Without { image: digest("a") }, &["a", "x"], 10);
}

/// `name last-used disk`; one whose name begins with `_` is led to by no template.
fn snapshot(text: &str) -> ListedSnapshot {
    let mut words = text.split(' ');
    let (name, last_used, disk) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    ListedSnapshot {
        digest: digest(name),
        is_named: !name.starts_with('_'),
        bytes: 1000,
        base: Some(digest(&format!("disk-{disk}"))),
        last_used: at(last_used.parse().unwrap()),
    }
}

fn check_snapshots(listing: &Listing, goal: Goal, snapshots: &[&str], disks: &[&str]) {
    let plan = plan(listing, &goal);
    let mut expected: Vec<Digest> = snapshots.iter().map(|name| digest(name)).collect();
    expected.sort();
    assert_eq!(plan.snapshots, expected, "{goal:?}");
    let disks: Vec<Digest> = disks.iter().map(|name| digest(&format!("disk-{name}"))).collect();
    assert_eq!(plan.disks, disks, "{goal:?}");
    assert_eq!(plan.bytes, 1000 * expected.len() as u64 + 100 * disks.len() as u64, "{goal:?}");
}

#[test]
fn a_disk_stays_as_long_as_a_snapshot_on_it_and_goes_after_it() {
    let mut all = listing(&[], &[("a", 1)], &[], &[]);
    all.snapshots = ["new 9 a", "_old 2 a"].map(snapshot).into();
    check_snapshots(&all, Goal::Fit { limit: 2100 }, &[], &[]);
    check_snapshots(&all, Goal::Fit { limit: 2099 }, &["_old"], &[]);
    check_snapshots(&all, Goal::Fit { limit: 1099 }, &["_old", "new"], &[]);
    check_snapshots(&all, Goal::Fit { limit: 99 }, &["_old", "new"], &["a"]);
    check_snapshots(&all, Goal::Unnamed, &["_old"], &[]);
    check_snapshots(&all, Goal::Unused, &["_old", "new"], &["a"]);
    all.held.insert(digest("new"));
    check_snapshots(&all, Goal::Fit { limit: 0 }, &["_old"], &[]);
    check_snapshots(&all, Goal::Unused, &["_old"], &[]);
}

#[test]
fn removing_an_image_leaves_the_disk_of_a_snapshot() {
    let mut all = listing(&["a 1 x"], &[("a", 1)], &["x"], &[]);
    all.snapshots = vec![snapshot("new 9 a")];
    check(&all, Goal::Without { image: digest("a") }, &["a", "x"], 10);
}

proptest! {
    #[test]
    fn nothing_that_stays_loses_a_blob_and_nothing_held_goes(
        images in prop::collection::vec((0u64..5, prop::collection::vec(0u8..6, 1..4)), 0..5),
        disks in prop::collection::vec(0u64..5, 0..5),
        held in prop::collection::vec(0u8..12, 0..4),
        limit in 0u64..600,
    ) {
        let texts: Vec<String> = images.iter().enumerate().map(|(name, (used, blobs))| {
            let blobs: Vec<String> = blobs.iter().map(|blob| format!("blob{blob}")).collect();
            format!("{name} {used} {}", blobs.join(","))
        }).collect();
        let disk_names: Vec<String> = (0..disks.len()).map(|name| name.to_string()).collect();
        let held: Vec<String> = held.iter().map(|it| match it { 0..6 => format!("blob{it}"), 6..9 => format!("{}", it - 6), _ => format!("disk-{}", it - 9) }).collect();
        let blobs: Vec<String> = (0..6).map(|blob| format!("blob{blob}")).collect();
        let all = listing(
            &texts.iter().map(String::as_str).collect::<Vec<_>>(),
            &disk_names.iter().map(String::as_str).zip(disks.iter().copied()).collect::<Vec<_>>(),
            &blobs.iter().map(String::as_str).collect::<Vec<_>>(),
            &held.iter().map(String::as_str).collect::<Vec<_>>(),
        );
        for goal in [Goal::Fit { limit }, Goal::Unnamed, Goal::Unused] {
            let plan = plan(&all, &goal);
            let gone: BTreeSet<Digest> = [&plan.images, &plan.disks, &plan.blobs].into_iter().flatten().copied().collect();
            prop_assert!(gone.is_disjoint(&all.held));
            for image in all.images.iter().filter(|image| !plan.images.contains(&image.digest)) {
                prop_assert!(image.blobs.iter().all(|blob| !plan.blobs.contains(blob)));
            }
            if let Goal::Fit { limit } = goal {
                let total = all.disks.len() as u64 * 100 + all.blobs.len() as u64 * 10;
                let movable = all.images.iter().any(|image| !all.held.contains(&image.digest) && !plan.images.contains(&image.digest))
                    || all.disks.iter().any(|disk| !all.held.contains(&disk.key) && !plan.disks.contains(&disk.key));
                prop_assert!(total - plan.bytes <= limit || !movable);
            }
        }
    }

    #[test]
    fn no_snapshot_that_stays_loses_its_disk_and_the_limit_is_met_if_it_can_be(
        snapshots in prop::collection::vec((0u64..6, 0u8..4), 0..6),
        disks in prop::collection::vec(0u64..6, 0..4),
        held in prop::collection::vec(0usize..6, 0..3),
        limit in 0u64..7000,
    ) {
        let names: Vec<String> = (0..disks.len()).map(|name| name.to_string()).collect();
        let disks: Vec<(&str, u64)> = names.iter().map(String::as_str).zip(disks.iter().copied()).collect();
        let held: Vec<String> = held.iter().map(|number| format!("snapshot{number}")).collect();
        let held: Vec<&str> = held.iter().map(String::as_str).collect();
        let mut all = listing(&[], &disks, &[], &held);
        all.snapshots = snapshots
            .iter()
            .enumerate()
            .map(|(number, (used, disk))| snapshot(&format!("snapshot{number} {used} {disk}")))
            .collect();
        for goal in [Goal::Fit { limit }, Goal::Unnamed, Goal::Unused] {
            let plan = plan(&all, &goal);
            prop_assert!(plan.snapshots.iter().all(|gone| !all.held.contains(gone)));
            let staying = all.snapshots.iter().filter(|it| !plan.snapshots.contains(&it.digest));
            for snapshot in staying.clone() {
                prop_assert!(!plan.disks.contains(&snapshot.base.unwrap()));
            }
            if let Goal::Fit { limit } = goal {
                let total = all.snapshots.len() as u64 * 1000 + all.disks.len() as u64 * 100;
                let needed: BTreeSet<Digest> = staying.clone().filter_map(|it| it.base).collect();
                let movable = staying.clone().any(|it| !all.held.contains(&it.digest))
                    || all.disks.iter().any(|disk| !needed.contains(&disk.key) && !plan.disks.contains(&disk.key));
                prop_assert!(total - plan.bytes <= limit || !movable);
            }
        }
    }
}
