//! What filters and translation cost: packets through a VM's network against the same way without them and against a bare
//! tap. Needs root and iproute2; everything happens in network namespaces of its own.
//!
//! A write to a tap returns when its packet has come through: its time is the cost of the whole way.

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use imp_network::Networks;
use imp_network::addresses::{Addresses, Pool};
use imp_network::egress::Egress;
use imp_network::names::TAP;
use imp_network::spec::{Guest, Mac, Outside, Site, TapOwner, VmNetwork};
use imp_sys::netns;
use imp_sys::tap::{self, Frames};

const GUEST: Mac = Mac([0x06, 0, 0, 0, 0, 2]);
const SERVER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// Of one packet on the wire.
const PAYLOAD: usize = 1400;
const ROUNDS: usize = 9;

/// How a guest hands packets over.
#[derive(Clone, Copy)]
enum Sending {
    /// One by one: the worst case.
    Single,
    /// Forty at once, to be cut into packets at the end of the way: what guests do with bulk data.
    Large,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let host = netns::create()?;
    netns::inside(host.as_fd(), measure)?
}

fn measure() -> Result<(), Failure> {
    let world = netns::create()?;
    let far = format!("/proc/{}/fd/{}", std::process::id(), world.as_raw_fd());
    ip("link add out0 type veth peer name in0")?;
    ip(&format!("link set in0 netns {far}"))?;
    ip("address add 192.0.2.1/24 dev out0")?;
    ip("link set out0 up")?;
    netns::inside(world.as_fd(), || -> Result<(), Failure> {
        ip(&format!("address add {SERVER}/24 dev in0"))?;
        ip("link set in0 up")
    })??;
    ip(&format!("route add default via {SERVER}"))?;
    sink(netns::inside(world.as_fd(), || UdpSocket::bind((SERVER, 9)))??);

    let directory = tempfile::tempdir()?;
    let pool = Pool::new("10.77.0.0/16".parse()?, None)?;
    let site =
        Site { name: "imp".parse()?, pool, outside: Outside::Masquerade, mtu: 1500, connections: 4096 };
    let networks = Networks::open(site, directory.path(), [])?;
    let mut addresses = Addresses::new(pool);
    let (filtered, made) = connected(&networks, &mut addresses, "filtered")?;
    let (unfiltered, _) = connected(&networks, &mut addresses, "unfiltered")?;
    networks
        .inside(&"unfiltered".parse()?, || fs::write("/proc/sys/net/ipv4/conf/tap0/rp_filter", "0"))??;
    strip(&networks, "unfiltered")?;
    let bare = bare()?;

    println!("network made in {:.1} ms", made.as_secs_f64() * 1e3);
    compare("single packets", Sending::Single, [&bare.0, &unfiltered, &filtered])?;
    compare("large segments", Sending::Large, [&bare.0, &unfiltered, &filtered])?;
    networks.disconnect(&"filtered".parse()?)?;
    networks.disconnect(&"unfiltered".parse()?)?;
    Ok(())
}

fn compare(what: &str, sending: Sending, taps: [&OwnedFd; 3]) -> Result<(), Failure> {
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (tap, times) in taps.into_iter().zip(&mut times) {
            times.push(send(tap, sending)?);
        }
    }
    let [bare, unfiltered, filtered] = times.map(|mut times| {
        times.sort();
        times.get(ROUNDS / 2).copied().unwrap_or_default()
    });
    println!("{what}:");
    for (name, time) in
        [("bare tap", bare), ("way out, no filters", unfiltered), ("way out, filters and NAT", filtered)]
    {
        let megabits =
            f64::from(sending.writes() * sending.packets()) * (PAYLOAD * 8) as f64 / time.as_secs_f64() / 1e6;
        let of_bare = bare.as_secs_f64() / time.as_secs_f64();
        println!("  {name:<26} {megabits:8.0} Mbit/s  {of_bare:5.2} of bare");
    }
    println!(
        "  filters and NAT keep {:.2} of the way without",
        unfiltered.as_secs_f64() / filtered.as_secs_f64()
    );
    Ok(())
}

impl Sending {
    /// In one round.
    fn writes(self) -> u32 {
        match self {
            Self::Single => 20_000,
            Self::Large => 2_000,
        }
    }

    /// In one write.
    fn packets(self) -> u32 {
        match self {
            Self::Single => 1,
            Self::Large => 40,
        }
    }
}

/// A VM's network, its opened tap, and how long making it took.
fn connected(
    networks: &Networks,
    addresses: &mut Addresses,
    name: &str,
) -> Result<(OwnedFd, Duration), Failure> {
    let vm = name.parse()?;
    let network = VmNetwork {
        link: addresses.lease(&vm, &[])?,
        vm: vm.clone(),
        tap: TapOwner { user: 0, group: 0 },
        guest: Guest::ipv4(GUEST, "172.16.0.2/30".parse()?, [172, 16, 0, 1].into())?,
        publish: Vec::new(),
        egress: Egress::open(),
    };
    let start = Instant::now();
    networks.connect(network)?;
    let made = start.elapsed();
    Ok((networks.inside(&vm, || tap::open(TAP, Frames::WithVirtioHeader))??, made))
}

/// Takes the filters of one VM away; packets then go out with the guest's own address.
fn strip(networks: &Networks, name: &str) -> Result<(), Failure> {
    networks.inside(&name.parse()?, || run("nft", "flush ruleset"))??;
    // The host's side asks for leased addresses: the guest's is not one.
    for entry in fs::read_dir("/proc/sys/net/ipv4/conf")? {
        let device = entry?.file_name();
        if device.to_string_lossy().starts_with("imp-") {
            fs::write(format!("/proc/sys/net/ipv4/conf/{}/rp_filter", device.to_string_lossy()), "0")?;
        }
    }
    run("nft", "flush chain inet imp early")
}

/// A tap that ends in the namespace of the server's like, with nothing between.
fn bare() -> Result<(OwnedFd, OwnedFd), Failure> {
    let namespace = netns::create()?;
    let tap = netns::inside(namespace.as_fd(), || -> Result<OwnedFd, Failure> {
        tap::create(TAP, 0, 0)?;
        ip(&format!("link set {TAP} address {} up", Mac::GATEWAY))?;
        ip(&format!("address add {SERVER}/24 dev {TAP}"))?;
        ip(&format!("route add 172.16.0.0/30 dev {TAP}"))?;
        sink(UdpSocket::bind((SERVER, 9))?);
        Ok(tap::open(TAP, Frames::WithVirtioHeader)?)
    })??;
    Ok((tap, namespace))
}

fn sink(socket: UdpSocket) {
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while socket.recv(&mut buffer).is_ok() {}
    });
}

fn send(tap: &OwnedFd, sending: Sending) -> Result<Duration, Failure> {
    let frame = frame(sending.packets() as usize * PAYLOAD)?;
    let mut tap = fs::File::from(tap.try_clone()?);
    let start = Instant::now();
    for _ in 0..sending.writes() {
        tap.write_all(&frame)?;
    }
    Ok(start.elapsed())
}

/// UDP datagrams from the guest to the server, behind a virtio header that says where to cut them.
fn frame(payload: usize) -> Result<Vec<u8>, Failure> {
    const NEEDS_CHECKSUM: u8 = 1;
    const UDP_SEGMENTS: u8 = 5;
    let kind = if payload > PAYLOAD { UDP_SEGMENTS } else { 0 };
    let mut frame = vec![NEEDS_CHECKSUM, kind];
    for number in [42, u16::try_from(PAYLOAD)?, 34, 6] {
        frame.extend(u16::to_le_bytes(number));
    }
    frame.extend([Mac::GATEWAY.0, GUEST.0].concat());
    frame.extend([0x08, 0x00]);
    let length = u16::try_from(28 + payload)?;
    let mut header = vec![0x45, 0];
    header.extend(length.to_be_bytes());
    header.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 172, 16, 0, 2]);
    header.extend(SERVER.octets());
    let checksum = !sum(&header)?;
    header.splice(10..12, checksum.to_be_bytes());
    // Of addresses, protocol and length; the rest is summed up at the end of the way.
    let mut pseudo = header.get(12..).unwrap_or_default().to_vec();
    pseudo.extend([0, 17]);
    pseudo.extend((length - 20).to_be_bytes());
    frame.extend(header);
    frame.extend(40000u16.to_be_bytes());
    frame.extend(9u16.to_be_bytes());
    frame.extend((length - 20).to_be_bytes());
    frame.extend(sum(&pseudo)?.to_be_bytes());
    frame.resize(frame.len() + payload, 0x55);
    Ok(frame)
}

/// The ones' complement sum of the internet's checksums.
fn sum(bytes: &[u8]) -> Result<u16, Failure> {
    let words = bytes.chunks_exact(2).filter_map(|pair| <[u8; 2]>::try_from(pair).ok());
    let sum: u32 = words.map(|pair| u32::from(u16::from_be_bytes(pair))).sum();
    Ok(u16::try_from((sum & 0xffff) + (sum >> 16))?)
}

fn ip(arguments: &str) -> Result<(), Failure> {
    run("ip", arguments)
}

fn run(program: &str, arguments: &str) -> Result<(), Failure> {
    let status = Command::new(program).args(arguments.split_whitespace()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{program} {arguments}: {status}").into()),
        Err(error) => Err(format!("{program}: {error}: apt-get install iproute2 nftables").into()),
    }
}
