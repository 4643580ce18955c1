//! A tap that somebody still holds when its VM starts: waited for, and then named.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use imp_network::names::TAP;
use imp_runtime::spec::Outside;
use imp_runtime::status::{Failure, Outcome, State};
use imp_runtime::{Runtime, VmId};
use imp_sys::netns;
use imp_sys::tap::{self, Frames};
use imp_testkit::world::SERVER;
use rustix::fs::inotify;
use tokio::time::timeout;

use super::bridge::{bridged, nothing_of_ours, on_own_host, reaches, uplink};
use super::host::{Host, LONG, outcome, running, until};

/// More attempts than one that is not waited for.
const ATTEMPTS: usize = 8;

/// The VM's namespace with its tap, as it will be, made before the VM starts, and the tap held.
fn hold(host: &Host, runtime: &Runtime, id: &VmId) -> OwnedFd {
    let directory = host.path().join("run/networks");
    std::fs::create_dir_all(&directory).unwrap();
    let namespace = netns::create_at(&directory.join(id.as_str())).unwrap();
    let user = runtime.get(id).unwrap().vmm_user;
    let (owner, group) = user.map_or_else(
        || (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()),
        |user| (user, user),
    );
    let held = netns::inside(namespace.as_fd(), || {
        tap::create(TAP, owner, group)?;
        tap::open(TAP, Frames::WithVirtioHeader)
    });
    held.unwrap().unwrap()
}

/// How often taps are asked for.
struct Attempts(OwnedFd);

impl Attempts {
    fn watch() -> Self {
        let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&watch, "/dev/net/tun", inotify::WatchFlags::OPEN).unwrap();
        Self(watch)
    }

    /// Since the last look.
    fn seen(&self) -> usize {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&self.0, &mut buffer);
        let mut seen = 0;
        while events.next().is_ok() {
            seen += 1;
        }
        seen
    }
}

#[test]
fn a_tap_that_is_still_held_for_a_moment_is_waited_for() {
    on_own_host(async |world| {
        world.serve_tcp(80).unwrap();
        let host = Host::new();
        let mut config = host.config();
        config.bridge.outside = Outside::Routed;
        let runtime = Runtime::open(config).await.unwrap();
        let id = runtime.create(bridged(host.spec("vm", &["sleep", "1000"]), None)).await.unwrap();
        let held = hold(&host, &runtime, &id);
        let attempts = Attempts::watch();
        runtime.start(&id).await.unwrap();
        let waits = async {
            let mut seen = 0;
            while seen < ATTEMPTS {
                until(&runtime, &id, |status| status.state == State::Starting).await;
                tokio::time::sleep(Duration::from_millis(2)).await;
                seen += attempts.seen();
            }
        };
        timeout(LONG, waits).await.expect("in time");
        assert_eq!(runtime.get(&id).unwrap().vmm_pid, None);
        drop(held);
        let status = running(&runtime, &id).await;
        assert_eq!(reaches(&runtime, &id, SERVER, 80).await, uplink(&status));
        runtime.kill(&id).await.unwrap();
        nothing_of_ours();
        host.end(runtime).await;
    });
}

#[test]
fn a_tap_that_is_held_for_good_is_its_vms_failure_alone_and_is_named() {
    on_own_host(async |_| {
        let host = Host::new();
        let runtime = host.open().await;
        let spec = |name: &str| bridged(host.spec(name, &["sleep", "1000"]), None);
        let id = runtime.create(spec("vm")).await.unwrap();
        let other = runtime.create(spec("other")).await.unwrap();
        let held = hold(&host, &runtime, &id);
        runtime.start(&id).await.unwrap();
        runtime.start(&other).await.unwrap();
        let Outcome::Failed { failure: Failure::Spawn { detail }, .. } = outcome(&runtime, &id).await else {
            panic!("{:?}", runtime.get(&id).unwrap().outcome);
        };
        assert!(detail.contains(id.as_str()) && detail.contains("is still held"), "{detail}");
        assert_eq!(running(&runtime, &other).await.state, State::Running);
        drop(held);
        runtime.kill(&other).await.unwrap();
        nothing_of_ours();
        host.end(runtime).await;
    });
}
