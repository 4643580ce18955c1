//! Limits of what goes over a VM's network: kept by the driver, or refused by name.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use imp_runtime::DriverChoice;
use imp_testkit::world::{HOST, SERVER};
use serde_json::{Value, json};

use super::bridge::{bridged, on_own_host, reaches};
use super::host::{Host, running, start};

#[test]
fn a_network_is_limited_each_way_or_the_limit_is_refused_by_name() {
    on_own_host(async |world| {
        world.serve_tcp(80).unwrap();
        let host = Host::new();
        let runtime = host.open().await;
        let mut spec = bridged(host.spec("guest", &["sleep", "1000"]), None);
        spec.limits.network_bytes_per_second = Some(1 << 20);
        if crate::DRIVER == DriverChoice::Qemu {
            let refused = runtime.create(spec).await.unwrap_err().to_string();
            assert!(refused.contains("qemu") && refused.contains("--network-bps"), "{refused}");
            return host.end(runtime).await;
        }
        let id = start(&runtime, spec).await;
        let status = running(&runtime, &id).await;
        assert_eq!(status.asked.network_bytes_per_second, Some(1 << 20));
        let root = format!("jail/firecracker/imp-{id}/root");
        let machine = configuration(&host.vm(&id).join(root).join("api.sock"));
        let device = &machine["network-interfaces"][0];
        for way in ["rx_rate_limiter", "tx_rate_limiter"] {
            assert_eq!(device[way]["bandwidth"]["size"], json!(1 << 20), "{way}: {device}");
        }
        assert_eq!(reaches(&runtime, &id, SERVER, 80).await, HOST);
        runtime.kill(&id).await.unwrap();
        host.end(runtime).await;
    });
}

/// What Firecracker says of its machine.
fn configuration(socket: &Path) -> Value {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
        .write_all(b"GET /vm/config HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\r\n")
        .unwrap();
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let count = stream.read(&mut buffer).unwrap();
        answer.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&answer);
        let body = text.split_once("\r\n\r\n").map(|(_, body)| serde_json::from_str(body));
        match body {
            Some(Ok(machine)) => return machine,
            _ if count == 0 => panic!("{text}"),
            _ => {}
        }
    }
}
