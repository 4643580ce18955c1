//! Many VMs at once, and one after the other.

use std::collections::HashSet;

use imp_runtime::status::{Event, Outcome, StageName, State};
use imp_runtime::{DriverChoice, VmId};
use tokio::time::timeout;

use super::driver::on_driver;
use super::host::{self, Host, LONG, exec, start};

const AT_ONCE: usize = 8;
const ENDED: Outcome = Outcome::Signalled { signal: 15, out_of_memory: false, timed_out: false };
/// How many boots it is to be: as many as this variable says.
const WANTED: &str = "IMP_TEST_ROUNDS";

/// All boots of the test; where guests are emulated twice, fewer.
fn rounds() -> usize {
    let wanted = std::env::var(WANTED).ok().map(|number| number.parse().unwrap());
    wanted.unwrap_or(match crate::DRIVER {
        DriverChoice::Firecracker => 12,
        DriverChoice::Qemu | DriverChoice::Auto => 50,
    })
}

#[test]
fn many_rounds_eight_at_once_leave_nothing_and_no_launch_waits_for_another() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let mut ids: Vec<VmId> = Vec::new();

        // The first eight run at the same time, and all have been spawned before the first has booted.
        let mut events = runtime.subscribe();
        let names: Vec<String> = (0..AT_ONCE).map(|number| format!("first-{number}")).collect();
        let starts = names.iter().map(|name| start(&runtime, host.spec(name, &["sleep", "1000"])));
        ids.extend(futures_util::future::join_all(starts).await);
        let (mut spawned, mut running) = (HashSet::new(), HashSet::new());
        while running.len() < AT_ONCE {
            let Event::Changed(status) = timeout(LONG, events.recv()).await.expect("in time").unwrap() else {
                continue;
            };
            assert_ne!(status.state, State::Stopped, "{:?}", status.outcome);
            if status.stages.iter().any(|stage| stage.name == StageName::Spawned) {
                spawned.insert(status.id.clone());
            }
            if status.state == State::Running {
                assert_eq!(spawned.len(), AT_ONCE, "one runs before all have been spawned");
                running.insert(status.id.clone());
            }
        }
        assert_eq!(runtime.machine().vms as usize, AT_ONCE);
        let stops = ids.iter().map(|id| runtime.stop(id, Some(LONG)));
        for stopped in futures_util::future::join_all(stops).await {
            assert_eq!(stopped.unwrap().outcome, Some(ENDED));
        }

        // The rest in rows: each takes the next round when its last one is over.
        let (rounds, all) = (std::cell::Cell::new(AT_ONCE), rounds());
        let row = || async {
            let mut ids = Vec::new();
            while rounds.get() < all {
                let round = rounds.replace(rounds.get() + 1);
                let id = start(&runtime, host.spec(&format!("round-{round}"), &["sleep", "1000"])).await;
                host::running(&runtime, &id).await;
                assert_eq!(exec(&runtime, &id, "true").await, (String::new(), 0));
                assert_eq!(runtime.stop(&id, Some(LONG)).await.unwrap().outcome, Some(ENDED));
                runtime.remove(&id).await.unwrap();
                ids.push(id);
            }
            ids
        };
        let rows = futures_util::future::join_all((0..AT_ONCE / 2).map(|_| row())).await;
        ids.extend(rows.into_iter().flatten());
        assert_eq!(ids.len(), all.max(AT_ONCE));
        for id in ids.iter().take(AT_ONCE) {
            runtime.remove(id).await.unwrap();
        }
        drop(runtime);
        host.assert_nothing_left(&ids);
    });
}
