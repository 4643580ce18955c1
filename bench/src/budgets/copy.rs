//! Files into a VM and out of it, against the channel that carries them and nothing else on it.

use std::cell::RefCell;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;
use imp_testkit::imp::Driver;
use imp_testkit::machine as needs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use crate::bare::Template;
use crate::guest;
use crate::machine::{Machine, Vm};
use crate::measure::{alternate, time};
use crate::report::{Limit, Line, Quantity};

const ROUNDS: usize = 15;
const SIZE: usize = 128 << 20;
const CHUNK: usize = 64 << 10;
const FILE: &str = "copied";

/// What the guest of the floor does with the port: takes or gives `SIZE` bytes, as it is told.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules.list); do /bin/busybox insmod $module; done
until port=$(/bin/busybox grep -lx imp.agent.0 /sys/class/virtio-ports/*/name 2>/dev/null); do :; done
port=${port%/name}; port=${port##*/}
exec 3<>/dev/$port
while :; do
  # The port reads as ended while no host is connected.
  read -r order <&3 || { /bin/busybox sleep 0.05; continue; }
  case $order in
    take) /bin/busybox dd bs=64k iflag=fullblock count=2048 <&3 of=/dev/null 2>/dev/null; echo taken >&3 ;;
    give) /bin/busybox dd bs=64k count=2048 if=/dev/zero 2>/dev/null >&3 ;;
  esac
done
"#;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    let machine = Machine::new(Driver::Qemu)?;
    let kept = machine.scratch()?;
    let vm = machine.start()?;
    let template = Template::take(&vm, kept.path())?;
    let folder = machine.scratch()?;
    let bare = template.boot(folder.path(), Some(&initramfs(kept.path(), INIT, &[])?))?;
    let channel = RefCell::new(machine.runtime.block_on(bare.channel())?);
    let names = ["128 MiB in / raw channel", "128 MiB out / raw channel"];
    let lines = against(&machine, &vm, &channel, ROUNDS, names)?;
    machine.remove(&vm)?;
    Ok(lines)
}

/// Copies over the VM's lane, and the same bytes raw over the channel of a guest that takes and gives them.
pub(super) fn against(
    machine: &Machine,
    vm: &Vm,
    channel: &RefCell<UnixStream>,
    rounds: usize,
    [name_in, name_out]: [&'static str; 2],
) -> anyhow::Result<Vec<Line>> {
    let agent = machine.guest(vm)?;
    let settled = |copy: &mut dyn FnMut() -> anyhow::Result<()>| {
        // What a copy before has left to be written to the host's disk would be written during this one.
        rustix::fs::sync();
        time(copy)
    };
    let wait = &machine.runtime;
    let [write, read, take, give] = alternate(
        rounds,
        [
            &mut || {
                settled(&mut || wait.block_on(guest::copy_in(&agent, machine.lane(vm)?, FILE, SIZE as u64)))
            },
            &mut || {
                settled(&mut || wait.block_on(guest::copy_out(&agent, machine.lane(vm)?, FILE, SIZE as u64)))
            },
            &mut || settled(&mut || wait.block_on(raw_in(&mut channel.borrow_mut()))),
            &mut || settled(&mut || wait.block_on(raw_out(&mut channel.borrow_mut()))),
        ],
    )?;
    // 0.7 of the throughput is 1 / 0.7 of the time.
    let line = |name, ours, floor| Line {
        name,
        ours: Quantity::Time(ours),
        limit: Limit::AtMostTimes { floor: Quantity::Time(floor), ratio: 1.0 / 0.7 },
    };
    Ok(vec![line(name_in, write, take), line(name_out, read, give)])
}

async fn raw_in(channel: &mut UnixStream) -> anyhow::Result<()> {
    channel.write_all(b"take\n").await?;
    let chunk = vec![0x5a; CHUNK];
    for _ in 0..SIZE / CHUNK {
        channel.write_all(&chunk).await?;
    }
    let mut answer = [0; 6];
    channel.read_exact(&mut answer).await?;
    ensure!(&answer == b"taken\n", "the guest of the floor says {answer:?}");
    Ok(())
}

async fn raw_out(channel: &mut UnixStream) -> anyhow::Result<()> {
    channel.write_all(b"give\n").await?;
    let mut chunk = vec![0; CHUNK];
    let mut left = SIZE;
    while left > 0 {
        let read = channel.read(&mut chunk).await?;
        ensure!(read > 0, "the guest of the floor has hung up");
        left = left.saturating_sub(read);
    }
    Ok(())
}

/// Our modules, busybox, a script as init, and files: name, mode, content.
pub(super) fn initramfs(folder: &Path, init: &str, files: &[(&str, u32, &[u8])]) -> anyhow::Result<PathBuf> {
    let root = folder.join("root");
    for name in ["bin", "dev", "proc", "sys"] {
        fs::create_dir_all(root.join(name))?;
    }
    fs::copy(needs::program("busybox")?, root.join("bin/busybox"))?;
    for (name, mode, content) in files.iter().copied().chain([("init", 0o755, init.as_bytes())]) {
        fs::write(root.join(name), content)?;
        fs::set_permissions(root.join(name), PermissionsExt::from_mode(mode))?;
    }
    let list = "find . | busybox cpio -o -H newc 2>/dev/null";
    let archive = Command::new("sh").args(["-c", list]).current_dir(&root).output()?;
    ensure!(archive.status.success(), "busybox could not write an initramfs");
    let mut initramfs = fs::read(needs::kernels()?.join("default/modules.cpio"))?;
    initramfs.extend(archive.stdout);
    let path = folder.join("initramfs");
    fs::write(&path, initramfs)?;
    Ok(path)
}
