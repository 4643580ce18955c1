//! A network of nodes and the host, in a network namespace of its own: the host's own network never hears of it.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

use imp_sys::netns;

use super::error::{Error, NetworkStep};
use super::plan::Attachment;
use crate::machine;

const PREFIX: u8 = 24;
/// The last number of the first node's address.
const FIRST: u8 = 11;

/// A bridge with the host at [`Network::HOST`] and the nodes at 10.99.0.11 and up. It lives as long as this value or a
/// node in it does, and leaves nothing.
#[derive(Debug)]
pub struct Network {
    namespace: OwnedFd,
    next: AtomicU8,
}

impl Network {
    /// Address of the host's side, reachable from nodes; see [`Network::within`].
    pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);

    /// Needs root.
    pub fn new() -> Result<Self, Error> {
        let namespace =
            netns::create().map_err(|source| Error::Network { step: NetworkStep::Namespace, source })?;
        let network = Self { namespace, next: AtomicU8::new(FIRST) };
        network.configure(&[
            "ip link set lo up",
            "ip link add bridge0 type bridge",
            &format!("ip addr add {}/{PREFIX} dev bridge0", Self::HOST),
            "ip link set bridge0 up",
        ])?;
        Ok(network)
    }

    /// Does `work` in a thread that is in the network, as a server or client on the host. Sockets that it makes, and
    /// processes that it starts, stay in the network when they are returned.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        netns::inside(self.namespace.as_fd(), work)
            .map_err(|source| Error::Network { step: NetworkStep::Enter, source })
    }

    /// A device and an address for one more node.
    pub(super) fn attach(&self) -> Result<Attachment, Error> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let tap = format!("node{number}");
        self.configure(&[
            &format!("tunctl -t {tap}"),
            &format!("brctl addif bridge0 {tap}"),
            &format!("ip link set {tap} up"),
        ])?;
        Ok(Attachment {
            tap,
            mac: format!("52:54:00:99:00:{number:02x}"),
            address: Ipv4Addr::new(10, 99, 0, number),
            prefix: PREFIX,
            gateway: Self::HOST,
        })
    }

    fn configure(&self, commands: &[&str]) -> Result<(), Error> {
        let busybox = machine::program("busybox")?;
        self.within(|| {
            for command in commands {
                let failed =
                    |source| Error::Network { step: NetworkStep::Device((*command).to_owned()), source };
                let mut busybox = Command::new(&busybox);
                let output =
                    busybox.args(command.split(' ')).stdin(Stdio::null()).output().map_err(failed)?;
                if !output.status.success() {
                    let said = String::from_utf8_lossy(&output.stderr);
                    return Err(failed(io::Error::other(format!("{}: {}", output.status, said.trim_end()))));
                }
            }
            Ok(())
        })?
    }
}
