//! Files into a VM and out of it, against a vsock stream that carries them and nothing else.

use std::cell::RefCell;

use imp_testkit::imp::Driver;
use imp_testkit::machine as needs;

use crate::budgets::copy::{against, initramfs};
use crate::firecracker::Template;
use crate::machine::Machine;
use crate::report::Line;

/// A copy takes seconds in an emulated node.
const ROUNDS: usize = 5;

/// What the guest of the floor does: hands a stream of vsock to its conversation.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in $(/bin/busybox cat /modules.list); do /bin/busybox insmod $module; done
exec /bin/node channel 10000 /bin/busybox sh /conversation
"#;

/// Takes or gives as much as ours does, as it is told. It gives in packets of one part: some versions of Firecracker pass on
/// wrong bytes of longer ones, and our agent avoids those, too.
const CONVERSATION: &str = r#"while read -r order; do
  case $order in
    take) /bin/busybox dd bs=64k iflag=fullblock count=2048 of=/dev/null 2>/dev/null; echo taken >&0 ;;
    give)
      /bin/busybox dd bs=28k count=4681 if=/dev/zero 2>/dev/null >&0
      /bin/busybox dd bs=4k count=1 if=/dev/zero 2>/dev/null >&0 ;;
  esac
done
"#;

pub(crate) fn measure() -> anyhow::Result<Vec<Line>> {
    let machine = Machine::new(Driver::Firecracker)?;
    let kept = machine.scratch()?;
    let vm = machine.start()?;
    let template = Template::take(&machine, &vm, kept.path())?;
    let folder = machine.scratch()?;
    let node = std::fs::read(needs::node_program()?)?;
    let files = [("bin/node", 0o755, node.as_slice()), ("conversation", 0o644, CONVERSATION.as_bytes())];
    let bare = template.boot(folder.path(), Some(&initramfs(kept.path(), INIT, &files)?), None)?;
    let channel = bare.channel()?;
    channel.set_nonblocking(true)?;
    let _entered = machine.runtime.enter();
    let channel = RefCell::new(tokio::net::UnixStream::from_std(channel)?);
    let names = ["128 MiB in / raw vsock", "128 MiB out / raw vsock"];
    let lines = against(&machine, &vm, &channel, ROUNDS, names)?;
    machine.remove(&vm)?;
    Ok(lines)
}
