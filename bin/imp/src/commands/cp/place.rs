//! What is at either end of a copy.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use bytes::Bytes;
use imp_embedded::client;
use imp_protocol::connection::Connection;
use imp_protocol::guest::files_client::FilesClient;
use imp_protocol::guest::{FileStat, StatRequest, file_stat};
use tonic::Code;

use super::Links;
use super::plan::{Destination, Kind, Source};
use super::unpack::OfSource;

pub(super) async fn source_in_vm(
    connection: &Connection,
    path: &OsStr,
    links: Links,
) -> anyhow::Result<(Source, OfSource)> {
    let stat = stat_in_vm(connection, Path::new(path), links).await?;
    let stat = stat.with_context(|| format!("{} does not exist in the VM", Path::new(path).display()))?;
    let name = Path::new(path).file_name().unwrap_or_default().to_owned();
    let attributes = OfSource {
        mode: stat.mode,
        uid: stat.uid,
        gid: stat.gid,
        modified_nanoseconds: stat.modified_nanoseconds,
    };
    Ok((Source { name, kind: kind_of(Some(&stat)), contents: ends_in_dot(path) }, attributes))
}

pub(super) async fn destination_in_vm(connection: &Connection, path: &OsStr) -> anyhow::Result<Destination> {
    let bare = without_end(path);
    let parent = bare.parent().unwrap_or(Path::new("/"));
    Ok(Destination {
        kind: kind_in_vm(connection, &bare, Links::Followed).await?,
        parent_exists: kind_in_vm(connection, parent, Links::Followed).await? == Kind::Directory,
        meant_as_directory: is_meant_as_directory(path),
        path: bare,
    })
}

async fn kind_in_vm(connection: &Connection, path: &Path, links: Links) -> anyhow::Result<Kind> {
    Ok(kind_of(stat_in_vm(connection, path, links).await?.as_ref()))
}

fn kind_of(stat: Option<&FileStat>) -> Kind {
    match stat.map(FileStat::kind) {
        None => Kind::Absent,
        Some(file_stat::Kind::Directory) => Kind::Directory,
        Some(_) => Kind::File,
    }
}

/// None: there is nothing of that name.
async fn stat_in_vm(connection: &Connection, path: &Path, links: Links) -> anyhow::Result<Option<FileStat>> {
    let request = StatRequest {
        path: Bytes::copy_from_slice(path.as_os_str().as_bytes()),
        follow_links: links == Links::Followed,
    };
    match FilesClient::new(connection.clone()).stat(request).await {
        Ok(answer) => Ok(Some(answer.into_inner().stat.unwrap_or_default())),
        Err(status) if status.code() == Code::NotFound => Ok(None),
        Err(status) => Err(client::Error::from(status).into()),
    }
}

/// The source's real path, and what the plan needs to know of it.
pub(super) fn source_here(path: &OsStr, links: Links) -> anyhow::Result<(PathBuf, Source)> {
    let bare = without_end(path);
    let followed = links == Links::Followed || is_meant_as_directory(path) || bare.file_name().is_none();
    let real = if followed { std::fs::canonicalize(&bare) } else { Ok(bare.clone()) };
    let metadata = real.and_then(|real| Ok((std::fs::symlink_metadata(&real)?, real)));
    let (metadata, real) = metadata.with_context(|| format!("cannot read {}", bare.display()))?;
    // The name is that which the user wrote, not that which a link leads to.
    let name = bare.file_name().or(real.file_name()).unwrap_or_default().to_owned();
    let kind = if metadata.is_dir() { Kind::Directory } else { Kind::File };
    Ok((real, Source { name, kind, contents: ends_in_dot(path) }))
}

pub(super) fn destination_here(path: &OsStr) -> Destination {
    let bare = without_end(path);
    let kind = match std::fs::metadata(&bare) {
        Ok(metadata) if metadata.is_dir() => Kind::Directory,
        Ok(_) => Kind::File,
        // A link that leads nowhere is replaced.
        Err(_) => Kind::Absent,
    };
    let parent = match bare.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    };
    Destination {
        kind,
        parent_exists: parent.is_dir(),
        meant_as_directory: is_meant_as_directory(path),
        path: match bare.file_name() {
            Some(name) => parent.join(name),
            None => bare,
        },
    }
}

fn ends_in_dot(path: &OsStr) -> bool {
    path == "." || path.as_bytes().ends_with(b"/.")
}

fn is_meant_as_directory(path: &OsStr) -> bool {
    ends_in_dot(path) || path.as_bytes().ends_with(b"/")
}

/// The path without slashes and dots at its end.
fn without_end(path: &OsStr) -> PathBuf {
    let mut bytes = path.as_bytes();
    loop {
        bytes = match bytes {
            [rest @ .., b'/', b'.'] if !rest.is_empty() => rest,
            [rest @ .., b'/'] if !rest.is_empty() => rest,
            [b'/', b'.'] => b"/",
            _ => return PathBuf::from(OsString::from(OsStr::from_bytes(bytes))),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_path_says_what_is_meant() {
        for (path, bare, contents, directory) in [
            ("/a/b", "/a/b", false, false),
            ("/a/b/", "/a/b", false, true),
            ("/a/b/.", "/a/b", true, true),
            ("/a//.", "/a", true, true),
            (".", ".", true, true),
            ("/", "/", false, true),
            ("/.", "/", true, true),
            ("a.", "a.", false, false),
        ] {
            assert_eq!(without_end(path.as_ref()), Path::new(bare), "{path}");
            assert_eq!(ends_in_dot(path.as_ref()), contents, "{path}");
            assert_eq!(is_meant_as_directory(path.as_ref()), directory, "{path}");
        }
    }

    #[test]
    fn a_link_is_copied_as_a_link_unless_it_is_to_be_followed() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::fs::create_dir(directory.path().join("real")).unwrap();
        std::os::unix::fs::symlink("real", &link).unwrap();
        let (path, source) = source_here(link.as_os_str(), Links::Copied).unwrap();
        assert_eq!((path, source.kind), (link.clone(), Kind::File));
        let (path, source) = source_here(link.as_os_str(), Links::Followed).unwrap();
        assert_eq!((source.name, source.kind), ("link".into(), Kind::Directory));
        assert!(path.ends_with("real"), "{}", path.display());
    }
}
