//! What a husk finds of one that was killed: it goes on where the machine can be told apart from one that may be nobody's.

use std::time::Duration;

use imp_runtime::status::{State, VmStatus};
use imp_runtime::{Digest, Runtime, VmId};
use tokio::time::timeout;

use crate::lifecycle::Machine;
use crate::prepare::LABEL;
use crate::protocol::Id;

/// How long a machine may take to be found, or to be gone.
const SETTLED: Duration = Duration::from_secs(90);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "VM {name} in this workdir is not this husk's: end it with `imp rm -f {name}`, or choose its --vm-id, or another --workdir"
    )]
    Foreign { name: String },
    #[error("there are machines {one} and {other} in this workdir: a husk has one")]
    Two { one: VmId, other: VmId },
    #[error("the machine {id} of the husk before is neither there nor gone: it is {state:?}")]
    Unsettled { id: VmId, state: State },
    #[error("what is left of the machine {id} cannot be removed")]
    NotRemoved {
        id: VmId,
        #[source]
        source: Box<imp_runtime::Error>,
    },
}

/// The machine that lives in this workdir, once what is left of others is gone. One that sleeps on another snapshot than is
/// wanted is nobody's, and goes, too.
pub(crate) async fn adopt(
    runtime: &Runtime,
    name: &Id,
    wanted: Option<Digest>,
) -> Result<Option<(VmId, Machine)>, Error> {
    match lives(runtime, name).await? {
        Some((id, Machine::Dormant(snapshot))) if wanted.is_some_and(|wanted| wanted != snapshot) => {
            tracing::info!(vm = %id, "sleeps on another snapshot, and goes");
            let killed = runtime.kill(&id).await.map(drop);
            killed.map_err(|source| Error::NotRemoved { id: id.clone(), source: Box::new(source) })?;
            remove(runtime, &id).await?;
            Ok(None)
        }
        machine => Ok(machine),
    }
}

async fn lives(runtime: &Runtime, name: &Id) -> Result<Option<(VmId, Machine)>, Error> {
    let vms = runtime.list();
    let is_ours = |vm: &VmStatus| vm.labels.get(LABEL).is_some_and(|label| label == name.as_str());
    if let Some(foreign) = vms.iter().find(|vm| !is_ours(vm) && vm.state != State::Stopped) {
        return Err(Error::Foreign { name: foreign.name.to_string() });
    }
    let mut found: Option<(VmId, Machine)> = None;
    for vm in vms.iter().filter(|vm| vm.labels.contains_key(LABEL)) {
        let id = &vm.id;
        match (settled(runtime, id).await?, &found) {
            (None, _) => remove(runtime, id).await?,
            (Some(_), Some((one, _))) => return Err(Error::Two { one: one.clone(), other: id.clone() }),
            (Some(machine), None) => found = Some((id.clone(), machine)),
        }
    }
    Ok(found)
}

/// None: it has ended. One that was half activated has by then: the engine ends what was never confirmed.
async fn settled(runtime: &Runtime, id: &VmId) -> Result<Option<Machine>, Error> {
    let Ok(mut status) = runtime.watch(id) else { return Ok(None) };
    let settles =
        |vm: &std::sync::Arc<VmStatus>| matches!(vm.state, State::Prepared | State::Running | State::Stopped);
    let vm = match timeout(SETTLED, status.wait_for(settles)).await {
        Ok(Ok(vm)) => vm.clone(),
        // It removed itself.
        Ok(Err(_)) => return Ok(None),
        Err(_) => {
            let state = runtime.get(id).map_or(State::Stopped, |vm| vm.state);
            return Err(Error::Unsettled { id: id.clone(), state });
        }
    };
    Ok(match (vm.state, vm.made_of) {
        (State::Prepared, Some(snapshot)) => Some(Machine::Dormant(snapshot)),
        (State::Running, _) => Some(Machine::Active),
        _ => None,
    })
}

async fn remove(runtime: &Runtime, id: &VmId) -> Result<(), Error> {
    match runtime.remove(id).await {
        Ok(()) | Err(imp_runtime::Error::NoSuchVm { .. }) => Ok(()),
        Err(source) => Err(Error::NotRemoved { id: id.clone(), source: Box::new(source) }),
    }
}
