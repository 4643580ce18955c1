//! A guest that cannot be reached for a while.

use imp_runtime::status::{Outcome, State};
use rustix::process::Signal;

use super::driver::on_driver;
use super::host::{Host, exec, kill, reachable, running, start, try_exec, until};

#[test]
fn a_stopped_vmm_is_noticed_and_goes_on_where_it_was_when_it_is_continued() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let id = start(
            &runtime,
            host.shell("vm", "trap 'exit 4' TERM; touch /trapped; while :; do sleep 0.1; done"),
        )
        .await;
        let pid = running(&runtime, &id).await.vmm_pid.unwrap();
        // A client that does not let go of its stream, nor of the channel under it.
        let exec_of_a_client = try_exec(&runtime, &id, "cat");
        let stop_and_continue = async {
            while try_exec(&runtime, &id, "pidof cat").await.unwrap().1 != 0 {}
            kill(pid, Signal::STOP);
            let noticed = until(&runtime, &id, |status| status.unreachable_since.is_some()).await;
            assert_eq!(noticed.state, State::Running);
            let refused = runtime.connection(&id).await.map(drop).unwrap_err().to_string();
            assert!(refused.contains("cannot be reached"), "{refused}");
            kill(pid, Signal::CONT);
            until(&runtime, &id, |status| status.unreachable_since.is_none()).await;
            reachable(&runtime, &id).await;
        };
        let (client, ()) = tokio::join!(exec_of_a_client, stop_and_continue);
        assert!(client.is_err(), "an exec without an end counts as one: {client:?}");
        assert_eq!(exec(&runtime, &id, "echo here").await, ("here\n".into(), 0));
        assert_eq!(exec(&runtime, &id, "until [ -e /trapped ]; do sleep 0.05; done").await.1, 0);
        let stopped = runtime.stop(&id, None).await.unwrap();
        assert_eq!(stopped.outcome, Some(Outcome::Exited { code: 4 }));
        host.end(runtime).await;
    });
}
