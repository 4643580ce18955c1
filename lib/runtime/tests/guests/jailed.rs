//! Kill -9 between any two steps of the way from the jailer's start to the guest's: of the process that is at the step, or
//! of the owner. The next start leaves nothing of it.

use std::path::Path;

use imp_runtime::Config;
use imp_runtime::spec::VmSpec;
use imp_runtime::status::{Failure, Outcome, State};
use imp_testkit::node;
use imp_testkit::small_disk::SmallDisk;
use rustix::process::Signal;

use super::engine::bridge::{bridged, nothing_of_ours, on_own_host};
use super::engine::disk::leave;
use super::engine::host::{Host, kill, outcome, start};
use super::engine::owner::{Owner, Then};
use super::gate::{Gate, Step};

const FIRECRACKER: &str = "firecracker";
const JAILER: &str = "jailer";

/// Of the file system that all of it is on.
const ROOM: &str = "1g";

/// In the order in which they are come to, with who is held there.
const STEPS: [(&str, Step); 6] = [
    ("nobody has become the jailer yet", Step::Becomes(JAILER)),
    ("the jailer has not made the jail yet", Step::Opens { program: JAILER, file: FIRECRACKER }),
    ("the jail is made, nobody has become Firecracker yet", Step::Becomes(FIRECRACKER)),
    (
        "the jailer has not written down whom it started yet",
        Step::Opens { program: JAILER, file: "firecracker.pid" },
    ),
    ("Firecracker is being told of its kernel", Step::Opens { program: FIRECRACKER, file: "initramfs" }),
    ("Firecracker is being told of its disks", Step::Opens { program: FIRECRACKER, file: "scratch.img" }),
];

/// A host on a file system of its own, with its own Firecracker and jailer on it.
struct Jails {
    host: Host,
    config: Config,
    gate: Gate,
    disk: SmallDisk,
    at: tempfile::TempDir,
}

impl Jails {
    async fn new() -> Self {
        // Sockets in a jail below it have longer names than the kernel takes.
        let at = tempfile::Builder::new().prefix("imp-whose-data-has-a-long-name-").tempdir().unwrap();
        let disk = SmallDisk::mount(at.path(), ROOM).unwrap();
        let programs = at.path().join("programs");
        std::fs::create_dir(&programs).unwrap();
        let official = [node::artefacts::firecracker(), node::artefacts::jailer()].map(Result::unwrap);
        for (name, from) in [FIRECRACKER, JAILER].into_iter().zip(official) {
            std::fs::copy(from, programs.join(name)).unwrap();
        }
        let host = Host::below(at.path());
        let config = Config { firecracker: Some(programs.join(FIRECRACKER)), ..host.config() };
        // What this Firecracker can do is found out by running it, once.
        drop(imp_runtime::Runtime::open(config.clone()).await.unwrap());
        let gate = Gate::of(at.path());
        Self { host, config, gate, disk, at }
    }

    fn spec(&self) -> VmSpec {
        bridged(self.host.spec("victim", &["sleep", "1000"]), None)
    }

    fn nothing_left(&self, ids: &[imp_runtime::VmId]) {
        nothing_of_ours();
        self.host.assert_nothing_left(ids);
    }
}

fn chroots(vms: &Path) -> usize {
    std::fs::read_dir(vms).unwrap().filter(|vm| vm.as_ref().unwrap().path().join("jail").exists()).count()
}

#[test]
fn what_is_killed_at_any_step_of_the_jailers_and_firecrackers_start_leaves_nothing() {
    on_own_host(async |_| {
        let jails = Jails::new().await;
        for (step, at) in STEPS {
            let runtime = imp_runtime::Runtime::open(jails.config.clone()).await.unwrap();
            let catch = jails.gate.arm(at);
            let id = start(&runtime, jails.spec()).await;
            let held = tokio::select! {
                held = catch.held() => held,
                ended = outcome(&runtime, &id) => panic!("{step}: {ended:?}"),
            };
            assert!(chroots(&jails.host.data().join("vms")) == 1, "{step}: there is nothing to leave");
            kill(held.pid, Signal::KILL);
            drop(held);
            let Outcome::Failed { failure, .. } = outcome(&runtime, &id).await else { panic!("{step}") };
            let expected = matches!(failure, Failure::Spawn { .. } | Failure::EndedInBoot { .. });
            assert!(expected, "{step}: {failure:?}");
            runtime.remove(&id).await.unwrap();
            // Under the owner that saw it.
            jails.nothing_left(std::slice::from_ref(&id));
            drop(runtime);
            println!("killed where {step}: {failure}");
        }
    });
}

#[test]
fn an_owner_killed_at_any_step_of_the_jailers_and_firecrackers_start_leaves_nothing_for_the_next() {
    on_own_host(async |_| {
        let jails = Jails::new().await;
        for (step, at) in STEPS {
            let catch = jails.gate.arm(at);
            let mut owner =
                Owner::start(&jails.host, jails.config.clone(), vec![(jails.spec(), Then::LetRun)]);
            let id = owner.next().id;
            let held = catch.held().await;
            owner.kill();
            // It goes on, and nobody knows of it.
            drop(held);
            let runtime = imp_runtime::Runtime::open(jails.config.clone()).await.unwrap();
            let ended = outcome(&runtime, &id).await;
            assert!(
                matches!(ended, Outcome::Failed { failure: Failure::OwnerGone, .. }),
                "{step}: {ended:?}"
            );
            assert_eq!(runtime.get(&id).unwrap().state, State::Stopped);
            runtime.remove(&id).await.unwrap();
            drop(runtime);
            jails.nothing_left(std::slice::from_ref(&id));
            println!("the owner was killed where {step}");
        }
    });
}

#[test]
fn a_jail_that_finds_no_room_is_a_failure_that_says_what_to_do() {
    on_own_host(async |_| {
        let jails = Jails::new().await;
        let runtime = imp_runtime::Runtime::open(jails.config.clone()).await.unwrap();
        let catch = jails.gate.arm(Step::Opens { program: JAILER, file: FIRECRACKER });
        let id = start(&runtime, jails.spec()).await;
        let held = catch.held().await;
        // Less than the program takes that the jailer is about to copy.
        leave(&jails.disk, jails.at.path(), 1 << 20);
        drop(held);
        let Outcome::Failed { failure, .. } = outcome(&runtime, &id).await else { panic!("it ran") };
        assert!(failure.to_string().contains("is full"), "{failure}");
        assert!(failure.to_string().contains("imp prune"), "{failure}");
        jails.disk.resize(ROOM).unwrap();
        runtime.remove(&id).await.unwrap();
        drop(runtime);
        jails.nothing_left(&[id]);
    });
}
