//! What is asked of Firecracker's API to boot a machine, as a pure function of what is to boot.

use serde_json::{Value, json};

use super::api::Request;
use super::room;
use super::version::Clock;
use crate::spec::Balloon;
use crate::vmm::snapshot::SnapshotKind;
use crate::vmm::{
    Access, Attachment, BootConfig, Changes, Drive, DriveLimit, Error, NetworkDevice, NetworkLimit, Origin,
};

/// The port on which the guest's agent listens, and at which it knocks on its host.
pub(super) const CHANNEL_PORT: u32 = 10_000;
/// Every guest is alone behind its own socket, so all have the same address.
const GUEST_CID: u32 = 3;
/// Name of the one network device.
const NETWORK: &str = "net0";

const BALLOON: &str = "/balloon";
/// How large the balloon is, and is to be.
pub(super) const BALLOON_STATISTICS: &str = "/balloon/statistics";
/// Makes a snapshot: state and memory.
pub(super) const LOAD: &str = "/snapshot/load";

/// The calls, in order; after the last one the guest runs, or is loaded and paused.
pub(super) fn begin(config: &BootConfig, clock: Clock) -> Result<Vec<Request>, Error> {
    match &config.origin {
        Origin::Boot(_) => boot(config),
        Origin::Snapshot(_) => {
            let mut calls = vec![load(config, clock)?];
            calls.extend(limits(config));
            Ok(calls)
        }
    }
}

/// The drives are not named again: the snapshot names them relative to the directory that the new machine has.
fn load(config: &BootConfig, clock: Clock) -> Result<Request, Error> {
    let networks = match &config.network {
        Some(device) => vec![json!({"iface_id": NETWORK, "host_dev_name": tap(device)?})],
        None => Vec::new(),
    };
    let mut body = json!({
        "snapshot_path": room::STATE,
        "mem_backend": {"backend_type": "File", "backend_path": room::MEMORY},
        "enable_diff_snapshots": config.changes == Changes::Noted,
        "resume_vm": false,
        "network_overrides": networks,
    });
    if let (Some(body), true) = (body.as_object_mut(), clock == Clock::GoesOn) {
        body.insert("clock_realtime".into(), true.into());
    }
    Ok(Request::put(LOAD, body))
}

/// The limits of this machine in the place of those that its snapshot was made with.
fn limits(config: &BootConfig) -> Vec<Request> {
    let limiter = drive_limiter(config.drive_limit, config.drives.len()).unwrap_or_else(unlimited);
    let drive = |drive: &Drive| {
        let body = json!({"drive_id": drive.id, "rate_limiter": limiter});
        Request::patch(format!("/drives/{}", drive.id), body)
    };
    let mut calls: Vec<Request> = config.drives.iter().map(drive).collect();
    calls.extend(config.network.as_ref().map(|device| {
        let limiter = network_limiter(device.limit).unwrap_or_else(unlimited);
        let body = json!({"iface_id": NETWORK, "rx_rate_limiter": limiter, "tx_rate_limiter": limiter});
        Request::patch(format!("/network-interfaces/{NETWORK}"), body)
    }));
    calls
}

/// Takes a limit away: docs/api_requests/patch-network-interface.md of Firecracker.
fn unlimited() -> Value {
    let none = json!({"size": 0, "refill_time": 0});
    json!({"bandwidth": none, "ops": none})
}

/// Writes a snapshot of a paused machine.
pub(super) fn snapshot(kind: SnapshotKind) -> Request {
    // Changes are written over those that are in the file.
    let (kind, memory) = match kind {
        SnapshotKind::Full => ("Full", room::NEW_MEMORY),
        SnapshotKind::Changes => ("Diff", room::CHANGES),
    };
    Request::put(
        "/snapshot/create",
        json!({
            "snapshot_type": kind, "snapshot_path": room::NEW_STATE, "mem_file_path": memory,
        }),
    )
}

pub(super) fn pause() -> Request {
    Request::patch("/vm", json!({"state": "Paused"}))
}

pub(super) fn resume() -> Request {
    Request::patch("/vm", json!({"state": "Resumed"}))
}

fn boot(boot: &BootConfig) -> Result<Vec<Request>, Error> {
    let mut calls = vec![
        Request::put(
            "/machine-config",
            json!({
                "vcpu_count": boot.cpus.get(),
                "mem_size_mib": boot.memory.mib(),
                "smt": false,
                "track_dirty_pages": boot.changes == Changes::Noted,
            }),
        ),
        Request::put(
            "/boot-source",
            json!({
                "kernel_image_path": room::KERNEL,
                "initrd_path": room::INITRAMFS,
                "boot_args": command_line(boot),
            }),
        ),
    ];
    let limiter = drive_limiter(boot.drive_limit, boot.drives.len());
    calls.extend(boot.drives.iter().map(|one| drive(one, limiter.clone())));
    if let Some(network) = &boot.network {
        calls.push(network_device(network)?);
    }
    if boot.balloon == Balloon::With {
        calls.push(balloon());
    }
    calls.push(Request::put("/vsock", json!({"guest_cid": GUEST_CID, "uds_path": room::VSOCK})));
    calls.push(Request::put("/entropy", json!({})));
    calls.push(Request::put("/actions", json!({"action_type": "InstanceStart"})));
    Ok(calls)
}

/// The guest's kernel command line.
fn command_line(boot: &BootConfig) -> String {
    // There is a keyboard controller for the sake of its reset line, and no keyboard; there is no PCI. The clock is KVM's,
    // so that nothing is gained by comparing the processor's with timers.
    let mut line = String::from(
        "console=ttyS0 quiet reboot=k panic=-1 pci=off 8250.nr_uarts=1 i8042.noaux i8042.nomux i8042.dumbkbd \
         i8042.nopnp tsc=reliable no_timer_check cryptomgr.notests random.trust_cpu=on",
    );
    if !boot.command_line.is_empty() {
        line.push(' ');
        line.push_str(&boot.command_line);
    }
    // A guest that switches its power off halts for ever: nothing takes note of it.
    line.push_str(&format!(" imp.channel=vsock:{CHANNEL_PORT} imp.end=restart"));
    line
}

/// Empty. A guest that is short of memory takes what it has given back before it kills a process: docs/ballooning.md of
/// Firecracker.
fn balloon() -> Request {
    let body = json!({
        "amount_mib": 0,
        "deflate_on_oom": true,
        // Without statistics nobody is told what the guest has given, which is known at any time. The rest of them the guest
        // has to be asked for, and its agent says more: as rarely as it can be.
        "stats_polling_interval_s": u8::MAX,
    });
    Request::put(BALLOON, body)
}

/// Wants this much of the guest's memory.
pub(super) fn inflate(mib: u64) -> Request {
    Request::patch(BALLOON, json!({"amount_mib": mib}))
}

fn drive(drive: &Drive, limiter: Option<Value>) -> Request {
    let mut body = json!({
        "drive_id": drive.id,
        "path_on_host": room::drive(drive),
        "is_root_device": false,
        "is_read_only": drive.access == Access::ReadOnly,
        // Flushes are answered without reaching the disk: a private file is thrown away when the machine ends.
        "cache_type": "Unsafe",
    });
    if let (Some(limiter), Some(body)) = (limiter, body.as_object_mut()) {
        body.insert("rate_limiter".into(), limiter);
    }
    Request::put(format!("/drives/{}", drive.id), body)
}

/// Each drive has a limiter of its own, so each gets its share of what all may take together.
fn drive_limiter(limit: DriveLimit, drives: usize) -> Option<Value> {
    let share = |total: u64| (total / drives.max(1) as u64).max(1);
    limiter(limit.bytes_per_second.map(share), limit.requests_per_second.map(share))
}

/// One for each way.
fn network_limiter(limit: NetworkLimit) -> Option<Value> {
    limiter(limit.bytes_per_second, limit.packets_per_second)
}

/// What is not named is as it was, so a limit that is not there is named, too.
fn limiter(bytes: Option<u64>, operations: Option<u64>) -> Option<Value> {
    let bucket = |limit: Option<u64>| match limit {
        Some(each_second) => json!({"size": each_second, "refill_time": 1000}),
        None => json!({"size": 0, "refill_time": 0}),
    };
    (bytes.is_some() || operations.is_some())
        .then(|| json!({"bandwidth": bucket(bytes), "ops": bucket(operations)}))
}

fn network_device(device: &NetworkDevice) -> Result<Request, Error> {
    let mut body = json!({"iface_id": NETWORK, "guest_mac": device.mac, "host_dev_name": tap(device)?});
    if let (Some(limiter), Some(body)) = (network_limiter(device.limit), body.as_object_mut()) {
        body.insert("rx_rate_limiter".into(), limiter.clone());
        body.insert("tx_rate_limiter".into(), limiter);
    }
    Ok(Request::put(format!("/network-interfaces/{NETWORK}"), body))
}

fn tap(device: &NetworkDevice) -> Result<&str, Error> {
    match &device.attachment {
        Attachment::Tap { name, .. } => Ok(name),
        Attachment::Stream(_) => Err(Error::StreamNetwork),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::spec::{Cpus, Memory};
    use crate::vmm::Image;
    use crate::vmm::snapshot::SnapshotFiles;

    fn config() -> BootConfig {
        BootConfig {
            balloon: Balloon::Without,
            id: "00ff00ff00ff00ff".into(),
            user: None,
            origin: Origin::Boot(Image { kernel: "/k/vmlinux".into(), initramfs: "/i".into() }),
            changes: Changes::NotNoted,
            cpus: Cpus::new(2).unwrap(),
            memory: Memory::from_bytes(256 << 20).unwrap(),
            command_line: "imp.base=/dev/vda".into(),
            drives: vec![
                Drive { id: "base", path: "/d/base".into(), access: Access::ReadOnly },
                Drive { id: "scratch", path: "/d/scratch".into(), access: Access::Private },
            ],
            drive_limit: DriveLimit::default(),
            network: None,
        }
    }

    fn body<'a>(calls: &'a [Request], path: &str) -> &'a Value {
        &calls.iter().find(|request| request.call.path == path).expect(path).body
    }

    fn descriptor() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn a_machine_starts_when_everything_else_has_been_said() {
        let calls = boot(&config()).unwrap();
        let paths: Vec<&str> = calls.iter().map(|request| request.call.path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "/machine-config",
                "/boot-source",
                "/drives/base",
                "/drives/scratch",
                "/vsock",
                "/entropy",
                "/actions"
            ]
        );
        assert_eq!(
            body(&calls, "/machine-config"),
            &json!({"vcpu_count": 2, "mem_size_mib": 256, "smt": false, "track_dirty_pages": false})
        );
    }

    #[test]
    fn a_balloon_is_empty_and_lets_go_of_memory_that_its_guest_needs() {
        assert!(boot(&config()).unwrap().iter().all(|request| request.call.path != "/balloon"));
        let calls = boot(&BootConfig { balloon: Balloon::With, ..config() }).unwrap();
        let balloon = json!({"amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 255});
        assert_eq!(body(&calls, "/balloon"), &balloon);
        assert_eq!(inflate(64), Request::patch("/balloon", json!({"amount_mib": 64})));
    }

    #[test]
    fn no_path_of_the_host_is_in_what_a_snapshot_would_hold() {
        let calls = boot(&config()).unwrap();
        let text: String = calls.iter().map(|request| request.body.to_string()).collect();
        assert!(!text.contains("/k/") && !text.contains("/d/") && !text.contains("\"/i\""), "{text}");
        assert_eq!(body(&calls, "/drives/base")["path_on_host"], "base.img");
        assert_eq!(body(&calls, "/drives/base")["is_read_only"], true);
        assert_eq!(body(&calls, "/drives/scratch")["is_read_only"], false);
        assert_eq!(body(&calls, "/vsock")["uds_path"], "v.sock");
    }

    #[test]
    fn the_guest_is_told_where_its_host_listens_and_how_to_end() {
        let calls = boot(&config()).unwrap();
        let line = body(&calls, "/boot-source")["boot_args"].as_str().unwrap();
        assert!(line.ends_with(" imp.base=/dev/vda imp.channel=vsock:10000 imp.end=restart"), "{line}");
        assert!(line.contains(" reboot=k panic=-1 "), "{line}");
    }

    #[test]
    fn drives_share_their_limit() {
        let mut config = config();
        config.drive_limit = DriveLimit { bytes_per_second: Some(4 << 20), requests_per_second: Some(1) };
        let limiter = json!({
            "bandwidth": {"size": 2 << 20, "refill_time": 1000}, "ops": {"size": 1, "refill_time": 1000},
        });
        let calls = boot(&config).unwrap();
        for path in ["/drives/base", "/drives/scratch"] {
            assert_eq!(body(&calls, path)["rate_limiter"], limiter);
        }
    }

    #[test]
    fn a_machine_of_a_snapshot_is_loaded_by_one_call_with_its_own_tap_and_a_clock_that_goes_on() {
        let mut config = config();
        let files = SnapshotFiles { state: "/s/state".into(), memory: "/s/memory".into() };
        config.origin = Origin::Snapshot(files);
        config.changes = Changes::Noted;
        let attachment = Attachment::Tap { name: "tap7".into(), namespace: descriptor() };
        let limit = NetworkLimit { bytes_per_second: Some(1 << 20), packets_per_second: None };
        config.network = Some(NetworkDevice { mac: "52:54:00:00:00:01".into(), attachment, limit });
        let mut expected = json!({
            "snapshot_path": "state",
            "mem_backend": {"backend_type": "File", "backend_path": "memory"},
            "enable_diff_snapshots": true,
            "resume_vm": false,
            "network_overrides": [{"iface_id": "net0", "host_dev_name": "tap7"}],
        });
        let calls = begin(&config, Clock::Unsaid).unwrap();
        assert_eq!(calls[0], Request::put(LOAD, expected.clone()));
        let none = json!({"size": 0, "refill_time": 0});
        for (call, drive) in calls[1..].iter().zip(["base", "scratch"]) {
            let body = json!({"drive_id": drive, "rate_limiter": {"bandwidth": none, "ops": none}});
            assert_eq!(*call, Request::patch(format!("/drives/{drive}"), body));
        }
        let limiter = json!({"bandwidth": {"size": 1 << 20, "refill_time": 1000}, "ops": none});
        let body = json!({"iface_id": "net0", "rx_rate_limiter": limiter, "tx_rate_limiter": limiter});
        assert_eq!(calls[3..], [Request::patch("/network-interfaces/net0", body)]);
        expected["clock_realtime"] = true.into();
        assert_eq!(begin(&config, Clock::GoesOn).unwrap()[0], Request::put(LOAD, expected));
    }

    #[test]
    fn a_network_is_a_tap_and_nothing_else() {
        let mut config = config();
        let mac = "52:54:00:00:00:01".to_owned();
        let attachment = Attachment::Tap { name: "tap0".into(), namespace: descriptor() };
        config.network = Some(NetworkDevice { mac: mac.clone(), attachment, limit: NetworkLimit::default() });
        let calls = boot(&config).unwrap();
        let device = json!({"iface_id": "net0", "guest_mac": mac, "host_dev_name": "tap0"});
        assert_eq!(body(&calls, "/network-interfaces/net0"), &device);
        let limit = NetworkLimit { bytes_per_second: None, packets_per_second: Some(7) };
        config.network.as_mut().unwrap().limit = limit;
        let limiter =
            json!({"bandwidth": {"size": 0, "refill_time": 0}, "ops": {"size": 7, "refill_time": 1000}});
        let calls = boot(&config).unwrap();
        for way in ["rx_rate_limiter", "tx_rate_limiter"] {
            assert_eq!(body(&calls, "/network-interfaces/net0")[way], limiter);
        }
        let attachment = Attachment::Stream(descriptor());
        config.network = Some(NetworkDevice { mac, attachment, limit: NetworkLimit::default() });
        let error = boot(&config).unwrap_err();
        assert!(error.to_string().contains("--network"), "{error}");
    }
}
