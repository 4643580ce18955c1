//! Kill -9 of the VMM and of its owner at each step of a VM's life: what comes after finds all of it, and leaves nothing.

use imp_runtime::spec::{CopiedMount, MountAccess, VmSpec};
use imp_runtime::status::{Failure, Outcome, StageName, State, VmStatus, VmmEnd};
use imp_runtime::{Runtime, VmId};
use rustix::process::Signal;

use super::driver::on_driver;
use super::host::{
    Host, STUBBORN, deaf, exec, kill, outcome, output, reachable, running, start, try_exec, until, wait_until,
};
use super::owner::{Owner, Then};

fn reached(status: &VmStatus, stage: StageName) -> bool {
    status.stages.iter().any(|reached| reached.name == stage)
}

/// Copying this much takes a while.
fn large_mount(host: &Host) -> CopiedMount {
    let source = host.path().with_extension("mount");
    std::fs::create_dir_all(&source).unwrap();
    let file = std::fs::File::create(source.join("large")).unwrap();
    file.set_len(256 << 20).unwrap();
    CopiedMount {
        source,
        target: imp_runtime::spec::Bytes::new("/mnt/copied").unwrap(),
        access: MountAccess::ReadWrite,
    }
}

async fn kill_vmm_when(runtime: &Runtime, id: &VmId, when: impl FnMut(&VmStatus) -> bool) -> Outcome {
    let status = until(runtime, id, when).await;
    kill(status.vmm_pid.unwrap(), Signal::KILL);
    outcome(runtime, id).await
}

#[test]
fn a_vmm_killed_at_any_step_is_seen_at_once_told_apart_and_cleaned_up_after() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let in_boot = Failure::EndedInBoot { vmm: VmmEnd::Signal(9) };
        let while_running = Failure::EndedWhileRunning { vmm: VmmEnd::Signal(9) };
        let mount = large_mount(&host);
        let spawned = start(&runtime, host.spec("spawned", &["true"])).await;
        let answered = start(&runtime, host.spec("answered", &["true"])).await;
        let mut copying = host.spec("copying", &["true"]);
        copying.mounts = vec![mount.clone()];
        copying.scratch = imp_runtime::spec::DiskSize::from_bytes(512 << 20).unwrap();
        let copying = start(&runtime, copying).await;
        let busy = start(&runtime, host.spec("busy", &["sleep", "1000"])).await;
        let stopping = start(&runtime, host.shell("stopping", STUBBORN)).await;

        let cases = async {
            tokio::join!(
                kill_vmm_when(&runtime, &spawned, |status| status.vmm_pid.is_some()),
                kill_vmm_when(&runtime, &answered, |status| reached(status, StageName::Answered)),
                kill_vmm_when(&runtime, &copying, |status| reached(status, StageName::Configured)),
                async {
                    running(&runtime, &busy).await;
                    let exec = try_exec(&runtime, &busy, "touch /begun; cat");
                    let kill = async {
                        while exec_code(&runtime, &busy, "test -e /begun").await != Some(0) {}
                        kill_vmm_when(&runtime, &busy, |_| true).await
                    };
                    let (exec, outcome) = tokio::join!(exec, kill);
                    assert!(exec.is_err(), "an exec without an end counts as one: {exec:?}");
                    outcome
                },
                async {
                    running(&runtime, &stopping).await;
                    deaf(&runtime, &stopping).await;
                    let stop = runtime.stop(&stopping, Some(super::host::LONG));
                    let kill = kill_vmm_when(&runtime, &stopping, |status| status.state == State::Stopping);
                    let (stopped, outcome) = tokio::join!(stop, kill);
                    assert_eq!(stopped.unwrap().outcome.as_ref(), Some(&outcome));
                    outcome
                },
            )
        };
        let (spawned, answered, copying, busy, stopping) = cases.await;
        let failure = |outcome| match outcome {
            Outcome::Failed { failure, .. } => failure,
            other => panic!("{other:?}"),
        };
        let spawned = failure(spawned);
        assert!(spawned == in_boot || matches!(spawned, Failure::Spawn { .. }), "{spawned:?}");
        let answered = failure(answered);
        assert!(answered == in_boot || answered == while_running, "{answered:?}");
        assert_eq!(failure(copying), in_boot);
        assert_eq!(failure(busy), while_running);
        assert_eq!(failure(stopping), while_running);
        std::fs::remove_dir_all(mount.source).unwrap();
        host.end(runtime).await;
    });
}

async fn exec_code(runtime: &Runtime, id: &VmId, script: &str) -> Option<u32> {
    try_exec(runtime, id, script).await.ok().map(|(_, code)| code)
}

/// What the next owner makes of a VM whose owner was killed.
async fn after_the_owner(host: &Host, id: &VmId) -> Outcome {
    let runtime = host.open().await;
    let outcome = if runtime.get(id).unwrap().state == State::Running {
        reachable(&runtime, id).await;
        assert_eq!(exec(&runtime, id, "echo again").await, ("again\n".into(), 0));
        runtime.kill(id).await.unwrap().outcome.clone().unwrap()
    } else {
        outcome(&runtime, id).await
    };
    runtime.remove(id).await.unwrap();
    drop(runtime);
    host.assert_nothing_left(std::slice::from_ref(id));
    outcome
}

/// Starts an owner with one VM, kills the owner when `when` says so, and has the next one clean up.
async fn owner_killed(
    host: &Host,
    spec: VmSpec,
    then: Then,
    mut when: impl FnMut(&Host, &VmStatus) -> bool,
) -> Outcome {
    let mut owner = Owner::start(host, host.config(), vec![(spec, then)]);
    let id = owner.until(|status| when(host, status)).id;
    owner.kill();
    after_the_owner(host, &id).await
}

fn owner_gone(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed { failure: Failure::OwnerGone, .. })
}

/// Whether a step of a VM's start has been reached.
type There = fn(&Host, &VmId) -> bool;

#[test]
fn an_owner_killed_at_any_step_before_the_guest_answers_leaves_nothing_for_the_next() {
    on_driver(async {
        let host = Host::new();
        let mut spec = host.spec("victim", &["sleep", "1000"]);
        spec.network = None;
        // Each of these is there before the next: from the record to the process that nobody has written down yet.
        let steps: [(&str, There); 5] = [
            ("created", |_, _| true),
            ("recorded as starting", |host, id| {
                std::fs::read_to_string(host.vm(id).join("record.json"))
                    .is_ok_and(|text| text.contains("starting"))
            }),
            ("disk", |host, id| host.vm(id).join("scratch.img").exists()),
            ("what the VMM works with", |host, id| {
                let sockets = std::fs::read_dir(host.path().join("run/vms").join(id.as_str()));
                sockets.is_ok_and(|mut entries| entries.next().is_some()) || host.vm(id).join("jail").exists()
            }),
            ("process", |host, id| host.vm(id).join("vmm.log").exists()),
        ];
        for (step, there) in steps {
            let mut owner = Owner::start(&host, host.config(), vec![(spec.clone(), Then::LetRun)]);
            let id = owner.next().id;
            wait_until(step, || there(&host, &id));
            owner.kill();
            let outcome = after_the_owner(&host, &id).await;
            assert!(owner_gone(&outcome), "{step}: {outcome:?}");
        }
        let outcome = owner_killed(&host, spec, Then::LetRun, |_, status| status.vmm_pid.is_some()).await;
        assert!(owner_gone(&outcome), "booting: {outcome:?}");
    });
}

#[test]
fn an_owner_killed_after_the_guest_answers_leaves_a_vm_that_the_next_one_ends_or_takes_over() {
    on_driver(async {
        let host = Host::new();
        let mount = large_mount(&host);
        let sleeper = host.spec("victim", &["sleep", "1000"]);
        let mut copying = sleeper.clone();
        copying.mounts = vec![mount.clone()];
        copying.scratch = imp_runtime::spec::DiskSize::from_bytes(512 << 20).unwrap();
        let outcome =
            owner_killed(&host, copying, Then::LetRun, |_, status| reached(status, StageName::Configured))
                .await;
        assert!(owner_gone(&outcome), "copying: {outcome:?}");
        std::fs::remove_dir_all(mount.source).unwrap();

        let mut stubborn = host.shell("victim", STUBBORN);
        stubborn.network = None;
        let outcome =
            owner_killed(&host, stubborn, Then::Stop, |_, status| status.state == State::Stopping).await;
        assert_eq!(outcome, Outcome::Killed, "stopping");

        // Running, with an exec that nobody listens to any more; both processes of the VM live on.
        let mut owner = Owner::start(
        &host,
        host.config(),
        vec![(
            host.shell("victim", "until [ -e /in-exec ]; do sleep 0.1; done; echo before; until [ -e /go ]; do sleep 0.1; done; echo after; exit 5"),
            Then::Exec,
        )],
    );
        let before = owner.until(|status| status.state == State::Running);
        let log = host.vm(&before.id).join("logs/main.0.log");
        wait_until("the exec runs", || std::fs::metadata(&log).is_ok_and(|log| log.len() > 0));
        owner.kill();
        let runtime = host.open().await;
        assert_eq!(runtime.get(&before.id).unwrap().vmm_pid, before.vmm_pid);
        reachable(&runtime, &before.id).await;
        assert!(runtime.get(&before.id).unwrap().unreachable_since.is_none());
        let id = before.id;
        // The exec went with its owner, whole tree.
        assert_eq!(exec(&runtime, &id, "while pidof cat; do sleep 0.1; done").await.1, 0);
        // An owner that lets go is as good as one that was killed; what happens meanwhile is not lost.
        assert_eq!(exec(&runtime, &id, "(sleep 0.5; touch /go) >/dev/null 2>&1 &").await.1, 0);
        drop(runtime);
        let runtime = host.open().await;
        assert_eq!(super::host::outcome(&runtime, &id).await, Outcome::Exited { code: 5 });
        assert_eq!(output(&runtime, &id).await, "before\nafter\n");
        host.end(runtime).await;
    });
}
