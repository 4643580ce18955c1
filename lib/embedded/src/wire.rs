//! Conversions between the engine's types and the messages on the owner's socket.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use imp_protocol::runtime as wire;
use imp_runtime::spec::{
    Balloon, Bytes, CopiedMount, Cpus, DiskSize, HostName, IpVersions, KernelChoice, Memory, MountAccess,
    NotASize, PublishedPort, VmName, VmSpec, WhenStopped,
};
use imp_runtime::status::{State, VmStatus};
use imp_runtime::{LogEntry, LogStream};

mod network;
mod pools;
mod program;
mod snapshots;

pub(crate) use pools::*;
pub(crate) use snapshots::*;

/// A message that lacks something, or holds what no peer of this version sends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the field `{0}` is missing or out of range")]
    Field(&'static str),
    #[error(transparent)]
    Spec(#[from] imp_runtime::spec::Error),
    #[error(transparent)]
    Size(#[from] NotASize),
    #[error("the record of a VM cannot be read")]
    Status(#[source] serde_json::Error),
    #[error("{0:?} is no digest")]
    Digest(String),
}

pub(crate) fn spec_to_wire(spec: &VmSpec) -> wire::VmSpec {
    wire::VmSpec {
        name: spec.name.as_str().to_owned(),
        base: Some(program::base_to_wire(&spec.base)),
        cpus: spec.cpus.get(),
        memory_bytes: spec.memory.bytes(),
        scratch_bytes: spec.scratch.bytes(),
        main: Some(program::main_to_wire(&spec.main)),
        hostname: spec.hostname.as_str().to_owned(),
        network: network::mode_to_wire(spec.network).into(),
        egress: spec.bridge.egress.as_ref().map(network::egress_to_wire),
        ipv6: spec.bridge.versions == IpVersions::Both,
        ports: spec.ports.iter().map(port_to_wire).collect(),
        mounts: spec
            .mounts
            .iter()
            .map(|mount| wire::CopiedMount {
                source: path_text(&mount.source),
                target: mount.target.as_slice().to_vec().into(),
                read_only: mount.access == MountAccess::ReadOnly,
            })
            .collect(),
        labels: spec.labels.clone().into_iter().collect(),
        limits: Some(program::limits_to_wire(&spec.limits)),
        stop_grace_milliseconds: u64::try_from(spec.stop_grace.as_millis()).unwrap_or(u64::MAX),
        kernel: match &spec.kernel {
            KernelChoice::Default => None,
            KernelChoice::Bundle(digest) => Some(wire::vm_spec::Kernel::KernelBundle(digest.clone())),
            KernelChoice::File(path) => Some(wire::vm_spec::Kernel::KernelFile(path_text(path))),
        },
        remove_when_stopped: spec.when_stopped == WhenStopped::Remove,
        balloon: spec.balloon == Balloon::With,
    }
}

pub(crate) fn spec_from_wire(spec: wire::VmSpec) -> Result<VmSpec, Error> {
    let network = network::mode_from_wire(spec.network());
    let base = spec.base.ok_or(Error::Field("base"))?;
    let main = spec.main.ok_or(Error::Field("main"))?;
    Ok(VmSpec {
        name: spec.name.parse::<VmName>()?,
        base: program::base_from_wire(base),
        cpus: Cpus::new(spec.cpus)?,
        memory: Memory::from_bytes(spec.memory_bytes)?,
        scratch: DiskSize::from_bytes(spec.scratch_bytes)?,
        main: program::main_from_wire(main)?,
        hostname: spec.hostname.parse::<HostName>()?,
        network,
        bridge: network::wishes_from_wire(spec.egress, spec.ipv6)?,
        ports: spec.ports.into_iter().map(port_from_wire).collect::<Result<_, _>>()?,
        mounts: spec.mounts.into_iter().map(mount_from_wire).collect::<Result<_, _>>()?,
        labels: spec.labels.into_iter().collect(),
        limits: program::limits_from_wire(spec.limits.unwrap_or_default()),
        stop_grace: Duration::from_millis(spec.stop_grace_milliseconds),
        kernel: match spec.kernel {
            None => KernelChoice::Default,
            Some(wire::vm_spec::Kernel::KernelBundle(digest)) => KernelChoice::Bundle(digest),
            Some(wire::vm_spec::Kernel::KernelFile(path)) => KernelChoice::File(path.into()),
        },
        when_stopped: if spec.remove_when_stopped { WhenStopped::Remove } else { WhenStopped::Keep },
        balloon: if spec.balloon { Balloon::With } else { Balloon::Without },
    })
}

fn port_to_wire(port: &PublishedPort) -> wire::PublishedPort {
    wire::PublishedPort { host: port.host.to_string(), guest: port.guest.get().into() }
}

fn port_from_wire(port: wire::PublishedPort) -> Result<PublishedPort, Error> {
    let guest = u16::try_from(port.guest).ok().and_then(std::num::NonZeroU16::new);
    Ok(PublishedPort {
        host: port.host.parse().map_err(|_| Error::Field("ports.host"))?,
        guest: guest.ok_or(Error::Field("ports.guest"))?,
    })
}

fn mount_from_wire(mount: wire::CopiedMount) -> Result<CopiedMount, Error> {
    Ok(CopiedMount {
        source: mount.source.into(),
        target: Bytes::new(mount.target)?,
        access: if mount.read_only { MountAccess::ReadOnly } else { MountAccess::ReadWrite },
    })
}

/// Paths on this socket are text: the client refuses others before.
fn path_text(path: &std::path::Path) -> String {
    path.to_string_lossy().into_owned()
}

pub(crate) fn status_to_wire(status: &VmStatus) -> Result<wire::Status, Error> {
    Ok(wire::Status { json: serde_json::to_vec(status).map_err(Error::Status)?.into() })
}

pub(crate) fn status_from_wire(status: Option<wire::Status>) -> Result<VmStatus, Error> {
    serde_json::from_slice(&status.ok_or(Error::Field("vm"))?.json).map_err(Error::Status)
}

pub(crate) fn state_to_wire(state: State) -> wire::State {
    match state {
        State::Created => wire::State::Created,
        State::Starting => wire::State::Starting,
        State::Prepared => wire::State::Prepared,
        State::Asleep => wire::State::Asleep,
        State::Paused => wire::State::Paused,
        State::Running => wire::State::Running,
        State::Stopping => wire::State::Stopping,
        State::Stopped => wire::State::Stopped,
    }
}

pub(crate) fn state_from_wire(state: wire::State) -> State {
    match state {
        wire::State::Created => State::Created,
        wire::State::Starting => State::Starting,
        wire::State::Prepared => State::Prepared,
        wire::State::Asleep => State::Asleep,
        wire::State::Paused => State::Paused,
        wire::State::Running => State::Running,
        wire::State::Stopping => State::Stopping,
        wire::State::Stopped => State::Stopped,
    }
}

pub(crate) fn entry_to_wire(entry: LogEntry) -> wire::LogEntry {
    let stream = match entry.stream {
        LogStream::Stdout => wire::log_entry::Stream::Stdout,
        // Said beside the program's own output, as by whoever is attached.
        LogStream::Stderr | LogStream::Note => wire::log_entry::Stream::Stderr,
    };
    wire::LogEntry { stream: stream.into(), unix_nanoseconds: nanoseconds(entry.at), data: entry.data.into() }
}

pub(crate) fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn time(nanoseconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_nanos(nanoseconds)
}

#[cfg(test)]
mod tests {
    use imp_runtime::spec::{Arguments, BaseDisk, Environment, Limits, MainProcess, Stdin, Terminal};

    use super::*;

    fn spec() -> VmSpec {
        VmSpec {
            name: "web".parse().unwrap(),
            base: BaseDisk { image: "debian:12".into(), key: "sha256:00".into(), path: "/d/base".into() },
            cpus: Cpus::new(3).unwrap(),
            memory: "512m".parse().unwrap(),
            scratch: "2g".parse().unwrap(),
            main: MainProcess {
                arguments: Arguments::new([b"sh".to_vec(), vec![0xff, b'$', b'\n']]).unwrap(),
                environment: Environment::new(["TOKEN=hunter2"]).unwrap(),
                user: "1:2".into(),
                working_directory: Bytes::new("/w").unwrap(),
                terminal: Some(Terminal { rows: 1, columns: 2, term: "vt100".into() }),
                stdin: Stdin::Attached,
                stop_signal: "SIGINT".into(),
                open_files: Some(9),
            },
            hostname: "h".parse().unwrap(),
            network: Some(imp_runtime::spec::NetworkMode::None),
            bridge: imp_runtime::spec::BridgeWishes::default(),
            ports: vec![PublishedPort {
                host: "[::1]:8080".parse().unwrap(),
                guest: std::num::NonZeroU16::new(80).unwrap(),
            }],
            mounts: vec![CopiedMount {
                source: "/src".into(),
                target: Bytes::new("/dst").unwrap(),
                access: MountAccess::ReadOnly,
            }],
            labels: [("a".to_owned(), "b".to_owned())].into(),
            limits: Limits {
                processes: Some(1),
                cpu_millis: Some(2),
                disk_bytes_per_second: Some(3),
                disk_requests_per_second: Some(4),
                network_bytes_per_second: Some(5),
                network_packets_per_second: Some(6),
            },
            stop_grace: Duration::from_millis(1500),
            kernel: KernelChoice::File("/boot/vmlinux".into()),
            when_stopped: WhenStopped::Remove,
            balloon: Balloon::With,
        }
    }

    #[test]
    fn a_spec_crosses_the_wire_unchanged() {
        let there = spec_from_wire(spec_to_wire(&spec())).unwrap();
        assert_eq!(format!("{there:?}"), format!("{:?}", spec()));
        assert_eq!(there.main.environment.expose(), spec().main.environment.expose());
    }

    #[test]
    fn a_spec_that_lacks_something_is_refused() {
        let good = spec_to_wire(&spec());
        let breakages: [fn(&mut wire::VmSpec); 7] = [
            |spec| spec.name = "../x".into(),
            |spec| spec.base = None,
            |spec| spec.main = None,
            |spec| spec.cpus = 0,
            |spec| spec.memory_bytes = 1,
            |spec| spec.ports = vec![wire::PublishedPort { host: "1.2.3.4:1".into(), guest: 0 }],
            |spec| spec.ports = vec![wire::PublishedPort { host: "here".into(), guest: 1 }],
        ];
        for (number, breakage) in breakages.into_iter().enumerate() {
            let mut spec = good.clone();
            breakage(&mut spec);
            assert!(spec_from_wire(spec).is_err(), "breakage {number}");
        }
    }
}
