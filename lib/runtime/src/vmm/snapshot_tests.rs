//! Snapshots of real guests, by each driver that makes them.

mod changes;
mod restore;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use imp_protocol::connection::Connection;
use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::{ExecInput, ProcessSpec, exec_input, exec_output};
use imp_testkit::{machine, node};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::firecracker::{self, Firecracker};
use super::memory::Freshness;
use super::qemu::{self, Qemu};
use super::snapshot::{SnapshotFiles, SnapshotKind, merge};
use super::{
    Access, BootConfig, Changes, Drive, DriveLimit, Driver, Error, Image, Machine, Origin, find_program,
};
use crate::boot::{self, COMMAND_LINE, InitramfsCache};
use crate::guest::{Channel, GuestHold, Lane, copy_in, greet};
use crate::id::VmId;
use crate::layout::{Layout, VmLayout};
use crate::process::Process;
use crate::spec::{Balloon, Bytes, CopiedMount, Cpus, KernelChoice, Memory, MountAccess};

const LONG: Duration = Duration::from_secs(240);
const MIB: u64 = 1 << 20;

/// A directory with all that machines begin with.
struct Place {
    directory: tempfile::TempDir,
    layout: Layout,
    image: Image,
    base: PathBuf,
    command_line: String,
}

impl Place {
    fn new() -> Self {
        Self::booting(machine::kernels())
    }

    /// Its guests boot from the default one of these bundles.
    fn booting(kernels: Result<PathBuf, machine::Error>) -> Self {
        let directory = tempfile::Builder::new().prefix("imp-").tempdir().unwrap();
        let data = directory.path().join("data");
        fs::create_dir(&data).unwrap();
        std::os::unix::fs::symlink(kernels.unwrap(), data.join("kernels")).unwrap();
        machine::data_directory(&data).unwrap();
        let layout = Layout::new(data, directory.path().join("run"));
        let kernel = boot::kernel(&layout, &KernelChoice::Default).unwrap();
        let agent = machine::guest_agent().unwrap();
        let initramfs = InitramfsCache::default().path(&layout, &kernel, &agent).unwrap();
        let (root, base) = (directory.path().join("root"), directory.path().join("base.ext4"));
        fs::create_dir_all(root.join("bin")).unwrap();
        fs::copy(machine::program("busybox").unwrap(), root.join("bin/busybox")).unwrap();
        for name in ["sh", "cat"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name)).unwrap();
        }
        let made = Command::new(machine::program("mke2fs").unwrap())
            .args(["-q", "-t", "ext4", "-F", "-d"])
            .arg(&root)
            .arg(&base)
            .arg("16M")
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(made.success());
        let command_line = COMMAND_LINE.to_owned();
        let image = Image { kernel: kernel.facts.path, initramfs };
        Self { directory, layout, image, base, command_line }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn boots(&self) -> Origin {
        Origin::Boot(self.image.clone())
    }

    /// A machine that begins like this, with this private disk.
    async fn begin(&self, driver: &dyn Driver, number: u8, origin: Origin, scratch: &Path) -> Begun {
        let id = VmId::from_random([number; 8]);
        let vm = self.layout.vm(&id);
        for directory in [vm.data(), vm.runtime()] {
            fs::create_dir_all(directory).unwrap();
        }
        let config = BootConfig {
            balloon: Balloon::Without,
            id: id.to_string(),
            user: driver.users().map(|users| users.start + u32::from(number)),
            origin,
            changes: Changes::Noted,
            cpus: Cpus::new(1).unwrap(),
            memory: Memory::from_bytes(128 * MIB).unwrap(),
            command_line: self.command_line.clone(),
            drives: vec![
                Drive { id: "base", path: self.base.clone(), access: Access::ReadOnly },
                Drive { id: "scratch", path: scratch.to_owned(), access: Access::Private },
            ],
            drive_limit: DriveLimit::default(),
            network: None,
        };
        let process = driver.spawn(&config, &vm).unwrap();
        let machine = driver.begin(&config, &vm, process.clone()).await;
        Begun { vm, process, machine }
    }
}

struct Begun {
    vm: VmLayout,
    process: Process,
    machine: Result<Box<dyn Machine>, Error>,
}

impl Begun {
    async fn guest(self) -> Guest {
        let machine = self.machine.unwrap();
        let greeted = timeout(LONG, greet(machine.as_ref())).await.expect("in time").unwrap();
        let (connection, _, channel) = greeted;
        Guest { vm: self.vm, process: self.process, machine, reached: Some((connection, channel)) }
    }

    async fn resumed(self) -> Guest {
        self.machine.as_ref().unwrap().resume().await.unwrap();
        self.guest().await
    }

    /// What there is instead of a machine; then its process is gone, too.
    async fn refusal(self) -> String {
        let Err(Error::NotLoaded(fault)) = self.machine else { panic!("it was loaded") };
        timeout(LONG, self.process.ended()).await.expect("in time");
        firecracker::jail::remove(&self.vm.jail()).unwrap();
        crate::vm::chain(&fault)
    }
}

struct Guest {
    vm: VmLayout,
    process: Process,
    machine: Box<dyn Machine>,
    reached: Option<(Connection, Channel)>,
}

impl Guest {
    fn connection(&self) -> &Connection {
        &self.reached.as_ref().unwrap().0
    }

    async fn says(&self, script: &str) -> String {
        timeout(LONG, exec(self.connection(), script)).await.unwrap_or_else(|_| panic!("in time: {script}"))
    }

    async fn snapshot(&mut self, kind: SnapshotKind, scratch: &Path, to: &SnapshotFiles, copy: &Path) {
        self.says("echo 3 >/proc/sys/vm/drop_caches").await;
        self.machine.pause().await.unwrap();
        self.machine.snapshot(kind, to).await.unwrap();
        fs::copy(scratch, copy).unwrap();
        self.machine.resume().await.unwrap();
        self.greet_again().await;
    }

    /// The channel may have ended with a snapshot; where it has not, the guest takes no other one beside it.
    async fn greet_again(&mut self) {
        self.reached = None;
        let greeted = timeout(LONG, greet(self.machine.as_ref())).await.expect("in time").unwrap();
        let (connection, _, channel) = greeted;
        self.reached = Some((connection, channel));
    }

    /// A file into the guest, over its lane and not over its channel.
    async fn is_copied_to(&self, place: &Path, text: &str) {
        let source = place.join("copied");
        fs::create_dir_all(&source).unwrap();
        fs::write(source.join("file"), text).unwrap();
        let only = Arc::new(Semaphore::new(1));
        // A guest that was made a moment ago drops its first connections.
        let opened = async {
            loop {
                let hold = GuestHold::new(self.connection().clone(), TaskTracker::new().token());
                let permit = Arc::clone(&only).acquire_owned().await.unwrap();
                if let Some(lane) = Lane::open(self.machine.as_ref(), hold, permit).await.unwrap() {
                    return lane;
                }
            }
        };
        let lane = timeout(LONG, opened).await.expect("a lane in time");
        let mount =
            CopiedMount { source, target: Bytes::new("/copied").unwrap(), access: MountAccess::ReadWrite };
        timeout(LONG, copy_in(self.connection(), Some(lane), &mount)).await.expect("in time").unwrap();
        assert_eq!(self.says("cat /copied/file").await, text);
    }

    async fn end(self) {
        self.process.kill();
        timeout(LONG, self.machine.ended()).await.expect("in time");
        firecracker::jail::remove(&self.vm.jail()).unwrap();
        fs::remove_dir_all(self.vm.runtime()).unwrap();
    }
}

async fn exec(connection: &Connection, script: &str) -> String {
    let start = ProcessSpec {
        arguments: ["sh", "-c", script].map(|word| word.as_bytes().to_vec().into()).to_vec(),
        environment: vec!["PATH=/bin".into()],
        ..ProcessSpec::default()
    };
    let input = ExecInput { input: Some(exec_input::Input::Start(start)) };
    let inputs = tokio_stream::iter([input]);
    let mut outputs = ProcessesClient::new(connection.clone()).exec(inputs).await.unwrap().into_inner();
    let mut text = Vec::new();
    while let Some(message) = outputs.message().await.unwrap() {
        match message.output {
            Some(exec_output::Output::Stdout(data) | exec_output::Output::Stderr(data)) => text.extend(data),
            Some(exec_output::Output::Exited(_)) => return String::from_utf8(text).unwrap(),
            _ => {}
        }
    }
    panic!("the stream ended without an exit status")
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

/// Firecracker as it is found here, in jails or not.
async fn firecracker(jails: Result<(), String>) -> Firecracker {
    let program = node::artefacts::firecracker().unwrap();
    let memory = tempfile::tempdir().unwrap();
    let memory = memory.path().join("probe.json");
    let found = firecracker::probe::probe(&program, &memory, Freshness::Now).await.unwrap();
    let jailer = match jails {
        Ok(()) => Ok(found.jailer.unwrap()),
        Err(why) => Err(why),
    };
    Firecracker::new(&firecracker::probe::Found { jailer, ..found })
}

#[test]
fn firecracker_makes_machines_of_whole_snapshots_and_of_changes_and_refuses_damaged_ones() {
    node::inside_within(LONG * 2, || {
        run(async {
            round_trip(&firecracker(Err("this one is for users without privileges".into())).await).await
        });
    });
}

#[test]
fn firecracker_in_a_jail_makes_and_refuses_the_same() {
    node::inside_within(LONG * 2, || run(async { round_trip(&firecracker(Ok(())).await).await }));
}

#[test]
fn qemu_makes_machines_of_whole_snapshots_and_refuses_damaged_ones() {
    run(async { round_trip(&qemu().await).await });
}

async fn qemu() -> Qemu {
    let program = find_program("qemu-system-x86_64").expect("apt-get install qemu-system-x86");
    let memory = tempfile::tempdir().unwrap();
    let memory = memory.path().join("probe.json");
    Qemu::new(&qemu::probe::probe(&program, &memory, Freshness::Now).await.unwrap())
}

/// What every driver does that makes snapshots, and of changes where it declares that it makes those.
async fn round_trip(driver: &dyn Driver) {
    let makes = |kind| driver.capabilities().snapshots.contains(&kind);
    assert!(makes(SnapshotKind::Full));
    let place = Place::new();
    let files = |name: &str| SnapshotFiles {
        state: place.path(&format!("{name}.state")),
        memory: place.path(&format!("{name}.memory")),
    };
    let scratch = place.path("scratch.img");
    imp_storage::disk::create_scratch(&scratch, 32 * MIB).unwrap();

    let mut parent = place.begin(driver, 1, place.boots(), &scratch).await.guest().await;
    assert_eq!(parent.says("echo whole >/dev/shm/x; cat /dev/shm/x").await, "whole\n");
    parent.is_copied_to(place.directory.path(), "before").await;
    let (whole, changes) = (files("whole"), files("changes"));
    parent.snapshot(SnapshotKind::Full, &scratch, &whole, &place.path("whole.img")).await;
    // It goes on.
    assert_eq!(parent.says("echo changed >/dev/shm/x; cat /dev/shm/x").await, "changed\n");
    if makes(SnapshotKind::Changes) {
        parent.snapshot(SnapshotKind::Changes, &scratch, &changes, &place.path("changes.img")).await;
        assert!(blocks(&changes.memory) < blocks(&whole.memory) / 2, "changes are fewer than the whole");
    } else {
        refuses_changes(&parent, &changes).await;
    }
    assert_eq!(parent.says("cat /dev/shm/x").await, "changed\n");
    parent.end().await;
    assert_eq!(fs::metadata(&whole.memory).unwrap().len(), 128 * MIB);
    let before = digest(&whole.memory);

    // Two machines of one snapshot at the same time; each has a disk and a memory of its own.
    let disks = ["one.img", "two.img"].map(|name| place.path(name));
    for disk in &disks {
        fs::copy(place.path("whole.img"), disk).unwrap();
    }
    let origin = Origin::Snapshot(whole.clone());
    let mut one = place.begin(driver, 2, origin.clone(), &disks[0]).await.resumed().await;
    let two = place.begin(driver, 3, origin, &disks[1]).await.resumed().await;
    assert_eq!(one.says("cat /dev/shm/x; echo one >/dev/shm/x; echo one >/one").await, "whole\n");
    assert_eq!(two.says("cat /dev/shm/x; cat /one 2>/dev/null").await, "whole\n");
    assert_eq!(one.says("cat /dev/shm/x /one").await, "one\none\n");
    for guest in [&one, &two] {
        guest.is_copied_to(place.directory.path(), "after").await;
    }

    // A snapshot of a machine that was made of one, by all ways there are; then machines of that.
    let (grandchild, difference) = (files("grandchild"), files("difference"));
    one.snapshot(SnapshotKind::Full, &disks[0], &grandchild, &place.path("grandchild.img")).await;
    assert_eq!(one.says("echo other >/dev/shm/x; cat /dev/shm/x").await, "other\n");
    let mut made = vec![(grandchild.clone(), "one\n")];
    if makes(SnapshotKind::Changes) {
        one.snapshot(SnapshotKind::Changes, &disks[0], &difference, &place.path("difference.img")).await;
        for (base, changes, says) in [(&whole, &changes, "changed\n"), (&grandchild, &difference, "other\n")]
        {
            let memory = changes.state.with_extension("merged");
            fs::copy(&base.memory, &memory).unwrap();
            merge(&changes.memory, &memory).unwrap();
            made.push((SnapshotFiles { state: changes.state.clone(), memory }, says));
        }
    }
    one.end().await;
    two.end().await;
    assert_eq!(digest(&whole.memory), before, "machines leave what they were made of as it was");
    for (number, (files, says)) in (4..).zip(made) {
        let disk = files.state.with_extension("img");
        let guest = place.begin(driver, number, Origin::Snapshot(files), &disk).await.resumed().await;
        assert_eq!(guest.says("cat /dev/shm/x").await, says);
        guest.end().await;
    }
    refuses_damage(driver, &place, &whole, &disks[0]).await;
}

fn blocks(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&fs::metadata(path).unwrap())
}

fn digest(path: &Path) -> String {
    use sha2::Digest;
    hex::encode(sha2::Sha256::digest(fs::read(path).unwrap()))
}

async fn refuses_changes(guest: &Guest, files: &SnapshotFiles) {
    guest.machine.pause().await.unwrap();
    assert!(timeout(Duration::from_millis(300), exec(guest.connection(), "true")).await.is_err());
    let refused = guest.machine.snapshot(SnapshotKind::Changes, files).await.unwrap_err();
    assert!(matches!(refused, Error::NoSnapshot { .. }), "{refused}");
    guest.machine.resume().await.unwrap();
}

async fn refuses_damage(driver: &dyn Driver, place: &Place, whole: &SnapshotFiles, disk: &Path) {
    let damaged = SnapshotFiles { state: place.path("damaged.state"), memory: place.path("damaged.memory") };
    let refusal = async |number| {
        place.begin(driver, number, Origin::Snapshot(damaged.clone()), disk).await.refusal().await
    };
    fs::copy(&whole.state, &damaged.state).unwrap();
    fs::copy(&whole.memory, &damaged.memory).unwrap();
    let state = fs::OpenOptions::new().read(true).write(true).open(&damaged.state).unwrap();
    let mut byte = [0];
    state.read_exact_at(&mut byte, 1000).unwrap();
    state.write_all_at(&[byte[0] ^ 1], 1000).unwrap();
    let refused = refusal(10).await;
    assert!(refused.contains("CRC") || refused.contains("damaged"), "{refused}");
    fs::copy(&whole.state, &damaged.state).unwrap();
    let memory = fs::OpenOptions::new().write(true).open(&damaged.memory).unwrap();
    memory.set_len(127 * MIB).unwrap();
    let refused = refusal(11).await;
    assert!(!refused.is_empty());
    memory.set_len(128 * MIB).unwrap();
    fs::write(&damaged.state, &fs::read(&whole.state).unwrap()[..100]).unwrap();
    refusal(12).await;
}
