//! A pool keeps VMs prepared, gives each to one who asks, and is filled again, whoever owns it.

use std::collections::BTreeSet;

use anyhow::Context as _;
use imp_testkit::imp::{Imp, finish, wait_until};

use super::promises::driver::on_driver;
use super::templates::{build, json};
use crate::DRIVER;

fn is_full(imp: &Imp, size: u64) -> anyhow::Result<()> {
    wait_until("the pool is full", || {
        Ok(json(imp, &["pool", "ls", "-o", "json"])?.pointer("/0/ready") == Some(&size.into()))
    })
}

/// Ids of the VMs that wait.
fn waiting(imp: &Imp) -> anyhow::Result<BTreeSet<String>> {
    let vms = json(imp, &["ps", "-o", "json"])?;
    let vms = vms.as_array().context("no list")?.iter();
    let waiting = vms.filter(|vm| vm.get("state") == Some(&"prepared".into()));
    Ok(waiting.filter_map(|vm| vm.get("id")?.as_str().map(str::to_owned)).collect())
}

#[test]
fn a_claim_takes_exactly_one_vm_and_the_pool_is_filled_again() -> anyhow::Result<()> {
    on_driver(|| {
        let imp = Imp::with_busybox(DRIVER)?;
        build(&imp, "ready")?;
        imp.run(["pool", "create", "warm", "--template", "ready", "--size", "2"])?.good()?;
        is_full(&imp, 2)?;
        let before = waiting(&imp)?;
        let claims: Vec<_> =
            (0..2).map(|_| imp.command(["run", "-d", "--pool", "warm"]).spawn()).collect::<Result<_, _>>()?;
        let claims = claims.into_iter().map(|claim| Ok(finish(claim)?.good()?.trim().to_owned()));
        let claimed = claims.collect::<anyhow::Result<BTreeSet<String>>>()?;
        assert_eq!(claimed, before, "each got one, and both were prepared");
        for vm in &claimed {
            assert_eq!(imp.run(["exec", vm, "cat", "/said"])?.good()?, "ready\n");
        }
        is_full(&imp, 2)?;
        // Those that wait are adopted, not made again.
        let before = waiting(&imp)?;
        imp.kill_owner()?;
        is_full(&imp, 2)?;
        assert_eq!(waiting(&imp)?, before);
        let came = imp.run(["template", "rm", "ready"])?;
        assert!(came.code == Some(1) && came.stderr.contains("`imp pool rm warm`"), "{}", came.stderr);
        imp.run(["pool", "rm", "warm"])?.good()?;
        assert!(waiting(&imp)?.is_empty());
        for vm in &claimed {
            imp.run(["exec", vm, "true"])?.good()?;
        }
        imp.end()
    })
}
