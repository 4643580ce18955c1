//! VMs of one template, each VMM in a memory control group of its own, have the template's pages in common: what many VMs on
//! one machine rest on.

use anyhow::ensure;
use imp_testkit::imp::Imp;
use serde_json::Value;

use super::promises::driver::on_driver;
use crate::DRIVER;

#[test]
fn four_vms_in_memory_groups_of_their_own_share_the_pages_of_their_template() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        let build = ["template", "build", "--network", "none", "-m", "96m", "--disk", "16m", "probe"];
        imp.run(build.iter().chain(&["imp.test/busybox", "--", "sleep", "1000000"]))?.good()?;
        let report: Value = serde_json::from_str(&imp.run(["probe", "cow", "-o", "json"])?.good()?)?;
        println!("{report:#}");
        ensure!(report.get("verdict") == Some(&"HUSK-COW-SURVIVES".into()), "{report}");
        for truth in ["CoWSurvives", "DirtyPerVM"] {
            ensure!(report.get(truth) == Some(&true.into()), "{truth} in {report}");
        }
        let vms = report.get("vms").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let mut groups: Vec<&str> = vms.iter().filter_map(|vm| vm.get("cgroup")?.as_str()).collect();
        groups.sort_unstable();
        groups.dedup();
        ensure!(groups.len() == 4, "a memory group for each of four VMs: {report}");
        imp.end()
    })
}
