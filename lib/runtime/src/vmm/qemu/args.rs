//! The command line of QEMU as a pure function of what is to boot.

use std::ffi::OsString;
use std::os::fd::RawFd;

use serde_json::json;

use crate::status::Accelerator;
use crate::vmm::{Access, Attachment, BootConfig, Drive, DriveLimit, Origin};

/// Upper bound of the emulator's cache of translated code.
pub(super) const TRANSLATION_CACHE_MIB: u64 = 128;

/// What the emulated processor's timer counts in a second: once for each 16 periods of its bus of 1 GHz, as Linux sets it. The
/// machine has no timer of a known rate that Linux compares it with, so the guest's kernel has to measure it while it boots, and
/// a busy host makes it believe anything. The agent compares, and resets a machine whose kernel is mistaken, so that it measures again.
const TIMER_HZ: u64 = 62_500_000;

/// What is known of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Host {
    pub accelerator: Accelerator,
    /// Rate of the time stamp counter.
    pub tsc_khz: Option<u64>,
}

/// Descriptors that QEMU inherits, by number: four listening sockets, and what the network is attached to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Descriptors {
    pub monitor: RawFd,
    pub channel: RawFd,
    pub lane: RawFd,
    pub console: RawFd,
    pub network: Option<RawFd>,
}

/// What QEMU calls the guest's memory when it migrates.
pub(super) const MEMORY: &str = "memory";

/// Name of the channel in the guest.
const CHANNEL: &str = "imp.agent.0";
/// Name of the lane in the guest.
const LANE: &str = "imp.lane.0";

/// The name of the process, which no other has.
pub(super) fn name(id: &str) -> String {
    format!("imp-{id}")
}

pub(super) fn arguments(boot: &BootConfig, host: Host, fds: Descriptors) -> Vec<OsString> {
    let mut args = Args(Vec::new());
    args.flags(&["-nodefaults", "-no-user-config"]);
    args.pair("-action", format!("reboot={}", at_reset(boot, host)));
    args.pair("-display", "none");
    args.pair("-name", name(&boot.id));
    args.pair(
        "-machine",
        format!("microvm,acpi=on,pit=on,pic=on,rtc=on,isa-serial=on,memory-backend={MEMORY}"),
    );

    match host.accelerator {
        Accelerator::Kvm => {
            args.pair("-accel", "kvm");
            args.pair("-cpu", "host");
        }
        Accelerator::Emulation => {
            // A thread for each processor loses a timer's interrupt now and then, just when the processor halts: the guest then
            // stands still for good. One processor needs no threads.
            let threads = if boot.cpus.get() == 1 { "single" } else { "multi" };
            args.pair("-accel", format!("tcg,thread={threads},tb-size={TRANSLATION_CACHE_MIB}"));
            // String instructions are emulated byte by byte, and a guest that sees `erms` copies and clears with them.
            args.pair("-cpu", "max,-erms");
        }
    }
    args.pair("-smp", boot.cpus.get().to_string());
    args.pair("-m", format!("{}M", boot.memory.mib()));
    args.pair("-object", memory(boot));
    match &boot.origin {
        Origin::Boot(image) => {
            args.pair("-kernel", image.kernel.as_os_str());
            args.pair("-initrd", image.initramfs.as_os_str());
            args.pair("-append", command_line(boot, host));
        }
        // It stays paused when its state has come.
        Origin::Snapshot(_) => {
            args.flags(&["-S"]);
            args.pair("-incoming", "defer");
        }
    }
    // Virtio 1.0: without it these devices speak the draft that came before.
    args.pair("-global", "virtio-mmio.force-legacy=false");

    // QEMU waits here for a client: nothing of the guest runs before its console is written down.
    args.pair("-chardev", format!("socket,id=console,fd={},server=on,wait=on", fds.console));
    args.pair("-serial", "chardev:console");
    args.pair("-chardev", format!("socket,id=monitor,fd={},server=on,wait=off", fds.monitor));
    args.pair("-mon", "chardev=monitor,mode=control");
    args.pair("-device", "virtio-serial-device,id=serial0,max_ports=4");
    args.pair("-chardev", format!("socket,id=channel,fd={},server=on,wait=off", fds.channel));
    args.pair(
        "-device",
        format!("virtserialport,bus=serial0.0,nr=1,chardev=channel,name={CHANNEL},id=channel0"),
    );
    args.pair("-chardev", format!("socket,id=lane,fd={},server=on,wait=off", fds.lane));
    args.pair("-device", format!("virtserialport,bus=serial0.0,nr=2,chardev=lane,name={LANE},id=lane0"));

    drives(&mut args, &boot.drives, boot.drive_limit);
    if let (Some(network), Some(fd)) = (&boot.network, fds.network) {
        args.pair(
            "-netdev",
            match network.attachment {
                Attachment::Stream(_) => format!("stream,id=net0,server=off,addr.type=fd,addr.str={fd}"),
                Attachment::Tap { .. } => format!("tap,id=net0,fd={fd},vhost=off"),
            },
        );
        // The announcement after a restore dead-locks the network of Linux 6.12 guests.
        args.pair(
            "-device",
            format!("virtio-net-device,netdev=net0,id=nic0,mac={},guest_announce=off", network.mac),
        );
    }
    args.pair("-device", "virtio-rng-device,id=rng0");
    args.pair("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    args.0
}

/// Whether a guest may boot again until it has answered: see [`TIMER_HZ`].
pub(super) fn may_boot_again(boot: &BootConfig, accelerator: Accelerator) -> bool {
    matches!(boot.origin, Origin::Boot(_)) && accelerator == Accelerator::Emulation
}

fn at_reset(boot: &BootConfig, host: Host) -> &'static str {
    if may_boot_again(boot, host.accelerator) { "reset" } else { "shutdown" }
}

/// That of a snapshot is mapped privately: what the guest writes is the machine's own.
fn memory(boot: &BootConfig) -> String {
    // Named by the id alone, whatever the version of QEMU would do.
    const BY_ID: &str = "x-use-canonical-path-for-ramblock-id";
    let size = boot.memory.bytes();
    let memory = match &boot.origin {
        Origin::Boot(_) => json!({
            "qom-type": "memory-backend-ram", "id": MEMORY, "size": size, "share": false, BY_ID: false,
        }),
        Origin::Snapshot(files) => json!({
            "qom-type": "memory-backend-file", "id": MEMORY, "size": size, "share": false, BY_ID: false,
            "mem-path": files.memory,
        }),
    };
    memory.to_string()
}

/// The guest's kernel command line.
fn command_line(boot: &BootConfig, host: Host) -> String {
    let mut line = String::from("console=ttyS0 quiet reboot=t panic=-1");
    if let (Accelerator::Emulation, Some(khz)) = (host.accelerator, host.tsc_khz) {
        // The emulated counter is the host's. A guest that has to measure it hangs when the host is busy meanwhile, and one
        // that compares it with timer ticks, of which a busy host loses some, falls back to a clock of 4 ms.
        line.push_str(&format!(" tsc_early_khz={khz} tsc=reliable"));
    }
    if host.accelerator == Accelerator::Emulation {
        line.push_str(&format!(" imp.timer_hz={TIMER_HZ}"));
    }
    if !boot.command_line.is_empty() {
        line.push(' ');
        line.push_str(&boot.command_line);
    }
    line.push_str(&format!(" imp.channel={CHANNEL} imp.lane={LANE}"));
    line
}

fn drives(args: &mut Args, drives: &[Drive], limit: DriveLimit) {
    let limited = limit != DriveLimit::default();
    if limited {
        let mut limits = serde_json::Map::new();
        if let Some(bytes) = limit.bytes_per_second {
            limits.insert("bps-total".into(), bytes.into());
        }
        if let Some(requests) = limit.requests_per_second {
            limits.insert("iops-total".into(), requests.into());
        }
        let group = json!({"qom-type": "throttle-group", "id": "drive-limit", "limits": limits});
        args.pair("-object", group.to_string());
    }
    for drive in drives {
        let id = drive.id;
        let file = match drive.access {
            Access::ReadOnly => json!({
                "driver": "file", "node-name": format!("{id}-file"), "filename": drive.path,
                "read-only": true, "locking": "off",
            }),
            // Flushes are answered without reaching the disk: the file is thrown away when the machine ends.
            Access::Private => json!({
                "driver": "file", "node-name": format!("{id}-file"), "filename": drive.path,
                "discard": "unmap", "cache": {"direct": false, "no-flush": true},
            }),
        };
        args.pair("-blockdev", file.to_string());
        let node = if limited {
            let throttle = json!({
                "driver": "throttle", "node-name": format!("{id}-limited"), "throttle-group": "drive-limit",
                "file": format!("{id}-file"), "read-only": drive.access == Access::ReadOnly,
                "discard": "unmap",
            });
            args.pair("-blockdev", throttle.to_string());
            format!("{id}-limited")
        } else {
            format!("{id}-file")
        };
        // A full disk of the host is an error for the guest. Without this QEMU stops the whole machine.
        args.pair(
            "-device",
            format!("virtio-blk-device,drive={node},id={id},serial={id},werror=report,rerror=report"),
        );
    }
}

struct Args(Vec<OsString>);

impl Args {
    fn flags(&mut self, flags: &[&str]) {
        self.0.extend(flags.iter().map(OsString::from));
    }

    fn pair(&mut self, option: &str, value: impl Into<OsString>) {
        self.0.push(option.into());
        self.0.push(value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use serde_json::Value;

    use super::*;
    use crate::spec::{Cpus, Memory};
    use crate::vmm::snapshot::SnapshotFiles;
    use crate::vmm::{Changes, Image, NetworkDevice, NetworkLimit};

    fn boot() -> BootConfig {
        BootConfig {
            balloon: crate::spec::Balloon::Without,
            id: "00ff00ff00ff00ff".into(),
            user: None,
            origin: Origin::Boot(Image { kernel: "/k/vmlinux".into(), initramfs: "/i".into() }),
            changes: Changes::NotNoted,
            cpus: Cpus::new(2).unwrap(),
            memory: Memory::from_bytes(256 << 20).unwrap(),
            command_line: "imp.base=/dev/vda".into(),
            drives: vec![
                Drive { id: "base", path: "/d/a,b\"c".into(), access: Access::ReadOnly },
                Drive { id: "scratch", path: "/d/s".into(), access: Access::Private },
            ],
            drive_limit: DriveLimit::default(),
            network: None,
        }
    }

    const FDS: Descriptors =
        Descriptors { monitor: 10, channel: 11, lane: 14, console: 12, network: Some(13) };
    const EMULATED: Host = Host { accelerator: Accelerator::Emulation, tsc_khz: Some(2_300_000) };

    fn text(boot: &BootConfig, host: Host) -> Vec<String> {
        arguments(boot, host, FDS).into_iter().map(|a| a.into_string().unwrap()).collect()
    }

    /// Values of one option, in order.
    fn values<'a>(args: &'a [String], option: &str) -> Vec<&'a str> {
        args.windows(2).filter(|w| w[0] == option).map(|w| w[1].as_str()).collect()
    }

    #[test]
    fn only_an_emulated_guest_is_told_the_rates_of_its_clocks_and_may_boot_again() {
        assert_eq!(
            values(&text(&boot(), EMULATED), "-append"),
            [
                "console=ttyS0 quiet reboot=t panic=-1 tsc_early_khz=2300000 tsc=reliable imp.timer_hz=62500000 imp.base=/dev/vda imp.channel=imp.agent.0 imp.lane=imp.lane.0"
            ]
        );
        let kvm = Host { accelerator: Accelerator::Kvm, ..EMULATED };
        assert_eq!(
            values(&text(&boot(), kvm), "-append"),
            [
                "console=ttyS0 quiet reboot=t panic=-1 imp.base=/dev/vda imp.channel=imp.agent.0 imp.lane=imp.lane.0"
            ]
        );
        assert_eq!(values(&text(&boot(), kvm), "-accel"), ["kvm"]);
        assert_eq!(values(&text(&boot(), EMULATED), "-action"), ["reboot=reset"]);
        assert_eq!(values(&text(&boot(), kvm), "-action"), ["reboot=shutdown"]);
    }

    #[test]
    fn a_path_with_commas_and_quotes_stays_one_path() {
        let args = text(&boot(), EMULATED);
        let drives: Vec<Value> =
            values(&args, "-blockdev").iter().map(|d| serde_json::from_str(d).unwrap()).collect();
        assert_eq!(drives[0]["filename"], "/d/a,b\"c");
        assert_eq!(drives[0]["read-only"], true);
        assert_eq!(drives[0]["locking"], "off");
        assert!(drives[1].get("read-only").is_none() && drives[1].get("locking").is_none());
    }

    #[test]
    fn a_drive_limit_covers_all_drives_together() {
        let mut boot = boot();
        boot.drive_limit = DriveLimit { bytes_per_second: Some(1 << 20), requests_per_second: None };
        let args = text(&boot, EMULATED);
        let group: Value = serde_json::from_str(values(&args, "-object")[1]).unwrap();
        assert_eq!(group["limits"], json!({"bps-total": 1 << 20}));
        let devices = values(&args, "-device").join(" ");
        assert!(
            devices.contains("drive=base-limited") && devices.contains("drive=scratch-limited"),
            "{devices}"
        );
    }

    #[test]
    fn a_machine_of_a_snapshot_maps_its_memory_privately_and_waits_for_its_state() {
        let object = |args: &[String]| serde_json::from_str::<Value>(values(args, "-object")[0]).unwrap();
        let booted = text(&boot(), EMULATED);
        assert_eq!(object(&booted)["qom-type"], "memory-backend-ram");
        assert!(!booted.contains(&"-S".to_owned()) && values(&booted, "-incoming").is_empty());
        let files = SnapshotFiles { state: "/s/state".into(), memory: "/s/mem,ory".into() };
        let restored = text(&BootConfig { origin: Origin::Snapshot(files), ..boot() }, EMULATED);
        let memory = object(&restored);
        assert_eq!((&memory["mem-path"], &memory["share"]), (&json!("/s/mem,ory"), &json!(false)));
        assert_eq!((&memory["id"], &memory["size"]), (&object(&booted)["id"], &json!(256 << 20)));
        assert!(restored.contains(&"-S".to_owned()));
        assert_eq!(values(&restored, "-action"), ["reboot=shutdown"]);
        assert_eq!(values(&restored, "-incoming"), ["defer"]);
        // It has booted.
        for option in ["-kernel", "-initrd", "-append"] {
            assert_eq!((values(&booted, option).len(), values(&restored, option).len()), (1, 0), "{option}");
        }
    }

    #[test]
    fn an_error_of_the_host_s_disk_is_told_to_the_guest_and_stops_no_machine() {
        let args = text(&boot(), EMULATED);
        let disks: Vec<&str> =
            values(&args, "-device").into_iter().filter(|d| d.starts_with("virtio-blk")).collect();
        assert_eq!(disks.len(), 2);
        assert!(disks.iter().all(|d| d.ends_with("werror=report,rerror=report")), "{disks:?}");
    }

    #[test]
    fn there_is_a_network_device_exactly_when_there_is_a_network() {
        assert!(values(&text(&boot(), EMULATED), "-netdev").is_empty());
        let mut boot = boot();
        let descriptor = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let tap = Attachment::Tap { name: "tap0".into(), namespace: descriptor() };
        boot.network = Some(NetworkDevice {
            mac: "52:54:00:00:00:01".into(),
            attachment: tap,
            limit: NetworkLimit::default(),
        });
        assert_eq!(values(&text(&boot, EMULATED), "-netdev"), ["tap,id=net0,fd=13,vhost=off"]);
        let attachment = Attachment::Stream(descriptor());
        boot.network = Some(NetworkDevice {
            mac: "52:54:00:00:00:01".into(),
            attachment,
            limit: NetworkLimit::default(),
        });
        let args = text(&boot, EMULATED);
        assert_eq!(values(&args, "-netdev"), ["stream,id=net0,server=off,addr.type=fd,addr.str=13"]);
        assert!(args.iter().any(|a| a.contains("mac=52:54:00:00:00:01") && a.contains("guest_announce=off")));
    }
}
