//! Guests that mean harm: what they send is bounded in the owner's memory and on its disk.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;

use imp_runtime::VmId;
use imp_runtime::spec::KernelChoice;
use imp_runtime::status::{Outcome, State};

use super::driver::on_driver;
use super::host::{Host, exec, reachable, wait_until};
use super::owner::{Owner, Then};

const MIB: u64 = 1 << 20;

/// In place of the agent: a shell that runs the attack of the kernel bundle it was booted with.
const AGENT: &str = "#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /proc /sys /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read module; do insmod $module; done </modules.list
case $(cat /proc/cmdline) in
*imp.channel=vsock:10000*) exec /bin/node channel 10000 sh /conversation ;;
esac
until [ -e /sys/class/virtio-ports/vport*p1 ]; do sleep 0.1; done
port=/dev/$(basename /sys/class/virtio-ports/vport*p1)
until [ -c $port ]; do sleep 0.1; done
sh /conversation <>$port
";

/// The channel is its standard input; the attack finds it as descriptor 3.
const CONVERSATION: &str = "exec 3<&0
greet() { while read -r word oldest newest nonce <&3; do [ \"$word\" = IMP-HOST ] && break; done; printf '\\nIMP-GUEST 1 1 0.1.0 %s\\n' $nonce >&3; }
. /attack
";

/// Bytes without a line, so that no greeting is ever found.
const NOISE: &str = "while :; do cat /flood >&3 && echo flooded >/dev/console; done";
/// Greets, and sends frames whatever the host says, until it hangs up.
const GREETED: &str = "greet; cat /settings >&3; cat <&3 >/dev/null & while cat /flood >&3; do echo flooded >/dev/console; done; echo flooded until the host hung up >/dev/console";

/// RFC 9113, 4.1.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Each asks for an answer.
fn pings() -> Vec<u8> {
    frame(6, 0, 0, b"12345678").repeat(4096)
}

/// An answer to the first call, of 4 GiB.
fn huge_answer() -> Vec<u8> {
    // ":status: 200" of the static table, "content-type" as a literal: RFC 7541.
    let headers = [&[0x88, 0x5f, 16][..], b"application/grpc"].concat();
    let mut bytes = frame(1, 4, 1, &headers);
    // Uncompressed, with the largest length there is.
    bytes.extend(frame(0, 0, 1, b"\0\xff\xff\xff\xff"));
    bytes.extend(frame(0, 0, 1, &[0; 16 << 10]).repeat(256));
    bytes
}

/// A kernel bundle whose modules bring a shell and an attack along.
fn bundle(host: &Host, name: &str, attack: &str, flood: &[u8]) {
    let kernels = host.data().join("kernels");
    let good = fs::canonicalize(kernels.join("default")).unwrap();
    let directory = kernels.join(name);
    fs::create_dir(&directory).unwrap();
    symlink(good.join("vmlinux"), directory.join("vmlinux")).unwrap();
    let busybox = fs::read(imp_testkit::machine::program("busybox").unwrap()).unwrap();
    let settings = frame(4, 0, 0, &[]);
    let node = fs::read(imp_testkit::machine::node_program().unwrap()).unwrap();
    let files: [(&str, u32, &[u8]); 7] = [
        ("bin", 0o040_755, b""),
        ("bin/busybox", 0o100_755, &busybox),
        ("bin/node", 0o100_755, &node),
        ("conversation", 0o100_644, CONVERSATION.as_bytes()),
        ("attack", 0o100_644, attack.as_bytes()),
        ("settings", 0o100_644, &settings),
        ("flood", 0o100_644, flood),
    ];
    let mut out = fs::read(good.join("modules.cpio")).unwrap();
    for (inode, (name, mode, content)) in files.into_iter().enumerate() {
        let entry = cpio::newc::Builder::new(name).ino(inode as u32 + 1).mode(mode).nlink(1);
        let mut entry = entry.write(out, content.len() as u32);
        entry.write_all(content).unwrap();
        out = entry.finish().unwrap();
    }
    fs::write(directory.join("modules.cpio"), cpio::newc::trailer(out).unwrap()).unwrap();
}

/// How often the guest has sent all of its flood. Bytes that QEMU passes on are in none of its counters.
fn floods(host: &Host, id: &VmId) -> usize {
    let text = fs::read_to_string(host.vm(id).join("console.log")).unwrap_or_default();
    text.lines().filter(|line| line.contains("flooded")).count()
}

#[test]
fn a_guest_that_floods_its_channel_before_or_after_its_greeting_costs_a_bounded_amount_of_memory() {
    on_driver(async {
        let host = Host::new();
        let link = host.data().join("kernels");
        let kernels = fs::canonicalize(link.join("default")).unwrap();
        fs::remove_file(&link).unwrap();
        fs::create_dir(&link).unwrap();
        symlink(kernels, link.join("default")).unwrap();
        let attacks: [(&str, &str, Vec<u8>, usize); 3] = [
            ("noise", NOISE, vec![b'x'; 64 << 10], 24),
            ("pings", GREETED, pings(), 1),
            ("huge", GREETED, huge_answer(), 1),
        ];
        let agent = host.path().join("hostile-agent");
        fs::write(&agent, AGENT).unwrap();
        let mut config = host.config();
        config.guest_agent = agent.clone();
        let vms = attacks.iter().map(|(name, attack, flood, _)| {
            bundle(&host, name, attack, flood);
            let mut spec = host.spec(name, &["true"]);
            spec.kernel = KernelChoice::Bundle((*name).into());
            spec.memory = imp_runtime::spec::Memory::from_bytes(256 * MIB).unwrap();
            (spec, Then::LetRun)
        });
        let vms = vms.collect();
        let mut owner = Owner::start(&host, config.clone(), vms);
        let mut spawned = std::collections::HashMap::new();
        let mut ids = std::collections::HashSet::new();
        while spawned.len() < attacks.len() {
            let status = owner.until(|status| status.vmm_pid.is_some());
            ids.insert(status.id.clone());
            spawned.insert(status.name.as_str().to_owned(), (status.vmm_pid.unwrap(), status.id));
        }
        let before = owner.resident();
        let mut most = 0;
        for (name, _, _, enough) in &attacks {
            let (pid, id) = &spawned[*name];
            let mut sent = 0;
            wait_until(name, || {
                most = most.max(owner.resident());
                sent = floods(&host, id);
                // The engine gives up a guest that does not answer in time.
                sent >= *enough || !Path::new(&format!("/proc/{pid}")).exists()
            });
            let consoles =
                ids.iter().map(|id| fs::read_to_string(host.vm(id).join("console.log")).unwrap_or_default());
            assert!(sent >= *enough, "{name} flooded only {sent} times: {}", consoles.collect::<String>());
        }
        let grown = most.saturating_sub(before);
        println!("the owner grew by {} KiB", grown >> 10);
        // Three connections of at most 16 MiB each would be allowed to take more than they do.
        assert!(grown < 24 * MIB, "the owner grew by {} KiB", grown >> 10);
        owner.kill();
        let runtime = imp_runtime::Runtime::open(config).await.unwrap();
        for id in &ids {
            // It floods on, and would be given up only when it has not answered in time.
            runtime.kill(id).await.unwrap();
            let console = runtime.console(id).await.unwrap();
            assert!(!console.iter().any(|line| line.contains("panic")), "{console:#?}");
            runtime.remove(id).await.unwrap();
        }
        drop(runtime);
        fs::remove_file(&agent).unwrap();
        fs::remove_dir_all(&link).unwrap();
        let ids: Vec<VmId> = ids.into_iter().collect();
        host.assert_nothing_left(&ids);
    });
}

/// Number of the log that is written; a flood is soon past any one of them.
fn newest_log(vm: &Path) -> u32 {
    let names = fs::read_dir(vm.join("logs")).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let number = |name: &str| name.strip_prefix("main.")?.strip_suffix(".log")?.parse().ok();
    names.filter_map(|name| number(name.to_str()?)).max().unwrap_or(0)
}

#[test]
fn a_program_that_floods_its_output_and_the_console_costs_a_bounded_amount_of_memory_and_disk() {
    on_driver(async {
        let host = Host::new();
        let spec =
            host.shell("flood", "head -c 600k /proc/kallsyms >/dev/console & exec yes 0123456789abcdef");
        let mut owner = Owner::start(&host, host.config(), vec![(spec, Then::LetRun)]);
        let status = owner.until(|status| status.state == State::Running);
        let before = owner.resident();
        let vm = host.vm(&status.id);
        let mut most = 0;
        // The files turn over: more of both than is kept, and more than an owner may take.
        wait_until("both have turned over", || {
            most = most.max(owner.resident());
            vm.join("console.1.log").exists() && newest_log(&vm) >= 3
        });
        let grown = most.saturating_sub(before);
        println!("the owner grew by {} KiB", grown >> 10);
        assert!(grown < 8 * MIB, "the owner grew by {} KiB", grown >> 10);
        owner.kill();
        assert!(!vm.join("logs/main.0.log").exists(), "nothing of the log is dropped");
        let size = |path: &Path| fs::metadata(path).unwrap().len();
        let logs: u64 =
            fs::read_dir(vm.join("logs")).unwrap().map(|entry| size(&entry.unwrap().path())).sum();
        assert!(logs <= 2 * (4 * MIB + MIB), "{logs} bytes of log");
        let console = size(&vm.join("console.log")) + size(&vm.join("console.1.log"));
        assert!(console <= MIB, "{console} bytes of console");
        // It floods on, and the next owner can ask it all the same.
        let runtime = host.open().await;
        reachable(&runtime, &status.id).await;
        assert_eq!(exec(&runtime, &status.id, "echo here").await, ("here\n".into(), 0));
        assert_eq!(runtime.kill(&status.id).await.unwrap().outcome, Some(Outcome::Killed));
        host.end(runtime).await;
    });
}
