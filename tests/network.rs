//! A bridge network: a VM reaches the world and is reached as it was asked for, and nothing of it stays on the machine.
//!
//! Each test has a host and a world of its own: these tests make network namespaces, which takes root.

use std::net::{SocketAddr, TcpListener};

use imp_testkit::imp::{Imp, wait_until};
use imp_testkit::leftovers::{Snapshot, Thing};
use imp_testkit::world::{HOST, METADATA, PUBLIC_SERVER, SERVER, World, fetch, on_own_host};

use super::driver::on_driver;
use crate::DRIVER;

pub(crate) const IMAGE: &str = "imp.test/busybox";

/// A script that says what each of these addresses says at port 80, or that it says nothing.
pub(crate) fn asks(addresses: &[&str]) -> String {
    let ask = |to: &&str| format!("echo {to}: $(timeout 60 nc -w 20 {to} 80 </dev/null 2>/dev/null)");
    addresses.iter().map(ask).collect::<Vec<_>>().join("; ")
}

pub(crate) fn run<'a>(flags: &[&'a str], script: &'a str) -> Vec<&'a str> {
    let bridge = ["run", "--rm", "--network", "bridge"];
    bridge.into_iter().chain(flags.iter().copied()).chain([IMAGE, "sh", "-c", script]).collect()
}

fn at(address: &str, port: u16) -> anyhow::Result<SocketAddr> {
    Ok(SocketAddr::new(address.parse()?, port))
}

/// Nothing of ours may be left on the host when Imp has ended.
pub(crate) fn in_a_world(test: impl FnOnce(&World, &Imp) -> anyhow::Result<()> + Send) -> anyhow::Result<()> {
    on_own_host(|world| {
        world.serve_tcp(80)?;
        let before = Snapshot::take(&[])?;
        let imp = Imp::with_busybox(DRIVER)?;
        test(world, &imp)?;
        imp.end()?;
        // Control groups are the whole machine's, and so are those of other tests.
        let left = before.new_since()?;
        let left: Vec<_> = left.iter().filter(|thing| !matches!(thing, Thing::Cgroup(_))).collect();
        anyhow::ensure!(left.is_empty(), "{left:?} is left");
        Ok(())
    })?
}

#[test]
fn the_internet_is_reached_and_metadata_and_the_host_are_not() -> anyhow::Result<()> {
    on_driver(|| {
        in_a_world(|_, imp| {
            let service = TcpListener::bind("0.0.0.0:80")?;
            service.set_nonblocking(true)?;
            let script = asks(&[SERVER, PUBLIC_SERVER, METADATA, HOST, "172.16.0.1"]);
            let said = imp.run(run(&[], &script))?.good()?;
            let expected =
                format!("{SERVER}: {HOST}\n{PUBLIC_SERVER}: {HOST}\n{METADATA}:\n{HOST}:\n172.16.0.1:\n");
            assert_eq!(said, expected);
            assert!(service.accept().is_err(), "the guest came to its host");
            Ok(())
        })
    })
}

#[test]
fn a_published_port_is_reached_from_outside_from_the_host_and_by_its_loopback() -> anyhow::Result<()> {
    on_driver(|| {
        in_a_world(|world, imp| {
            let serve = "while :; do echo hello | nc -l -p 8080; done";
            let line =
                ["run", "-d", "--name", "web", "--network", "bridge", "-p", "8000:8080", IMAGE, "sh", "-c"];
            imp.run(line.into_iter().chain([serve]))?.good()?;
            let said = |address: &str| -> anyhow::Result<String> {
                let (to, mut text) = (at(address, 8000)?, String::new());
                // Between two connections nobody listens in the guest for a moment.
                wait_until("the guest serves", || {
                    Ok(fetch(to).is_ok_and(|said| {
                        text = said;
                        true
                    }))
                })?;
                Ok(text)
            };
            assert_eq!(world.out_there(|| said(HOST))??, "hello\n");
            for address in [HOST, "127.0.0.1"] {
                assert_eq!(said(address)?, "hello\n", "{address}");
            }
            let network = imp.inspect("web")?;
            let text =
                |path: &str| network.pointer(path).and_then(serde_json::Value::as_str).map(str::to_owned);
            assert_eq!(text("/network/mode").as_deref(), Some("bridge"));
            assert_eq!(text("/network/addresses/0").as_deref(), Some("172.16.0.2/30"));
            let (own, shared) = ("/host_memory/private_bytes", "/host_memory/shared_bytes");
            for part in [own, shared] {
                assert!(
                    network.pointer(part).and_then(serde_json::Value::as_u64) > Some(0),
                    "{part}: {network}"
                );
            }
            imp.run(["rm", "-f", "web"])?.good()?;
            assert!(fetch(at(HOST, 8000)?).is_err());
            Ok(())
        })
    })
}
