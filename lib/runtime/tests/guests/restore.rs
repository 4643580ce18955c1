//! VMs that are made of a snapshot: each becomes a machine of its own before anybody uses it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use imp_runtime::spec::{Child, Environment, Identity, Outside, VmSpec, WhenStopped};
use imp_runtime::status::{Failure, Outcome, StageName, State, VmStatus};
use imp_runtime::{Config, Error, NotActivated, Runtime, VmId, WithSecrets};
use imp_storage::blob::digest::Digest;
use imp_storage::store::{Store, StoreOptions};
use imp_testkit::world::SERVER;
use rustix::process::Signal;
use tokio::time::timeout;

use super::bridge::{bridged, nothing_of_ours, on_own_host, reaches, uplink};
use super::driver::{makes_none, on_driver};
use super::fork::forked;
use super::host::{Host, LONG, exec, kill, outcome, reachable, running, start};
use super::owner::Owner;
use super::template::{Reached, end, template};

pub(crate) fn child(name: &str) -> Child {
    Child { when_stopped: WhenStopped::Remove, ..Child::named(name.parse().unwrap()) }
}

/// Prepared and activated.
pub(crate) async fn restored(runtime: &Runtime, snapshot: &Digest, child: Child) -> VmId {
    runtime.restore(snapshot, child, Identity::default()).await.unwrap().id.clone()
}

/// For an owner that is to be killed meanwhile.
pub(crate) async fn for_ever(runtime: &Runtime, spec: VmSpec) {
    let made = runtime.template_build(template(spec), |_| {}).await.unwrap();
    runtime.prepare(&made, child("spare")).await.unwrap();
    for number in 0.. {
        let id = runtime.prepare(&made, child(&format!("vm-{number}"))).await.unwrap();
        runtime.activate(&id, Identity::default()).await.unwrap();
        runtime.kill(&id).await.unwrap();
    }
}

/// What must differ between any two machines, one in each line.
const OWN: &str =
    "cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id /etc/machine-id /etc/hostname
    head -c 16 /dev/urandom | md5sum; cat /run/imp/generation; hostname";

#[test]
fn each_vm_of_a_snapshot_is_a_machine_of_its_own_with_what_it_was_given_and_nothing_of_others() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let made =
            runtime.template_build(template(host.spec("unused", &["sleep", "1000"])), |_| {}).await.unwrap();
        let (one, two) =
            tokio::join!(runtime.prepare(&made, child("one")), runtime.prepare(&made, child("two")));
        let (one, two) = (one.unwrap(), two.unwrap());
        for id in [&one, &two] {
            assert_eq!(runtime.get(id).unwrap().state, State::Prepared);
            assert!(runtime.connection(id).await.is_err(), "nobody reaches a VM that is nobody's");
        }
        let identity = Identity {
            hostname: Some("first".parse().unwrap()),
            environment: Environment::new(["COLOUR=blue"]).unwrap(),
            secrets: Environment::new(["TOKEN=correct-horse"]).unwrap(),
        };
        let activated = runtime.activate(&one, identity).await.unwrap();
        assert_eq!(activated.state, State::Running);
        println!("{:?}", activated.stages);
        runtime.activate(&two, Identity::default()).await.unwrap();
        let again = runtime.activate(&two, Identity::default()).await.unwrap_err();
        let twice = NotActivated::NotPrepared { state: State::Running };
        assert!(matches!(again, Error::NotActivated { source, .. } if source == twice));

        let mut seen = BTreeSet::new();
        for id in [&one, &two] {
            let (text, code) = exec(&runtime, id, OWN).await;
            assert_eq!(code, 0, "{text}");
            let mut own: BTreeSet<String> = text.lines().map(str::to_owned).collect();
            assert!(own.len() >= 6, "{text}");
            assert!(seen.is_disjoint(&own), "{seen:?} {own:?}");
            seen.append(&mut own);
            let (now, _) = exec(&runtime, id, "date +%s").await;
            let now: u64 = now.trim().parse().unwrap();
            let here = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
            assert!(now <= here && here - now < 30, "{now} {here}");
        }
        assert!(seen.contains("first") && seen.contains(two.short()));
        // The main process lives on; what comes later has what was given.
        assert_eq!(
            exec(&runtime, &one, "echo $COLOUR $TOKEN; pidof sleep >/dev/null").await,
            ("blue correct-horse\n".into(), 0)
        );
        assert_eq!(exec(&runtime, &two, "echo $COLOUR$TOKEN").await.0, "\n");
        nowhere(&host, "correct-horse");
        // Disks are their own, too.
        assert_eq!(exec(&runtime, &one, "echo one >/own; sync").await.1, 0);
        assert_eq!(exec(&runtime, &two, "cat /own").await.1, 1);
        for id in [&one, &two] {
            runtime.kill(id).await.unwrap();
        }
        end(&host, runtime).await;
    });
}

/// In no file of the host's, disks and memory of snapshots among them, and in no argument or environment of a process.
fn nowhere(host: &Host, secret: &str) {
    assert_eq!(holds(host.path(), secret), Vec::<String>::new());
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        for file in ["cmdline", "environ"] {
            let text = std::fs::read(process.path().join(file)).unwrap_or_default();
            assert!(!text.windows(secret.len()).any(|window| window == secret.as_bytes()));
        }
    }
}

/// All files below a directory that hold this.
pub(crate) fn holds(directory: &Path, secret: &str) -> Vec<String> {
    let mut grep = Command::new("grep");
    // Pipes and sockets are read by those whom they belong to.
    let grep = grep.args(["-rlF", "--devices=skip", secret]).arg(directory).output().unwrap();
    String::from_utf8(grep.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn a_prepared_vm_outlives_its_owner_and_ends_as_itself_when_it_is_killed() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let made =
            runtime.template_build(template(host.spec("unused", &["sleep", "1000"])), |_| {}).await.unwrap();
        let id = runtime.prepare(&made, child("kept")).await.unwrap();
        let keep = Child { when_stopped: WhenStopped::Keep, ..child("killed") };
        let killed = runtime.prepare(&made, keep).await.unwrap();
        let pid = runtime.get(&id).unwrap().vmm_pid;
        drop(runtime);
        let runtime = host.open().await;
        let found = runtime.get(&id).unwrap();
        assert_eq!((found.state, found.vmm_pid), (State::Prepared, pid));
        runtime.activate(&id, Identity::default()).await.unwrap();
        assert_eq!(exec(&runtime, &id, "echo here").await, ("here\n".into(), 0));

        kill(runtime.get(&killed).unwrap().vmm_pid.unwrap(), Signal::KILL);
        let ended = outcome(&runtime, &killed).await;
        assert!(matches!(ended, Outcome::Failed { failure: Failure::EndedDormant { .. }, .. }), "{ended:?}");
        let gone = runtime.activate(&killed, Identity::default()).await.unwrap_err();
        assert!(matches!(gone, Error::NotActivated { .. }), "{gone}");
        runtime.kill(&id).await.unwrap();
        runtime.remove(&killed).await.unwrap();
        end(&host, runtime).await;
    });
}

#[test]
fn a_vm_of_a_snapshot_needs_no_kernel_and_no_agent_of_this_host() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let made =
            runtime.template_build(template(host.spec("unused", &["sleep", "1000"])), |_| {}).await.unwrap();
        drop(runtime);
        let (kernels, aside) = (host.data().join("kernels"), host.path().join("kernels"));
        std::fs::rename(&kernels, &aside).unwrap();
        let guest_agent = host.path().join("none");
        let runtime = Runtime::open(Config { guest_agent, ..host.config() }).await.unwrap();
        let id = restored(&runtime, &made, child("one")).await;
        assert_eq!(exec(&runtime, &id, "echo here").await, ("here\n".into(), 0));
        // Nor do those that are made of it.
        let two = forked(&runtime, &id, &["two"]).await.remove(0);
        assert_eq!(exec(&runtime, &two, "echo here").await, ("here\n".into(), 0));
        let kernel = |id| runtime.get(id).unwrap().kernel.clone();
        assert!(kernel(&id).digest.is_some());
        assert_eq!(kernel(&id), kernel(&two));
        for id in [&id, &two] {
            runtime.kill(id).await.unwrap();
        }
        std::fs::rename(aside, kernels).unwrap();
        end(&host, runtime).await;
    });
}

#[test]
fn a_snapshot_names_the_agent_that_its_guest_runs_and_not_the_one_that_is_there_by_then() {
    on_driver(async {
        let host = Host::on_disk();
        let guest_agent = host.path().join("agent");
        std::fs::copy(host.config().guest_agent, &guest_agent).unwrap();
        let config = || Config { guest_agent: guest_agent.clone(), ..host.config() };
        let runtime = Runtime::open(config()).await.unwrap();
        if makes_none(&runtime) {
            std::fs::remove_file(guest_agent).unwrap();
            return host.end(runtime).await;
        }
        let id = start(&runtime, host.spec("vm", &["sleep", "1000"])).await;
        running(&runtime, &id).await;
        let agent = async |runtime: &Runtime| {
            let made = runtime.fork_snapshot(&id, WithSecrets::Refused, "test").await.unwrap().snapshot;
            let store = Store::open(host.data().join("images"), StoreOptions::default()).unwrap();
            let manifest = store.snapshots().manifest(&made).unwrap();
            runtime.forget_fork("test").await.unwrap();
            manifest.description.agent.digest
        };
        let before = agent(&runtime).await;
        drop(runtime);
        // Another version is installed.
        let mut file = std::fs::File::options().append(true).open(&guest_agent).unwrap();
        std::io::Write::write_all(&mut file, b"newer").unwrap();
        let runtime = Runtime::open(config()).await.unwrap();
        reachable(&runtime, &id).await;
        assert_eq!(agent(&runtime).await, before);
        runtime.kill(&id).await.unwrap();
        std::fs::remove_file(guest_agent).unwrap();
        end(&host, runtime).await;
    });
}

#[test]
fn a_damaged_snapshot_is_refused_and_says_what_is_wrong_with_it() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let made =
            runtime.template_build(template(host.spec("unused", &["sleep", "1000"])), |_| {}).await.unwrap();
        let id = restored(&runtime, &made, child("lives")).await;
        let directory = host.data().join("images/snapshots").join(made.hex());
        // A file in the place of the one that was hashed.
        let state = directory.join("state");
        let text = std::fs::read(&state).unwrap();
        std::fs::remove_file(&state).unwrap();
        std::fs::write(&state, &text[..text.len() / 2]).unwrap();
        let refused = runtime.prepare(&made, child("never")).await.unwrap_err();
        let text = imp_protocol::causes::chain(&refused);
        assert!(text.contains("state"), "{text}");
        assert_eq!(runtime.list().len(), 1, "nothing was made");
        // Others do not notice.
        assert_eq!(exec(&runtime, &id, "echo here").await, ("here\n".into(), 0));
        runtime.kill(&id).await.unwrap();
        end(&host, runtime).await;
    });
}

fn loaded(vm: &VmStatus) -> bool {
    vm.stages.iter().any(|stage| stage.name == StageName::Loaded)
}

#[test]
fn an_owner_killed_at_any_step_of_a_restore_leaves_a_vm_that_is_whole_or_none() {
    on_driver(async {
        let host = Host::on_disk();
        {
            let runtime = host.open().await;
            if makes_none(&runtime) {
                return host.end(runtime).await;
            }
        }
        let is_child = |vm: &VmStatus| vm.made_of.is_some();
        let steps: [(&str, Reached); 5] = [
            ("created", |_| true),
            ("spawned", |vm| vm.vmm_pid.is_some()),
            ("prepared", |vm| vm.state == State::Prepared),
            ("waking", |vm| vm.state == State::Starting && loaded(vm)),
            ("running", |vm| vm.state == State::Running),
        ];
        for (step, reached) in steps {
            let mut owner = Owner::of_a_template(&host, host.spec("unused", &["sleep", "1000"]));
            let mut child = owner.next();
            while !(is_child(&child) && reached(&child)) {
                child = owner.next();
            }
            owner.kill();
            let runtime = host.open().await;
            let found = runtime.list();
            println!("killed when it was {step}: {:?}", found.iter().map(|vm| vm.state).collect::<Vec<_>>());
            let spare = found.iter().any(|vm| vm.state == State::Prepared);
            assert!(spare || matches!(step, "created" | "spawned"), "{step}");
            for vm in &found {
                match vm.state {
                    State::Prepared => {
                        runtime.activate(&vm.id, Identity::default()).await.unwrap();
                    }
                    // Or it ends: nobody had been told of it.
                    State::Running => {
                        let gone = async {
                            while runtime.connection(&vm.id).await.is_err() {
                                if runtime.watch(&vm.id).is_err() {
                                    return true;
                                }
                                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                            }
                            false
                        };
                        if timeout(LONG, gone).await.expect("in time") {
                            continue;
                        }
                    }
                    _ => {
                        // It may have gone meanwhile.
                        let Ok(mut watch) = runtime.watch(&vm.id) else { continue };
                        while timeout(LONG, watch.changed()).await.expect("in time").is_ok() {}
                        continue;
                    }
                }
                assert_eq!(exec(&runtime, &vm.id, "pidof sleep >/dev/null").await.1, 0, "{step}");
                runtime.kill(&vm.id).await.unwrap();
            }
            assert!(runtime.list().is_empty(), "{step}");
            drop(runtime);
        }
        end(&host, host.open().await).await;
    });
}

#[test]
fn vms_of_one_snapshot_have_networks_of_their_own() {
    on_own_host(async |world| {
        world.serve_tcp(80).unwrap();
        let host = Host::on_disk();
        let mut config = host.config();
        config.bridge.outside = Outside::Routed;
        let runtime = Runtime::open(config).await.unwrap();
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let spec = bridged(host.spec("unused", &["sleep", "1000"]), None);
        let made = runtime.template_build(template(spec), |_| {}).await.unwrap();
        let one = restored(&runtime, &made, child("one")).await;
        let two = restored(&runtime, &made, child("two")).await;
        let three = forked(&runtime, &two, &["three"]).await.remove(0);
        let mut uplinks = BTreeSet::new();
        for id in [&one, &two, &three] {
            let uplink = uplink(&runtime.get(id).unwrap());
            assert_eq!(reaches(&runtime, id, SERVER, 80).await, uplink);
            uplinks.insert(uplink);
        }
        assert_eq!(uplinks.len(), 3);
        for id in [&one, &two, &three] {
            runtime.kill(id).await.unwrap();
        }
        nothing_of_ours();
        end(&host, runtime).await;
    });
}

#[test]
fn a_vmm_killed_while_its_guest_wakes_is_an_error_and_leaves_nothing() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let made =
            runtime.template_build(template(host.spec("unused", &["sleep", "1000"])), |_| {}).await.unwrap();
        let other = restored(&runtime, &made, child("other")).await;
        // At once, and when its guest may have begun.
        for turns in [0, 10, 100, 1000] {
            let id = runtime.prepare(&made, child("victim")).await.unwrap();
            let pid = runtime.get(&id).unwrap().vmm_pid.unwrap();
            let mut watch = runtime.watch(&id).unwrap();
            let killed = async {
                let waking = watch.wait_for(|vm| vm.state == State::Starting || vm.state == State::Stopped);
                drop(timeout(LONG, waking).await.expect("in time"));
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
                kill(pid, Signal::KILL);
            };
            let (activated, ()) = tokio::join!(runtime.activate(&id, Identity::default()), killed);
            match activated {
                Err(Error::NotActivated { source: NotActivated::Ended { outcome }, .. }) => {
                    assert!(matches!(outcome, Outcome::Failed { .. }), "{outcome:?}");
                }
                // It was quicker.
                Ok(_) if turns > 0 => {}
                other => panic!("{turns}: {other:?}"),
            }
            let gone = async { while watch.changed().await.is_ok() {} };
            timeout(LONG, gone).await.expect("in time");
            assert_eq!(runtime.list().len(), 1, "{turns}");
        }
        assert_eq!(exec(&runtime, &other, "echo here").await, ("here\n".into(), 0));
        runtime.kill(&other).await.unwrap();
        end(&host, runtime).await;
    });
}

#[test]
fn vms_of_a_template_live_on_when_its_files_are_taken_away_under_them() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let fill = "yes words | head -c 20000000 >/dev/shm/x; touch /ready; exec sleep 1000";
        let mut spec = template(host.shell("unused", fill));
        spec.ready = vec![super::template::ready(super::template::command("test -e /ready"), LONG)];
        let made = runtime.template_build(spec, |_| {}).await.unwrap();
        let (lives, waits) = (restored(&runtime, &made, child("lives")).await, child("waits"));
        let waits = runtime.prepare(&made, waits).await.unwrap();
        let refused = runtime.template_remove(&made).await.unwrap_err();
        assert!(refused.to_string().contains(waits.as_str()), "{refused}");
        // By somebody who does not ask.
        std::fs::remove_dir_all(host.data().join("images/snapshots").join(made.hex())).unwrap();
        runtime.activate(&waits, Identity::default()).await.unwrap();
        let sum = "md5sum </dev/shm/x; pidof sleep >/dev/null";
        let (one, other) = (exec(&runtime, &lives, sum).await, exec(&runtime, &waits, sum).await);
        assert!(one.1 == 0 && one == other, "{one:?} {other:?}");
        let gone = runtime.prepare(&made, child("never")).await.unwrap_err();
        assert!(gone.to_string().contains("no snapshot"), "{gone}");
        for id in [&lives, &waits] {
            runtime.kill(id).await.unwrap();
        }
        end(&host, runtime).await;
    });
}
