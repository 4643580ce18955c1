//! A program that has its own generator of random numbers learns from a hook of its image that it goes on in another machine.

use std::collections::BTreeSet;

use imp_runtime::{Runtime, VmId};

use super::driver::{makes_none, on_driver};
use super::fork::forked;
use super::host::{Host, LONG, exec};
use super::restore::{child, restored};
use super::template::{command, end, init, ready, template};

/// Two programs that draw a number whenever they are asked, out of the same seed; one of them begins anew when it is told.
const DRAW: &str = "draws() {
        n=42
        while :; do
            if [ -e /dev/shm/ask-$1 ]; then
                rm /dev/shm/ask-$1
                n=$(((n * 1103515245 + 12345) % 2147483648))
                echo $n >/dev/shm/new-$1; mv /dev/shm/new-$1 /dev/shm/drawn-$1
            fi
            sleep 0.05
        done
    }
    (draws deaf) &
    trap 'n=$(od -An -N4 -tu4 /dev/urandom)' HUP
    echo $$ >/dev/shm/pid
    draws told";
const HOOK: &str = "mkdir -p /etc/imp/after-restore.d; cd /etc/imp/after-restore.d
    echo '#!/bin/sh' >10-draw; echo 'kill -HUP $(cat /dev/shm/pid)' >>10-draw; chmod 755 10-draw";

async fn drawn(runtime: &Runtime, id: &VmId, by: &str) -> String {
    let ask = format!(
        "rm -f /dev/shm/drawn-{by}; touch /dev/shm/ask-{by}
        until [ -e /dev/shm/drawn-{by} ]; do sleep 0.05; done; cat /dev/shm/drawn-{by}"
    );
    let (number, code) = exec(runtime, id, &ask).await;
    assert_eq!(code, 0, "{number}");
    number
}

#[test]
fn generators_that_a_hook_tells_of_the_new_machine_draw_other_numbers_and_all_others_the_same() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let mut spec = template(host.shell("unused", DRAW));
        spec.init = vec![init(HOOK)];
        spec.ready = vec![ready(command("test -s /dev/shm/pid"), LONG)];
        let made = runtime.template_build(spec, |_| {}).await.unwrap();
        let one = restored(&runtime, &made, child("one")).await;
        let two = restored(&runtime, &made, child("two")).await;
        let (mut told, mut deaf) = (BTreeSet::new(), BTreeSet::new());
        for id in [&one, &two] {
            told.insert(drawn(&runtime, id, "told").await);
            deaf.insert(drawn(&runtime, id, "deaf").await);
        }
        assert_eq!((told.len(), deaf.len()), (2, 1), "{told:?} {deaf:?}");
        // The same for children of one that runs; it goes on as itself.
        let children = forked(&runtime, &one, &["three", "four"]).await;
        deaf.clear();
        for id in children.iter().chain([&one]) {
            told.insert(drawn(&runtime, id, "told").await);
            deaf.insert(drawn(&runtime, id, "deaf").await);
        }
        assert_eq!((told.len(), deaf.len()), (5, 1), "{told:?} {deaf:?}");
        for id in children.iter().chain([&one, &two]) {
            runtime.kill(id).await.unwrap();
        }
        end(&host, runtime).await;
    });
}
