//! Where a copy goes, as docker decides it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What is to be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    /// Last part of its path; empty for a root.
    pub(super) name: OsString,
    pub(super) kind: Kind,
    /// Whether only what is in the directory is meant: the path ends in `/.`.
    pub(super) contents: bool,
}

/// Where it is to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
    /// Whether the path ends in a slash, or in `/.`.
    pub(super) meant_as_directory: bool,
    pub(super) parent_exists: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Absent,
    /// Anything but a directory.
    File,
    Directory,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Placement {
    /// One file, in a directory that exists.
    Entry { directory: PathBuf, name: OsString },
    /// What is in the source, in a directory that may have to be made.
    Contents { directory: PathBuf },
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum Error {
    #[error("{0} does not exist")]
    NoSource(PathBuf),
    #[error("the directory {0} does not exist: make it first")]
    NoParent(PathBuf),
    #[error("the directory {0} does not exist: make it first, or leave out the slash at its end")]
    NoDirectory(PathBuf),
    #[error("{0} is no directory: leave out the slash at its end to replace it")]
    NotADirectory(PathBuf),
    #[error("a directory cannot replace the file {0}")]
    FileInTheWay(PathBuf),
}

pub(super) fn plan(source: &Source, destination: &Destination) -> Result<Placement, Error> {
    let path = &destination.path;
    let parent = || path.parent().unwrap_or(Path::new("/")).to_owned();
    match (source.kind, destination.kind) {
        (Kind::Absent, _) => Err(Error::NoSource(source.name.clone().into())),
        (_, Kind::Absent) if !destination.parent_exists => Err(Error::NoParent(parent())),
        (Kind::File, Kind::Absent) if destination.meant_as_directory => Err(Error::NoDirectory(path.clone())),
        (Kind::File, Kind::File) if destination.meant_as_directory => Err(Error::NotADirectory(path.clone())),
        (Kind::File, Kind::Absent | Kind::File) => Ok(Placement::Entry {
            directory: parent(),
            name: path.file_name().unwrap_or_default().to_owned(),
        }),
        (Kind::File, Kind::Directory) => {
            Ok(Placement::Entry { directory: path.clone(), name: source.name.clone() })
        }
        (Kind::Directory, Kind::File) => Err(Error::FileInTheWay(path.clone())),
        (Kind::Directory, Kind::Absent) => Ok(Placement::Contents { directory: path.clone() }),
        (Kind::Directory, Kind::Directory) if source.contents || source.name.is_empty() => {
            Ok(Placement::Contents { directory: path.clone() })
        }
        (Kind::Directory, Kind::Directory) => Ok(Placement::Contents { directory: path.join(&source.name) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(kind: Kind, contents: bool) -> Source {
        Source { name: "src".into(), kind, contents }
    }

    fn destination(kind: Kind) -> Destination {
        Destination { path: "/d/dst".into(), kind, meant_as_directory: false, parent_exists: true }
    }

    fn entry(directory: &str, name: &str) -> Result<Placement, Error> {
        Ok(Placement::Entry { directory: directory.into(), name: name.into() })
    }

    fn contents(directory: &str) -> Result<Placement, Error> {
        Ok(Placement::Contents { directory: directory.into() })
    }

    #[test]
    fn copies_go_where_docker_puts_them() {
        use Kind::{Absent, Directory, File};
        let table = [
            (source(File, false), Absent, entry("/d", "dst")),
            (source(File, false), File, entry("/d", "dst")),
            (source(File, false), Directory, entry("/d/dst", "src")),
            (source(Directory, false), Absent, contents("/d/dst")),
            (source(Directory, true), Absent, contents("/d/dst")),
            (source(Directory, false), File, Err(Error::FileInTheWay("/d/dst".into()))),
            (source(Directory, false), Directory, contents("/d/dst/src")),
            (source(Directory, true), Directory, contents("/d/dst")),
            (source(Absent, false), Directory, Err(Error::NoSource("src".into()))),
        ];
        for (source, kind, expected) in table {
            assert_eq!(plan(&source, &destination(kind)), expected, "{source:?} to {kind:?}");
        }
    }

    #[test]
    fn a_root_is_copied_as_its_contents() {
        let root = Source { name: OsString::new(), kind: Kind::Directory, contents: false };
        assert_eq!(plan(&root, &destination(Kind::Directory)), contents("/d/dst"));
    }

    #[test]
    fn a_slash_at_the_end_asks_for_a_directory() {
        let slash = |kind| Destination { meant_as_directory: true, ..destination(kind) };
        let file = source(Kind::File, false);
        assert_eq!(plan(&file, &slash(Kind::Absent)), Err(Error::NoDirectory("/d/dst".into())));
        assert_eq!(plan(&file, &slash(Kind::File)), Err(Error::NotADirectory("/d/dst".into())));
        assert_eq!(plan(&file, &slash(Kind::Directory)), entry("/d/dst", "src"));
        assert_eq!(plan(&source(Kind::Directory, false), &slash(Kind::Absent)), contents("/d/dst"));
    }

    #[test]
    fn parents_are_not_made_up() {
        let orphan = Destination { parent_exists: false, ..destination(Kind::Absent) };
        for kind in [Kind::File, Kind::Directory] {
            assert_eq!(plan(&source(kind, false), &orphan), Err(Error::NoParent("/d".into())));
        }
    }
}
