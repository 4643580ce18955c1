//! VMs that stand still until their user wants them to go on.

use imp_runtime::status::{Outcome, State};
use imp_runtime::{Error, RestError};

use super::driver::{makes_none, on_driver};
use super::host::{Host, exec, outcome, running, start};
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
