//! Processes of a guest that nobody waits for but its PID 1.

use super::driver::on_driver;
use super::host::{Host, exec, running, start};

/// Each is a child of a shell that has ended before it.
const ORPHANS: &str = "n=0; while [ $n -lt 1000 ]; do n=$((n + 1)); sh -c 'true & exec true'; done; echo $n";
/// Processes that have ended and are waited for, until there are none.
const REAPED: &str =
    "until ! grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | grep -q .; do sleep 0.1; done
    ls -d /proc/[0-9]* | wc -l";

#[test]
fn a_thousand_orphans_are_waited_for_and_the_guest_goes_on() {
    on_driver(async {
        let host = Host::new();
        let runtime = host.open().await;
        let id = start(&runtime, host.spec("vm", &["sleep", "1000"])).await;
        running(&runtime, &id).await;
        let (before, _) = exec(&runtime, &id, REAPED).await;
        assert_eq!(exec(&runtime, &id, ORPHANS).await, ("1000\n".into(), 0));
        let (after, _) = exec(&runtime, &id, REAPED).await;
        let count = |text: &str| text.trim().parse::<u32>().unwrap();
        // But for threads of the kernel that come and go.
        assert!(count(&after) < count(&before) + 50, "{before} {after}");
        runtime.kill(&id).await.unwrap();
        host.end(runtime).await;
    });
}
