//! A guest whose kernel has to measure its timer while it boots, on a host that takes the processor away meanwhile.

use std::time::Duration;

use imp_protocol::boot::AGAIN;
use imp_runtime::status::{Accelerator, Outcome, State};
use imp_runtime::{Runtime, VmId};
use rustix::process::Signal;
use tokio::time::sleep;

use super::driver::on_driver;
use super::host::{Host, kill, outcome, output, start, until};

/// Shorter than the measurement, so that it does not get through in one piece.
const AT_WORK: Duration = Duration::from_millis(40);
/// Several times as long as the measurement: whatever of it falls in here is wrong by far.
const AWAY: Duration = Duration::from_millis(400);
/// The kernel may measure well although it is taken away, if this test is, too.
const TRIES: usize = 5;
/// Nanoseconds times this, shifted right by 32, are the ticks of a timer of 62.5 MHz.
const MULT: u64 = 268_435_456;

/// Whether the guest has mistaken its timer, which it boots again for; otherwise its program has ended.
async fn mistook(runtime: &Runtime, id: &VmId, pid: u32) -> bool {
    while runtime.get(id).unwrap().state != State::Stopped {
        kill(pid, Signal::STOP);
        sleep(AWAY).await;
        kill(pid, Signal::CONT);
        sleep(AT_WORK).await;
        if runtime.console(id).await.unwrap().iter().any(|line| line.contains(AGAIN)) {
            return true;
        }
    }
    false
}

#[test]
fn a_guest_that_mistook_its_timer_on_a_busy_host_boots_again_and_has_the_right_one() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let mut mistaken = false;
        for number in 0..TRIES {
            let spec = host.shell(&format!("vm-{number}"), "sleep 0.1; cat /proc/timer_list");
            let id = start(&runtime, spec).await;
            let status = until(&runtime, &id, |status| status.vmm_pid.is_some()).await;
            let emulated = status.driver.accelerator == Accelerator::Emulation;
            mistaken = emulated && mistook(&runtime, &id, status.vmm_pid.unwrap()).await;
            assert_eq!(outcome(&runtime, &id).await, Outcome::Exited { code: 0 });
            let list = output(&runtime, &id).await;
            let (_, timer) = list.split_once("Clock Event Device: lapic").unwrap();
            let mult = timer.lines().find_map(|line| line.trim().strip_prefix("mult:")).unwrap();
            let mult: u64 = mult.trim().parse().unwrap();
            if !emulated {
                println!("not for {:?}, whose guests know the rate of their timer", crate::DRIVER);
                return host.end(runtime).await;
            }
            assert!((MULT / 2..=MULT / 4 * 5).contains(&mult), "{mult}");
            if mistaken {
                break;
            }
        }
        assert!(mistaken, "no guest mistook its timer");
        host.end(runtime).await;
    });
}
