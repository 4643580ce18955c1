//! The manifest of a snapshot: all that decides whether it can be restored here, and what its files must hold.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::base::BaseImage;
use super::chunks;
use crate::blob::digest::Digest;

/// The format that this version writes, and the only one it reads.
pub const FORMAT: u32 = 1;
/// Largest manifest, bytes.
pub const LARGEST: u64 = 256 << 10;
/// Longest name of a VMM, a processor or an agent's version, bytes.
const LONGEST_TEXT: usize = 256;
/// More than any VMM gives a guest.
const MOST_CPUS: u32 = 1024;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the manifest is not one of a snapshot")]
    Json(#[source] serde_json::Error),
    #[error("the manifest has {size} bytes; at most {LARGEST} are allowed")]
    TooLarge { size: u64 },
    #[error("the manifest has format {found}, this version of imp knows {FORMAT}")]
    Format { found: u64 },
    #[error("{field} of the manifest is empty, longer than {LONGEST_TEXT} bytes, or not printable")]
    Text { field: &'static str },
    #[error("the manifest says that the machine has {0} processors")]
    Cpus(u32),
    #[error("the manifest says that the memory has {memory} bytes, and its file {file}")]
    Memory { memory: u64, file: u64 },
    #[error("the manifest gives the hardware address {0:?}, which is none")]
    Mac(String),
    #[error("the manifest gives a hardware address to a machine without a network")]
    MacWithoutNetwork,
    #[error("the manifest cannot be true of the part {part}")]
    Part {
        part: Part,
        #[source]
        source: chunks::Error,
    },
    #[error("the manifest says of only some parts what is in them")]
    Mixed,
}

/// What a snapshot was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Many machines start from it.
    Template,
    /// Children of one machine that ran.
    Fork,
    /// One machine that goes on later.
    Suspend,
}

/// The files of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// The guest's memory, byte for byte.
    Memory,
    /// Devices and processors, in a form of the VMM's own.
    State,
    /// The scratch disk as it was at that moment.
    Scratch,
}

impl Part {
    pub const ALL: [Self; 3] = [Self::Memory, Self::State, Self::Scratch];

    /// Of the file, and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::State => "state",
            Self::Scratch => "scratch",
        }
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Its digest, that of its bytes, is the snapshot's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub format: u32,
    #[serde(rename = "snapshot")]
    pub description: Description,
    pub parts: Parts,
    /// Of which the base disk can be made; absent: nobody knew, or the snapshot never leaves its machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<BaseImage>,
    /// Of a snapshot whose content nobody hashed: makes its digest unlike any other's. Such a snapshot is good on the machine
    /// that made it, until that restarts, and cannot be exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local: Option<String>,
}

/// What the maker of a snapshot says of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    pub kind: Kind,
    /// Digest of all that a template was made of. See [`super::Snapshots::find`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<Digest>,
    pub vmm: Vmm,
    pub cpu: Cpu,
    /// Digest of the guest kernel's bundle.
    pub kernel: Digest,
    pub agent: Agent,
    /// The snapshot from which the machine came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Digest>,
    pub devices: Devices,
    /// Key of the base disk, which is no part of the snapshot. While the snapshot is in a store, the disk stays.
    pub base: Digest,
    /// What the engine wants to know again, such as the main process. No secrets: everyone who may read the snapshot reads it.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub configuration: Value,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vmm {
    /// `firecracker` or `qemu`.
    pub name: String,
    pub version: String,
}

/// The processor as the guest sees it: what it has found out about it at boot must stay true.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cpu {
    pub vendor: String,
    pub model: String,
    /// Digest of all features that a guest can see.
    pub features: Digest,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agent {
    pub version: String,
    pub digest: Digest,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Devices {
    pub cpus: u32,
    /// Bytes; as many as the part `memory` has.
    pub memory: u64,
    /// Whether the machine has a network device.
    pub network: bool,
    /// Its hardware address, six pairs of lower-case hex digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parts {
    pub memory: Content,
    pub state: Content,
    pub scratch: Content,
}

impl Parts {
    pub fn get(&self, part: Part) -> &Content {
        match part {
            Part::Memory => &self.memory,
            Part::State => &self.state,
            Part::Scratch => &self.scratch,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Content {
    /// Bytes of the file, holes included.
    pub size: u64,
    /// What is in it. Absent in a local snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<Chunks>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunks {
    /// Bytes of a chunk: [`chunks::size_for`] the part.
    pub size: u64,
    /// Of the part's index, see [`chunks::Index`].
    pub digest: Digest,
}

impl Manifest {
    /// Reads a manifest and checks all that can be checked without its files.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        /// Another format may have other fields, so this one is looked at first.
        #[derive(Deserialize)]
        struct Any {
            format: u64,
        }
        if bytes.len() as u64 > LARGEST {
            return Err(Error::TooLarge { size: bytes.len() as u64 });
        }
        let any: Any = serde_json::from_slice(bytes).map_err(Error::Json)?;
        if any.format != u64::from(FORMAT) {
            return Err(Error::Format { found: any.format });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(Error::Json)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// The bytes that are stored and whose digest is the snapshot's.
    pub fn bytes(&self) -> Result<Vec<u8>, Error> {
        self.check()?;
        let bytes = serde_json::to_vec(self).map_err(Error::Json)?;
        let size = bytes.len() as u64;
        if size > LARGEST { Err(Error::TooLarge { size }) } else { Ok(bytes) }
    }

    fn check(&self) -> Result<(), Error> {
        let Description { vmm, cpu, agent, devices, .. } = &self.description;
        for (field, text) in [
            ("the VMM's name", &vmm.name),
            ("the VMM's version", &vmm.version),
            ("the processor's vendor", &cpu.vendor),
            ("the processor's model", &cpu.model),
            ("the agent's version", &agent.version),
        ] {
            if text.is_empty() || text.len() > LONGEST_TEXT || text.chars().any(char::is_control) {
                return Err(Error::Text { field });
            }
        }
        if !(1..=MOST_CPUS).contains(&devices.cpus) {
            return Err(Error::Cpus(devices.cpus));
        }
        if devices.memory != self.parts.memory.size {
            return Err(Error::Memory { memory: devices.memory, file: self.parts.memory.size });
        }
        match &devices.mac {
            Some(_) if !devices.network => return Err(Error::MacWithoutNetwork),
            Some(mac) if !is_mac(mac) => return Err(Error::Mac(mac.chars().take(40).collect())),
            Some(_) | None => {}
        }
        for part in Part::ALL {
            let content = self.parts.get(part);
            let failed = |source| Error::Part { part, source };
            let expected = chunks::size_for(content.size).map_err(failed)?;
            if content.chunks.is_some() == self.local.is_some() {
                return Err(Error::Mixed);
            }
            if let Some(found) = content.chunks.as_ref().map(|it| it.size).filter(|size| *size != expected) {
                return Err(failed(chunks::Error::ChunkSize { size: content.size, expected, found }));
            }
        }
        Ok(())
    }
}

fn is_mac(text: &str) -> bool {
    let pairs: Vec<&str> = text.split(':').collect();
    let hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    pairs.len() == 6 && pairs.iter().all(|pair| pair.len() == 2 && pair.bytes().all(hex))
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
