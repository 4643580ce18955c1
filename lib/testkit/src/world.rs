//! A host of its own for a test, and the rest of the world: two network namespaces with a cable between them. Nothing of
//! the machine's own network is in reach of either.
//!
//! ```text
//!   host                                       outside
//!   out0 192.0.2.1, 2001:db8::1 ═══════════════ in0 192.0.2.2, 2001:db8::2
//!   (everything else is routed there)           lo  all other addresses below, and the machine's name server's
//! ```
//!
//! What happens on "the host" is what the thread that runs the test does, and the threads and processes that it starts.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use imp_sys::netns;

use crate::node;

/// For what must happen; never reached when it does.
pub const DEADLINE: Duration = Duration::from_secs(20);

pub const HOST: &str = "192.0.2.1";
pub const HOST6: &str = "2001:db8::1";
pub const SERVER: &str = "192.0.2.2";
pub const SERVER6: &str = "2001:db8::2";
/// Another address of the server.
pub const OTHER_SERVER: &str = "198.51.100.7";
/// An address of the server that anybody on the internet could have.
pub const PUBLIC_SERVER: &str = "93.184.216.34";
/// One that only a network of the host's own could have.
pub const PRIVATE_SERVER: &str = "10.1.2.3";
pub const METADATA: &str = "169.254.169.254";

const RESOLV_CONF: &str = "/etc/resolv.conf";
const DNS: u16 = 53;

/// Everything but the host.
pub struct World {
    outside: OwnedFd,
    host: OwnedFd,
}

/// Runs a test on a host of its own.
pub fn on_own_host<T: Send>(test: impl FnOnce(&World) -> T + Send) -> anyhow::Result<T> {
    let machine = fs::read_link("/proc/thread-self/ns/net")?;
    let host = netns::create().context("network namespaces are made by root: run this test as root")?;
    netns::inside(host.as_fd(), || {
        ensure!(fs::read_link("/proc/thread-self/ns/net")? != machine, "still on the machine's own network");
        Ok(test(&World::new()?))
    })?
}

impl World {
    /// The calling thread's namespace becomes the host.
    fn new() -> anyhow::Result<Self> {
        let (outside, host) = (netns::create()?, netns::current()?);
        let far = format!("/proc/{}/fd/{}", std::process::id(), outside.as_raw_fd());
        ip("link set lo up")?;
        ip("link add out0 type veth peer name in0")?;
        ip(&format!("link set in0 netns {far}"))?;
        ip(&format!("address add {HOST}/24 dev out0"))?;
        ip(&format!("-6 address add {HOST6}/64 dev out0 nodad"))?;
        // No address that appears by itself, some time after the rest.
        ip("link set out0 addrgenmode none")?;
        ip("link set out0 up")?;
        let world = Self { outside, host };
        world.out_there(|| {
            ip("link set lo up")?;
            ip(&format!("address add {SERVER}/24 dev in0"))?;
            ip(&format!("-6 address add {SERVER6}/64 dev in0 nodad"))?;
            ip("link set in0 addrgenmode none")?;
            ip("link set in0 up")?;
            for address in [OTHER_SERVER, PUBLIC_SERVER, PRIVATE_SERVER, METADATA] {
                ip(&format!("address add {address}/32 dev lo"))?;
            }
            await_carrier("in0")?;
            // What the host sends with other addresses than its own is answered, too.
            ip(&format!("route add default via {HOST}"))
        })??;
        await_carrier("out0")?;
        ip(&format!("route add default via {SERVER}"))?;
        ip(&format!("-6 route add default via {SERVER6}"))?;
        Ok(world)
    }

    pub fn out_there<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        Ok(netns::inside(self.outside.as_fd(), work)?)
    }

    /// Does something on the host, wherever the caller is.
    pub fn on_host<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        Ok(netns::inside(self.host.as_fd(), work)?)
    }

    /// A server of the outside world, at all its addresses, that answers each connection with the address it came from.
    pub fn serve_tcp(&self, port: u16) -> anyhow::Result<()> {
        serve(self.out_there(|| TcpListener::bind(("0.0.0.0", port)))??);
        Ok(())
    }

    pub fn serve_tcp6(&self, port: u16) -> anyhow::Result<()> {
        serve(self.out_there(|| TcpListener::bind(("::", port)))??);
        Ok(())
    }

    /// A server of the outside world that tells who sent it which datagram.
    pub fn collect_udp(&self, port: u16) -> anyhow::Result<Receiver<(SocketAddr, Vec<u8>)>> {
        let socket = self.out_there(|| UdpSocket::bind(("0.0.0.0", port)))??;
        let (sender, receiver) = channel();
        thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(from.to_string().as_bytes(), from);
                let bytes = buffer.get(..length).unwrap_or_default().to_vec();
                if sender.send((from, bytes)).is_err() {
                    break;
                }
            }
        });
        Ok(receiver)
    }

    /// The name server that this machine's resolv.conf names: every name has this one IPv4 address.
    pub fn serve_names(&self, address: [u8; 4]) -> anyhow::Result<()> {
        let server = name_server()?;
        let bind = move || UdpSocket::bind((server, DNS));
        let socket = if server.is_loopback() {
            bind()?
        } else {
            self.out_there(|| {
                ip(&format!("address add {server} dev lo"))?;
                Ok::<_, anyhow::Error>(bind()?)
            })??
        };
        thread::spawn(move || {
            let mut buffer = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let question = buffer.get(..length).unwrap_or_default();
                if let Some(answer) = answer(question, address) {
                    let _ = socket.send_to(&answer, from);
                }
            }
        });
        Ok(())
    }
}

fn name_server() -> anyhow::Result<IpAddr> {
    // A node has none. A machine's own is not for a test to change.
    if node::is_node() {
        fs::write(RESOLV_CONF, "nameserver 203.0.113.53\n")?;
    }
    let text = fs::read_to_string(RESOLV_CONF)?;
    let mut servers = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    let server = servers.next().with_context(|| format!("{RESOLV_CONF} names no server"))?;
    Ok(server.trim().parse()?)
}

/// The answer to a question of RFC 1035: one A record, or none for other types.
fn answer(question: &[u8], address: [u8; 4]) -> Option<Vec<u8>> {
    const A: u16 = 1;
    let (header, rest) = question.split_at_checked(12)?;
    let name = rest.iter().position(|byte| *byte == 0)? + 1;
    let asked = rest.get(..name + 4)?;
    let kind = u16::from_be_bytes([*rest.get(name)?, *rest.get(name + 1)?]);
    let mut answer = header.get(..2)?.to_vec();
    // A response without an error, to one question, with one answer at most.
    answer.extend([0x81, 0x80, 0, 1, 0, u8::from(kind == A), 0, 0, 0, 0]);
    answer.extend(asked);
    if kind == A {
        // The name is the one that stands 12 bytes from the beginning; for a minute.
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
        answer.extend(address);
    }
    Some(answer)
}

fn serve(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { break };
            let Ok(peer) = stream.peer_addr() else { continue };
            let _ = stream.write_all(peer.ip().to_string().as_bytes());
        }
    });
}

/// Connects from the calling thread's namespace and reads to the end.
pub fn fetch(to: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// Until then a device loses packets.
fn await_carrier(device: &str) -> anyhow::Result<()> {
    let end = Instant::now() + DEADLINE;
    while !ip(&format!("-o link show {device}"))?.contains("state UP") {
        ensure!(Instant::now() < end, "{device} does not come up");
    }
    Ok(())
}

/// Runs `ip` in the calling thread's namespace.
pub fn ip(arguments: &str) -> anyhow::Result<String> {
    run("ip", arguments, "iproute2")
}

/// Runs `nft` in the calling thread's namespace.
pub fn nft(arguments: &str) -> anyhow::Result<String> {
    run("nft", arguments, "nftables")
}

fn run(program: &str, arguments: &str, package: &str) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments.split_whitespace())
        .output()
        .with_context(|| format!("{program} is not installed: apt-get install {package}"))?;
    if !output.status.success() {
        bail!("{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}
