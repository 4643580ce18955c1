//! Random layers, merged twice: by the code, and by a model that is too simple to be wrong.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use crate::ext4_reader::{DIRECTORY, FILE, Image};
use crate::support::Workplace;
use crate::tar_builder::{Header, Tar, record};

#[derive(Clone, Debug)]
enum Step {
    Directory(String, u16),
    File(String, u8),
    Symlink(String),
    Link(String, String),
    Hide(String),
    HideAll(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Thing {
    Directory(u16),
    /// Content, and which file it is: two names of one file have the same number.
    File(u8, usize),
    Symlink,
}

type Model = BTreeMap<String, Thing>;

fn below<'a>(model: &'a Model, path: &str) -> Vec<&'a String> {
    let prefix = format!("{path}/");
    model.keys().filter(|key| key.starts_with(&prefix)).collect()
}

fn remove(model: &mut Model, path: &str) {
    let gone: Vec<String> = below(model, path).into_iter().cloned().chain([path.to_owned()]).collect();
    for path in gone {
        model.remove(&path);
    }
}

/// Whiteouts act on what is below the layer; then its entries are laid over it in order.
fn merge(layers: &[Vec<Step>]) -> Option<Model> {
    let mut model = Model::new();
    let mut files = 0;
    for layer in layers {
        for step in layer {
            match step {
                Step::Hide(path) => remove(&mut model, path),
                Step::HideAll(path) => {
                    for path in below(&model, path).into_iter().cloned().collect::<Vec<_>>() {
                        model.remove(&path);
                    }
                }
                _ => {}
            }
        }
        let mut own = BTreeSet::new();
        for step in layer {
            let (path, thing) = match step {
                Step::Directory(path, mode) => (path, Thing::Directory(*mode)),
                Step::File(path, content) => {
                    files += 1;
                    (path, Thing::File(*content, files))
                }
                Step::Symlink(path) => (path, Thing::Symlink),
                Step::Link(path, target) => match model.get(target)? {
                    Thing::Directory(_) => return None,
                    thing => (path, thing.clone()),
                },
                Step::Hide(_) | Step::HideAll(_) => continue,
            };
            for (end, _) in path.match_indices('/') {
                let parent = &path[..end];
                match model.get(parent) {
                    Some(Thing::Directory(_)) => {}
                    Some(_) if own.contains(parent) => return None,
                    _ => {
                        model.insert(parent.to_owned(), Thing::Directory(0o755));
                        own.insert(parent.to_owned());
                    }
                }
            }
            let over = matches!((&thing, model.get(path)), (Thing::Directory(_), Some(Thing::Directory(_))));
            let again = matches!(step, Step::Link(..)) && model.get(path) == Some(&thing);
            if !over && !again {
                remove(&mut model, path);
            }
            model.insert(path.clone(), thing);
            own.insert(path.clone());
        }
    }
    Some(model)
}

fn tar(layer: &[Step]) -> Tar {
    layer.iter().fold(Tar::new(), |tar, step| match step {
        Step::Directory(path, mode) => tar.header(Header::new(b'5', path).mode((*mode).into())),
        Step::File(path, content) => tar.file(path, vec![*content; usize::from(*content) * 100]),
        Step::Symlink(path) => tar.symlink(path, "nowhere/at/all"),
        Step::Link(path, target) => tar.hard_link(path, target),
        Step::Hide(path) => tar.whiteout(path),
        Step::HideAll(path) => tar.opaque(path),
    })
}

/// Compares names, kinds, modes and contents, and which names are the same file.
fn assert_same(image: &Image, model: &Model) {
    let names: Vec<&String> = image.paths.keys().filter(|path| !path.is_empty()).collect();
    assert_eq!(names, model.keys().collect::<Vec<_>>());
    let mut numbers = BTreeMap::new();
    for (path, thing) in model {
        let node = image.node(path);
        match thing {
            Thing::Directory(mode) => assert_eq!(node.mode, DIRECTORY | mode, "{path}"),
            Thing::Symlink => assert_eq!(image.target(path), "nowhere/at/all"),
            Thing::File(content, number) => {
                assert_eq!(node.kind(), FILE);
                assert_eq!(image.read(path), vec![*content; usize::from(*content) * 100], "{path}");
                let inode = *numbers.entry(*number).or_insert(node.inode);
                assert_eq!(inode, node.inode, "{path}");
            }
        }
    }
    let distinct: BTreeSet<u32> = numbers.values().copied().collect();
    assert_eq!(distinct.len(), numbers.len(), "different files have different inodes");
}

fn path() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4).prop_map(|names| names.join("/"))
}

/// Links that are never a way to somewhere else.
fn leaf() -> impl Strategy<Value = String> {
    path().prop_map(|path| format!("{path}/s"))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (path(), prop::sample::select(vec![0o755_u16, 0o700, 0o1777])).prop_map(|(p, m)| Step::Directory(p, m)),
        4 => (path(), 0_u8..200).prop_map(|(p, c)| Step::File(p, c)),
        1 => leaf().prop_map(Step::Symlink),
        2 => (path(), path()).prop_map(|(p, t)| Step::Link(p, t)),
        2 => path().prop_map(Step::Hide),
        1 => path().prop_map(Step::HideAll),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn random_layers_merge_as_the_model_says(
        layers in prop::collection::vec(prop::collection::vec(step(), 0..8), 1..4)
    ) {
        // Whiteouts first, where the model has them: a link may not mean what its own layer hides.
        let layers: Vec<Vec<Step>> = layers.into_iter().map(hides_first).collect();
        let workplace = layers.iter().fold(Workplace::new(), |workplace, layer| workplace.layer(tar(layer)));
        match merge(&layers) {
            Some(model) => assert_same(&workplace.build(), &model),
            None => { workplace.refusal_or_late_link(); }
        }
    }

    #[test]
    fn the_place_of_whiteouts_among_other_entries_does_not_matter(
        lower in prop::collection::vec(step(), 0..8),
        upper in prop::collection::vec(step().prop_filter("links look below", |s| !matches!(s, Step::Link(..))), 0..8)
    ) {
        let lower = hides_first(lower);
        let layers = [lower, upper];
        if let Some(model) = merge(&layers) {
            let workplace = layers.iter().fold(Workplace::new(), |workplace, layer| workplace.layer(tar(layer)));
            assert_same(&workplace.build(), &model);
        }
    }

    #[test]
    fn whiteouts_mean_the_same_anywhere_in_a_layer_whose_paths_lead_through_links(
        upper in prop::collection::vec(
            step().prop_filter("links look below", |step| !matches!(step, Step::Link(..))), 0..8)
    ) {
        // "a" and "b/a" lead to directories which the layer may hide, fill or replace.
        let lower = || Tar::new().file("c/a", "1").file("c/b/c", "2").symlink("a", "c").symlink("b/a", "../c/b");
        let outcome = |layer: &[Step]| {
            let workplace = Workplace::new().layer(lower()).layer(tar(layer));
            workplace.try_build().is_ok().then(|| {
                crate::support::assert_clean(&workplace.target());
                let image = Image::open(&workplace.target());
                image.paths.keys().map(|path| (path.clone(), image.node(path).mode)).collect::<Vec<_>>()
            })
        };
        // A layer that has a name both as a file and as a directory may be refused in one order alone.
        if let (Some(as_it_is), Some(hides_first)) = (outcome(&upper), outcome(&hides_first(upper.clone()))) {
            prop_assert_eq!(as_it_is, hides_first);
        }
    }

    #[test]
    fn no_bytes_at_all_break_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let _ = Workplace::new().blob(crate::support::TAR, &bytes, None).try_build();
    }

    /// A good tar, damaged, under checksums that are right: past them the reader looks at everything.
    #[test]
    fn a_tar_damaged_anywhere_is_refused_or_makes_a_clean_disk(damage in prop::collection::vec(damage(), 1..4), end in prop_oneof![Just(usize::MAX), 0_usize..20_000]) {
        let mut members = members();
        for (member, at, bytes) in damage {
            let count = members.len();
            let (header, data) = &mut members[member % count];
            let all = header.bytes.len() + data.len();
            for (offset, byte) in bytes.into_iter().enumerate() {
                match (at + offset) % all {
                    at if at < header.bytes.len() => header.bytes[at] = byte,
                    at => data[at - header.bytes.len()] = byte,
                }
            }
        }
        let mut tar = members.iter().fold(Tar::new(), |tar, (header, data)| tar.header(header).data(data)).end();
        tar.truncate(end);
        let mut workplace = Workplace::new().layer(Tar::new().file("d/l/x", "x")).blob(crate::support::TAR, &tar, None);
        workplace.limits.disk_bytes = 64 << 20;
        if workplace.try_build().is_ok() {
            crate::support::assert_clean(&workplace.target());
        }
    }
}

#[test]
fn the_tar_that_is_damaged_is_good() {
    let tar = members().iter().fold(Tar::new(), |tar, (header, data)| tar.header(header).data(data));
    let image = crate::support::image([Tar::new().file("d/gone", "x"), tar]);
    let names = ["d", "d/a long name", "d/fifo", "d/hard", "d/null", "d/pax", "d/sparse", "l"];
    assert_eq!(image.names_of_all(), names);
}

/// What is written over which member, and where: noise, and what fields look like.
fn damage() -> impl Strategy<Value = (usize, usize, Vec<u8>)> {
    let field = prop::sample::select(vec![
        0_usize, 100, 108, 116, 124, 136, 156, 157, 257, 329, 337, 345, 386, 482, 512,
    ]);
    let bytes = prop_oneof![
        prop::collection::vec(any::<u8>(), 1..12),
        prop::sample::select(
            [
                &b"77777777777\0"[..],
                b"-1\0",
                b"\x80\0\0\0\0\0\0\x01\0\0\0\0",
                b"../../x\0",
                b".wh.d\0",
                b"/",
                b"\0",
                b"S",
                b"x",
                b"L",
                b"g"
            ]
            .map(<[u8]>::to_vec)
            .to_vec()
        ),
    ];
    (any::<usize>(), prop_oneof![field, 0_usize..1200], bytes)
}

/// One member of every kind.
fn members() -> Vec<(Header, Vec<u8>)> {
    let data = |header: &Header, data: &[u8]| {
        let mut data = data.to_vec();
        let mut header = header.clone();
        header.size(data.len() as u64);
        data.resize(data.len().next_multiple_of(512), 0);
        (header, data)
    };
    let records =
        [record("path", b"d/pax"), record("SCHILY.xattr.user.a", b"value"), record("mtime", b"12345.678")];
    let map = [
        record("GNU.sparse.major", b"1"),
        record("GNU.sparse.minor", b"0"),
        record("GNU.sparse.name", b"d/sparse"),
        record("GNU.sparse.realsize", b"65536"),
    ];
    let sparse = [format!("{:\0<512}", "1\n4096\n5\n").as_bytes(), b"piece"].concat();
    vec![
        data(&Header::new(b'5', "d"), b""),
        data(&Header::new(b'L', "././@LongLink"), b"d/a long name\0"),
        data(&Header::new(b'0', "short"), b"content"),
        data(&Header::new(b'x', "pax"), &records.concat()),
        data(&Header::new(b'0', "short"), b"more"),
        data(&Header::new(b'x', "pax"), &map.concat()),
        data(&Header::new(b'0', "sparse"), &sparse),
        data(Header::new(b'2', "l").link("d"), b""),
        data(Header::new(b'1', "l/hard").link("d/pax"), b""),
        data(Header::new(b'3', "d/null").device(1, 3), b""),
        data(&Header::new(b'6', "d/fifo"), b""),
        data(&Header::new(b'0', "l/.wh.x"), b""),
        data(&Header::new(b'0', "d/.wh..wh..opq"), b""),
    ]
}

fn hides_first(layer: Vec<Step>) -> Vec<Step> {
    let (hides, rest): (Vec<Step>, Vec<Step>) =
        layer.into_iter().partition(|step| matches!(step, Step::Hide(_) | Step::HideAll(_)));
    hides.into_iter().chain(rest).collect()
}

impl Workplace {
    /// The model refuses a link whose target stands behind it; the code finds it at the end of the layer.
    fn refusal_or_late_link(&self) {
        if self.try_build().is_ok() {
            crate::support::assert_clean(&self.target());
        }
    }
}
