//! Memory of a VM that runs is taken back and returned, where its driver has balloons.

use imp_testkit::imp::{Imp, wait_until};
use serde_json::Value;

use super::driver::on_driver;
use crate::DRIVER;

const IMAGE: &str = "imp.test/busybox";
const MIB: u64 = 1 << 20;

#[test]
fn a_vm_with_a_balloon_gives_memory_back_and_gets_it_again_or_the_balloon_is_refused() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let line = ["run", "-d", "--name", "web", "--network", "none", "-m", "256m", "--balloon", IMAGE];
        let came = imp.run(line.iter().chain(&["sleep", "1000"]))?;
        if came.stderr.contains(&format!("{} has no balloon", DRIVER.name())) {
            assert!(came.code == Some(125) && came.stderr.contains("--balloon"), "{}", came.stderr);
            return imp.end();
        }
        came.good()?;
        let came = imp.run(["update", "-m", "144m", "web"])?;
        assert_eq!((came.stdout.as_str(), came.stderr.as_str()), ("web\n", ""));
        let given = |imp: &Imp| -> anyhow::Result<Option<u64>> {
            Ok(imp.inspect("web")?.pointer("/balloon/given_bytes").and_then(Value::as_u64))
        };
        wait_until("it is shown", || Ok(given(&imp)? == Some(112 * MIB)))?;
        let top: Value = serde_json::from_str(&imp.run(["top", "--once", "-o", "json"])?.good()?)?;
        let given_back = top.pointer("/0/memory_given_back_bytes").and_then(Value::as_u64);
        assert_eq!(given_back, Some(112 * MIB), "{top}");
        let used = top.pointer("/0/memory_used_bytes").and_then(Value::as_u64);
        assert!(used.is_some_and(|used| used < 100 * MIB), "{top}");
        let refused = imp.run(["update", "-m", "1g", "web"])?;
        assert!(refused.code == Some(1) && refused.stderr.contains("256 MiB"), "{}", refused.stderr);
        assert_eq!(imp.run(["update", "-m", "256m", "web"])?.good()?, "web\n");
        wait_until("it has it again", || Ok(given(&imp)? == Some(0)))?;
        imp.end()
    })
}
