//! `imp image rm`

use clap::Args;
use imp_runtime::pins;
use imp_storage::store::{Error, Removal};

use super::prune::tell;
use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Remove images
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Name, digest, or the beginning of a digest
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// With all its names, also when a VM uses it (the VM keeps its disk)
    #[arg(short, long)]
    force: bool,
}

impl Rm {
    pub(super) fn run(self, context: &Context) -> Outcome {
        let store = context.store()?;
        let removal = if self.force { Removal::Forced } else { Removal::Careful };
        let mut code = 0;
        for name in &self.images {
            match store.remove(name, removal) {
                Ok(removed) => tell(&removed)?,
                Err(error) => {
                    output::complain(&match error {
                        Error::InUse { owners, .. } => in_use(name, &names(context, &owners)),
                        error => format!("{:#}", anyhow::Error::from(error)),
                    });
                    code = 1;
                }
            }
        }
        Ok(code)
    }
}

/// The names of VMs that own pins; an id where the name cannot be found out, and what else owns a pin as it is.
fn names(context: &Context, owners: &[String]) -> Vec<String> {
    let listed = context.block_on(async {
        match context.owner_if_any().await {
            Ok(Some(owner)) => owner.list().await.unwrap_or_default(),
            Ok(None) | Err(_) => Vec::new(),
        }
    });
    let listed = listed.unwrap_or_default();
    let name = |owner: &String| {
        let Some(id) = pins::vm_of(owner) else { return owner.clone() };
        let vm = listed.iter().find(|vm| vm.id == id);
        vm.map_or_else(|| id.to_string(), |vm| vm.name.to_string())
    };
    owners.iter().map(name).collect()
}

fn in_use(image: &str, vms: &[String]) -> String {
    let (noun, pronoun) = if vms.len() == 1 { ("VM", "it") } else { ("VMs", "them") };
    format!(
        "{image} is used by the {noun} {}; remove {pronoun} first: imp rm -f {}",
        vms.join(", "),
        vms.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_uses_an_image_is_named_with_the_way_out() {
        let one = in_use("app", &["web".into()]);
        assert_eq!(one, "app is used by the VM web; remove it first: imp rm -f web");
        let two = in_use("app", &["web".into(), "db".into()]);
        assert_eq!(two, "app is used by the VMs web, db; remove them first: imp rm -f web db");
    }
}
