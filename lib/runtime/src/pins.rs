//! Keeps the base disk of a living VM in the store, and the snapshot that it was made of.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::PathBuf;

use imp_storage::blob::digest::Digest;
use imp_storage::store::{self, Store};

use crate::id::VmId;
use crate::layout::Layout;
use crate::random;

const PREFIX: &str = "vm-";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{key:?} is not the key of a disk")]
    Key { key: String },
    #[error("{key} cannot be kept for the VM")]
    Pin {
        key: String,
        #[source]
        source: Box<store::Error>,
    },
    #[error("what is kept by {by} cannot be let go")]
    LetGo {
        by: String,
        #[source]
        source: Box<store::Error>,
    },
    #[error("it cannot be found out what is kept")]
    List {
        #[source]
        source: Box<store::Error>,
    },
    #[error("the disk of VM {id} cannot be let go")]
    Unpin {
        id: VmId,
        #[source]
        source: Box<store::Error>,
    },
    #[error("{} cannot be used: it names this data directory in a store that others use, too", path.display())]
    Keeper {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// In whose name VMs of one data directory keep things. Where a link leads to the store of another one, others keep things
/// there too, of whose VMs nothing is known here.
#[derive(Debug, Clone)]
pub(crate) struct Keeper {
    /// Absent: the store is this data directory's own.
    name: Option<String>,
}

impl Keeper {
    /// Draws the name when it is needed first.
    pub(crate) fn of(layout: &Layout) -> Result<Self, Error> {
        if !layout.images().is_symlink() {
            return Ok(Self { name: None });
        }
        let path = layout.keeper();
        let name = read_or_draw(&path).map_err(|source| Error::Keeper { path, source })?;
        Ok(Self { name: Some(name.to_string()) })
    }

    pub(crate) fn pin(&self, store: &Store, key: &str, id: &VmId) -> Result<(), Error> {
        let digest: Digest = key.parse().map_err(|_| Error::Key { key: key.to_owned() })?;
        store
            .pin(&digest, &self.owner(id))
            .map_err(|source| Error::Pin { key: key.to_owned(), source: Box::new(source) })
    }

    /// The snapshot whose memory the VM maps.
    pub(crate) fn pin_snapshot(&self, store: &Store, snapshot: &Digest, id: &VmId) -> Result<(), Error> {
        store
            .pin(snapshot, &self.owner(id))
            .map_err(|source| Error::Pin { key: snapshot.to_string(), source: Box::new(source) })
    }

    pub(crate) fn unpin(&self, store: &Store, id: &VmId) -> Result<(), Error> {
        store
            .unpin_all(&self.owner(id))
            .map_err(|source| Error::Unpin { id: id.clone(), source: Box::new(source) })
    }

    /// Takes back the pins of VMs that are not among the living.
    pub(crate) fn unpin_all_but(&self, store: &Store, living: &[&VmId]) -> Result<(), store::Error> {
        for pin in store.pins()? {
            if self.vm_of(&pin.owner).is_some_and(|id| !living.contains(&&id)) {
                store.unpin_all(&pin.owner)?;
            }
        }
        Ok(())
    }

    /// A snapshot for somebody who is no VM.
    pub(crate) fn pin_for(&self, store: &Store, snapshot: &Digest, by: &str) -> Result<(), Error> {
        store
            .pin(snapshot, &self.qualified(by))
            .map_err(|source| Error::Pin { key: snapshot.to_string(), source: Box::new(source) })
    }

    pub(crate) fn unpin_for(&self, store: &Store, by: &str) -> Result<(), Error> {
        store
            .unpin_all(&self.qualified(by))
            .map_err(|source| Error::LetGo { by: by.to_owned(), source: Box::new(source) })
    }

    /// What somebody who is no VM keeps.
    pub(crate) fn kept_for(&self, store: &Store, by: &str) -> Result<Vec<Digest>, Error> {
        let owner = self.qualified(by);
        let pins = store.pins().map_err(|source| Error::List { source: Box::new(source) })?;
        Ok(pins.into_iter().filter(|pin| pin.owner == owner).map(|pin| pin.key).collect())
    }

    /// All who keep something for this data directory, VMs aside.
    pub(crate) fn keep_something(&self, store: &Store) -> Result<BTreeSet<String>, Error> {
        let pins = store.pins().map_err(|source| Error::List { source: Box::new(source) })?;
        Ok(pins.iter().filter_map(|pin| self.bare(&pin.owner)).map(str::to_owned).collect())
    }

    /// Begins with the data directory's name, so that it is taken for nobody's in the store's own.
    fn qualified(&self, by: &str) -> String {
        match &self.name {
            None => by.to_owned(),
            Some(name) => format!("{name}.{by}"),
        }
    }

    /// As who keeps something is called in this data directory; none of a VM, and of others' in a store that is not its own.
    pub(crate) fn bare<'a>(&self, owner: &'a str) -> Option<&'a str> {
        let bare = match &self.name {
            None => owner,
            Some(name) => owner.strip_prefix(name.as_str())?.strip_prefix('.')?,
        };
        (!bare.starts_with(PREFIX)).then_some(bare)
    }

    fn owner(&self, id: &VmId) -> String {
        match &self.name {
            None => format!("{PREFIX}{id}"),
            Some(name) => format!("{PREFIX}{id}.{name}"),
        }
    }

    /// The VM of this data directory that owns a pin.
    fn vm_of(&self, owner: &str) -> Option<VmId> {
        match &self.name {
            None => vm_of(owner),
            Some(name) => vm_of(owner.strip_suffix(name)?.strip_suffix('.')?),
        }
    }
}

fn read_or_draw(path: &std::path::Path) -> io::Result<VmId> {
    match fs::read_to_string(path) {
        Ok(name) => return name.trim_end().parse().map_err(io::Error::other),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) => {}
    }
    let name = VmId::from_random(random::bytes());
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(name.as_str().as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    Ok(name)
}

/// The VM that owns a pin; none if something else does, or a VM of a data directory that has its store elsewhere.
#[must_use]
pub fn vm_of(owner: &str) -> Option<VmId> {
    owner.strip_prefix(PREFIX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_directories_that_share_a_store_let_go_only_of_what_is_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| Layout::new(folder.path().join(name), folder.path().join("run"));
        for name in ["own", "one", "two"] {
            fs::create_dir(at(name).data()).unwrap();
        }
        fs::create_dir(at("own").images()).unwrap();
        for name in ["one", "two"] {
            std::os::unix::fs::symlink(at("own").images(), at(name).images()).unwrap();
        }
        let keepers = ["own", "one", "two"].map(|name| Keeper::of(&at(name)).unwrap());
        let id = VmId::from_random([7; 8]);
        for (number, keeper) in keepers.iter().enumerate() {
            let owner = keeper.owner(&id);
            let knows = keepers.iter().map(|keeper| keeper.vm_of(&owner).is_some()).collect::<Vec<_>>();
            assert_eq!(knows, [0, 1, 2].map(|other| other == number), "{owner}");
            let by = keeper.qualified("pool-warm");
            let knows =
                keepers.iter().map(|keeper| keeper.bare(&by) == Some("pool-warm")).collect::<Vec<_>>();
            assert_eq!(knows, [0, 1, 2].map(|other| other == number), "{by}");
            assert!(keepers.iter().all(|keeper| keeper.bare(&owner).is_none()), "a VM is no name");
        }
        // As long as the data directory lasts.
        assert_eq!(Keeper::of(&at("one")).unwrap().owner(&id), keepers[1].owner(&id));
    }
}
