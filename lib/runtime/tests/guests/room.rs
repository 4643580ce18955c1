//! A disk of the host that is full, or becomes so, while machines are written down on it.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use imp_protocol::causes::chain;
use imp_runtime::spec::Identity;
use imp_runtime::status::State;
use imp_runtime::template::BuildStep;
use imp_runtime::{ForkRequest, Runtime, VmId, WithSecrets};
use imp_testkit::small_disk::SmallDisk;

use super::disk::leave;
use super::driver::{makes_none, on_driver};
use super::host::{Host, exec, running, start};
use super::restore::child;
use super::template::{nothing_written_down, template};

/// For the memory and the disk of three machines.
const ROOM: &str = "700m";

/// A host whose store is on a disk of its own.
pub(super) struct Small {
    pub(super) host: Host,
    disk: Arc<SmallDisk>,
}

impl Small {
    pub(super) fn new() -> Self {
        let host = Host::on_disk();
        let images = host.data().join("images");
        let aside = host.path().join("aside");
        fs::rename(&images, &aside).unwrap();
        fs::create_dir(&images).unwrap();
        let disk = SmallDisk::mount(&images, ROOM).unwrap();
        let all = format!("{}/.", aside.display());
        assert!(Command::new("cp").arg("-a").arg(all).arg(&images).status().unwrap().success());
        fs::remove_dir_all(aside).unwrap();
        Self { host, disk: Arc::new(disk) }
    }

    fn images(&self) -> std::path::PathBuf {
        self.host.data().join("images")
    }

    fn leave(&self, bytes: u64) {
        leave(&self.disk, &self.images(), bytes);
    }

    fn make_room(&self) {
        self.disk.resize(ROOM).unwrap();
    }

    fn nothing_half(&self) {
        for directory in ["drafts", "arriving", "snapshots"] {
            let left: Vec<_> = fs::read_dir(self.images().join(directory)).unwrap().flatten().collect();
            assert!(left.is_empty(), "{left:?}");
        }
    }

    pub(super) async fn end(self, runtime: Runtime) {
        for template in runtime.templates().await.unwrap() {
            runtime.template_remove(&template.snapshot).await.unwrap();
        }
        let ids: Vec<VmId> = runtime.list().iter().map(|vm| vm.id.clone()).collect();
        for id in &ids {
            runtime.remove(id).await.unwrap();
        }
        nothing_written_down(&self.host);
        drop(runtime);
        drop(self.disk);
        // What was in it went with the disk.
        drop(imp_storage::store::Store::open(self.host.data().join("images"), Default::default()).unwrap());
        self.host.assert_nothing_left(&ids);
    }
}

fn request(name: &str) -> ForkRequest {
    ForkRequest { children: vec![(child(name), Identity::default())], secrets: WithSecrets::Refused }
}

async fn works(runtime: &Runtime, id: &VmId) {
    // After a fork that failed it goes on, which takes a moment.
    running(runtime, id).await;
    assert_eq!(exec(runtime, id, "echo here; pidof sleep >/dev/null").await, ("here\n".into(), 0));
}

#[test]
fn a_full_disk_refuses_snapshots_with_numbers_and_the_machine_goes_on() {
    on_driver(async {
        let small = Small::new();
        let runtime = small.host.open().await;
        if makes_none(&runtime) {
            return small.end(runtime).await;
        }
        let parent = start(&runtime, small.host.spec("parent", &["sleep", "100000"])).await;
        running(&runtime, &parent).await;
        small.leave(8 << 20);
        let spec = template(small.host.spec("unused", &["sleep", "100000"]));
        let refused = [
            chain(&runtime.template_build(spec.clone(), |step| panic!("{step:?}")).await.unwrap_err()),
            chain(&runtime.fork(&parent, request("one")).await.unwrap_err()),
            chain(&runtime.suspend(&parent, WithSecrets::Refused).await.unwrap_err()),
        ];
        for text in refused {
            assert!(text.contains("not enough disk space") && text.contains("MiB are free"), "{text}");
        }
        small.nothing_half();
        works(&runtime, &parent).await;
        small.make_room();
        let forked = runtime.fork(&parent, request("one")).await.unwrap();
        let one = forked.children.into_iter().next().unwrap().unwrap().id.clone();
        works(&runtime, &one).await;
        for id in [&parent, &one] {
            runtime.kill(id).await.unwrap();
        }
        small.end(runtime).await;
    });
}

#[test]
fn a_disk_that_fills_while_a_machine_is_written_down_leaves_no_part_of_it_and_the_machine_goes_on() {
    on_driver(async {
        let small = Small::new();
        let runtime = small.host.open().await;
        if makes_none(&runtime) {
            return small.end(runtime).await;
        }
        // There is room at first, and somebody else takes it.
        let disk = Arc::clone(&small.disk);
        let images = small.images();
        let fill = move |step: BuildStep| {
            if step == BuildStep::Snapshot {
                leave(&disk, &images, 1 << 20);
            }
        };
        let spec = template(small.host.spec("unused", &["sleep", "100000"]));
        let failed = chain(&runtime.template_build(spec.clone(), fill).await.unwrap_err());
        assert!(failed.to_lowercase().contains("space") || failed.contains("full"), "{failed}");
        small.nothing_half();
        small.make_room();
        runtime.template_build(spec, |_| {}).await.unwrap();
        // One that booted: its memory is not on this disk.
        let parent = start(&runtime, small.host.spec("parent", &["sleep", "100000"])).await;
        running(&runtime, &parent).await;
        // More than it knew of before: its memory fills while it is written.
        let (forked, ()) = tokio::join!(runtime.fork(&parent, request("one")), async {
            super::host::until(&runtime, &parent, |vm| vm.state == State::Asleep).await;
            small.leave(1 << 20);
        });
        match forked {
            Err(error) => println!("the fork failed: {}", chain(&error)),
            Ok(forked) => {
                for child in forked.children {
                    match child {
                        Ok(vm) => drop(runtime.kill(&vm.id).await.unwrap()),
                        Err(error) => println!("its child failed: {}", chain(&error)),
                    }
                }
            }
        }
        small.make_room();
        works(&runtime, &parent).await;
        // Nothing but the template.
        let left = fs::read_dir(small.images().join("snapshots")).unwrap().count();
        assert_eq!((left, fs::read_dir(small.images().join("drafts")).unwrap().count()), (1, 0));
        runtime.kill(&parent).await.unwrap();
        small.end(runtime).await;
    });
}
