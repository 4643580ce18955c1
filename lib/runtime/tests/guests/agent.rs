//! A guest agent that dies: its VM ends, and says so, and others do not notice.

use imp_runtime::status::{Failure, Outcome};

use super::driver::on_driver;
use super::host::{Host, exec, outcome, running, start, try_exec};

/// Overwrites the agent's code with an instruction that only the kernel may execute: its next step is a fault. A signal from
/// outside would not do, because it blocks all that it does not expect.
const FAULT: &str = r#"p=$(pidof agent); set -- $(grep r-xp /proc/$p/maps | head -n 1 | tr - ' ')
    tr '\0' '\364' </dev/zero | dd of=/proc/$p/mem bs=4096 seek=$((0x$1 / 4096)) count=$(((0x$2 - 0x$1) / 4096)) conv=notrunc
    sleep 1000"#;

#[test]
fn an_agent_that_is_killed_by_a_fault_ends_its_vm_and_says_so() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let other = start(&runtime, host.spec("other", &["sleep", "1000"])).await;
        let id = start(&runtime, host.spec("faulty", &["sleep", "1000"])).await;
        running(&runtime, &id).await;
        running(&runtime, &other).await;
        assert!(try_exec(&runtime, &id, FAULT).await.is_err(), "an exec without an end counts as one");
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
