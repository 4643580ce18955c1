//! Machines that go on days later: their clock is right before anything runs, and what waits for a time goes on waiting.

use std::time::{SystemTime, UNIX_EPOCH};

use imp_runtime::{Runtime, VmId};

use super::driver::{makes_none, on_driver};
use super::fork::forked;
use super::host::{Host, LONG, exec};
use super::restore::{child, restored};
use super::template::{command, end, init, ready, template};

const DAY: u64 = 24 * 3600;
/// How far a guest's clock may be from its host's.
const AWAY: u64 = 2;
/// Notes the wall clock and whether the other one went backwards, and counts; a timer of hours runs beside it.
const WATCH: &str = "sleep 40000 & echo $! >/dev/shm/long; last=0; n=0
    while :; do
        read now rest </proc/uptime; now=${now%.*}${now#*.}
        [ $now -ge $last ] || echo $last $now >>/dev/shm/backwards
        last=$now; n=$((n + 1)); date +%s >>/dev/shm/walls; echo $n >/dev/shm/new; mv /dev/shm/new /dev/shm/n
        sleep 0.05
    done";
/// Once it has counted on: all that it noted.
const NOTED: &str = "n=$(cat /dev/shm/n); until [ $(cat /dev/shm/n) -gt $((n + 2)) ]; do sleep 0.05; done
    kill -0 $(cat /dev/shm/long) || echo the long timer has ended
    cat /dev/shm/backwards 2>/dev/null; sort -n /dev/shm/walls | uniq";

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Of a guest in whose past it was `aged`, and that became what it is not before `woken`.
async fn is_right(runtime: &Runtime, id: &VmId, aged: u64, woken: u64) {
    let before = now();
    let (date, _) = exec(runtime, id, "date +%s").await;
    let date: u64 = date.trim().parse().unwrap();
    assert!((before - AWAY..=now() + AWAY).contains(&date), "{date} is not {before}");
    let (noted, code) = exec(runtime, id, NOTED).await;
    assert_eq!(code, 0, "{noted}");
    for line in noted.lines() {
        let wall: u64 = line.parse().unwrap_or_else(|_| panic!("{noted}"));
        let past = (aged..aged + DAY).contains(&wall);
        assert!(past || wall >= woken - AWAY, "a program saw {wall}, {} s early", woken - wall);
    }
    assert!(noted.lines().count() >= 2, "{noted}");
}

#[test]
fn a_machine_that_goes_on_three_days_later_has_the_right_time_at_once_and_its_timers_go_on() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let aged = now() - 3 * DAY;
        let mut spec = template(host.shell("unused", WATCH));
        spec.init = vec![init(&format!("date -s @{aged}"))];
        spec.ready = vec![ready(command("test $(cat /dev/shm/n) -ge 2"), LONG)];
        let made = runtime.template_build(spec, |_| {}).await.unwrap();
        let woken = now();
        let one = restored(&runtime, &made, child("one")).await;
        is_right(&runtime, &one, aged, woken).await;
        // A machine that runs and whose clock is as far behind: its child, and itself.
        let behind =
            format!("date -s @{aged}; rm /dev/shm/walls; until [ -e /dev/shm/walls ]; do sleep 0.05; done");
        assert_eq!(exec(&runtime, &one, &behind).await.1, 0);
        let woken = now();
        let two = forked(&runtime, &one, &["two"]).await.remove(0);
        for id in [&two, &one] {
            is_right(&runtime, id, aged, woken).await;
            runtime.kill(id).await.unwrap();
        }
        end(&host, runtime).await;
    });
}
