//! What is asked of Firecracker's API to boot a machine, as a pure function of what is to boot.

use serde_json::{Value, json};

use super::api::Request;
use super::room;
use super::version::Version;
use crate::vmm::snapshot::SnapshotKind;
use crate::vmm::{Access, Attachment, BootConfig, Changes, Drive, DriveLimit, Error, NetworkDevice, Origin};

/// The port on which the guest's agent listens, and at which it knocks on its host.
pub(super) const CHANNEL_PORT: u32 = 10_000;
/// Every guest is alone behind its own socket, so all have the same address.
const GUEST_CID: u32 = 3;
/// Name of the one network device.
const NETWORK: &str = "net0";

/// Makes a snapshot: state and memory.
pub(super) const LOAD: &str = "/snapshot/load";

/// The calls, in order; after the last one the guest runs, or is loaded and paused.
pub(super) fn begin(config: &BootConfig, version: Option<Version>) -> Result<Vec<Request>, Error> {
    match &config.origin {
        Origin::Boot => boot(config),
        Origin::Snapshot(_) => Ok(vec![load(config, version)?]),
    }
}

/// The drives are not named again: the snapshot names them relative to the directory that the new machine has.
fn load(config: &BootConfig, version: Option<Version>) -> Result<Request, Error> {
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
    if let (Some(body), true) = (body.as_object_mut(), version.is_some_and(Version::has_clock_flag)) {
        body.insert("clock_realtime".into(), true.into());
    }
    Ok(Request::put(LOAD, body))
}

/// Writes a snapshot of a paused machine.
pub(super) fn snapshot(kind: SnapshotKind) -> Request {
    let kind = match kind {
        SnapshotKind::Full => "Full",
        SnapshotKind::Changes => "Diff",
    };
    Request::put(
        "/snapshot/create",
        json!({
            "snapshot_type": kind, "snapshot_path": room::NEW_STATE, "mem_file_path": room::NEW_MEMORY,
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
    let bucket = |total| json!({"size": share(total), "refill_time": 1000});
    let mut limiter = serde_json::Map::new();
    if let Some(bytes) = limit.bytes_per_second {
        limiter.insert("bandwidth".into(), bucket(bytes));
    }
    if let Some(requests) = limit.requests_per_second {
        limiter.insert("ops".into(), bucket(requests));
    }
    (!limiter.is_empty()).then(|| limiter.into())
}

fn network_device(device: &NetworkDevice) -> Result<Request, Error> {
    let body = json!({"iface_id": NETWORK, "guest_mac": device.mac, "host_dev_name": tap(device)?});
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
    use crate::vmm::snapshot::SnapshotFiles;

    fn config() -> BootConfig {
        BootConfig {
            id: "00ff00ff00ff00ff".into(),
            user: None,
            origin: Origin::Boot,
            changes: Changes::NotNoted,
            cpus: Cpus::new(2).unwrap(),
            memory: Memory::from_bytes(256 << 20).unwrap(),
            kernel: "/k/vmlinux".into(),
            initramfs: "/i".into(),
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
        config.network = Some(NetworkDevice { mac: "52:54:00:00:00:01".into(), attachment });
        let old = Version { major: 1, minor: 12, patch: 1 };
        let mut expected = json!({
            "snapshot_path": "state",
            "mem_backend": {"backend_type": "File", "backend_path": "memory"},
            "enable_diff_snapshots": true,
            "resume_vm": false,
            "network_overrides": [{"iface_id": "net0", "host_dev_name": "tap7"}],
        });
        let calls = begin(&config, Some(old)).unwrap();
        assert_eq!(calls, [Request::put(LOAD, expected.clone())]);
        expected["clock_realtime"] = true.into();
        let new = Version { major: 1, minor: 16, patch: 1 };
        assert_eq!(begin(&config, Some(new)).unwrap(), [Request::put(LOAD, expected)]);
    }

    #[test]
    fn a_network_is_a_tap_and_nothing_else() {
        let mut config = config();
        let mac = "52:54:00:00:00:01".to_owned();
        let attachment = Attachment::Tap { name: "tap0".into(), namespace: descriptor() };
        config.network = Some(NetworkDevice { mac: mac.clone(), attachment });
        let calls = boot(&config).unwrap();
        let device = json!({"iface_id": "net0", "guest_mac": mac, "host_dev_name": "tap0"});
        assert_eq!(body(&calls, "/network-interfaces/net0"), &device);
        config.network = Some(NetworkDevice { mac, attachment: Attachment::Stream(descriptor()) });
        let error = boot(&config).unwrap_err();
        assert!(error.to_string().contains("--network"), "{error}");
    }
}
