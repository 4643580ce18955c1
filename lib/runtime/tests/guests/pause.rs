//! VMs that stand still until their user wants them to go on.

use imp_protocol::guest::restore_client::RestoreClient;
use imp_protocol::guest::{NewMachine, SleepRequest, WakeRequest, wake_request};
use imp_runtime::status::{Outcome, State};
use imp_runtime::{Error, RestError, WithSecrets};
use rustix::process::Signal;
use tokio::time::timeout;

use super::driver::{makes_none, on_driver};
use super::host::{Host, LONG, exec, outcome, running, start, try_exec};
use super::owner::{Owner, Then};

#[test]
fn a_paused_vm_does_nothing_until_it_goes_on_with_all_that_it_had() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let ticks = "echo $$ >/dev/shm/pid; until [ -e /go ]; do sleep 0.1; done; exit 5";
        let id = start(&runtime, host.shell("vm", ticks)).await;
        running(&runtime, &id).await;
        assert_eq!(exec(&runtime, &id, "echo kept >/dev/shm/x; touch /mark").await.1, 0);
        for round in 0..3 {
            assert_eq!(runtime.pause(&id).await.unwrap().state, State::Paused, "{round}");
            let again = runtime.pause(&id).await.unwrap_err();
            let paused = RestError::NotRunning { state: State::Paused };
            assert!(matches!(again, Error::NotPaused { source, .. } if source == paused));
            assert!(runtime.connection(&id).await.is_err());
            assert_eq!(runtime.resume(&id).await.unwrap().state, State::Running, "{round}");
            let again = runtime.resume(&id).await.unwrap_err();
            assert!(matches!(again, Error::NotResumed { .. }), "{again}");
            let all = "cat /dev/shm/x; test -e /mark && kill -0 $(cat /dev/shm/pid)";
            assert_eq!(exec(&runtime, &id, all).await, ("kept\n".into(), 0), "{round}");
        }
        // It hears that it should end, and how it ends is heard.
        runtime.pause(&id).await.unwrap();
        runtime.resume(&id).await.unwrap();
        assert_eq!(exec(&runtime, &id, "touch /go").await.1, 0);
        assert_eq!(outcome(&runtime, &id).await, Outcome::Exited { code: 5 });
        host.end(runtime).await;
    });
}

#[test]
fn a_paused_vm_stays_paused_under_the_next_owner_and_can_be_stopped_in_order() {
    on_driver(async {
        let host = Host::on_disk();
        {
            let runtime = host.open().await;
            if makes_none(&runtime) {
                return host.end(runtime).await;
            }
        }
        let spec = host.shell("vm", "trap 'exit 9' TERM; touch /deaf; while :; do sleep 0.1; done");
        let mut owner = Owner::start(&host, host.config(), vec![(spec, Then::Pause)]);
        let id = owner.until(|status| status.state == State::Paused).id;
        owner.kill();
        let runtime = host.open().await;
        super::host::until(&runtime, &id, |vm| vm.state == State::Paused).await;
        let stopped = runtime.stop(&id, Some(super::host::LONG)).await.unwrap();
        assert_eq!(stopped.outcome, Some(Outcome::Exited { code: 9 }));
        host.end(runtime).await;
    });
}

#[test]
fn a_guest_that_went_on_by_itself_becomes_no_other_machine() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let id = start(&runtime, host.spec("vm", &["sleep", "1000"])).await;
        running(&runtime, &id).await;
        let hold = runtime.connection(&id).await.unwrap();
        let mut guest = RestoreClient::new(hold.connection());
        guest.sleep(SleepRequest { at_most_milliseconds: 1 }).await.unwrap();
        // It serves nobody while it sleeps.
        let awake = async { while try_exec(&runtime, &id, "true").await.is_err() {} };
        timeout(LONG, awake).await.expect("in time");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let machine = NewMachine {
            generation: "another".into(),
            entropy: vec![7; 64].into(),
            hostname: "another".into(),
            machine_id: "7".repeat(32),
            ..NewMachine::default()
        };
        let wake = WakeRequest {
            r#as: Some(wake_request::As::New(machine)),
            unix_time_nanoseconds: u64::try_from(now.as_nanos()).unwrap(),
        };
        let refused = guest.wake(wake).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused}");
        assert_eq!(
            exec(&runtime, &id, "hostname; test ! -e /run/imp/generation").await,
            ("guest\n".into(), 0)
        );
        drop(hold);
        runtime.kill(&id).await.unwrap();
        host.end(runtime).await;
    });
}

#[test]
fn a_vm_that_is_put_away_on_disk_goes_on_as_the_machine_it_was() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let main = "echo begun; until [ -e /go ]; do sleep 0.1; done; echo ended; exit 5";
        let mut id = start(&runtime, host.shell("vm", main)).await;
        running(&runtime, &id).await;
        let own = "cat /proc/sys/kernel/random/boot_id /etc/machine-id; hostname";
        let (before, _) = exec(&runtime, &id, own).await;
        assert_eq!(exec(&runtime, &id, "echo kept >/dev/shm/x; echo kept >/x").await.1, 0);
        let mut runtime = runtime;
        for round in 0..2 {
            let away = runtime.suspend(&id, WithSecrets::Refused).await.unwrap();
            assert!(runtime.list().is_empty(), "{round}");
            assert_eq!(runtime.suspended().await.unwrap()[0].name.as_str(), "vm");
            // Nor does it need its owner.
            drop(runtime);
            runtime = host.open().await;
            let woken = runtime.wake(&away).await.unwrap();
            assert_eq!((woken.state, woken.name.as_str()), (State::Running, "vm"));
            id = woken.id.clone();
            let twice = runtime.wake(&away).await.unwrap_err();
            assert!(matches!(twice, Error::NotSuspended { .. }), "{twice}");
            let all = format!("cat /dev/shm/x /x; {own}");
            assert_eq!(exec(&runtime, &id, &all).await, (format!("kept\nkept\n{before}"), 0), "{round}");
            assert!(runtime.suspended().await.unwrap().is_empty(), "{round}");
        }
        assert_eq!(exec(&runtime, &id, "touch /go").await.1, 0);
        assert_eq!(outcome(&runtime, &id).await, Outcome::Exited { code: 5 });
        super::template::nothing_written_down(&host);
        host.end(runtime).await;
    });
}

#[test]
fn a_vm_whose_snapshot_cannot_be_kept_goes_on() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let id = start(&runtime, host.spec("vm", &["sleep", "1000"])).await;
        running(&runtime, &id).await;
        // Where snapshots get their names there is no room for any.
        let snapshots = host.data().join("images/snapshots");
        std::fs::remove_dir_all(&snapshots).unwrap();
        std::fs::write(&snapshots, "").unwrap();
        runtime.suspend(&id, WithSecrets::Refused).await.unwrap_err();
        std::fs::remove_file(&snapshots).unwrap();
        std::fs::create_dir(&snapshots).unwrap();
        assert_eq!(running(&runtime, &id).await.state, State::Running);
        assert_eq!(exec(&runtime, &id, "pidof sleep >/dev/null && echo here").await, ("here\n".into(), 0));
        super::host::kill(runtime.get(&id).unwrap().vmm_pid.unwrap(), Signal::KILL);
        outcome(&runtime, &id).await;
        host.end(runtime).await;
    });
}
