//! A user network: a VM reaches the world as a process of the user's would, and not what listens on this machine's loopback.
//!
//! The host and its world are the test's own: making network namespaces takes root.

use std::net::TcpListener;

use imp_testkit::imp::Imp;
use imp_testkit::world::{HOST, PUBLIC_SERVER, SERVER, on_own_host};

use super::driver::{lacks, on_driver};
use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

#[test]
fn the_outside_is_reached_and_this_machines_loopback_is_not() -> anyhow::Result<()> {
    on_driver(|| {
        on_own_host(|world| {
            world.serve_tcp(80)?;
            let imp = Imp::with_busybox(DRIVER)?;
            let local = TcpListener::bind("127.0.0.1:80")?;
            local.set_nonblocking(true)?;
            // Input that does not end: passt may lose the end of a connection whose other half the guest has closed.
            let ask = |to: &str| format!("echo {to}: $(timeout 60 nc -w 20 {to} 80 <>/open 2>/dev/null); ");
            let reached = [SERVER, PUBLIC_SERVER].map(ask).concat();
            // The guest's own loopback, its gateway, and the machine by its own address.
            let not_reached = ["127.0.0.1", "10.0.2.2", HOST].map(ask).concat();
            let script = format!("mkfifo /open; {reached} {not_reached} true");
            let came = imp.run(["run", "--rm", "--network", "user", IMAGE, "sh", "-c", &script])?;
            if lacks(&came, "user") {
                return imp.end();
            }
            let said = came.good()?;
            let expected =
                format!("{SERVER}: {HOST}\n{PUBLIC_SERVER}: {HOST}\n127.0.0.1:\n10.0.2.2:\n{HOST}:\n");
            assert_eq!(said, expected);
            assert!(local.accept().is_err(), "the guest came to this machine's loopback");
            imp.end()
        })?
    })
}
