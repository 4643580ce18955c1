//! Random layers, merged twice: by the code, and by a model that is too simple to be wrong.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use crate::ext4_reader::{DIRECTORY, FILE, Image};
use crate::support::Workplace;
use crate::tar_builder::{Header, Tar};

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
    fn no_bytes_at_all_break_the_reader(mut bytes in prop::collection::vec(any::<u8>(), 0..2000), flips in prop::collection::vec((0_usize..4096, any::<u8>()), 0..6)) {
        let workplace = Workplace::new().blob(crate::support::TAR, &bytes, None);
        let _ = workplace.try_build();
        bytes = Tar::new().directory("d").gnu_long(b'L', "d/long").file("x", "content").hard_link("d/l", "d/long").end();
        for (at, value) in flips {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        let workplace = Workplace::new().blob(crate::support::TAR, &bytes, None);
        if workplace.try_build().is_ok() {
            crate::support::assert_clean(&workplace.target());
        }
    }
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
