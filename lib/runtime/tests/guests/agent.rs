//! A guest agent that dies: its VM ends, and says so, and others do not notice.

use imp_runtime::status::{Failure, Outcome};

use super::driver::on_driver;
use super::host::{Host, exec, outcome, running, start, try_exec};

/// The agent is the one process besides PID 1 that runs this program: it has no other name in a guest.
const SEGV: &str = "for it in /proc/[0-9]*; do pid=${it#/proc/}; [ $pid != 1 ] && [ \"$(readlink $it/exe)\" = /.imp/agent ] \
    && kill -SEGV $pid; done; sleep 1000";

#[test]
fn an_agent_that_is_killed_by_a_fault_ends_its_vm_and_says_so() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let other = start(&runtime, host.spec("other", &["sleep", "1000"])).await;
        let id = start(&runtime, host.spec("faulty", &["sleep", "1000"])).await;
        running(&runtime, &id).await;
        running(&runtime, &other).await;
        assert!(try_exec(&runtime, &id, SEGV).await.is_err(), "an exec without an end counts as one");
        let ended = outcome(&runtime, &id).await;
        let Outcome::Failed { failure, console } = ended else { panic!("{ended:?}") };
        assert_eq!(failure, Failure::MainLost);
        // PID 1 is there to say it: it has started the agent again, or the host would have waited in vain.
        assert!(console.iter().any(|line| line.contains("the agent died (1 in a row)")), "{console:#?}");
        assert_eq!(exec(&runtime, &other, "echo here").await, ("here\n".into(), 0));
        runtime.kill(&other).await.unwrap();
        host.end(runtime).await;
    });
}
