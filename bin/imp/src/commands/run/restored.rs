//! `imp run --template` and `--pool`: a VM whose program runs already.

use std::time::Instant;

use imp_embedded::Owner;
use imp_embedded::client::Error;
use imp_runtime::spec::{Child, Claim, Identity, WhenStopped};
use imp_runtime::status::VmStatus;

use super::timings::Timings;
use super::{Run, cancel, names, spec};
use crate::context::Context;
use crate::output;
use crate::session::{Interrupts, Written, exit_status};

/// What a VM is made of that does not boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    Template(String),
    Pool(String),
}

/// What the VM is to be like.
enum Wanted {
    Made(Child),
    Claimed(Claim),
}

impl Origin {
    pub(super) fn of(run: &Run) -> Option<Self> {
        let template = run.template.clone().map(Self::Template);
        template.or_else(|| run.pool.clone().map(Self::Pool))
    }
}

impl Run {
    pub(super) async fn run_restored(
        &self,
        context: &Context,
        origin: Origin,
        mut timings: Timings,
    ) -> anyhow::Result<u8> {
        let (wanted, identity) = (self.wanted(&origin)?, self.identity()?);
        let mut interrupts = Interrupts::catch()?;
        let owner = tokio::select! {
            owner = context.owner() => owner?,
            kind = interrupts.next() => return Ok(exit_status(kind)),
        };
        timings.stage("owner found");
        let start = Instant::now();
        // What was made must be known, to be removed.
        let (vm, interrupted) = interrupts.after(make(&owner, &origin, &wanted, &identity)).await;
        let vm = vm?;
        if let Some(kind) = interrupted {
            return cancel(&owner, &vm, kind, &mut interrupts).await;
        }
        timings.vm_stages(start, &vm.stages);
        timings.stage("VM ready");
        if self.timings {
            output::say(timings.table().trim_end());
        }
        if self.detach {
            output::print(&format!("{}\n", vm.id))?;
            return Ok(0);
        }
        let attached = owner.attach(vm.id.as_str(), self.attachment(None)).await?;
        // Its program has started long ago.
        let mut written = Written { bytes: 1, first: None };
        self.foreground(context, owner, &vm, attached, &mut interrupts, &mut written).await
    }

    fn wanted(&self, origin: &Origin) -> anyhow::Result<Wanted> {
        let labels = spec::labels(&Default::default(), &self.labels)?;
        let ports = self.publish.iter().map(|port| port.0).collect();
        let when_stopped = if self.rm { WhenStopped::Remove } else { WhenStopped::Keep };
        Ok(match origin {
            Origin::Template(_) => {
                let name = match &self.name {
                    Some(name) => name.clone(),
                    None => names::made_up()?,
                };
                Wanted::Made(Child {
                    hostname: self.hostname.as_deref().map(str::parse).transpose()?,
                    labels,
                    ports,
                    bridge: spec::bridge(self),
                    when_stopped,
                    ..Child::named(name.parse()?)
                })
            }
            // Without a name of its own it stays under the one that the pool gave it.
            Origin::Pool(_) => Wanted::Claimed(Claim {
                name: self.name.as_deref().map(str::parse).transpose()?,
                labels,
                ports,
                when_stopped: Some(when_stopped),
            }),
        })
    }

    fn identity(&self) -> anyhow::Result<Identity> {
        Ok(Identity {
            hostname: self.hostname.as_deref().map(str::parse).transpose()?,
            environment: self.variables.environment(|name| std::env::var_os(name))?,
            secrets: self.secrets.environment(|name| std::env::var_os(name))?,
        })
    }
}

async fn make(
    owner: &Owner,
    origin: &Origin,
    wanted: &Wanted,
    identity: &Identity,
) -> Result<VmStatus, Error> {
    let (Origin::Template(from) | Origin::Pool(from)) = origin;
    match wanted {
        Wanted::Made(child) => owner.restore(from, child, identity).await,
        Wanted::Claimed(claim) => Ok(owner.claim(from, claim, identity).await?.vm),
    }
}
