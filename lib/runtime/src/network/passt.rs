//! The network of a VM without privileges: passt, a process that translates its connections into ordinary sockets of the
//! user.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use imp_sys::spawn::{Program, spawn_detached};

use crate::id::VmId;
use crate::layout::VmLayout;
use crate::process::{self, Process};
use crate::vmm::find_program;

/// Addresses in the guest's own network; no other network sees them.
pub(super) const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
pub(super) const PREFIX: u8 = 24;
pub(super) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// Passt sends questions to this address on to the host's own name server.
pub(super) const NAMESERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 3);
/// Frames never meet a wire, so they may be as long as passt takes them.
pub(super) const MTU: u32 = 65_520;
const PROGRAM: &str = "passt";

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("passt is not installed: run `apt-get install passt`, or use --network none")]
    NotInstalled,
    #[error("cannot make a socket for the network")]
    Socket(#[source] io::Error),
    #[error("cannot open {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot start {}", program.display())]
    Spawn {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot hold the network's process")]
    Hold(#[source] process::Error),
}

/// A network whose process runs; it ends by itself when the VMM closes its end of the socket.
#[derive(Debug)]
pub(crate) struct Passt {
    pub process: Process,
    /// The VMM's end.
    pub socket: OwnedFd,
}

/// Where passt is.
pub(crate) fn program() -> Result<PathBuf, Error> {
    find_program(PROGRAM).ok_or(Error::NotInstalled)
}

/// Starts the network of one VM.
pub(crate) fn start(program: &Path, id: &VmId, vm: &VmLayout) -> Result<Passt, Error> {
    let (theirs, ours) = UnixStream::pair().map_err(Error::Socket)?;
    let open = |path: &Path, options: &OpenOptions| {
        options.open(path).map_err(|source| Error::Open { path: path.to_owned(), source })
    };
    let null = open(Path::new("/dev/null"), OpenOptions::new().read(true))?;
    let log = open(&vm.network_log(), OpenOptions::new().create(true).append(true))?;
    let pid = spawn_detached(&Program {
        path: program,
        arguments: &arguments(theirs.as_raw_fd(), id),
        environment: &[],
        directory: None,
        stdin: null.as_fd(),
        stdout: log.as_fd(),
        stderr: log.as_fd(),
        inherited: &[theirs.as_fd()],
    })
    .map_err(|source| Error::Spawn { program: program.to_owned(), source })?;
    Ok(Passt { process: Process::of_child(pid).map_err(Error::Hold)?, socket: ours.into() })
}

fn arguments(socket: i32, id: &VmId) -> Vec<OsString> {
    let socket = socket.to_string();
    let (guest, prefix, gateway) = (GUEST.to_string(), PREFIX.to_string(), GATEWAY.to_string());
    let (nameserver, mark) = (NAMESERVER.to_string(), mark(id));
    [
        "--foreground",
        "--quiet",
        "--fd",
        &socket,
        "--ipv4-only",
        "--address",
        &guest,
        "--netmask",
        &prefix,
        // Without this the gateway's address leads to the services on the host's loopback.
        "--gateway",
        &gateway,
        "--no-map-gw",
        "--dns-forward",
        &nameserver,
        "--tcp-ports",
        "none",
        "--udp-ports",
        "none",
        // The agent configures the guest. The search list, which only DHCP hands out, is the mark of this process:
        // passt drops to another user, who cannot write a pid file here.
        "--no-dhcp",
        "--search",
        &mark,
    ]
    .map(OsString::from)
    .to_vec()
}

/// An argument that only this VM's network has.
fn mark(id: &VmId) -> String {
    format!("imp-{id}")
}

/// The networks of a VM whose owner died before it had written down their process.
pub(crate) fn find(program: &Path, id: &VmId) -> Vec<Process> {
    process::find(program.as_os_str(), mark(id).as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_s_loopback_is_never_mapped() {
        let id = VmId::from_random([0xab; 8]);
        let arguments = arguments(7, &id);
        assert!(arguments.contains(&"--no-map-gw".into()));
        assert!(arguments.windows(2).any(|pair| pair == [OsString::from("--fd"), "7".into()]));
        assert!(arguments.contains(&OsString::from("imp-abababababababab")));
    }

    #[tokio::test]
    async fn the_network_ends_with_the_vmm_s_end_of_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let layout = crate::layout::Layout::new(directory.path().into(), directory.path().join("run"));
        let id = VmId::from_random([3; 8]);
        let vm = layout.vm(&id);
        std::fs::create_dir_all(vm.data()).unwrap();
        let program = program().expect("apt-get install passt");
        let network = start(&program, &id, &vm).unwrap();
        assert!(network.process.is_alive());
        drop(network.socket);
        network.process.ended().await;
        assert!(find(&program, &id).is_empty());
    }
}
