//! Measures Imp against its budgets: one line each, and exit status 1 when one is missed. With `--lab`, those of VMs in
//! Firecracker, where KVM runs guests: here or in a node VM.
//!
//! A budget is a ratio to a floor that is measured in the same run, or a size. Times alternate between ours and the
//! floor, round by round, so that both see the same machine; their medians are compared.

mod bare;
mod budgets;
mod conditions;
mod engine;
mod firecracker;
mod floor;
mod guest;
mod machine;
mod measure;
mod programs;
mod report;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use imp_testkit::imp::Driver;
use imp_testkit::node::{self, End};

/// Eight guests at once, or fifty of one template, for each of which a quarter of its memory is set aside.
const NODE_MEMORY_MIB: u32 = 6144;
const NODE_DEADLINE: Duration = Duration::from_secs(1800);

fn main() -> anyhow::Result<ExitCode> {
    let mut words = std::env::args().skip(1).peekable();
    let (groups, driver) = if words.next_if(|word| word == "--lab").is_some() {
        if let Some(end) = node::again_inside(NODE_MEMORY_MIB, NODE_DEADLINE)? {
            return Ok(if end == End::Exited(0) { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        (budgets::LAB, Driver::Firecracker)
    } else {
        (budgets::ALL, Driver::Qemu)
    };
    let filter = words.next().unwrap_or_default();
    conditions::print(driver)?;
    println!("{}", report::HEADER);
    let mut missed = false;
    for (group, budget) in groups.iter().filter(|(group, _)| group.contains(&filter)) {
        for line in budget().with_context(|| format!("measuring {group}"))? {
            println!("{line}");
            missed |= !line.is_kept();
        }
    }
    Ok(if missed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
