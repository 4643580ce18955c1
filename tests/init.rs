//! An image whose entry point is an init system boots as a machine of its own, and `imp` works in it as in any other.

use imp_testkit::images;
use imp_testkit::imp::{Imp, wait_until};

use super::driver::on_driver;
use crate::DRIVER;

/// The agent beside the init; whoever asks for this is one of its processes, and ends with it.
const KILL_AGENT: &str = r#"for pid in $(cat /sys/fs/cgroup/imp/agent/cgroup.procs); do
    case $(tr '\0' ' ' </proc/$pid/cmdline) in @imp-agent*) kill -KILL $pid ;; esac
done
sleep 1000"#;

#[test]
fn systemd_boots_is_worked_in_and_shuts_down_in_order() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::new(DRIVER)?;
        imp.run(["image", "import", &format!("oci:{}", images::systemd()?.display())])?.good()?;
        let line =
            ["run", "-d", "--name", "vm", "--network", "none", "--stop-timeout", "170", images::SYSTEMD];
        imp.run(line)?.good()?;
        let exec = |words: &[&str]| imp.run(["exec", "vm"].iter().chain(words));
        let init = exec(&["readlink", "/proc/1/exe"])?.good()?;
        assert!(init.ends_with("/systemd/systemd\n"), "{init}");
        wait_until("it has booted", || {
            Ok(exec(&["systemctl", "is-active", "multi-user.target"])?.stdout == "active\n")
        })?;
        let failed = exec(&["systemctl", "--failed", "--no-legend", "--plain"])?.good()?;
        assert_eq!(failed, "", "units failed");
        assert_eq!(exec(&["cat", "/var/life"])?.good()?, "started with systemd\n");
        // The agent is beside the init and its services: it is none of them, and what it runs is none of them.
        let unit = exec(&["sh", "-c", "cat /proc/self/cgroup"])?.good()?;
        assert!(unit.starts_with("0::/imp/exec/"), "{unit}");
        exec(&["systemctl", "daemon-reexec"])?.good()?;
        // An agent that dies is started again, finds the machine as it is, and can end it in order.
        let killed = exec(&["sh", "-c", KILL_AGENT])?;
        assert_ne!(killed.code, Some(0), "{}", killed.stderr);
        wait_until("the next agent is there", || Ok(exec(&["true"])?.code == Some(0)))?;
        assert_eq!(exec(&["systemctl", "is-active", "multi-user.target"])?.good()?, "active\n");
        assert_eq!(exec(&["sh", "-c", "echo here; exit 3"])?.code, Some(3));
        assert_eq!(imp.run(["stop", "vm"])?.good()?, "vm\n");
        let console = imp.run(["logs", "--console", "vm"])?.good()?;
        assert!(console.contains("the agent died (1 in a row)"), "{console}");
        assert!(console.contains("life stopped in order"), "{console}");
        let vm = imp.inspect("vm")?;
        let outcome = vm.get("outcome").cloned().unwrap_or_default();
        assert!(outcome.to_string().contains("powered-off"), "{outcome}");
        assert_eq!(imp.run(["wait", "vm"])?.good()?, "0\n");
        imp.end()
    })
}
