//! Children of VMs that run.

use imp_runtime::spec::{Environment, Identity};
use imp_runtime::status::{Outcome, State};
use imp_runtime::{Error, ForkRequest, Runtime, VmId, WithSecrets};
use rustix::process::Signal;
use tokio::time::timeout;

use super::driver::{makes_none, on_driver};
use super::host::{Host, LONG, exec, kill, outcome, reachable, running, start, try_exec, until, wait_until};
use super::owner::{Owner, Then};
use super::restore::{child, holds};
use super::template::{end, nothing_written_down, template};

fn request(names: &[&str]) -> ForkRequest {
    let children = names.iter().map(|name| (child(name), Identity::default())).collect();
    ForkRequest { children, secrets: WithSecrets::Refused }
}

pub(crate) async fn forked(runtime: &Runtime, parent: &VmId, names: &[&str]) -> Vec<VmId> {
    let forked = runtime.fork(parent, request(names)).await.unwrap();
    println!("the parent stood still for {} ms", forked.paused.as_millis());
    forked.children.into_iter().map(|child| child.unwrap().id.clone()).collect()
}

/// For an owner that is to be killed meanwhile.
pub(crate) async fn for_ever(runtime: &Runtime, parent: &VmId) {
    for number in 0.. {
        let forked = runtime.fork(parent, request(&[&format!("child-{number}")])).await;
        for child in forked.into_iter().flat_map(|forked| forked.children).flatten() {
            let _ = runtime.kill(&child.id).await;
        }
    }
}

async fn kill_all(runtime: &Runtime, ids: impl IntoIterator<Item = &VmId>) {
    for id in ids {
        runtime.kill(id).await.unwrap();
    }
}

#[test]
fn children_see_what_their_parent_had_and_go_their_own_ways_and_so_do_their_children() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let counts = "n=0; while :; do n=$((n + 1)); echo $n >/dev/shm/n; sleep 0.1; done";
        let parent = start(&runtime, host.shell("parent", counts)).await;
        running(&runtime, &parent).await;
        let write =
            "echo disk >/file; echo memory >/dev/shm/file; until [ -e /dev/shm/n ]; do sleep 0.1; done";
        assert_eq!(exec(&runtime, &parent, write).await.1, 0);
        let children = forked(&runtime, &parent, &["one", "two"]).await;
        let read = "cat /file /dev/shm/file";
        for id in &children {
            assert_eq!(exec(&runtime, id, read).await, ("disk\nmemory\n".into(), 0));
            // On its disk as in its page cache.
            let anew = "echo 3 >/proc/sys/vm/drop_caches; cat /file";
            assert_eq!(exec(&runtime, id, anew).await, ("disk\n".into(), 0));
        }
        assert_eq!(exec(&runtime, &children[0], "echo own >/file; echo own >/dev/shm/file").await.1, 0);
        for id in [&parent, &children[1]] {
            assert_eq!(exec(&runtime, id, read).await.0, "disk\nmemory\n");
        }
        // The main process goes on in all of them, and so does the parent, as the same machine.
        for id in [&parent, &children[0], &children[1]] {
            let goes_on = "a=$(cat /dev/shm/n); until [ $(cat /dev/shm/n) -gt $a ]; do sleep 0.1; done";
            assert_eq!(exec(&runtime, id, goes_on).await.1, 0);
        }
        assert_eq!(runtime.get(&parent).unwrap().state, State::Running);
        // A fork of a fork, after its parent.
        let grandchildren = forked(&runtime, &children[0], &["grandchild"]).await;
        kill_all(&runtime, &children).await;
        assert_eq!(exec(&runtime, &grandchildren[0], read).await, ("own\nown\n".into(), 0));
        kill_all(&runtime, &grandchildren).await;
        nothing_written_down(&host);
        runtime.kill(&parent).await.unwrap();
        end(&host, runtime).await;
    });
}

#[test]
fn a_second_fork_leaves_the_memory_of_the_first_child_as_it_was() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let parent = start(&runtime, host.spec("parent", &["sleep", "1000"])).await;
        running(&runtime, &parent).await;
        let fill = |what: &str| format!("yes {what} | head -c 24000000 >/dev/shm/x; md5sum /dev/shm/x");
        let (first, code) = exec(&runtime, &parent, &fill("first")).await;
        assert_eq!(code, 0, "{first}");
        let one = forked(&runtime, &parent, &["one"]).await;
        let (second, _) = exec(&runtime, &parent, &fill("second")).await;
        // Two at once: one after the other.
        let (two, three) =
            tokio::join!(forked(&runtime, &parent, &["two"]), forked(&runtime, &parent, &["three"]));
        let sum = "md5sum /dev/shm/x";
        assert_eq!(exec(&runtime, &one[0], sum).await.0, first);
        for id in [&two[0], &three[0], &parent] {
            assert_eq!(exec(&runtime, id, sum).await.0, second);
        }
        kill_all(&runtime, one.iter().chain(&two).chain(&three).chain([&parent])).await;
        end(&host, runtime).await;
    });
}

#[test]
fn a_vm_that_holds_secrets_is_forked_only_by_name_and_so_are_its_children() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let spec = template(host.spec("unused", &["sleep", "1000"]));
        let made = runtime.template_build(spec, |_| {}).await.unwrap();
        let secrets = Environment::new(["TOKEN=correct-horse"]).unwrap();
        let identity = Identity { secrets, ..Identity::default() };
        let parent = runtime.restore(&made, child("parent"), identity).await.unwrap().id.clone();
        let refused = runtime.fork(&parent, request(&["one"])).await.unwrap_err();
        assert!(matches!(refused, Error::HoldsSecrets { .. }), "{refused}");
        assert_eq!(runtime.list().len(), 1);
        let allowed = ForkRequest { secrets: WithSecrets::Allowed, ..request(&["one"]) };
        assert_eq!(holds(&host.data(), "correct-horse"), Vec::<String>::new());
        let one = runtime.fork(&parent, allowed).await.unwrap().children.remove(0).unwrap().id.clone();
        // In the memory that the children share.
        let held = holds(&host.data(), "correct-horse");
        let is_memory = |file: &String| file.ends_with("/memory") || file.ends_with("/memory.changes");
        assert!(!held.is_empty() && held.iter().all(is_memory), "{held:?}");
        let refused = runtime.fork(&one, request(&["two"])).await.unwrap_err();
        assert!(matches!(refused, Error::HoldsSecrets { .. }), "{refused}");
        kill_all(&runtime, [&parent, &one]).await;
        end(&host, runtime).await;
    });
}

#[test]
fn a_parent_whose_fork_fails_goes_on_and_one_that_ends_meanwhile_leaves_nothing() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let parent = start(&runtime, host.spec("parent", &["sleep", "1000"])).await;
        running(&runtime, &parent).await;
        // A name that is taken.
        let forked = runtime.fork(&parent, request(&["parent"])).await.unwrap();
        assert!(matches!(forked.children[0], Err(Error::NameTaken { .. })));
        nothing_written_down(&host);
        assert_eq!(exec(&runtime, &parent, "echo here").await, ("here\n".into(), 0));
        // Its machine is killed while it is written down.
        let fork = runtime.fork(&parent, request(&["child"]));
        let killed = async {
            let status = until(&runtime, &parent, |vm| vm.state == State::Asleep).await;
            kill(status.vmm_pid.unwrap(), Signal::KILL);
        };
        let (forked, ()) = tokio::join!(fork, killed);
        assert!(matches!(forked, Err(Error::NotSaved { .. })), "{forked:?}");
        let ended = outcome(&runtime, &parent).await;
        assert!(matches!(ended, Outcome::Failed { .. }), "{ended:?}");
        assert_eq!(runtime.list().len(), 1);
        end(&host, runtime).await;
    });
}

#[test]
fn a_parent_whose_owner_is_killed_while_it_sleeps_is_woken_by_the_next() {
    on_driver(async {
        let host = Host::on_disk();
        {
            let runtime = host.open().await;
            if makes_none(&runtime) {
                return host.end(runtime).await;
            }
        }
        let spec = host.spec("parent", &["sleep", "1000"]);
        let mut owner = Owner::start(&host, host.config(), vec![(spec, Then::Fork)]);
        let parent = owner.until(|status| status.state == State::Asleep);
        // What Firecracker writes last: the machine stands still. QEMU writes no file of its own.
        let jail = host.vm(&parent.id);
        if matches!(crate::DRIVER, imp_runtime::DriverChoice::Firecracker) {
            wait_until("its memory is written", || {
                walk(&jail).iter().any(|path| path.ends_with("memory.new"))
            });
        }
        owner.kill();
        let runtime = host.open().await;
        reachable(&runtime, &parent.id).await;
        let found = running(&runtime, &parent.id).await;
        assert_eq!(found.vmm_pid, parent.vmm_pid);
        assert_eq!(
            exec(&runtime, &parent.id, "echo here; pidof sleep >/dev/null").await,
            ("here\n".into(), 0)
        );
        // Also once more.
        let again = forked(&runtime, &parent.id, &["again"]).await;
        kill_all(&runtime, again.iter().chain([&parent.id])).await;
        end(&host, runtime).await;
    });
}

#[test]
fn a_child_whose_owner_is_killed_before_it_runs_is_ended_by_the_next() {
    on_driver(async {
        let host = Host::on_disk();
        {
            let runtime = host.open().await;
            if makes_none(&runtime) {
                return host.end(runtime).await;
            }
        }
        let spec = host.spec("parent", &["sleep", "1000"]);
        let mut owner = Owner::start(&host, host.config(), vec![(spec, Then::Fork)]);
        let child = owner.until(|vm| vm.made_of.is_some() && vm.state == State::Prepared).id;
        owner.kill();
        let runtime = host.open().await;
        // Unless it came up in the meantime it is nobody's.
        if let Ok(mut watch) = runtime.watch(&child) {
            let settled = watch.wait_for(|vm| matches!(vm.state, State::Running | State::Stopped));
            let _ = timeout(LONG, settled).await.expect("in time");
        }
        for vm in runtime.list() {
            assert_eq!(running(&runtime, &vm.id).await.state, State::Running);
            runtime.kill(&vm.id).await.unwrap();
        }
        end(&host, runtime).await;
    });
}

fn walk(directory: &std::path::Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(walk(&entry.path()));
        }
        found.push(entry.path().display().to_string());
    }
    found
}

#[test]
fn an_exec_that_runs_during_a_fork_ends_with_an_error_or_well_and_never_hangs() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        // Busy with memory and disk, and with a connection to itself.
        let busy = "nc -ll -p 80 -e cat & (while :; do echo x; sleep 0.1; done) | nc 127.0.0.1 80 >/echo &
            while :; do dd if=/dev/zero of=/dev/shm/busy bs=1M count=8; cp /dev/shm/busy /busy; sync; done";
        let parent = start(&runtime, host.shell("parent", busy)).await;
        running(&runtime, &parent).await;
        let execs = async {
            let cat = try_exec(&runtime, &parent, "cat");
            timeout(LONG, cat).await.expect("it ends").map(drop)
        };
        let fork = async {
            while exec(&runtime, &parent, "test -s /echo").await.1 != 0 {}
            // One begins while the machine is put to sleep.
            let late = async {
                until(&runtime, &parent, |vm| vm.state == State::Asleep).await;
                timeout(LONG, try_exec(&runtime, &parent, "echo late")).await.expect("it ends")
            };
            let (children, late) = tokio::join!(forked(&runtime, &parent, &["child"]), late);
            println!("an exec that began meanwhile: {late:?}");
            children
        };
        let (ended, children) = tokio::join!(execs, fork);
        println!("an exec that ran meanwhile: {ended:?}");
        // The parent's connections within itself go on, the child's too.
        for id in [&parent, &children[0]] {
            let grows = "a=$(wc -c </echo); until [ $(wc -c </echo) -gt $a ]; do sleep 0.1; done";
            assert_eq!(exec(&runtime, id, grows).await.1, 0);
        }
        let clean = "sync; cmp /busy /dev/shm/busy 2>&1; dmesg | grep -i 'ext4.*error'; true";
        let (text, _) = exec(&runtime, &children[0], clean).await;
        assert!(!text.to_lowercase().contains("error"), "{text}");
        kill_all(&runtime, children.iter().chain([&parent])).await;
        end(&host, runtime).await;
    });
}

#[test]
fn a_fork_of_a_vm_that_shuts_down_is_refused_or_whole_and_keeps_nobody_from_ending() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        // It takes its time to end.
        let slow = "trap 'sleep 1; exit 4' TERM; touch /deaf; while :; do sleep 0.1; done";
        for (number, asleep) in [false, true].into_iter().enumerate() {
            let parent = start(&runtime, host.shell(&format!("parent-{number}"), slow)).await;
            running(&runtime, &parent).await;
            super::host::deaf(&runtime, &parent).await;
            let name = format!("child-{number}");
            let fork = async {
                if !asleep {
                    until(&runtime, &parent, |vm| vm.state == State::Stopping).await;
                }
                runtime.fork(&parent, request(&[&name])).await
            };
            let stop = async {
                if asleep {
                    until(&runtime, &parent, |vm| vm.state == State::Asleep).await;
                }
                timeout(LONG, runtime.stop(&parent, Some(LONG))).await.expect("in time").unwrap()
            };
            let (forked, stopped) = tokio::join!(fork, stop);
            println!("asleep: {asleep}: {:?} {:?}", forked.as_ref().map(|it| it.paused), stopped.outcome);
            assert_eq!(stopped.outcome, Some(Outcome::Exited { code: 4 }), "{asleep}");
            if !asleep {
                assert!(matches!(forked, Err(Error::NotSaved { .. })), "{forked:?}");
            }
            for child in forked.into_iter().flat_map(|forked| forked.children).flatten() {
                assert_eq!(exec(&runtime, &child.id, "echo here").await, ("here\n".into(), 0));
                runtime.kill(&child.id).await.unwrap();
            }
            runtime.remove(&parent).await.unwrap();
        }
        end(&host, runtime).await;
    });
}
