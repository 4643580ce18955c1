//! VMs that are put away on disk, and what is left of one when its owner is killed: always one of it, never two, never none.

use std::path::{Path, PathBuf};

use imp_runtime::spec::{Environment, Identity};
use imp_runtime::status::{StageName, State, VmStatus};
use imp_runtime::{Error, Runtime, VmId, WithSecrets};
use tokio::time::timeout;

use super::driver::{makes_none, on_driver};
use super::host::{Host, LONG, exec, reachable, running, start, try_exec, until};
use super::owner::{Owner, Then};
use super::restore::{child, holds};
use super::template::{end, nothing_written_down, template};

const MARK: &str = "echo kept >/dev/shm/x; echo kept >/x";
const KEPT: &str = "cat /dev/shm/x /x && pidof sleep >/dev/null";

/// For an owner that is to be killed meanwhile.
pub(crate) async fn for_ever(runtime: &Runtime, id: &VmId) {
    try_exec(runtime, id, MARK).await.unwrap();
    let mut id = id.clone();
    loop {
        let away = runtime.suspend(&id, WithSecrets::Refused).await.unwrap();
        id = runtime.wake(&away).await.unwrap().id.clone();
    }
}

fn snapshots(host: &Host) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(host.data().join("images/snapshots")).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.join("manifest.json").exists()).collect()
}

fn loaded(vm: &VmStatus) -> bool {
    vm.stages.iter().any(|stage| stage.name == StageName::Loaded)
}

/// What the next owner has of the VM: one that runs, or one that is put away. Ends it.
async fn whole(host: &Host, step: &str) {
    let runtime = host.open().await;
    let (mut vms, away) = (runtime.list(), runtime.suspended().await.unwrap());
    println!("killed when it was {step}: {} VMs, {} put away", vms.len(), away.len());
    assert_eq!(vms.len() + away.len(), 1, "{step}: {:?}", vms.iter().map(|vm| vm.state).collect::<Vec<_>>());
    if let [away] = &away[..] {
        assert_eq!(away.name.as_str(), "vm", "{step}");
        vms = vec![runtime.wake(&away.snapshot).await.unwrap()];
    }
    let id = &vms[0].id;
    until(&runtime, id, |vm| vm.state == State::Running).await;
    reachable(&runtime, id).await;
    assert_eq!(exec(&runtime, id, KEPT).await, ("kept\nkept\n".into(), 0), "{step}");
    assert!(runtime.suspended().await.unwrap().is_empty(), "{step}");
    runtime.kill(id).await.unwrap();
    nothing_written_down(host);
    host.end(runtime).await;
    // Its tasks have ended by then, which have the data directory.
    drop(host.open().await);
}

/// Whether a suspended VM, or the one that it becomes, has come to a step.
type There = fn(&Host, &VmStatus) -> bool;

#[test]
fn an_owner_killed_at_any_step_of_a_suspend_or_a_wake_leaves_the_vm_once() {
    on_driver(async {
        let host = Host::on_disk();
        {
            let runtime = host.open().await;
            if makes_none(&runtime) {
                return host.end(runtime).await;
            }
        }
        let steps: [(&str, There); 9] = [
            ("asleep", |_, vm| vm.state == State::Asleep),
            ("written down", |host, vm| vm.state == State::Asleep && written(host)),
            ("ending", |host, vm| vm.state == State::Stopping && !snapshots(host).is_empty()),
            ("stopped", |host, vm| vm.state == State::Stopped && !snapshots(host).is_empty()),
            ("created again", |_, vm| vm.made_of.is_some()),
            ("spawned", |_, vm| vm.made_of.is_some() && vm.vmm_pid.is_some()),
            ("prepared", |_, vm| vm.made_of.is_some() && vm.state == State::Prepared),
            ("waking", |_, vm| vm.made_of.is_some() && vm.state == State::Starting && loaded(vm)),
            ("running again", |_, vm| vm.made_of.is_some() && vm.state == State::Running),
        ];
        for (step, there) in steps {
            let spec = host.spec("vm", &["sleep", "100000"]);
            let mut owner = Owner::start(&host, host.config(), vec![(spec, Then::SuspendAndWake)]);
            while !there(&host, &owner.next()) {}
            owner.kill();
            whole(&host, step).await;
        }
    });
}

/// Waits for a snapshot that is being made.
fn written(host: &Host) -> bool {
    super::host::wait_until("it is written down", || !snapshots(host).is_empty());
    true
}

#[test]
fn a_vm_that_ended_after_its_snapshot_was_safe_is_put_away_whatever_its_record_says() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let id = start(&runtime, host.spec("vm", &["sleep", "100000"])).await;
        running(&runtime, &id).await;
        assert_eq!(exec(&runtime, &id, MARK).await.1, 0);
        let record = host.vm(&id).join("record.json");
        let text = std::fs::read(&record).unwrap();
        runtime.suspend(&id, WithSecrets::Refused).await.unwrap();
        drop(runtime);
        // As an owner leaves it that is killed, with the machine, before it has written down that the VM has ended.
        std::fs::create_dir(record.parent().unwrap()).unwrap();
        std::fs::write(&record, text).unwrap();
        whole(&host, "ended").await;
    });
}

#[test]
fn a_vm_that_is_being_put_away_is_resumed_by_nobody_and_what_it_has_is_kept() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let id = start(&runtime, host.spec("vm", &["sleep", "100000"])).await;
        running(&runtime, &id).await;
        assert_eq!(exec(&runtime, &id, MARK).await.1, 0);
        let (away, resumed) = tokio::join!(runtime.suspend(&id, WithSecrets::Refused), async {
            until(&runtime, &id, |vm| vm.state == State::Asleep).await;
            timeout(LONG, runtime.resume(&id)).await.expect("in time")
        });
        let refused = resumed.unwrap_err();
        assert!(matches!(refused, Error::NoSuchVm { .. }), "{refused}");
        let woken = runtime.wake(&away.unwrap()).await.unwrap().id.clone();
        assert_eq!(exec(&runtime, &woken, KEPT).await, ("kept\nkept\n".into(), 0));
        runtime.kill(&woken).await.unwrap();
        nothing_written_down(&host);
        host.end(runtime).await;
    });
}

#[test]
fn a_vm_whose_wake_fails_stays_put_away() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let id = start(&runtime, host.spec("vm", &["sleep", "100000"])).await;
        running(&runtime, &id).await;
        assert_eq!(exec(&runtime, &id, MARK).await.1, 0);
        let away = runtime.suspend(&id, WithSecrets::Refused).await.unwrap();
        let mut events = runtime.subscribe();
        let (woken, ()) = tokio::join!(runtime.wake(&away), async {
            loop {
                let Ok(imp_runtime::status::Event::Changed(vm)) = events.recv().await else { continue };
                if let Some(pid) = vm.vmm_pid {
                    return super::host::kill(pid, rustix::process::Signal::KILL);
                }
            }
        });
        let failed = woken.unwrap_err();
        assert!(matches!(failed, Error::NotPrepared { .. } | Error::NotActivated { .. }), "{failed}");
        drop(runtime);
        whole(&host, "woken in vain").await;
    });
}

#[test]
fn a_vm_that_holds_secrets_is_put_on_disk_with_them_only_by_name() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let made = runtime.template_build(template(host.spec("unused", &["sleep", "1000"])), |_| {}).await;
        let secrets = Environment::new(["TOKEN=correct-horse"]).unwrap();
        let identity = Identity { secrets, ..Identity::default() };
        let id = runtime.restore(&made.unwrap(), child("vm"), identity).await.unwrap().id.clone();
        let refused = runtime.suspend(&id, WithSecrets::Refused).await.unwrap_err();
        assert!(matches!(refused, Error::SecretsOnDisk { .. }), "{refused}");
        assert!(refused.to_string().contains("--with-secrets"), "{refused}");
        assert_eq!(exec(&runtime, &id, "echo $TOKEN").await, ("correct-horse\n".into(), 0));
        assert_eq!(holds(&host.data(), "correct-horse"), Vec::<String>::new());
        let away = runtime.suspend(&id, WithSecrets::Allowed).await.unwrap();
        // Which is why.
        let held = holds(&host.data(), "correct-horse");
        let memory = host.data().join("images/snapshots").join(away.hex()).join("memory");
        assert_eq!(held.iter().map(Path::new).collect::<Vec<_>>(), [memory]);
        let woken = runtime.wake(&away).await.unwrap().id.clone();
        let refused = runtime.suspend(&woken, WithSecrets::Refused).await.unwrap_err();
        assert!(matches!(refused, Error::SecretsOnDisk { .. }), "{refused}");
        assert_eq!(exec(&runtime, &woken, "echo $TOKEN").await, ("correct-horse\n".into(), 0));
        runtime.kill(&woken).await.unwrap();
        assert_eq!(holds(&host.data(), "correct-horse"), Vec::<String>::new());
        end(&host, runtime).await;
    });
}
