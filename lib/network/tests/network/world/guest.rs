//! A guest without a VM: smoltcp on the VM's tap.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use imp_network::Networks;
use imp_network::names::{TAP, VmName};
use imp_network::spec::Mac;
use imp_sys::tap::Frames;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium};
use smoltcp::socket::{tcp, udp};
use smoltcp::wire::{EthernetAddress, HardwareAddress, IpCidr};

use super::{DEADLINE, GUEST_MAC};

pub(crate) struct Guest {
    tap: Tap,
    interface: Interface,
    sockets: SocketSet<'static>,
    next_port: u16,
    /// Sockets that listen, and what they say to who connects.
    serving: Vec<(SocketHandle, String)>,
}

/// Frames to and from a tap; keeps what it received, for tests that look at frames.
struct Tap {
    device: OwnedFd,
    received: Vec<Vec<u8>>,
}

impl Guest {
    pub(crate) fn new(networks: &Networks, vm: &VmName) -> Self {
        Self::with_mac(networks, vm, GUEST_MAC)
    }

    pub(crate) fn with_mac(networks: &Networks, vm: &VmName, mac: Mac) -> Self {
        Self::on(networks.inside(vm, || imp_sys::tap::open(TAP, Frames::Bare)).unwrap().unwrap(), mac)
    }

    /// On a tap that is open.
    pub(crate) fn on(device: OwnedFd, mac: Mac) -> Self {
        rustix::fs::fcntl_setfl(&device, OFlags::RDWR | OFlags::NONBLOCK).unwrap();
        let mut tap = Tap { device, received: Vec::new() };
        let config = Config::new(HardwareAddress::Ethernet(EthernetAddress(mac.0)));
        let mut interface = Interface::new(config, &mut tap, smoltcp::time::Instant::now());
        interface.update_ip_addrs(|addresses| {
            addresses.push("172.16.0.2/30".parse::<IpCidr>().unwrap()).unwrap();
            addresses.push("fd00::2/64".parse::<IpCidr>().unwrap()).unwrap();
        });
        interface.routes_mut().add_default_ipv4_route([172, 16, 0, 1].into()).unwrap();
        interface.routes_mut().add_default_ipv6_route("fd00::1".parse().unwrap()).unwrap();
        Self { tap, interface, sockets: SocketSet::new(Vec::new()), next_port: 40000, serving: Vec::new() }
    }

    /// Lets the stack work until `done` says what it was waited for.
    pub(crate) fn until<T>(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        let end = Instant::now() + DEADLINE;
        loop {
            let now = smoltcp::time::Instant::now();
            self.interface.poll(now, &mut self.tap, &mut self.sockets);
            self.serving.retain(|(handle, text)| {
                let socket = self.sockets.get_mut::<tcp::Socket<'_>>(*handle);
                let connected = socket.may_send();
                if connected {
                    socket.send_slice(text.as_bytes()).unwrap();
                    socket.close();
                }
                !connected
            });
            if let Some(result) = done(self) {
                return result;
            }
            assert!(Instant::now() < end, "{what} did not happen");
            let wait = self
                .interface
                .poll_delay(now, &self.sockets)
                .map_or(50_000, |d| d.total_micros().min(50_000));
            let timeout = Timespec { tv_sec: 0, tv_nsec: i64::try_from(wait * 1000).unwrap() };
            rustix::event::poll(&mut [PollFd::new(&self.tap.device, PollFlags::IN)], Some(&timeout)).unwrap();
        }
    }

    /// Connects and reads to the end.
    pub(crate) fn fetch(&mut self, to: SocketAddr) -> String {
        let handle = self.tcp();
        let port = self.port();
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(handle);
        socket.connect(self.interface.context(), to, port).unwrap();
        let mut text = Vec::new();
        self.until("the server's answer", |guest| {
            let socket = guest.sockets.get_mut::<tcp::Socket<'_>>(handle);
            while socket.can_recv() {
                text.extend(socket.recv(|bytes| (bytes.len(), bytes.to_vec())).unwrap());
            }
            (!socket.may_recv() && !text.is_empty()).then(|| socket.close())
        });
        self.until("the end of the connection", |guest| {
            let state = guest.sockets.get_mut::<tcp::Socket<'_>>(handle).state();
            matches!(state, tcp::State::Closed | tcp::State::TimeWait).then_some(())
        });
        String::from_utf8(text).unwrap()
    }

    /// Serves one connection on a port: says `text` and closes.
    pub(crate) fn serve_once(&mut self, port: u16, text: &str) {
        let handle = self.tcp();
        self.sockets.get_mut::<tcp::Socket<'_>>(handle).listen(port).unwrap();
        let mut said = false;
        self.until("a connection to the guest", |guest| {
            let socket = guest.sockets.get_mut::<tcp::Socket<'_>>(handle);
            if socket.may_send() && !said {
                socket.send_slice(text.as_bytes()).unwrap();
                socket.close();
                said = true;
            }
            (said && matches!(socket.state(), tcp::State::Closed | tcp::State::TimeWait)).then_some(())
        });
    }

    /// Serves one connection while it does other things.
    pub(crate) fn serve_meanwhile(&mut self, port: u16, text: &str) {
        let handle = self.tcp();
        self.sockets.get_mut::<tcp::Socket<'_>>(handle).listen(port).unwrap();
        self.serving.push((handle, text.to_owned()));
    }

    /// Sends a datagram and waits for nothing.
    pub(crate) fn send(&mut self, to: SocketAddr, text: &str) -> SocketHandle {
        let buffer = || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 8], vec![0; 8192]);
        let handle = self.sockets.add(udp::Socket::new(buffer(), buffer()));
        let port = self.port();
        self.sockets.get_mut::<udp::Socket<'_>>(handle).bind(port).unwrap();
        self.send_on(handle, to, text);
        handle
    }

    /// Sends another datagram from the same port.
    pub(crate) fn send_on(&mut self, handle: SocketHandle, to: SocketAddr, text: &str) {
        self.sockets.get_mut::<udp::Socket<'_>>(handle).send_slice(text.as_bytes(), to).unwrap();
        self.until("sending", |guest| {
            let queued = guest.sockets.get_mut::<udp::Socket<'_>>(handle).send_queue();
            (queued == 0).then_some(())
        });
    }

    /// Sends a datagram and waits for its answer.
    pub(crate) fn ask(&mut self, to: SocketAddr, bytes: &[u8]) -> Vec<u8> {
        let buffer = || udp::PacketBuffer::new(vec![udp::PacketMetadata::EMPTY; 8], vec![0; 8192]);
        let handle = self.sockets.add(udp::Socket::new(buffer(), buffer()));
        let port = self.port();
        let socket = self.sockets.get_mut::<udp::Socket<'_>>(handle);
        socket.bind(port).unwrap();
        socket.send_slice(bytes, to).unwrap();
        self.until("an answer", |guest| {
            let socket = guest.sockets.get_mut::<udp::Socket<'_>>(handle);
            socket.recv().ok().map(|(bytes, _)| bytes.to_vec())
        })
    }

    /// Connects, sends, and reads so many bytes.
    pub(crate) fn exchange(&mut self, to: SocketAddr, bytes: &[u8], expected: usize) -> Vec<u8> {
        let handle = self.tcp();
        let port = self.port();
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(handle);
        socket.connect(self.interface.context(), to, port).unwrap();
        let (mut sent, mut received) = (false, Vec::new());
        self.until("an answer on a connection", |guest| {
            let socket = guest.sockets.get_mut::<tcp::Socket<'_>>(handle);
            if socket.can_send() && !sent {
                socket.send_slice(bytes).unwrap();
                sent = true;
            }
            while socket.can_recv() {
                received.extend(socket.recv(|bytes| (bytes.len(), bytes.to_vec())).unwrap());
            }
            (received.len() >= expected).then_some(())
        });
        received
    }

    /// Puts a frame on the wire as it is.
    pub(crate) fn inject(&mut self, frame: &[u8]) {
        rustix::io::write(&self.tap.device, frame).unwrap();
    }

    /// Waits for a received frame that `wanted` recognises.
    pub(crate) fn until_frame(&mut self, what: &str, wanted: impl Fn(&[u8]) -> bool) {
        self.until(what, |guest| guest.tap.received.iter().any(|frame| wanted(frame)).then_some(()));
    }

    /// Waits until the host says that packets to `to` are administratively prohibited.
    pub(crate) fn until_refused(&mut self, to: SocketAddr) {
        self.until_frame(&format!("the refusal of {to}"), |frame| is_refusal(frame, to));
    }

    pub(crate) fn was_refused(&self, to: SocketAddr) -> bool {
        self.tap.received.iter().any(|frame| is_refusal(frame, to))
    }

    fn tcp(&mut self) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 16384]);
        self.sockets.add(tcp::Socket::new(buffer(), buffer()))
    }

    fn port(&mut self) -> u16 {
        self.next_port += 1;
        self.next_port
    }
}

fn is_refusal(frame: &[u8], to: SocketAddr) -> bool {
    let std::net::IpAddr::V4(to) = to.ip() else { panic!("only of IPv4") };
    // Ethernet 14, IPv4 20, ICMP 8, then the refused packet's header.
    let icmp = frame.get(12..14) == Some(&[0x08, 0x00]) && frame.get(23) == Some(&1);
    icmp && frame.get(34..36) == Some(&[3, 13]) && frame.get(58..62) == Some(&to.octets())
}

/// An Ethernet frame with a UDP datagram of IPv4.
pub(crate) fn udp_frame(
    source_mac: Mac,
    gateway: Mac,
    source: [u8; 4],
    to: SocketAddr,
    text: &str,
) -> Vec<u8> {
    let std::net::IpAddr::V4(destination) = to.ip() else { panic!("only of IPv4") };
    let length = u16::try_from(28 + text.len()).unwrap();
    let mut header = vec![0x45, 0];
    header.extend(length.to_be_bytes());
    header.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    header.extend(source);
    header.extend(destination.octets());
    let sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let checksum = !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    let mut frame = [gateway.0, source_mac.0].concat();
    frame.extend([0x08, 0x00]);
    frame.extend(header);
    frame.extend(40000u16.to_be_bytes());
    frame.extend(to.port().to_be_bytes());
    frame.extend((length - 20).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(text.as_bytes());
    frame
}

struct Received(Vec<u8>);
struct Sending<'a>(&'a OwnedFd);

impl Device for Tap {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.max_transmission_unit = 1514;
        capabilities.medium = Medium::Ethernet;
        capabilities
    }

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Received, Sending<'_>)> {
        let mut buffer = [0; 2048];
        let length = rustix::io::read(&self.device, &mut buffer).ok()?;
        self.received.push(buffer[..length].to_vec());
        Some((Received(buffer[..length].to_vec()), Sending(&self.device)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Sending<'_>> {
        Some(Sending(&self.device))
    }
}

impl smoltcp::phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, work: F) -> R {
        work(&self.0)
    }
}

impl smoltcp::phy::TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, work: F) -> R {
        let mut frame = vec![0; length];
        let result = work(&mut frame);
        let _ = rustix::io::write(self.0, &frame);
        result
    }
}
