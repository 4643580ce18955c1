//! Firecracker by those who are not root, or not in deed: machines run all the same, without jails, and doctor says so.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use imp_runtime::{Check, Verdict, examine};
use imp_testkit::node;

use super::engine::host::{Host, exec, running, start};

const IN_NODE: Duration = Duration::from_secs(600);
/// Tells this program, started again, that it has become whom it is to be.
const BECOME: &str = "IMP_TEST_BECOME";
const USER: u32 = 60_000;
/// What an administrator has given the user.
const GROUPS: &str = "/sys/fs/cgroup/ordinary";

#[test]
fn an_ordinary_user_runs_vms_within_the_limits_that_groups_of_his_own_set() {
    let user = USER.to_string();
    let ids = format!("--reuid={user}");
    let group = format!("--regid={user}");
    becoming(&[&ids, &group, "--clear-groups"], async || {
        let host = Host::new();
        let checks = examine(&host.config()).await;
        assert!(good(&checks, "firecracker") && good(&checks, "limits"), "{checks:?}");
        assert!(!good(&checks, "jailer") && !good(&checks, "bridge"), "{checks:?}");
        assert!(found(&checks, "user").starts_with("60000"), "{checks:?}");
        let runtime = host.open().await;
        let id = start(&runtime, host.spec("guest", &["sleep", "1000"])).await;
        let status = running(&runtime, &id).await;
        assert!(status.not_enforced.is_empty() && status.vmm_user.is_none(), "{:?}", status.not_enforced);
        let process = format!("/proc/{}", status.vmm_pid.unwrap());
        let groups = fs::read_to_string(format!("{process}/cgroup")).unwrap();
        assert!(groups.contains(&format!("/ordinary/imp/{id}")), "{groups}");
        let of = fs::read_to_string(format!("{process}/status")).unwrap();
        assert!(of.contains("Uid:\t60000\t60000") && of.contains("Seccomp:\t2"), "{of}");
        assert_eq!(exec(&runtime, &id, "echo hello").await, ("hello\n".to_owned(), 0));
        runtime.kill(&id).await.unwrap();
        host.end(runtime).await;
    });
}

#[test]
fn root_without_the_privileges_of_a_jailer_as_in_a_pod_runs_vms_without_jails() {
    becoming(&["--bounding-set=-sys_admin,-mknod", "--inh-caps=-sys_admin,-mknod"], async || {
        let host = Host::new();
        let checks = examine(&host.config()).await;
        assert!(
            good(&checks, "firecracker") && !good(&checks, "jailer") && !good(&checks, "user"),
            "{checks:?}"
        );
        for check in ["jailer", "user"] {
            assert!(found(&checks, check).contains("CAP_SYS_ADMIN, CAP_MKNOD"), "{checks:?}");
        }
        let runtime = host.open().await;
        let id = start(&runtime, host.spec("guest", &["sleep", "1000"])).await;
        assert_eq!(running(&runtime, &id).await.vmm_user, None);
        assert_eq!(exec(&runtime, &id, "echo hello").await, ("hello\n".to_owned(), 0));
        runtime.kill(&id).await.unwrap();
        host.end(runtime).await;
    });
}

fn good(checks: &[Check], name: &str) -> bool {
    checks.iter().any(|check| check.name == name && check.verdict == Verdict::Good)
}

fn found<'a>(checks: &'a [Check], name: &str) -> &'a str {
    &checks.iter().find(|check| check.name == name).unwrap().found
}

/// Runs a test as somebody else: this program again, by setpriv(1) with these words, in a group that the user has.
fn becoming(whom: &[&str], test: impl AsyncFnOnce()) {
    if std::env::var_os(BECOME).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(test());
    }
    node::inside_within(IN_NODE, || {
        give_groups();
        fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(0o666)).unwrap();
        let directory = tempfile::Builder::new().prefix("imp-").tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let name = std::thread::current().name().unwrap().to_owned();
        let ended = Command::new("/bin/sh")
            .args(["-c", &format!("echo $$ >{GROUPS}/session/cgroup.procs && exec setpriv \"$@\""), "sh"])
            .args(whom)
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture", "--test-threads=1"])
            .env(BECOME, "1")
            .env("TMPDIR", directory.path())
            .env("HOME", directory.path())
            .status()
            .unwrap();
        take_groups();
        assert!(ended.success(), "{ended}");
    });
}

/// As `Delegate=yes` of a service manager: the group is the user's, and this process's successor is in one below it.
fn give_groups() {
    let (all, session) = (Path::new(GROUPS), Path::new(GROUPS).join("session"));
    let controllers = "+memory +cpu +pids";
    fs::write(all.with_file_name("cgroup.subtree_control"), controllers).unwrap();
    fs::create_dir_all(&session).unwrap();
    fs::write(all.join("cgroup.subtree_control"), controllers).unwrap();
    for group in [all, &session] {
        for file in ["", "cgroup.procs", "cgroup.subtree_control", "cgroup.threads"] {
            chown(group.join(file), Some(USER), Some(USER)).unwrap();
        }
    }
}

fn take_groups() {
    for group in [Path::new(GROUPS).join("session"), GROUPS.into()] {
        fs::remove_dir(&group).unwrap();
    }
}
