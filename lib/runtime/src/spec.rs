//! What a user may ask of one VM, in types that cannot hold nonsense.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::id::VmId;

mod child;
mod network;
mod size;
pub use child::{Child, Claim, Identity};
pub use network::{
    Allow, BridgeSettings, BridgeWishes, Cidr, Egress, IpVersions, NamePattern, NetworkMode, Otherwise,
    Outside, PatternError, Pool, PoolError, PortRange, Ports, PublishedPort, Scope, Transport,
};
pub use size::{DiskSize, Memory, NotASize, bytes};

/// One VM as it was asked for. Environment values are not kept on disk: see [`Environment`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VmSpec {
    /// Unique among the VMs of one data directory.
    pub name: VmName,
    pub base: BaseDisk,
    pub cpus: Cpus,
    pub memory: Memory,
    /// Size of the private writable disk.
    pub scratch: DiskSize,
    pub main: MainProcess,
    pub hostname: HostName,
    /// Absent: what this host and its VMM do best.
    pub network: Option<NetworkMode>,
    #[serde(default)]
    pub bridge: BridgeWishes,
    #[serde(default)]
    pub ports: Vec<PublishedPort>,
    #[serde(default)]
    pub mounts: Vec<CopiedMount>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub limits: Limits,
    #[serde(default)]
    pub balloon: Balloon,
    /// What the main process gets between its stop signal and SIGKILL when nobody says otherwise.
    pub stop_grace: Duration,
    pub kernel: KernelChoice,
    pub when_stopped: WhenStopped,
}

/// The read-only disk made from an image, as lib/storage knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BaseDisk {
    /// The image as the user named it; shown, never parsed.
    pub image: String,
    /// Key of the disk in the store.
    pub key: String,
    pub path: PathBuf,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MainProcess {
    /// Program and arguments; not empty.
    pub arguments: Arguments,
    #[serde(skip)]
    pub environment: Environment,
    /// As in an OCI configuration; empty: 0:0.
    pub user: String,
    /// Empty: "/".
    pub working_directory: Bytes,
    /// Present: the process has a terminal of its own.
    pub terminal: Option<Terminal>,
    pub stdin: Stdin,
    /// Signal for an orderly stop; empty: SIGTERM.
    pub stop_signal: String,
    /// Open files the process may hold; absent: the guest's default.
    #[serde(default)]
    pub open_files: Option<u32>,
}

/// A path or an argument: bytes without NUL.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes(Vec<u8>);

impl Bytes {
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, Error> {
        let bytes = bytes.into();
        if bytes.contains(&0) { Err(Error::Nul) } else { Ok(Self(bytes)) }
    }

    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

/// Program and arguments: at least one, the first not empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arguments(Vec<Bytes>);

impl Arguments {
    pub fn new(arguments: impl IntoIterator<Item = impl Into<Vec<u8>>>) -> Result<Self, Error> {
        let arguments = arguments.into_iter().map(Bytes::new).collect::<Result<Vec<_>, _>>()?;
        match arguments.first() {
            Some(program) if !program.as_slice().is_empty() => Ok(Self(arguments)),
            _ => Err(Error::NoProgram),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(Bytes::as_slice)
    }
}

/// For people: bytes that are not UTF-8 are replaced.
impl fmt::Display for Arguments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> = self.iter().map(String::from_utf8_lossy).collect();
        f.write_str(&words.join(" "))
    }
}

/// Environment of the main process, secrets among it: never written to disk, never shown.
#[derive(Clone, Default)]
pub struct Environment(Vec<Vec<u8>>);

/// Linux starts no program with more: a quarter of the usual limit of its stack.
const MOST_ENVIRONMENT: usize = 2 << 20;

impl Environment {
    /// `NAME=value` each; later ones win.
    pub fn new(variables: impl IntoIterator<Item = impl Into<Vec<u8>>>) -> Result<Self, Error> {
        let variables: Vec<Vec<u8>> = variables.into_iter().map(Into::into).collect();
        for variable in &variables {
            if variable.contains(&0) {
                return Err(Error::Nul);
            }
            match variable.iter().position(|&b| b == b'=') {
                None | Some(0) => return Err(Error::NotAVariable),
                Some(_) => {}
            }
        }
        let bytes = variables.iter().map(Vec::len).sum();
        if bytes > MOST_ENVIRONMENT {
            return Err(Error::LargeEnvironment { bytes });
        }
        Ok(Self(variables))
    }

    pub fn expose(&self) -> &[Vec<u8>] {
        &self.0
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} variables", self.0.len())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    pub rows: u16,
    pub columns: u16,
    /// Value of TERM; empty: "xterm".
    pub term: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stdin {
    /// Whoever attaches with input feeds it.
    Attached,
    /// /dev/null.
    Null,
}

/// A directory of the host that is copied into the guest before the main process starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedMount {
    pub source: PathBuf,
    /// Absolute path in the guest.
    pub target: Bytes,
    pub access: MountAccess,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountAccess {
    ReadWrite,
    ReadOnly,
}

/// Limits besides memory, processors and disk size; absent: none of its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Processes in the tree of the main process.
    pub processes: Option<u32>,
    /// Processor time of the whole VM, in thousandths of a processor.
    pub cpu_millis: Option<u32>,
    /// Bytes a second to and from the disks.
    pub disk_bytes_per_second: Option<u64>,
    /// Requests a second to and from the disks.
    pub disk_requests_per_second: Option<u64>,
    /// Bytes a second over the network, each way.
    #[serde(default)]
    pub network_bytes_per_second: Option<u64>,
    /// Packets a second over the network, each way.
    #[serde(default)]
    pub network_packets_per_second: Option<u64>,
}

impl Limits {
    /// Whether the network has a limit of its own.
    pub(crate) fn limits_network(&self) -> bool {
        self.network_bytes_per_second.is_some() || self.network_packets_per_second.is_some()
    }
}

/// Whether the machine has a device by which its guest gives memory back while it runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Balloon {
    #[default]
    Without,
    With,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KernelChoice {
    /// The bundle that setup installed as the default.
    Default,
    /// A bundle by its digest.
    Bundle(String),
    /// Any kernel: an ELF with a PVH entry, virtio drivers built in.
    File(PathBuf),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenStopped {
    /// Record, logs and scratch disk stay until the VM is removed.
    Keep,
    /// Nothing stays (`--rm`).
    Remove,
}

/// Virtual processors: 1 to 255.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Cpus(u8);

impl Cpus {
    pub fn new(count: u32) -> Result<Self, Error> {
        match u8::try_from(count) {
            Ok(count) if count > 0 => Ok(Self(count)),
            _ => Err(Error::Cpus { count }),
        }
    }

    pub fn get(self) -> u32 {
        self.0.into()
    }
}

impl TryFrom<u32> for Cpus {
    type Error = Error;

    fn try_from(count: u32) -> Result<Self, Error> {
        Self::new(count)
    }
}

impl From<Cpus> for u32 {
    fn from(cpus: Cpus) -> Self {
        cpus.get()
    }
}

/// Name of a VM: 1 to 63 of [a-z0-9A-Z_.-], starting with a letter or digit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmName(String);

/// Host name of a guest: 1 to 63 of [a-z0-9A-Z-], neither starting nor ending with '-'.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostName(String);

impl HostName {
    /// What a VM is called that nobody has named.
    pub(crate) fn of(id: &VmId) -> Self {
        Self(id.short().to_owned())
    }
}

impl FromStr for VmName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let good = (1..=63).contains(&text.len())
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b));
        if good { Ok(Self(text.to_owned())) } else { Err(Error::VmName { name: text.to_owned() }) }
    }
}

impl FromStr for HostName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let good = (1..=63).contains(&text.len())
            && !text.starts_with('-')
            && !text.ends_with('-')
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if good { Ok(Self(text.to_owned())) } else { Err(Error::HostName { name: text.to_owned() }) }
    }
}

macro_rules! text_newtype {
    ($($name:ident),*) => {$(
        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl TryFrom<String> for $name {
            type Error = Error;
            fn try_from(text: String) -> Result<Self, Error> {
                text.parse()
            }
        }
        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}
text_newtype!(VmName, HostName);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{name:?} is not a VM name: use 1 to 63 of a-z, A-Z, 0-9, '_', '.' and '-', starting with a letter or digit"
    )]
    VmName { name: String },
    #[error("{name:?} is not a host name: use 1 to 63 of a-z, A-Z, 0-9 and '-'")]
    HostName { name: String },
    #[error("{count} virtual processors: 1 to 255 are possible")]
    Cpus { count: u32 },
    #[error("no program to run: name a command, or use an image that has one")]
    NoProgram,
    #[error("an argument, path or variable holds a NUL byte")]
    Nul,
    #[error("an environment variable must look like NAME=value")]
    NotAVariable,
    #[error(
        "the environment has {bytes} bytes and may have {MOST_ENVIRONMENT}: give large values as a file, with -v or `imp cp`"
    )]
    LargeEnvironment { bytes: usize },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_that_no_program_could_have_is_refused() {
        let of = |bytes| Environment::new([[b"A=", &vec![b'x'; bytes - 2][..]].concat()]);
        assert!(of(MOST_ENVIRONMENT).is_ok());
        assert!(
            matches!(of(MOST_ENVIRONMENT + 1), Err(Error::LargeEnvironment { bytes }) if bytes > MOST_ENVIRONMENT)
        );
    }

    #[test]
    fn a_secret_in_the_environment_reaches_neither_debug_nor_disk() {
        let main = MainProcess {
            arguments: Arguments::new(["true"]).unwrap(),
            environment: Environment::new(["TOKEN=hunter2"]).unwrap(),
            user: String::new(),
            working_directory: Bytes::default(),
            terminal: None,
            stdin: Stdin::Null,
            stop_signal: String::new(),
            open_files: None,
        };
        assert!(!format!("{main:?}").contains("hunter2"));
        assert!(!serde_json::to_string(&main).unwrap().contains("hunter2"));
        assert_eq!(main.environment.expose(), [b"TOKEN=hunter2"]);
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(Arguments::new(Vec::<Vec<u8>>::new()).is_err());
        assert!(Arguments::new([""]).is_err());
        assert!(Arguments::new(["a\0b"]).is_err());
        assert!(Environment::new(["=x"]).is_err());
        assert!(Environment::new(["NAME"]).is_err());
        assert!(Cpus::new(0).is_err());
        assert!(Cpus::new(256).is_err());
        for bad in ["", "-x", "a/b", "..", &"x".repeat(64)] {
            assert!(bad.parse::<VmName>().is_err(), "{bad}");
        }
        for bad in ["", "-x", "x-", "a_b", "a.b"] {
            assert!(bad.parse::<HostName>().is_err(), "{bad}");
        }
        assert!(serde_json::from_str::<VmName>("\"../x\"").is_err());
    }
}
