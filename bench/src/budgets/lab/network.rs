//! Bytes from a guest to its host's side of the world, through filters and translation, against a bare tap.
//!
//! Ours go through the tap, the filters and the translation of the VM's own namespace, a cable, those of the host, and one
//! more cable to the server. The floor's go through a tap to a socket in the same namespace.

use std::io::{self, Read as _};
use std::net::{IpAddr, TcpListener};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use imp_protocol::connection::Connection;
use imp_testkit::imp::Driver;
use imp_testkit::world::{self, SERVER, on_own_host};

use crate::firecracker::{Bare, Template};
use crate::guest;
use crate::machine::Machine;
use crate::measure::{alternate, time};
use crate::report::{Limit, Line, Quantity};

const ROUNDS: usize = 5;
const MIB: u32 = 32;
const PORT: u16 = 9;
const TAP: &str = "tap0";
const GATEWAY: &str = "172.16.0.1";
/// 0.9 of the throughput.
const MOST: f64 = 1.0 / 0.9;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    on_own_host(|world| {
        sink(
            world
                .out_there(|| TcpListener::bind((SERVER.parse::<IpAddr>()?, PORT)).context("the server"))??,
        );
        let machine = Machine::new(Driver::Firecracker)?;
        let kept = machine.scratch()?;
        let vm = machine.start_with(&["--network", "bridge"])?;
        let agent = machine.guest(&vm)?;
        let template = Template::take(&machine, &vm, kept.path())?;
        let folder = machine.scratch()?;
        let bare = on_own_host(|_| beside_a_tap(&template, folder.path()))??;
        let floor = machine.runtime.block_on(ready(&bare))?;
        let [filtered, plain] = alternate(
            ROUNDS,
            [&mut || send(&machine, &agent, SERVER), &mut || send(&machine, &floor, GATEWAY)],
        )?;
        machine.remove(&vm)?;
        Ok(vec![Line {
            name: "32 MiB out by a bridge / bare tap",
            ours: Quantity::Time(filtered),
            limit: Limit::AtMostTimes { floor: Quantity::Time(plain), ratio: MOST },
        }])
    })?
}

/// A machine with a tap in the calling thread's namespace, where a server listens.
fn beside_a_tap(template: &Template, folder: &std::path::Path) -> anyhow::Result<Bare> {
    world::ip(&format!("tuntap add dev {TAP} mode tap vnet_hdr"))?;
    world::ip(&format!("address add {GATEWAY}/30 dev {TAP}"))?;
    world::ip(&format!("link set {TAP} up"))?;
    sink(TcpListener::bind((GATEWAY.parse::<IpAddr>()?, PORT))?);
    template.boot(folder, None, Some(TAP))
}

/// The agent of the floor, once its network is there.
async fn ready(bare: &Bare) -> anyhow::Result<Connection> {
    let agent = bare.agent().await?;
    guest::configure(&agent).await?;
    let up = "ip link set eth0 up && ip address add 172.16.0.2/30 dev eth0";
    guest::exec(&agent, &["sh", "-c", up]).await?;
    Ok(agent)
}

/// How long it takes until the server has all of it.
fn send(machine: &Machine, agent: &Connection, to: &str) -> anyhow::Result<Duration> {
    let script = format!("dd if=/dev/zero bs=64k count={} 2>/dev/null | nc {to} {PORT}", MIB * 16);
    time(|| machine.runtime.block_on(guest::exec(agent, &["sh", "-c", &script])).map(drop))
}

/// Takes all that one client sends, and hangs up: busybox's nc does not say that its input has ended.
fn sink(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // The client sees it when not all was taken.
            let _ = io::copy(&mut (&stream).take(u64::from(MIB) << 20), &mut io::sink());
        }
    });
}
