//! What a running VM is given: copied directories, disks with limits, control groups.

use std::fs;
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::os::unix::net::UnixListener;

use imp_runtime::spec::{Bytes, CopiedMount, Limits, MountAccess};

use super::driver::on_driver;
use super::host::{Host, exec, running, start};

#[test]
fn a_vm_has_what_was_copied_in_and_the_limits_that_its_status_tells() {
    on_driver(async {
        let host = Host::new();
        let source = tempfile::tempdir().unwrap();
        let below = |name: &str| source.path().join(name);
        fs::create_dir(below("sub")).unwrap();
        fs::write(below("sub/program"), "#!/bin/sh\necho ran\n").unwrap();
        fs::set_permissions(below("sub/program"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("sub/program", below("link")).unwrap();
        symlink("/etc/outside", below("dangling")).unwrap();
        fs::File::create(below("sparse")).unwrap().set_len(1 << 20).unwrap();
        let _listener = UnixListener::bind(below("socket")).unwrap();
        if rustix::process::geteuid().is_root() {
            lchown(below("sub/program"), Some(1234), Some(70_000)).unwrap();
        }
        let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(below("sub/program")).unwrap());
        let mount = |target: &str, access| CopiedMount {
            source: source.path().to_owned(),
            target: Bytes::new(target).unwrap(),
            access,
        };
        let mut spec = host.spec("vm", &["sleep", "1000"]);
        spec.mounts = vec![mount("/srv/rw", MountAccess::ReadWrite), mount("/srv/ro", MountAccess::ReadOnly)];
        spec.limits = Limits {
            processes: Some(64),
            cpu_millis: Some(1500),
            disk_bytes_per_second: Some(256 << 20),
            disk_requests_per_second: Some(50_000),
            ..Limits::default()
        };
        let runtime = host.open().await;
        let id = start(&runtime, spec).await;
        let status = running(&runtime, &id).await;

        let look = "cd $1; ./link; readlink dangling; stat -c '%u %g %a' sub/program; stat -c %s sparse; ls";
        let copied = format!("ran\n/etc/outside\n{owner} ");
        for at in ["/srv/rw", "/srv/ro"] {
            let (text, code) = exec(&runtime, &id, &format!("set -e x {at}; shift; {look}")).await;
            assert_eq!(code, 0, "{text}");
            assert!(text.starts_with(&copied), "{text}");
            assert!(
                text.contains("755\n1048576\n") && text.ends_with("dangling\nlink\nsparse\nsub\n"),
                "{text}"
            );
        }
        assert_eq!(exec(&runtime, &id, "echo x >/srv/rw/new && cat /srv/rw/new").await, ("x\n".into(), 0));
        let (text, code) = exec(&runtime, &id, "echo x >/srv/ro/new").await;
        assert!(code != 0 && text.contains("Read-only file system"), "{text}");
        assert!(!below("new").exists());

        // A limited disk works as any other: more than a second's worth of requests, read back.
        let (text, code) = exec(&runtime, &id, "dd if=/dev/urandom of=/x bs=1M count=8 2>/dev/null; sync; md5sum </x; echo 3 >/proc/sys/vm/drop_caches; md5sum </x").await;
        let sums: Vec<&str> = text.lines().collect();
        assert!(code == 0 && sums.len() == 2 && sums[0] == sums[1], "{text}");

        // What the status tells is what the kernel has, and the VMM is in it.
        assert!(status.limits.len() + status.not_enforced.len() >= 3, "{status:#?}");
        for limit in &status.limits {
            let kernel = fs::read_to_string(&limit.path).unwrap();
            assert_eq!(kernel.trim(), limit.value, "{}", limit.path.display());
            let processes = fs::read_to_string(limit.path.with_file_name("cgroup.procs")).unwrap();
            let vmm = status.vmm_pid.unwrap().to_string();
            assert!(processes.lines().any(|pid| pid == vmm), "{}", limit.path.display());
        }
        let quota =
            status.limits.iter().find(|limit| limit.path.to_string_lossy().contains("cpu.cfs_quota_us"));
        assert!(quota.is_none_or(|quota| quota.value == "150000"), "{quota:?}");
        runtime.kill(&id).await.unwrap();
        host.end(runtime).await;
    });
}
