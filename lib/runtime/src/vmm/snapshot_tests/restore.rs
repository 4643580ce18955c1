//! Machines of one snapshot differ in all that must differ, before anything but their agents runs in them.

use std::collections::HashSet;

use imp_protocol::guest::ExecOutput;
use tonic::{Code, Streaming};

use super::*;
use crate::guest::restore::{Generation, MachineId, NewMachine, RepairKind, Wake, Woken, sleep, wake};
use crate::spec::Environment;

/// Keeps the kernel from noticing by itself that it goes on in another machine: its driver's name, since 6.8 and before.
const NO_VMGENID: &str = "initcall_blacklist=vmgenid_plaform_driver_init,vmgenid_driver_init";
/// What the kernel says when it has noticed.
const NOTICED: &str = "crng reseeded due to virtual machine fork";
/// Draws numbers for as long as it runs.
const DRAW: &str = "while :; do cat /proc/sys/kernel/random/uuid; done >/dev/shm/uuids";
/// Runs before others do, so that between its first step and its last nothing is drawn by them.
const HOOK: &str = r#"#!/bin/sh
PATH=/bin
wc -c </dev/shm/uuids >/before
echo "$IMP_GENERATION $TOKEN" >/hook
for i in 1 2 3 4 5 6 7 8; do cat /proc/sys/kernel/random/uuid; done >/hook-uuids
wc -c </dev/shm/uuids >/after
"#;
/// A connection that looks like one to another machine, one over loopback, and a socket that listens.
const CONNECT: &str = "
ip link set lo up; ip addr add 10.9.9.2/32 dev lo
ip route add local 10.9.9.1 dev lo table local src 10.9.9.2
for port in 9 10; do { sleep 5432 | nc -l -p $port; } </dev/null >/dev/null 2>&1 & done
nc -l -p 11 </dev/null >/dev/shm/heard 2>/dev/null &
until [ $(netstat -tln | grep -c LISTEN) = 3 ]; do sleep 0.1; done
{ sleep 5432 | nc 10.9.9.1 9; } </dev/null >/dev/null 2>&1 &
{ sleep 5432 | nc 127.0.0.1 10; } </dev/null >/dev/null 2>&1 &
until [ $(netstat -tn | grep -c ESTABLISHED) = 4 ]; do sleep 0.1; done";

#[test]
fn firecracker_guests_of_one_snapshot_are_different_machines() {
    node::inside_within(LONG * 2, || {
        run(async {
            let driver = firecracker(Err("this one is for users without privileges".into())).await;
            different_machines(&driver, newest()).await;
        });
    });
}

#[test]
fn firecracker_guests_of_one_snapshot_are_different_machines_on_a_kernel_without_vmgenid() {
    node::inside_within(LONG * 2, || {
        run(async {
            let driver = firecracker(Err("this one is for users without privileges".into())).await;
            different_machines(&driver, older()).await;
        });
    });
}

#[test]
fn qemu_guests_of_one_snapshot_are_different_machines() {
    run(async { different_machines(&qemu().await, newest()).await });
}

#[test]
fn qemu_guests_of_one_snapshot_are_different_machines_on_a_kernel_without_vmgenid() {
    run(async { different_machines(&qemu().await, older()).await });
}

fn newest() -> Place {
    Place { command_line: format!("{COMMAND_LINE} {NO_VMGENID}"), ..Place::new() }
}

fn older() -> Place {
    Place::booting(machine::older_kernels())
}

async fn different_machines(driver: &dyn Driver, place: Place) {
    let scratch = place.path("scratch.img");
    imp_storage::disk::create_scratch(&scratch, 32 * MIB).unwrap();
    let mut parent = place.begin(driver, 1, place.boots(), &scratch).await.guest().await;
    parent.says("busybox --install -s /bin").await;
    parent.says(CONNECT).await;
    parent.says(&format!("mkdir -p /etc/imp/after-restore.d; cd /etc/imp/after-restore.d; cat >1 <<'END'\n{HOOK}END\nchmod 755 1")).await;
    parent
        .says(&format!("sh -c '{DRAW}' </dev/null 2>/dev/null & until [ -s /dev/shm/uuids ]; do :; done"))
        .await;
    // Its stream ends with the connections of the parent.
    let mut held = begin_exec(parent.connection(), "exec sleep 4321").await.unwrap();
    held.message().await.unwrap();

    let files = SnapshotFiles { state: place.path("state"), memory: place.path("memory") };
    let disks = ["one.img", "two.img"].map(|name| place.path(name));
    let frozen = sleep(parent.connection(), Some(LONG)).await.unwrap();
    assert!(frozen >= 8, "{frozen}");
    assert_eq!(sleep(parent.connection(), Some(LONG)).await.unwrap(), frozen);
    refuses_to_run(&parent).await;
    parent.machine.pause().await.unwrap();
    parent.machine.snapshot(SnapshotKind::Full, &files).await.unwrap();
    for disk in &disks {
        fs::copy(&scratch, disk).unwrap();
    }
    parent.machine.resume().await.unwrap();
    drop(held);
    parent.greet_again().await;
    goes_on_as_it_was(&parent).await;
    parent.end().await;

    let mut guests = Vec::new();
    for (number, disk) in (2..).zip(&disks) {
        let guest = place.begin(driver, number, Origin::Snapshot(files.clone()), disk).await.resumed().await;
        refuses_to_run(&guest).await;
        let machine = new_machine(number);
        let woken = wake(guest.connection(), &machine).await.unwrap();
        all_is_repaired(&woken, frozen);
        is_what_it_was_told(&guest, number).await;
        assert_eq!(wake(guest.connection(), &machine).await.unwrap(), woken);
        is_what_it_was_told(&guest, number).await;
        connections_are_those_of_this_machine(&guest).await;
        guests.push(guest);
    }
    let [one, two] = &guests[..] else { panic!("two guests") };
    nothing_is_drawn_twice(one, two).await;
    is_new_on_a_root_that_cannot_be_written(one).await;
    for guest in guests {
        let log = guest.says("dmesg").await;
        assert!(!log.contains(NOTICED), "the kernel noticed by itself: {log}");
        guest.end().await;
    }
}

async fn begin_exec(connection: &Connection, script: &str) -> Result<Streaming<ExecOutput>, tonic::Status> {
    let start = ProcessSpec {
        arguments: ["sh", "-c", script].map(|word| word.as_bytes().to_vec().into()).to_vec(),
        environment: vec!["PATH=/bin".into()],
        ..ProcessSpec::default()
    };
    let inputs = tokio_stream::iter([ExecInput { input: Some(exec_input::Input::Start(start)) }]);
    Ok(ProcessesClient::new(connection.clone()).exec(inputs).await?.into_inner())
}

async fn refuses_to_run(guest: &Guest) {
    let refused = timeout(LONG, begin_exec(guest.connection(), "true")).await.expect("in time").unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
}

async fn goes_on_as_it_was(parent: &Guest) {
    let woken = wake(parent.connection(), &Wake::Same).await.unwrap();
    assert_eq!(woken.done.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [RepairKind::Clock]);
    let count = "wc -c </dev/shm/uuids";
    let then = parent.says(&format!("ls /run/imp 2>/dev/null; {count}")).await;
    parent.says(&format!("until [ $({count}) -gt {} ]; do :; done", then.trim())).await;
    assert_eq!(parent.says("netstat -tn | grep -c ESTABLISHED").await, "4\n");
}

fn new_machine(number: u8) -> Wake {
    Wake::New(Box::new(NewMachine {
        generation: Generation::from_random([number; 16]),
        hostname: format!("guest-{number}").parse().unwrap(),
        machine_id: MachineId::from_random([number; 16]),
        network: None,
        hosts: Vec::new(),
        environment: Environment::new([format!("NUMBER={number}"), "TOKEN=none".into()]).unwrap(),
        secrets: Environment::new([format!("TOKEN=secret-{number}")]).unwrap(),
    }))
}

fn all_is_repaired(woken: &Woken, frozen: u32) {
    let done: Vec<RepairKind> = woken.done.iter().map(|(kind, _)| *kind).collect();
    let all = [
        RepairKind::Entropy,
        RepairKind::Clock,
        RepairKind::Identity,
        RepairKind::Connections,
        RepairKind::Generation,
        RepairKind::Environment,
        RepairKind::Hooks,
    ];
    assert_eq!(done, all, "{woken:?}");
    // But for the one that a stream held.
    assert!((1..frozen).contains(&woken.processes), "{woken:?}");
}

async fn is_what_it_was_told(guest: &Guest, number: u8) {
    let (generation, id) = (Generation::from_random([number; 16]), MachineId::from_random([number; 16]));
    let says =
        guest.says("hostname; cat /etc/machine-id /run/imp/generation /hook; echo $NUMBER $TOKEN").await;
    let told = format!(
        "guest-{number}\n{id}\n{generation}\n{generation} secret-{number}\n{number} secret-{number}\n"
    );
    assert_eq!(says, told);
    let says = guest.says("cat /before; cat /after").await;
    let (before, after) = says.trim().split_once('\n').unwrap();
    assert_eq!(before, after, "others ran before the hooks were done");
    assert_eq!(guest.says("ps | grep -c '[s]leep 4321'").await, "0\n");
}

async fn connections_are_those_of_this_machine(guest: &Guest) {
    let says = guest
        .says("netstat -tn | grep -v 127.0.0.1 | grep -c ESTABLISHED; netstat -tn | grep -c ESTABLISHED")
        .await;
    assert_eq!(says, "0\n2\n");
    let says = guest
        .says("echo hello | nc 127.0.0.1 11; until [ -s /dev/shm/heard ]; do :; done; cat /dev/shm/heard")
        .await;
    assert_eq!(says, "hello\n");
}

async fn nothing_is_drawn_twice(one: &Guest, two: &Guest) {
    for file in ["/proc/sys/kernel/random/boot_id", "/hook-uuids"] {
        let says = [one.says(&format!("cat {file}")).await, two.says(&format!("cat {file}")).await];
        let [one, two] = [&says[0], &says[1]].map(|says| says.lines().collect::<HashSet<_>>());
        assert!(!one.is_empty() && one.is_disjoint(&two), "{file}: {one:?} {two:?}");
    }
    let [mut drawn_one, mut drawn_two] = [Vec::new(), Vec::new()];
    for (guest, drawn) in [(one, &mut drawn_one), (two, &mut drawn_two)] {
        let wanted = "$(($(cat /before) + 1000))";
        guest.says(&format!("until [ $(wc -c </dev/shm/uuids) -gt {wanted} ]; do :; done")).await;
        drawn.extend(guest.says("cat /dev/shm/uuids").await.lines().map(str::to_owned));
    }
    let shared = drawn_one.iter().zip(&drawn_two).take_while(|(one, two)| one == two).count();
    let [one, two] = [&drawn_one, &drawn_two].map(|drawn| drawn[shared..].iter().collect::<HashSet<_>>());
    assert!(shared > 0 && one.len() > 10 && two.len() > 10, "{shared} {} {}", one.len(), two.len());
    // The last may have been cut off as it was read.
    assert!(one.is_disjoint(&two), "{:?}", one.intersection(&two));
}

async fn is_new_on_a_root_that_cannot_be_written(guest: &Guest) {
    guest.says("mount -o remount,ro /; ! touch /x 2>/dev/null && echo read-only").await;
    for number in [9, 10] {
        sleep(guest.connection(), None).await.unwrap();
        let woken = wake(guest.connection(), &new_machine(number)).await.unwrap();
        let failed: Vec<RepairKind> = woken.failed.iter().map(|(kind, _)| *kind).collect();
        // The hook writes to that root, too.
        assert_eq!(failed, [RepairKind::Generation, RepairKind::Hooks], "{woken:?}");
        let says = guest.says("cat /etc/machine-id; hostname; mount >/dev/shm/mounts").await;
        assert_eq!(says, format!("{}\nguest-{number}\n", MachineId::from_random([number; 16])));
        for file in ["boot_id", "machine-id"] {
            assert_eq!(guest.says(&format!("grep -c {file} /dev/shm/mounts")).await, "1\n", "{file}");
        }
    }
}
