//! A guest whose kernel has to measure its timer while it boots, on a host that takes the processor away meanwhile.

use std::time::Duration;

use imp_runtime::status::{Accelerator, Outcome, State};
use rustix::process::Signal;
use tokio::time::sleep;

use super::driver::on_driver;
use super::host::{Host, kill, outcome, output, start, until};

/// Shorter than the measurement, so that it does not get through in one piece.
const AT_WORK: Duration = Duration::from_millis(40);
/// Several times as long as the measurement: whatever of it falls in here is wrong by far.
const AWAY: Duration = Duration::from_millis(400);

#[test]
fn a_guest_that_mistook_its_timer_on_a_busy_host_boots_again_and_has_the_right_one() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let id = start(&runtime, host.shell("vm", "sleep 0.1; cat /proc/timer_list")).await;
        let status = until(&runtime, &id, |status| status.vmm_pid.is_some()).await;
        if status.driver.accelerator != Accelerator::Emulation {
            println!("not for {:?}, whose guests know the rate of their timer", crate::DRIVER);
            assert_eq!(outcome(&runtime, &id).await, Outcome::Exited { code: 0 });
            return host.end(runtime).await;
        }
        let pid = status.vmm_pid.unwrap();
        let mut console = String::new();
        while !console.contains("boots again") {
            kill(pid, Signal::STOP);
            sleep(AWAY).await;
            kill(pid, Signal::CONT);
            sleep(AT_WORK).await;
            let status = runtime.get(&id).unwrap();
            assert_ne!(status.state, State::Stopped, "{:?}", status.outcome);
            console = runtime.console(&id).await.unwrap().join("\n");
        }
        assert_eq!(outcome(&runtime, &id).await, Outcome::Exited { code: 0 }, "{console}");
        let list = output(&runtime, &id).await;
        assert!(list.contains("Clock Event Device: lapic"), "{list}");
        host.end(runtime).await;
    });
}
