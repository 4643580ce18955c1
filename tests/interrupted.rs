//! What interrupts a VM from outside, a command that is killed or a disk that fills up, is told to whom it concerns and no more.

use std::fs;
use std::io::Write;

use imp_testkit::imp::{Imp, wait_until};
use imp_testkit::small_disk::SmallDisk;

use super::driver::on_driver;
use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";

#[test]
fn a_run_that_is_killed_leaves_its_vm_to_its_user() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let mut child = imp
            .command(["run", "-i", "--name", "web", "--network", "none", IMAGE, "sh", "-c", "cat; exit 6"])
            .stdin(std::process::Stdio::piped())
            .spawn()?;
        wait_until("it runs", || {
            Ok(imp.run(["ps", "-o", "name"])?.good()? == "web\n" && imp.state("web")? == "running")
        })?;
        child.kill()?;
        child.wait()?;
        // Its input is closed, and so the program ends by itself.
        assert_eq!(imp.run(["wait", "web"])?.good()?, "6\n");
        imp.end()
    })
}

#[test]
fn a_disk_of_the_host_that_fills_up_is_an_error_in_the_guest_and_no_more() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let vms = imp.data().join("vms");
        fs::create_dir_all(&vms)?;
        let disk = SmallDisk::mount(&vms, "80m")?;
        let script = "trap 'exit 4' TERM; while :; do echo line; sleep 0.1; done";
        let line =
            ["run", "-d", "--name", "web", "--network", "none", "--disk", "64m", IMAGE, "sh", "-c", script];
        imp.run(line)?.good()?;
        let mut rest = fs::File::create(vms.join("rest"))?;
        while rest.write_all(&[1; 4 << 10]).is_ok() {}
        let fill = "dd if=/dev/urandom of=/filled bs=1M count=24 conv=fsync";
        let came = imp.run(["exec", "web", "sh", "-c", fill])?;
        assert_ne!(came.code, Some(0), "{}", came.stderr);
        assert!(came.stderr.contains("filled"), "{}", came.stderr);
        // Its output is lost, and its program goes on; so does everything that does not write.
        assert_eq!(imp.run(["exec", "web", "echo", "alive"])?.good()?, "alive\n");
        assert_eq!(imp.state("web")?, "running");
        drop(rest);
        fs::remove_file(vms.join("rest"))?;
        let lines = |imp: &Imp| anyhow::Ok(imp.run(["logs", "web"])?.good()?.lines().count());
        let before = lines(&imp)?;
        wait_until("output is recorded again", || Ok(lines(&imp)? > before))?;
        imp.run(["stop", "web"])?.good()?;
        assert_eq!(imp.run(["wait", "web"])?.good()?, "4\n");
        imp.run(["rm", "web"])?.good()?;
        drop(disk);
        imp.end()
    })
}
