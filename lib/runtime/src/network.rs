//! A VM's network: none, or one of its own behind passt, a process that translates its connections into ordinary
//! sockets of the user. The guest reaches what the host reaches, except the host's loopback.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use imp_protocol::guest::NetworkInterface;
use imp_sys::spawn::{Program, spawn_detached};

use crate::id::VmId;
use crate::layout::VmLayout;
use crate::process::{self, Process};
use crate::spec::NetworkMode;
use crate::status::NetworkFacts;
use crate::vmm::qemu::probe::find_program;

/// Addresses in the guest's own network; no other network sees them.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const PREFIX: u8 = 24;
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// Passt sends questions to this address on to the host's own name server.
const NAMESERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 3);
/// Frames never meet a wire, so they may be as long as passt takes them.
const MTU: u32 = 65_520;
pub(crate) const PROGRAM: &str = "passt";

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
pub(crate) struct Network {
    pub process: Process,
    /// The VMM's end.
    pub socket: OwnedFd,
}

pub(crate) fn facts(mode: NetworkMode, id: &VmId) -> NetworkFacts {
    match mode {
        NetworkMode::None => NetworkFacts { mode, mac: None, addresses: Vec::new(), nameservers: Vec::new() },
        NetworkMode::User => NetworkFacts {
            mode,
            mac: Some(mac(id)),
            addresses: vec![format!("{GUEST}/{PREFIX}")],
            nameservers: vec![IpAddr::V4(NAMESERVER)],
        },
    }
}

/// A locally administered address out of the id.
fn mac(id: &VmId) -> String {
    let digits = id.as_str().get(..6).unwrap_or("000000");
    let octet = |at: usize| digits.get(at..at + 2).unwrap_or("00");
    format!("52:54:00:{}:{}:{}", octet(0), octet(2), octet(4))
}

/// What the guest is told of its network.
pub(crate) fn interface(facts: &NetworkFacts) -> Option<NetworkInterface> {
    let mac = facts.mac.clone()?;
    Some(NetworkInterface {
        mac,
        addresses: facts.addresses.clone(),
        gateways: vec![GATEWAY.to_string()],
        nameservers: facts.nameservers.iter().map(IpAddr::to_string).collect(),
        search_domains: search_domains(&fs::read_to_string("/etc/resolv.conf").unwrap_or_default()),
        mtu: MTU,
    })
}

/// The host's search list: the last `search` line of resolv.conf counts.
fn search_domains(resolv_conf: &str) -> Vec<String> {
    let last = resolv_conf.lines().filter_map(|line| line.trim().strip_prefix("search")).next_back();
    last.map(|list| list.split_whitespace().take(6).map(str::to_owned).collect()).unwrap_or_default()
}

/// Where passt is.
pub(crate) fn program() -> Result<PathBuf, Error> {
    find_program(PROGRAM).ok_or(Error::NotInstalled)
}

/// Starts the network of one VM.
pub(crate) fn start(program: &Path, id: &VmId, vm: &VmLayout) -> Result<Network, Error> {
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
        stdin: null.as_fd(),
        stdout: log.as_fd(),
        stderr: log.as_fd(),
        inherited: &[theirs.as_fd()],
    })
    .map_err(|source| Error::Spawn { program: program.to_owned(), source })?;
    Ok(Network { process: Process::of_child(pid).map_err(Error::Hold)?, socket: ours.into() })
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

    #[test]
    fn a_vm_without_a_network_has_no_address_and_one_with_has_all_it_needs() {
        let id = VmId::from_random([0xab; 8]);
        assert!(interface(&facts(NetworkMode::None, &id)).is_none());
        let user = interface(&facts(NetworkMode::User, &id)).unwrap();
        assert_eq!(user.mac, "52:54:00:ab:ab:ab");
        assert_eq!((user.addresses, user.gateways), (vec!["10.0.2.15/24".into()], vec!["10.0.2.2".into()]));
    }

    #[test]
    fn the_last_search_list_counts() {
        assert_eq!(search_domains("search a\nnameserver 1.1.1.1\nsearch b c\n"), ["b", "c"]);
        assert!(search_domains("nameserver 1.1.1.1").is_empty());
    }

    #[tokio::test]
    async fn the_network_ends_with_the_vmm_s_end_of_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let layout = crate::layout::Layout::new(directory.path().into(), directory.path().join("run"));
        let id = VmId::from_random([3; 8]);
        let vm = layout.vm(&id);
        fs::create_dir_all(vm.data()).unwrap();
        let program = program().expect("apt-get install passt");
        let network = start(&program, &id, &vm).unwrap();
        assert!(network.process.is_alive());
        drop(network.socket);
        network.process.ended().await;
        assert!(find(&program, &id).is_empty());
    }
}
