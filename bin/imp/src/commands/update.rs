//! `imp update`

use clap::Args;
use imp_runtime::spec::Memory;
use imp_runtime::status::BalloonFacts;

use crate::commands::each::each;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;
use crate::value::show_bytes;

/// Change what running VMs may use
///
/// Of VMs that were started with --balloon. A guest gives back what it can do without, and takes it again, as much as it
/// needs, before it would end a program for want of memory.
#[derive(Debug, Args)]
pub(crate) struct Update {
    /// Memory that the guest keeps, at most what it was started with
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true, required = true)]
    memory: Memory,
    /// Name, id, or the beginning of an id
    #[arg(required = true, value_name = "VM")]
    vms: Vec<String>,
}

impl Update {
    pub(crate) fn run(self, context: &Context) -> Outcome {
        let memory = self.memory;
        each(context, &self.vms, |owner, vm| async move {
            if let Some(less) = missing(owner.set_memory(vm, memory).await?) {
                output::complain(&format!("{vm}: {less}"));
            }
            Ok(vm.to_owned())
        })
    }
}

/// What a guest keeps for itself of what was wanted back.
fn missing(balloon: BalloonFacts) -> Option<String> {
    let kept = balloon.wanted_bytes.saturating_sub(balloon.given_bytes);
    (kept > 0).then(|| {
        format!(
            "its guest needs {} of the {} that it was to give back",
            show_bytes(kept),
            show_bytes(balloon.wanted_bytes)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_does_not_give_back_is_said() {
        let balloon = |given_mib: u64| BalloonFacts { wanted_bytes: 64 << 20, given_bytes: given_mib << 20 };
        assert_eq!(missing(balloon(64)), None);
        let text = "its guest needs 24 MiB of the 64 MiB that it was to give back";
        assert_eq!(missing(balloon(40)).as_deref(), Some(text));
    }
}
