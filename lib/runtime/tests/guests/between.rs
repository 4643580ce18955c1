//! Kill -9 of the owner between what happens to a VM's main process and the record of it: the next owner asks the guest, and
//! what the guest was told to forget is on disk.

use std::time::Duration;

use imp_runtime::VmId;
use imp_runtime::status::{Failure, Outcome, State};

use super::driver::on_driver;
use super::host::{Host, exec, outcome, reachable, running, wait_until};
use super::owner::{Owner, Then};

/// How often a moment is waited for that may pass between two looks.
const TRIES: u32 = 10;

/// From now on no record of this VM is written: a new one is written here, and takes the place of the old one when it is
/// whole.
fn keep_from_recording(host: &Host, id: &VmId) {
    let new = host.vm(id).join("record.new");
    // The one that is being written goes on to its place.
    wait_until("a record is written", || !new.exists() && std::fs::create_dir(&new).is_ok());
}

fn record_again(host: &Host, id: &VmId) {
    std::fs::remove_dir(host.vm(id).join("record.new")).unwrap();
}

fn stage(host: &Host, id: &VmId) -> String {
    let text = std::fs::read_to_string(host.vm(id).join("record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_str(&text).unwrap();
    record["stage"]["stage"].as_str().unwrap().to_owned()
}

#[test]
fn a_main_process_that_was_started_and_not_yet_recorded_is_found_by_the_next_owner() {
    on_driver(async {
        let host = Host::new();
        let spec = host.shell("vm", "echo before; until [ -e /go ]; do sleep 0.1; done; echo after; exit 5");
        let mut tries = 0;
        let (runtime, id) = loop {
            let mut owner = Owner::start(&host, host.config(), vec![(spec.clone(), Then::LetRun)]);
            let id = owner.until(|status| status.vmm_pid.is_some()).id;
            wait_until("it boots", || ["booting", "running"].contains(&stage(&host, &id).as_str()));
            keep_from_recording(&host, &id);
            let log = host.vm(&id).join("logs/main.0.log");
            wait_until("it runs", || std::fs::metadata(&log).is_ok_and(|log| log.len() > 0));
            owner.kill();
            record_again(&host, &id);
            let late = stage(&host, &id) != "booting";
            let runtime = host.open().await;
            if !late {
                break (runtime, id);
            }
            // On a machine that stands still for a moment, the guest is faster than this test looks.
            tries += 1;
            assert!(tries < TRIES, "the record was written each time before it could be kept from it");
            runtime.stop(&id, Some(Duration::ZERO)).await.unwrap();
            outcome(&runtime, &id).await;
            host.end(runtime).await;
        };
        let found = running(&runtime, &id).await;
        assert!(found.started.is_some());
        reachable(&runtime, &id).await;
        assert_eq!(stage(&host, &id), "running");
        assert_eq!(exec(&runtime, &id, "touch /go").await.1, 0);
        assert_eq!(outcome(&runtime, &id).await, Outcome::Exited { code: 5 });
        assert_eq!(super::host::output(&runtime, &id).await, "before\nafter\n");
        host.end(runtime).await;
    });
}

#[test]
fn an_owner_killed_while_the_guest_greets_it_leaves_a_vm_whose_program_never_ran() {
    on_driver(async {
        let host = Host::new();
        let spec = host.spec("vm", &["sleep", "1000"]);
        // From just after the spawn to about the time at which guests answer: the greeting is repeated all the time.
        for lines in [0, 1] {
            let mut owner = Owner::start(&host, host.config(), vec![(spec.clone(), Then::LetRun)]);
            let id = owner.until(|status| status.vmm_pid.is_some()).id;
            let console = host.vm(&id).join("console.log");
            wait_until("the guest's kernel has come so far", || {
                std::fs::read_to_string(&console).is_ok_and(|text| text.lines().count() >= lines)
            });
            owner.kill();
            let runtime = host.open().await;
            let ended = outcome(&runtime, &id).await;
            let gone = matches!(ended, Outcome::Failed { failure: Failure::OwnerGone, .. });
            assert!(gone, "{lines}: {ended:?}");
            host.end(runtime).await;
        }
    });
}

#[test]
fn an_exit_that_the_guest_was_told_to_forget_is_not_lost_with_the_owner() {
    on_driver(async {
        let host = Host::new();
        let spec = host.shell("vm", "until [ -e /deaf ]; do sleep 0.05; done; exit 7");
        let mut owner = Owner::start(&host, host.config(), vec![(spec, Then::ExecStubborn)]);
        let id = owner.next().id;
        wait_until("its end is recorded", || {
            assert_ne!(stage(&host, &id), "stopped", "the end came before it could be interrupted");
            stage(&host, &id) == "ended"
        });
        owner.kill();
        let runtime = host.open().await;
        assert_eq!(outcome(&runtime, &id).await, Outcome::Exited { code: 7 });
        assert_eq!(runtime.get(&id).unwrap().state, State::Stopped);
        host.end(runtime).await;
    });
}
