//! Snapshots with content that is known, and stores that have or want them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use imp_storage::blob::digest::Digest;
use imp_storage::image::reference::{Archive, ArchiveFormat};
use imp_storage::image::registry::settings::RegistrySettings;
use imp_storage::snapshots::manifest::{Agent, Cpu, Devices, Kind, Vmm};
use imp_storage::snapshots::{Description, Draft, Host, Keeping, Part, Snapshot};
use imp_storage::store::{Store, StoreOptions};

/// Bytes of memory, in 16 chunks.
pub(crate) const MEMORY: u64 = 4 << 20;
pub(crate) const CHUNK: u64 = 256 << 10;
/// Chunks of memory and scratch that are not all zeros, and the state.
pub(crate) const FULL: u64 = 8 + 1 + 1;

pub(crate) fn description() -> Description {
    Description {
        kind: Kind::Template,
        template: Some(Digest::of(b"template")),
        vmm: Vmm { name: "firecracker".into(), version: "1.12.1".into() },
        cpu: Cpu { vendor: "GenuineIntel".into(), model: "6/85/7".into(), features: Digest::of(b"features") },
        kernel: Digest::of(b"kernel"),
        agent: Agent { version: "0.1.0".into(), digest: Digest::of(b"agent") },
        parent: None,
        devices: Devices { cpus: 1, memory: MEMORY, network: false, mac: None },
        base: Digest::of(b"base"),
        configuration: serde_json::json!({ "main": ["/bin/sh"] }),
    }
}

pub(crate) fn host() -> Host {
    let description = description();
    Host { vmm: description.vmm, cpu: description.cpu, kernel: None }
}

pub(crate) fn options(insecure: &[&str]) -> StoreOptions {
    let registries = RegistrySettings {
        insecure: insecure.iter().map(|host| (*host).to_owned()).collect(),
        first_pause: Duration::from_millis(1),
        idle_timeout: Duration::from_secs(20),
        ..RegistrySettings::default()
    };
    StoreOptions { registries, ..StoreOptions::default() }
}

pub(crate) fn store(root: &Path) -> Store {
    Store::open(root, options(&[])).unwrap()
}

/// Bytes that do not compress, others for each seed.
fn noise(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take(count).collect()
}

/// Writes the parts of a version: half of the memory's chunks, the last of them its own, the others those of all versions.
pub(crate) fn draft(store: &Store, version: u64) -> Draft {
    let draft = store.snapshots().draft(MEMORY).unwrap();
    let memory = File::create(draft.part(Part::Memory)).unwrap();
    memory.set_len(MEMORY).unwrap();
    for chunk in 0..8 {
        let seed = if chunk == 7 { 100 + version } else { chunk };
        memory.write_all_at(&noise(seed, 40_000), chunk * 2 * CHUNK + 4096).unwrap();
    }
    fs::write(draft.part(Part::State), b"state").unwrap();
    let scratch = File::create(draft.part(Part::Scratch)).unwrap();
    scratch.set_len(64 << 20).unwrap();
    scratch.write_all_at(&noise(1000, 4096), 33 << 20).unwrap();
    draft
}

pub(crate) fn commit(store: &Store, version: u64) -> Snapshot {
    store.snapshots().commit(draft(store, version), description(), Keeping::Durable).unwrap()
}

pub(crate) fn layout(path: &Path, name: Option<&str>) -> Archive {
    Archive { format: ArchiveFormat::OciLayout, path: path.to_owned(), name: name.map(str::to_owned) }
}

/// Whether both hold the same in all parts, and the second takes no more room than it must.
pub(crate) fn assert_same(one: &Snapshot, other: &Snapshot) {
    assert_same_within(one, other, 8 * (48 << 10));
}

/// The same, of a memory with so many bytes that are not zero.
pub(crate) fn assert_same_within(one: &Snapshot, other: &Snapshot, room: u64) {
    assert_eq!(one.digest, other.digest);
    assert_eq!(one.manifest, other.manifest);
    for part in [Part::Memory, Part::State, Part::Scratch] {
        assert!(fs::read(one.part(part)).unwrap() == fs::read(other.part(part)).unwrap(), "{part}");
    }
    let occupied = fs::metadata(other.part(Part::Memory)).unwrap().blocks() * 512;
    assert!(occupied <= room, "{occupied} of {room}");
}

/// What of a snapshot only an operation under way may have in a store.
pub(crate) fn leftovers(root: &Path) -> Vec<PathBuf> {
    let directories = ["drafts", "leases", "partial", "arriving"].map(|name| root.join(name));
    directories
        .iter()
        .flat_map(|directory| fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()))
        .collect()
}

/// The files of a directory with their content.
pub(crate) fn content(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(content(&path));
        } else {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}
