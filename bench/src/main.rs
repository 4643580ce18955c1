//! Measures Imp against its budgets: one line each, and exit status 1 when one is missed.
//!
//! A budget is a ratio to a floor that is measured in the same run, or a size. Times alternate between ours and the
//! floor, round by round, so that both see the same machine; their medians are compared.

mod bare;
mod budgets;
mod conditions;
mod guest;
mod machine;
mod measure;
mod programs;
mod report;

use std::process::ExitCode;

use anyhow::Context as _;

fn main() -> anyhow::Result<ExitCode> {
    let filter = std::env::args().nth(1).unwrap_or_default();
    conditions::print()?;
    println!("{}", report::HEADER);
    let mut missed = false;
    for (group, budget) in budgets::ALL.iter().filter(|(group, _)| group.contains(&filter)) {
        for line in budget().with_context(|| format!("measuring {group}"))? {
            println!("{line}");
            missed |= !line.is_kept();
        }
    }
    Ok(if missed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
