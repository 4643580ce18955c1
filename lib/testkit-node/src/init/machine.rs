//! What a node is before any program runs in it: modules, the root, cgroups, network, a disk.

use std::ffi::CStr;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::{fs, io};

use anyhow::{Context as _, ensure};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change, mount_move};
use rustix::process::{chdir, chroot};

use super::modules;

/// Tag of the host's directories.
const SHARE: &str = "host";
/// The disk that is this node's own, made empty for it.
const DISK: &str = "/dev/vda";
const DATA: &str = "/data";

/// By how many millionths a guest's clock may differ from the processor's before KVM wants it scaled.
const CLOCK_TOLERANCE: &str = "/sys/module/kvm/parameters/tsc_tolerance_ppm";
const CLOCK_TOLERANCE_PPM: &str = "20000";

/// Users, groups and names that programs expect.
const ETC: [(&str, &str); 4] = [
    (
        "passwd",
        "root:x:0:0:root:/root:/bin/sh\ndaemon:x:1:1:daemon:/:/usr/sbin/nologin\n\
         nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    ),
    ("group", "root:x:0:\ntty:x:5:\nkvm:x:36:\nnogroup:x:65534:\n"),
    ("hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
];

pub(super) fn prepare() -> anyhow::Result<()> {
    mount_new("proc", "/proc", "proc", c"")?;
    mount_new("sysfs", "/sys", "sysfs", c"")?;
    mount_new("devtmpfs", "/dev", "devtmpfs", c"")?;
    modules::load_first()?;
    tolerate_clocks()?;
    enter_root()?;
    furnish()?;
    control_groups()?;
    if Path::new(DISK).exists() {
        mount_new(DISK, DATA, "ext4", c"")?;
    }
    network(&fs::read_to_string("/proc/cmdline").context("reading the kernel's command line")?)
}

/// KVM takes note of the rate of the processor's clock when it is loaded, and the kernel corrects that rate, by one per cent
/// at the most, at about the same time. Where KVM was first, and the difference is more than it tolerates, it wants guests'
/// clocks scaled. No emulated processor can do that, and KVM goes on with a factor of nought: each timer of each guest is
/// late by all the time that the node has run, so guests stop at the first one.
fn tolerate_clocks() -> anyhow::Result<()> {
    match fs::write(CLOCK_TOLERANCE, CLOCK_TOLERANCE_PPM) {
        // Where the processor has no virtualisation there is no KVM.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        written => written.with_context(|| format!("writing {CLOCK_TOLERANCE}")),
    }
}

fn mount_new(source: &str, place: &str, kind: &str, options: &CStr) -> anyhow::Result<()> {
    fs::create_dir_all(place).with_context(|| format!("making {place}"))?;
    mount(source, place, kind, MountFlags::empty(), options)
        .with_context(|| format!("mounting {source} on {place}"))
}

/// The root is what the host shares, with a layer of memory over it: writes stay in the node. It is no initramfs, out of
/// which a program could not pivot.
fn enter_root() -> anyhow::Result<()> {
    fs::create_dir_all("/host")?;
    mount(SHARE, "/host", "virtiofs", MountFlags::RDONLY, c"").context("mounting the host's directories")?;
    mount_new("tmpfs", "/layer", "tmpfs", c"mode=755,size=80%")?;
    for directory in ["/layer/upper", "/layer/work"] {
        fs::create_dir_all(directory)?;
    }
    let layers = c"lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work";
    mount_new("overlay", "/root", "overlay", layers)?;
    for directory in ["proc", "sys", "dev"] {
        let place = format!("/root/{directory}");
        fs::create_dir_all(&place)?;
        mount_move(format!("/{directory}"), &place).with_context(|| format!("moving /{directory}"))?;
    }
    modules::keep_for_later("/root")?;
    chdir("/root")?;
    mount_move(".", "/").context("moving the root")?;
    chroot(".")?;
    chdir("/")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    Ok(())
}

fn furnish() -> anyhow::Result<()> {
    for directory in ["/etc", "/home", "/mnt", "/opt", "/srv", "/var/lib", "/var/log", "/var/cache"] {
        fs::create_dir_all(directory).with_context(|| format!("making {directory}"))?;
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create("/root")?;
    for directory in ["/tmp", "/var/tmp"] {
        fs::create_dir_all(directory)?;
        fs::set_permissions(directory, fs::Permissions::from_mode(0o1777))?;
    }
    mount_new("tmpfs", "/run", "tmpfs", c"mode=755")?;
    if !Path::new("/var/run").exists() {
        symlink("/run", "/var/run")?;
    }
    mount_new("tmpfs", "/dev/shm", "tmpfs", c"mode=1777")?;
    mount_new("devpts", "/dev/pts", "devpts", c"mode=620,ptmxmode=666,gid=5")?;
    for (link, target) in [("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")] {
        symlink(format!("/proc/self/fd{target}"), format!("/dev/{link}"))?;
    }
    // Opening it loads the module; on installed systems it is made from the modules' names.
    let mode = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::from_raw_mode(0o660));
    rustix::fs::mknodat(rustix::fs::CWD, "/dev/loop-control", mode.0, mode.1, rustix::fs::makedev(10, 237))?;
    for (name, content) in ETC {
        fs::write(format!("/etc/{name}"), content)?;
    }
    Ok(())
}

/// The unified hierarchy, with every controller that has one delegated to the groups below the root.
fn control_groups() -> anyhow::Result<()> {
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MountFlags::empty(), c"")?;
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers")?;
    for controller in controllers.split_whitespace() {
        fs::write("/sys/fs/cgroup/cgroup.subtree_control", format!("+{controller}"))
            .with_context(|| format!("delegating the controller {controller}"))?;
    }
    fs::create_dir(super::program::GROUPS).context("making the programs' cgroup")
}

/// `imp.hostname=NAME`, `imp.address=ADDRESS/PREFIX`, `imp.gateway=ADDRESS` of the kernel's command line.
fn network(command_line: &str) -> anyhow::Result<()> {
    let word = |name: &str| {
        command_line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    };
    if let Some(name) = word("imp.hostname") {
        rustix::system::sethostname(name.as_bytes())?;
    }
    ip("link set lo up")?;
    if let Some(address) = word("imp.address") {
        ip(&format!("addr add {address} dev eth0"))?;
        ip("link set eth0 up")?;
    }
    if let Some(gateway) = word("imp.gateway") {
        ip(&format!("route add default via {gateway}"))?;
    }
    Ok(())
}

fn ip(words: &str) -> anyhow::Result<()> {
    let status = Command::new("/usr/bin/busybox").arg("ip").args(words.split(' ')).status();
    let status = status.with_context(|| format!("running busybox ip {words}"))?;
    ensure!(status.success(), "busybox ip {words}: {status}");
    Ok(())
}
