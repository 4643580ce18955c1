//! Templates: built once, and left nowhere when they fail.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use imp_runtime::Runtime;
use imp_runtime::spec::{Arguments, DiskSize, NetworkMode, VmSpec};
use imp_runtime::status::{State, VmStatus};
use imp_runtime::template::{BuildStep, Error, InitCommand, Probe, Readiness, TemplateSpec};
use imp_storage::store::{Store, StoreOptions};
use tokio::time::timeout;

use super::driver::{makes_none, on_driver};
use super::host::{Host, LONG, exec, output, running, wait_until};
use super::owner::Owner;
use super::restore::{child, restored};

/// Long enough to look once.
const SHORT: Duration = Duration::from_secs(8);

/// Whether a VM has come to a step.
pub(crate) type Reached = fn(&VmStatus) -> bool;

/// A template of what a VM of this specification is.
pub(crate) fn template(vm: VmSpec) -> TemplateSpec {
    TemplateSpec {
        base: vm.base,
        cpus: vm.cpus,
        memory: vm.memory,
        scratch: vm.scratch,
        network: vm.network,
        kernel: vm.kernel,
        hostname: vm.hostname,
        main: vm.main,
        limits: vm.limits,
        init: Vec::new(),
        ready: Vec::new(),
    }
}

pub(crate) fn init(script: &str) -> InitCommand {
    InitCommand { arguments: Arguments::new(["sh", "-c", script]).unwrap(), at_most: LONG }
}

pub(crate) fn ready(probe: Probe, at_most: Duration) -> Readiness {
    Readiness { probe, at_most }
}

pub(crate) fn command(script: &str) -> Probe {
    Probe::Command(Arguments::new(["sh", "-c", script]).unwrap())
}

/// The host once more, when all templates are gone.
pub(crate) async fn end(host: &Host, runtime: Runtime) {
    for template in runtime.templates().await.unwrap() {
        runtime.template_remove(&template.snapshot).await.unwrap();
    }
    nothing_written_down(host);
    host.end(runtime).await;
}

/// Neither a snapshot nor a part of one.
pub(crate) fn nothing_written_down(host: &Host) {
    let store = Store::open(host.data().join("images"), StoreOptions::default()).unwrap();
    assert!(store.snapshots().list().unwrap().is_empty());
    for entry in walk(&host.data().join("images")) {
        assert!(!entry.ends_with("memory") && !entry.ends_with("scratch"), "{entry}");
    }
}

fn walk(directory: &std::path::Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(walk(&path));
        }
        found.push(path.display().to_string());
    }
    found
}

#[test]
fn a_template_is_made_once_and_vms_of_it_go_on_where_it_was_ready() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let serve =
            "cat /prepared; nc -ll -p 80 -e sh -c 'while read l && [ ${#l} -gt 1 ]; do :; done; printf \"HTTP/1.0 200 OK\\r\\n\\r\\n\"; cat /prepared' &
            echo up; while :; do sleep 1; done";
        let mut spec = template(host.shell("unused", serve));
        spec.init = vec![init("echo one >/prepared"), init("echo $SECRET >>/prepared")];
        spec.ready = vec![
            ready(Probe::Log("up".into()), LONG),
            ready(command("test -e /prepared"), LONG),
            ready(Probe::Port(80.try_into().unwrap()), LONG),
            ready(Probe::Http { port: 80.try_into().unwrap(), path: "/".into() }, LONG),
        ];
        let steps = Arc::new(Mutex::new(Vec::new()));
        let tell = || {
            let told = Arc::clone(&steps);
            move |step| told.lock().unwrap().push(step)
        };
        // Both ask for the same at the same time, and one of them makes it.
        let (one, two) = tokio::join!(
            runtime.template_build(spec.clone(), tell()),
            runtime.template_build(spec.clone(), tell()),
        );
        let made = one.unwrap();
        assert_eq!(two.unwrap(), made);
        let mut expected = vec![BuildStep::Boot];
        expected.extend(spec.ready.iter().cloned().map(BuildStep::Ready));
        expected.extend([BuildStep::Snapshot, BuildStep::Keep]);
        assert_eq!(*steps.lock().unwrap(), expected);
        assert!(runtime.list().is_empty(), "its machine is gone");
        let listed = runtime.templates().await.unwrap();
        assert_eq!(listed.iter().map(|one| one.snapshot).collect::<Vec<_>>(), [made]);
        runtime.template_verify(&made).await.unwrap();
        // Nor does another owner make it again.
        drop(runtime);
        let runtime = host.open().await;
        let again = runtime.template_build(spec.clone(), |step| panic!("made again: {step:?}")).await;
        assert_eq!(again.unwrap(), made);

        let id = restored(&runtime, &made, child("one")).await;
        let served = "wget -q -O - http://127.0.0.1/; pidof nc >/dev/null && echo alive";
        let (text, code) = exec(&runtime, &id, served).await;
        assert_eq!((text.as_str(), code), ("one\nhunter2\nalive\n", 0));
        assert!(output(&runtime, &id).await.contains("up\n"));
        let in_use = runtime.template_remove(&made).await.unwrap_err();
        assert!(in_use.to_string().contains(id.as_str()), "{in_use}");
        runtime.kill(&id).await.unwrap();
        end(&host, runtime).await;
    });
}

#[test]
fn a_template_that_fails_says_at_which_step_and_leaves_nothing() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let sleeper = template(host.spec("unused", &["sleep", "1000"]));
        let build =
            async |spec: TemplateSpec| runtime.template_build(spec, |_| {}).await.unwrap_err().to_string();

        let mut init_fails = sleeper.clone();
        init_fails.init = vec![init("true"), init("echo no such thing; exit 3")];
        let text = build(init_fails).await;
        for part in ["exit 3", "exit status 3", "no such thing"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let mut never_ready = sleeper.clone();
        never_ready.ready = vec![ready(command("echo not yet; exit 1"), SHORT)];
        let text = build(never_ready).await;
        assert!(text.contains("not ready") && text.contains("not yet"), "{text}");
        let mut ends = sleeper.clone();
        ends.main = host.shell("unused", "echo last words; exit 7").main;
        ends.ready = vec![ready(Probe::Port(80.try_into().unwrap()), LONG)];
        let text = build(ends).await;
        assert!(text.contains("exited with 7"), "{text}");
        let mut panics = sleeper.clone();
        panics.init = vec![init("echo c >/proc/sysrq-trigger; sleep 1000")];
        let text = build(panics).await;
        assert!(text.contains("panic") && text.contains("sysrq"), "{text}");
        assert!(runtime.list().is_empty());
        nothing_written_down(&host);

        // Before anything runs: there is no disk for that, and no memory.
        let mut large = sleeper.clone();
        large.scratch = DiskSize::from_bytes(8 << 40).unwrap();
        let text = build(large).await;
        assert!(text.contains("MiB are free"), "{text}");
        let mut networked = sleeper.clone();
        networked.network = Some(NetworkMode::User);
        let refused = runtime.template_build(networked, |_| {}).await;
        assert!(
            crate::DRIVER == imp_runtime::DriverChoice::Qemu || matches!(refused, Err(Error::Runtime(_)))
        );
        end(&host, runtime).await;
    });
}

#[test]
fn a_machine_that_cannot_be_removed_keeps_no_template_from_being_made() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let spec = template(host.spec("unused", &["sleep", "1000"]));
        let vms = host.data().join("vms");
        // A directory in the place of its record.
        let record = Arc::new(Mutex::new(None));
        let seen = Arc::clone(&record);
        let spoil = move |step| {
            if step == BuildStep::Snapshot {
                let path =
                    std::fs::read_dir(&vms).unwrap().next().unwrap().unwrap().path().join("record.json");
                std::fs::remove_file(&path).unwrap();
                std::fs::create_dir_all(path.join("in the way")).unwrap();
                *seen.lock().unwrap() = Some(path);
            }
        };
        let made = timeout(LONG, runtime.template_build(spec, spoil)).await.expect("in time").unwrap();
        runtime.template_verify(&made).await.unwrap();
        let stays = runtime.list().remove(0);
        assert_eq!(stays.state, State::Stopped);
        std::fs::remove_dir_all(record.lock().unwrap().take().unwrap()).unwrap();
        end(&host, runtime).await;
    });
}

#[test]
fn a_guest_whose_connection_breaks_while_it_is_waited_for_is_looked_at_over_the_next() {
    on_driver(async {
        let host = Host::on_disk();
        let runtime = host.open().await;
        if makes_none(&runtime) {
            return host.end(runtime).await;
        }
        let mut spec = template(host.spec("unused", &["sleep", "1000"]));
        spec.ready = vec![ready(command("touch /looked; test -e /go"), LONG)];
        let go = async {
            let id = loop {
                if let Some(vm) = runtime.list().first() {
                    break vm.id.clone();
                }
                tokio::task::yield_now().await;
            };
            running(&runtime, &id).await;
            assert_eq!(exec(&runtime, &id, "until [ -e /looked ]; do sleep 0.1; done").await.1, 0);
            // What it is reached over ends with that.
            runtime.pause(&id).await.unwrap();
            runtime.resume(&id).await.unwrap();
            assert_eq!(exec(&runtime, &id, "touch /go").await.1, 0);
        };
        let (made, ()) = tokio::join!(runtime.template_build(spec, |_| {}), go);
        made.unwrap();
        end(&host, runtime).await;
    });
}

#[test]
fn an_owner_killed_at_any_step_of_a_template_leaves_no_part_of_one() {
    on_driver(async {
        let host = Host::on_disk();
        {
            let runtime = host.open().await;
            if makes_none(&runtime) {
                return host.end(runtime).await;
            }
        }
        let steps: [(&str, Reached); 4] = [
            ("created", |_| true),
            ("booting", |vm| vm.vmm_pid.is_some()),
            ("running", |vm| vm.state == State::Running),
            ("being written down", |vm| vm.state == State::Asleep),
        ];
        for (step, reached) in steps {
            let mut owner = Owner::of_a_template(&host, host.spec("unused", &["sleep", "1000"]));
            owner.until(reached);
            owner.kill();
            nothing_of_a_template(&host, step).await;
        }
        // Its machine is gone, and its parts are hashed.
        let mut owner = Owner::of_a_template(&host, host.spec("unused", &["sleep", "1000"]));
        let id = owner.until(|vm| vm.state == State::Asleep).id;
        wait_until("its machine is gone", || !host.vm(&id).exists());
        owner.kill();
        let runtime = host.open().await;
        let made = runtime.templates().await.unwrap();
        if let [made] = &made[..] {
            runtime.template_verify(&made.snapshot).await.unwrap();
        }
        end(&host, runtime).await;
    });
}

async fn nothing_of_a_template(host: &Host, step: &str) {
    let runtime = host.open().await;
    for vm in runtime.list() {
        // It may have gone meanwhile.
        let Ok(mut watch) = runtime.watch(&vm.id) else { continue };
        while timeout(LONG, watch.changed()).await.expect("in time").is_ok() {}
    }
    assert!(runtime.list().is_empty() && runtime.templates().await.unwrap().is_empty(), "{step}");
    end(host, runtime).await;
}
