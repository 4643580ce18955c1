//! What the bridge networks of one data directory remember: their name on this machine, their pool, and who has which
//! address.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use imp_network::addresses::{AddressError, Addresses, HostRoute, Pool};
use imp_network::names::SiteName;
use serde::{Deserialize, Serialize};

/// Pools that hosts rarely use, tried in this order; the IPv6 part is made up for each data directory.
const CANDIDATES: [&str; 6] =
    ["10.87.0.0/16", "10.187.0.0/16", "172.30.0.0/16", "192.168.208.0/20", "100.88.0.0/16", "198.18.0.0/16"];
/// Devices and tables of this machine's networks begin with it.
const SITE: &str = "imp";
/// Digits behind it, which tell data directories apart.
const DIGITS: usize = 3;
/// A share of the table of connections that all VMs of a host use together.
const SHARE: u32 = 16;
const CONNECTIONS: std::ops::RangeInclusive<u32> = 1024..=8192;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Book {
    pub site: SiteName,
    /// Connections that a VM may have open at once. Kept, because filters that change forget what names have opened.
    pub connections: u32,
    pub addresses: Addresses,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is damaged: remove it when no VM with a bridge network runs", path.display())]
    Damaged {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("there is no address for the VM")]
    Address(#[from] AddressError),
}

impl Book {
    /// A new one. `digits`: random; `tracked`: how many connections this host keeps in mind at most, if it is known.
    pub(super) fn new(
        digits: [u8; 8],
        wanted: Option<Pool>,
        routes: &[HostRoute],
        tracked: Option<u32>,
    ) -> Result<Self, Error> {
        let pool = match wanted {
            Some(pool) => pool,
            None => Pool::first_free(&candidates(digits), routes)?,
        };
        let share = tracked.map_or(*CONNECTIONS.end(), |most| most / SHARE);
        Ok(Self {
            site: site(digits),
            connections: share.clamp(*CONNECTIONS.start(), *CONNECTIONS.end()),
            addresses: Addresses::new(pool),
        })
    }

    pub(super) fn read(path: &Path) -> Result<Option<Self>, Error> {
        match fs::read(path) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|source| Error::Damaged { path: path.to_owned(), source }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Read { path: path.to_owned(), source }),
        }
    }

    /// Replaces the file: after a crash at any moment either the old or the new one is there, whole.
    pub(super) fn write(&self, path: &Path) -> Result<(), Error> {
        let written = || -> io::Result<()> {
            let text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
            let new = path.with_extension("new");
            let mut file = File::create(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&new, path)
        };
        written().map_err(|source| Error::Write { path: path.to_owned(), source })
    }

    /// The pool of the settings, once no VM has an address of the old one.
    pub(super) fn with_pool(mut self, wanted: Option<Pool>) -> Self {
        if let Some(pool) = wanted.filter(|pool| *pool != self.addresses.pool()) {
            if self.addresses.holders().next().is_none() {
                self.addresses = Addresses::new(pool);
            } else {
                tracing::warn!("the new address pool is used once no VM has an address of the old one");
            }
        }
        self
    }
}

/// The name that these digits give.
pub(super) fn site(digits: [u8; 8]) -> SiteName {
    const LETTERS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let letter = |byte: &u8| char::from(*LETTERS.get(usize::from(*byte) % LETTERS.len()).unwrap_or(&b'0'));
    let name: String = SITE.chars().chain(digits.iter().take(DIGITS).map(letter)).collect();
    name.parse().expect("six lower-case letters and digits name a site")
}

/// A name for looking at what is not ours, where there is no book yet.
pub(super) fn any_site() -> SiteName {
    site([0; 8])
}

/// With a unique local network of RFC 4193, whose 40 random bits are these.
fn candidates(digits: [u8; 8]) -> Vec<Pool> {
    let [.., a, b, c, d, e] = digits;
    let network = format!("fd{a:02x}:{b:02x}{c:02x}:{d:02x}{e:02x}::/64").parse().ok();
    CANDIDATES.iter().filter_map(|text| Pool::new(text.parse().ok()?, network).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANDOM: [u8; 8] = [0, 37, 255, 1, 2, 3, 4, 5];

    #[test]
    fn a_new_book_has_a_name_of_its_own_and_a_pool_of_both_versions() {
        let book = Book::new(RANDOM, None, &[], Some(65_536)).unwrap();
        assert_eq!((book.site.as_str(), book.connections), ("imp013", 4096));
        assert_eq!(book.addresses.pool().ipv4().to_string(), "10.87.0.0/16");
        assert_eq!(book.addresses.pool().ipv6().unwrap().to_string(), "fd01:203:405::/64");
        assert_eq!(candidates(RANDOM).len(), CANDIDATES.len());
        for (tracked, connections) in [(Some(1000), 1024), (Some(1 << 20), 8192), (None, 8192)] {
            assert_eq!(Book::new(RANDOM, None, &[], tracked).unwrap().connections, connections);
        }
    }

    #[test]
    fn a_pool_that_this_host_uses_is_passed_over() {
        let route = HostRoute { to: "10.0.0.0/8".parse().unwrap(), device: "eth0".parse().unwrap() };
        let book = Book::new(RANDOM, None, &[route], None).unwrap();
        assert_eq!(book.addresses.pool().ipv4().to_string(), "172.30.0.0/16");
    }

    #[test]
    fn what_is_written_is_read_and_damage_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("networks.json");
        assert_eq!(Book::read(&path).unwrap(), None);
        let mut book = Book::new(RANDOM, None, &[], None).unwrap();
        book.addresses.lease(&"a".parse().unwrap(), &[]).unwrap();
        book.write(&path).unwrap();
        assert_eq!(Book::read(&path).unwrap(), Some(book));
        fs::write(&path, "{").unwrap();
        assert!(matches!(Book::read(&path), Err(Error::Damaged { .. })));
    }

    #[test]
    fn another_pool_waits_until_the_old_one_is_free() {
        let wanted = Pool::new("10.99.0.0/24".parse().unwrap(), None).unwrap();
        let mut book = Book::new(RANDOM, None, &[], None).unwrap();
        let vm = "a".parse().unwrap();
        book.addresses.lease(&vm, &[]).unwrap();
        book = book.with_pool(Some(wanted));
        assert_ne!(book.addresses.pool(), wanted);
        book.addresses.release(&vm);
        assert_eq!(book.with_pool(Some(wanted)).addresses.pool(), wanted);
    }
}
