//! VMs that are made of a snapshot: each becomes a machine of its own before anybody uses it.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use imp_runtime::spec::{Child, Environment, Identity, Outside, VmSpec, WhenStopped};
use imp_runtime::status::{Failure, Outcome, StageName, State, VmStatus};
use imp_runtime::{Error, NotActivated, Runtime, VmId};
use imp_storage::blob::digest::Digest;
use imp_testkit::world::SERVER;
use rustix::process::Signal;
use tokio::time::timeout;

use super::bridge::{bridged, nothing_of_ours, on_own_host, reaches, uplink};
use super::driver::{makes_none, on_driver};
use super::fork::forked;
use super::host::{Host, LONG, exec, kill, outcome};
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

/// In no file of the host's directories that the engine writes for itself, and in no argument or environment of a process.
fn nowhere(host: &Host, secret: &str) {
    let vms = host.data().join("vms");
    let mut directories = vec![vms];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap().flatten() {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() && entry.file_name() != "jail" {
                directories.push(entry.path());
            } else if kind.is_file() && entry.file_name() != "scratch.img" {
                let text = std::fs::read(entry.path()).unwrap();
                let found = text.windows(secret.len()).any(|window| window == secret.as_bytes());
                assert!(!found, "{}", entry.path().display());
            }
        }
    }
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        for file in ["cmdline", "environ"] {
            let text = std::fs::read(process.path().join(file)).unwrap_or_default();
            assert!(!text.windows(secret.len()).any(|window| window == secret.as_bytes()));
        }
    }
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
