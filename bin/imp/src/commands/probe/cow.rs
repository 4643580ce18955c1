//! `imp probe cow`

use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use imp_embedded::Owner;
use imp_embedded::client::Running;
use imp_runtime::spec::{Child, Identity, WhenStopped};
use imp_runtime::status::VmStatus;
use tokio::signal::unix::SignalKind;

use super::verdict::{Measured, Report};
use crate::commands::run::names;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::session::{Interrupts, exit_status};
use crate::value::show_bytes;

/// Label of VMs that are there to be measured.
const LABEL: &str = "imp.probe";

/// Whether VMs of one template share its memory, each in a memory control group of its own where this machine gives one
///
/// Makes VMs of a template, measures what their VMMs have in memory, and removes them. Exit status 1 (HUSK-DESIGN-FAILED)
/// when they do not share what they should, 2 (HUSK-SETUP-LIMITATION) when that could not be measured.
#[derive(Debug, Args)]
pub(crate) struct Cow {
    /// Name, or the beginning of a digest [default: the template used last]
    #[arg(long, value_name = "TEMPLATE")]
    template: Option<String>,
    /// How many VMs: 3 or more, because of two one page of difference would decide
    #[arg(short = 'n', long, value_name = "NUMBER", allow_hyphen_values = true,
          default_value = "4", value_parser = clap::value_parser!(u16).range(3..=64))]
    number: u16,
    /// Form of the report
    #[arg(short, long, value_enum, value_name = "FORM", default_value = "text")]
    output: Form,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// For people
    Text,
    /// One JSON document
    Json,
}

/// What came of the measuring.
enum Came {
    Measured(Vec<Measured>),
    Interrupted(SignalKind),
}

impl Cow {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let came = context.block_on(async {
            // Before this, a signal ends the command: there is nothing yet that it would leave.
            let mut interrupts = Interrupts::catch()?;
            let found = async {
                let owner = context.owner().await?;
                let template = self.template(&owner).await?;
                anyhow::Ok((owner, template))
            };
            let (owner, template) = tokio::select! {
                found = found => found?,
                kind = interrupts.next() => return Ok(Came::Interrupted(kind)),
            };
            let mut vms = Vec::new();
            let came = self.measure(&owner, &template, &mut vms, &mut interrupts).await;
            remove(&owner, &vms, &mut interrupts).await;
            came
        });
        let report = match came.and_then(|came| came) {
            Ok(Came::Measured(measured)) => Report::of(&measured),
            Ok(Came::Interrupted(kind)) => return Ok(exit_status(kind)),
            Err(error) => Report::limited(format!("{error:#}")),
        };
        output::print(&match self.output {
            Form::Text => text(&report),
            Form::Json => output::json(&report),
        })?;
        Ok(report.verdict.exit_status())
    }

    async fn template(&self, owner: &Owner) -> anyhow::Result<String> {
        if let Some(template) = &self.template {
            return Ok(template.clone());
        }
        let last = owner.templates().await?.into_iter().next();
        let last = last.context("there is no template: make one with `imp template build`")?;
        Ok(last.snapshot.to_string())
    }

    /// `vms`: those that are there, also after a failure.
    async fn measure(
        &self,
        owner: &Owner,
        template: &str,
        vms: &mut Vec<VmStatus>,
        interrupts: &mut Interrupts,
    ) -> anyhow::Result<Came> {
        for _ in 0..self.number {
            let child = Child {
                labels: [(LABEL.to_owned(), "cow".to_owned())].into(),
                when_stopped: WhenStopped::Remove,
                ..Child::named(names::made_up()?.parse()?)
            };
            // What was made must be known, to be removed.
            let identity = Identity::default();
            let (vm, interrupted) = interrupts.after(owner.restore(template, &child, &identity)).await;
            vms.push(vm?);
            if let Some(kind) = interrupted {
                return Ok(Came::Interrupted(kind));
            }
        }
        // All of them live now: what they share is shared by all.
        let usages = tokio::select! {
            usages = owner.usage(vms.iter().map(|vm| vm.id.to_string()).collect()) => usages?,
            kind = interrupts.next() => return Ok(Came::Interrupted(kind)),
        };
        let mut measured = Vec::new();
        for vm in vms.iter() {
            let Some(usage) = usages.iter().find(|usage| usage.id == vm.id.as_str()) else {
                bail!("{} ended before it was measured", vm.name);
            };
            measured.push(Measured {
                name: vm.name.to_string(),
                memory: usage.host_memory,
                group: group(vm),
            });
        }
        Ok(Came::Measured(measured))
    }
}

/// A signal that comes meanwhile does not wait for that.
async fn remove(owner: &Owner, vms: &[VmStatus], interrupts: &mut Interrupts) {
    for (number, vm) in vms.iter().enumerate() {
        tokio::select! {
            removed = owner.remove(vm.id.as_str(), Running::EndFirst) => match removed {
                Err(error) if !error.is_unknown_vm() => {
                    output::warn(&format!("{error:#}; `imp rm -f {}` removes it", vm.name));
                }
                Ok(_) | Err(_) => {}
            },
            _ = interrupts.next() => {
                let left: Vec<&str> = vms.iter().skip(number).map(|vm| vm.name.as_str()).collect();
                output::warn(&format!("VMs are left; `imp rm -f {}` removes them", left.join(" ")));
                return;
            }
        }
    }
}

/// The VM's own memory control group, of either version, with what it is charged.
fn group(vm: &VmStatus) -> Option<(String, u64)> {
    let charged = |limit: &Path| {
        let file = match limit.file_name()?.to_str()? {
            "memory.max" => "memory.current",
            "memory.limit_in_bytes" => "memory.usage_in_bytes",
            _ => return None,
        };
        let group = limit.parent()?;
        let bytes = fs::read_to_string(group.join(file)).ok()?.trim().parse().ok()?;
        Some((group.display().to_string(), bytes))
    };
    vm.limits.iter().find_map(|limit| charged(&limit.path))
}

fn text(report: &Report) -> String {
    let mut text = String::new();
    if let Some(sharing) = &report.sharing {
        let headings = ["VM", "RESIDENT", "PRIVATE DIRTY", "COMMON", "PAYS", "CGROUP CHARGED"];
        let mut lines = vec![headings.map(str::to_owned).to_vec()];
        lines.extend(report.vms.iter().map(|vm| {
            vec![
                vm.name.clone(),
                show_bytes(vm.resident),
                show_bytes(vm.private_dirty),
                show_bytes(vm.common),
                show_bytes(vm.bill),
                vm.cgroup_charged.map_or_else(|| "no group of its own".to_owned(), show_bytes),
            ]
        }));
        text.push_str(&output::table(&lines));
        text.push('\n');
        let said = |bytes: u64| format!("{bytes} ({})", show_bytes(bytes));
        text.push_str(&output::table(&[
            vec!["NaiveSum".into(), said(sharing.naive_sum)],
            vec!["SharedResident".into(), said(sharing.shared_resident)],
            vec!["TotalPrivateDirty".into(), said(sharing.total_private_dirty)],
            vec!["AggregatePhysical".into(), said(sharing.aggregate_physical)],
            vec!["CoWSavings".into(), said(sharing.cow_savings)],
            vec!["CoWSurvives".into(), sharing.cow_survives.to_string()],
            vec!["DirtyPerVM".into(), sharing.dirty_per_vm.to_string()],
        ]));
        text.push('\n');
    }
    text + &format!("{}: {}\n", report.verdict.tag(), report.why)
}
