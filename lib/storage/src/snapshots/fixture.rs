//! Stores and snapshots for the tests of this module.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use serde_json::json;

use super::manifest::{Agent, Content, Cpu, Devices, FORMAT, Kind, Parts, Vmm};
use super::*;
use crate::store::StoreOptions;

/// Bytes of the memory of [`description`].
pub(crate) const MEMORY: u64 = 1 << 20;

pub(crate) fn description() -> Description {
    Description {
        kind: Kind::Template,
        template: Some(Digest::of(b"template")),
        vmm: Vmm { name: "firecracker".into(), version: "1.12.1".into() },
        cpu: Cpu { vendor: "GenuineIntel".into(), model: "6/85/7".into(), features: Digest::of(b"features") },
        kernel: Digest::of(b"kernel"),
        agent: Agent { version: "0.1.0".into(), digest: Digest::of(b"agent") },
        parent: None,
        devices: Devices { cpus: 2, memory: MEMORY, network: true, mac: Some("06:00:0a:00:00:02".into()) },
        base: Digest::of(b"base"),
        configuration: json!({ "main": ["/bin/sh"] }),
    }
}

pub(crate) fn host() -> Host {
    let description = description();
    Host { vmm: description.vmm, cpu: description.cpu, kernel: None }
}

/// A manifest whose parts are all zeros.
pub(crate) fn manifest() -> Manifest {
    let content = |size| {
        let index = chunks::Index::zero(size).unwrap();
        let chunks = manifest::Chunks { size: index.chunk_size(), digest: index.digest() };
        Content { size, chunks: Some(chunks) }
    };
    let parts = Parts { memory: content(MEMORY), state: content(100), scratch: content(5 << 20) };
    Manifest { format: FORMAT, description: description(), parts, image: None, local: None }
}

pub(crate) fn store(folder: &Path) -> Store {
    Store::open(folder.join("store"), StoreOptions::default()).unwrap()
}

/// Writes parts that hold `seed` here and there.
pub(crate) fn draft(store: &Store, seed: u8) -> Draft {
    let draft = store.snapshots().draft(MEMORY).unwrap();
    let memory = File::create(draft.part(Part::Memory)).unwrap();
    memory.set_len(MEMORY).unwrap();
    memory.write_all_at(&[seed; 10_000], 5000).unwrap();
    memory.write_all_at(&[0; 100_000], 300_000).unwrap();
    std::fs::write(draft.part(Part::State), [seed, 2, 3]).unwrap();
    let scratch = File::create(draft.part(Part::Scratch)).unwrap();
    scratch.set_len(64 << 20).unwrap();
    scratch.write_all_at(&[7; 4096], 33 << 20).unwrap();
    draft
}

pub(crate) fn commit(store: &Store, seed: u8) -> Snapshot {
    store.snapshots().commit(draft(store, seed), description(), Keeping::Durable).unwrap()
}
