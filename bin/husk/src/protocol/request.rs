//! Requests, read from lines of which nothing is believed.
//!
//! No error holds a part of the line: it may be a secret.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use imp_runtime::Digest;
use imp_runtime::spec::{Environment, VmName};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use serde_json::error::Category;

use super::{Variables, raw};

const LONGEST_PATH: usize = 4096;
const LONGEST_ID: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Prepare,
    Activate,
    ForkSnapshot,
    RemoveForkSnapshot,
    Status,
}

/// The first line of what a client wants.
#[derive(Debug)]
pub(crate) enum First {
    /// The request is the next line.
    Op {
        op: Op,
        /// Sooner than the operation's own.
        deadline: Option<Duration>,
    },
    /// This is the request; no other follows on this connection.
    Activate(Box<Activate>),
}

#[derive(Debug)]
pub(crate) enum Request {
    Prepare(Prepare),
    Activate(Box<Activate>),
    ForkSnapshot(ForkSnapshot),
    RemoveForkSnapshot(RemoveForkSnapshot),
    Status,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prepare {
    pub(crate) snapshot: SnapshotRef,
    pub(crate) reach: Reach,
    pub(crate) vm: Option<Id>,
}

#[derive(Debug, Clone)]
pub(crate) struct Activate {
    /// Absent: the one that is prepared.
    pub(crate) snapshot: Option<SnapshotRef>,
    /// Without its directory: the one that must be prepared.
    pub(crate) expected: Option<Digest>,
    pub(crate) environment: Environment,
    pub(crate) secrets: Environment,
    pub(crate) reach: Reach,
    pub(crate) vm: Option<Id>,
}

/// A snapshot by the directory in which it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotRef {
    pub(crate) directory: PathBuf,
    pub(crate) expected: Option<Digest>,
    pub(crate) trust: Trust,
}

/// What makes a snapshot acceptable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trust {
    /// That it is the one with the expected digest.
    Digest,
    /// As `Digest`, or that it was made on this machine for the children of a fork.
    Fork,
}

/// What the machine may reach over its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It must not have a network.
    NoNetwork,
    Nothing,
    /// All that any machine may.
    Everything,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ForkSnapshot {
    pub(crate) fork: Id,
    /// Where the snapshot is to be found; absent: by the fork's id in the directory of forks.
    pub(crate) directory: Option<PathBuf>,
    pub(crate) with_secrets: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoveForkSnapshot {
    pub(crate) fork: Id,
}

/// The name of a machine or a fork: 1 to 64 of a-z, A-Z, 0-9, '_' and '-', starting with a letter or digit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Id(String);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    #[error("the line is not JSON, from byte {column} on")]
    NotJson { column: usize },
    #[error(
        "the line is JSON and no request of this kind: what ends at byte {column} is unknown, of another type, there twice or missing"
    )]
    NotARequest { column: usize },
    #[error("the stream ended within a line")]
    Unfinished,
    #[error("there is no such op: use prepare, activate, fork-snapshot, remove-fork-snapshot or status")]
    UnknownOp,
    #[error("{field} cannot be used: {why}")]
    Field { field: &'static str, why: &'static str },
    #[error("{field} cannot be used: {why}")]
    Variables { field: &'static str, why: super::variables::Error },
    #[error("{field} asks for what this husk cannot do: leave it out")]
    Unsupported { field: &'static str },
}

/// Reads the first line.
pub(crate) fn first(line: &[u8]) -> Result<First, Invalid> {
    if !is_op_line(line)? {
        return Ok(First::Activate(Box::new(activate(parse(line)?)?)));
    }
    let raw::OpLine { op, deadline_ms } = parse(line)?;
    let op = match op.as_str() {
        "prepare" => Op::Prepare,
        "" | "activate" => Op::Activate,
        "fork-snapshot" => Op::ForkSnapshot,
        "remove-fork-snapshot" => Op::RemoveForkSnapshot,
        "status" => Op::Status,
        _ => return Err(Invalid::UnknownOp),
    };
    Ok(First::Op { op, deadline: deadline_ms.map(Duration::from_millis) })
}

/// Reads the line after that of an op.
pub(crate) fn request(op: Op, line: &[u8]) -> Result<Request, Invalid> {
    Ok(match op {
        Op::Prepare => Request::Prepare(prepare(parse(line)?)?),
        Op::Activate => Request::Activate(Box::new(activate(parse(line)?)?)),
        Op::ForkSnapshot => Request::ForkSnapshot(fork_snapshot(parse(line)?)?),
        Op::RemoveForkSnapshot => {
            let raw::RemoveForkSnapshot { fork_id } = parse(line)?;
            Request::RemoveForkSnapshot(RemoveForkSnapshot { fork: needed_id("fork_id", fork_id)? })
        }
        Op::Status => {
            let raw::Status {} = parse(line)?;
            Request::Status
        }
    })
}

/// Told before the fields are looked at, so that a wrong one is told of as what it is.
fn is_op_line(line: &[u8]) -> Result<bool, Invalid> {
    let fields: BTreeMap<String, IgnoredAny> = parse(line)?;
    Ok(fields.contains_key("op"))
}

fn parse<T: DeserializeOwned>(line: &[u8]) -> Result<T, Invalid> {
    serde_json::from_slice(line).map_err(|error| match error.classify() {
        Category::Data => Invalid::NotARequest { column: error.column() },
        Category::Syntax | Category::Eof | Category::Io => Invalid::NotJson { column: error.column() },
    })
}

impl Prepare {
    /// By the same rules as a client's.
    pub(crate) fn of(directory: &Path, digest: Option<&str>, egress: &str) -> Result<Self, Invalid> {
        prepare(raw::Prepare {
            snapshot_dir: Some(directory.to_string_lossy().into_owned()),
            expected_digest: digest.map(str::to_owned),
            egress: Some(egress.to_owned()),
            ..raw::Prepare::default()
        })
    }
}

fn prepare(raw: raw::Prepare) -> Result<Prepare, Invalid> {
    let needed = Invalid::Field { field: "snapshot_dir", why: "it names the snapshot, and is missing" };
    let trust = trust(raw.fork_snapshot);
    Ok(Prepare {
        snapshot: snapshot(raw.snapshot_dir, digest(raw.expected_digest)?, trust)?.ok_or(needed)?,
        reach: reach(raw.egress.as_deref(), raw.block_network)?,
        vm: id("vm_id", raw.vm_id)?,
    })
}

fn activate(raw: raw::Activate) -> Result<Activate, Invalid> {
    for (field, value) in [
        ("network_overrides", &raw.network_overrides),
        ("network", &raw.network),
        ("volumes", &raw.volumes),
        ("token", &raw.token),
        ("allow", &raw.allow),
        ("allow_cidrs", &raw.allow_cidrs),
        ("inbound", &raw.inbound),
        ("inbound_cidrs", &raw.inbound_cidrs),
    ] {
        if !value.as_ref().is_none_or(asks_nothing) {
            return Err(Invalid::Unsupported { field });
        }
    }
    let expected = digest(raw.expected_digest)?;
    Ok(Activate {
        snapshot: snapshot(raw.snapshot_dir, expected, trust(raw.fork_snapshot))?,
        expected,
        environment: variables("env", raw.env)?,
        secrets: variables("secrets", raw.secrets)?,
        reach: reach(raw.egress.as_deref(), raw.block_network)?,
        vm: id("vm_id", raw.vm_id)?,
    })
}

fn fork_snapshot(raw: raw::ForkSnapshot) -> Result<ForkSnapshot, Invalid> {
    let directory = raw.snapshot_dir.filter(|directory| !directory.is_empty());
    Ok(ForkSnapshot {
        fork: needed_id("fork_id", raw.fork_id)?,
        directory: directory.map(path).transpose()?,
        with_secrets: raw.with_secrets.unwrap_or(false),
    })
}

/// What a client writes that has a field and nothing to say in it.
fn asks_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(_) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

fn trust(is_fork: Option<bool>) -> Trust {
    if is_fork.unwrap_or(false) { Trust::Fork } else { Trust::Digest }
}

fn snapshot(
    directory: Option<String>,
    expected: Option<Digest>,
    trust: Trust,
) -> Result<Option<SnapshotRef>, Invalid> {
    let Some(directory) = directory.filter(|directory| !directory.is_empty()) else { return Ok(None) };
    let directory = path(directory)?;
    if expected.is_none() && trust == Trust::Digest {
        let why = "without it nobody knows that the snapshot is the right one";
        return Err(Invalid::Field { field: "expected_digest", why });
    }
    Ok(Some(SnapshotRef { directory, expected, trust }))
}

fn path(text: String) -> Result<PathBuf, Invalid> {
    let path = Path::new(&text);
    let is_plain = |component| matches!(component, Component::RootDir | Component::Normal(_));
    let good = text.len() <= LONGEST_PATH
        && path.is_absolute()
        && path.components().all(is_plain)
        && !text.contains('\0');
    if good {
        Ok(text.into())
    } else {
        let why = "it must be an absolute path without .. in it, of at most 4096 bytes";
        Err(Invalid::Field { field: "snapshot_dir", why })
    }
}

/// 64 hex digits, with `sha256:` before them or without.
fn digest(text: Option<String>) -> Result<Option<Digest>, Invalid> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let hex = text.strip_prefix("sha256:").unwrap_or(&text);
    let why = "it must be the 64 hex digits of a snapshot's digest";
    Digest::from_hex(hex).map(Some).map_err(|_| Invalid::Field { field: "expected_digest", why })
}

fn variables(field: &'static str, variables: Option<Variables>) -> Result<Environment, Invalid> {
    variables.unwrap_or_default().environment().map_err(|why| Invalid::Variables { field, why })
}

/// Nothing, unless it is asked for.
fn reach(egress: Option<&str>, block_network: Option<bool>) -> Result<Reach, Invalid> {
    match (egress.unwrap_or_default(), block_network.unwrap_or(false)) {
        ("" | "deny", false) => Ok(Reach::Nothing),
        ("" | "deny", true) => Ok(Reach::NoNetwork),
        ("allow", false) => Ok(Reach::Everything),
        ("allow", true) => {
            Err(Invalid::Field { field: "block_network", why: "egress says \"allow\" at the same time" })
        }
        (_, _) => Err(Invalid::Field { field: "egress", why: "it is neither \"deny\" nor \"allow\"" }),
    }
}

fn needed_id(field: &'static str, text: Option<String>) -> Result<Id, Invalid> {
    id(field, text)?.ok_or(Invalid::Field { field, why: "it is missing" })
}

fn id(field: &'static str, text: Option<String>) -> Result<Option<Id>, Invalid> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    Id::parse(&text).map(Some).ok_or(Invalid::Field {
        field,
        why: "it must be 1 to 64 of a-z, A-Z, 0-9, '_' and '-', starting with a letter or digit",
    })
}

impl Id {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let good = (1..=LONGEST_ID).contains(&text.len())
            && text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
        good.then(|| Self(text.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The longest ids are a digit too long for a VM.
    pub(crate) fn vm_name(&self) -> Option<VmName> {
        self.0.parse().ok()
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
