//! The same thing done to several VMs: one failure does not keep the others from it.

use std::future::Future;

use imp_embedded::Owner;

use crate::context::Context;
use crate::exit::Outcome;
use crate::output;

/// Does it to all at once; prints what each came to, in the order in which they were named.
pub(crate) fn each<'a, F>(context: &Context, vms: &'a [String], act: impl Fn(Owner, &'a str) -> F) -> Outcome
where
    F: Future<Output = anyhow::Result<String>>,
{
    let done = context.block_on(async {
        let owner = context.owner().await?;
        anyhow::Ok(futures_util::future::join_all(vms.iter().map(|vm| act(owner.clone(), vm))).await)
    })??;
    let mut code = 0;
    for result in done {
        match result {
            Ok(line) => output::print(&format!("{line}\n"))?,
            Err(error) => {
                output::complain(&format!("{error:#}"));
                code = 1;
            }
        }
    }
    Ok(code)
}
