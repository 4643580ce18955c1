//! The only work on a claim's way: the machine goes on as somebody's, confirms that it is one of its own, and is served.
//!
//! Whoever asks has a machine that confirmed its entropy, its clock and its identity, or none: one that did not is ended, and the
//! husk with it, so that nothing that has seen a secret is ever given to somebody else.

use std::sync::Arc;

use imp_protocol::causes::chain;
use imp_runtime::VmId;
use imp_runtime::spec::Identity;
use imp_runtime::status::VmStatus;

use crate::husk::{Deadline, Husk};
use crate::lifecycle::{Ask, Beginning, Outcome, Refused};
use crate::network;
use crate::protocol::{Activate, Answer, Stages};
use crate::refusal::Refusal;

impl Husk {
    pub(crate) async fn activate(
        self: &Arc<Self>,
        request: Activate,
        deadline: Deadline,
    ) -> Result<Answer, Refusal> {
        self.is_called(request.vm.as_ref())?;
        self.may(Ask::Activate { snapshot: None })?;
        let snapshot = match &request.snapshot {
            Some(named) => Some(self.digest_in(&named.directory).await?),
            None => request.expected,
        };
        // Without a directory it is known by its digest alone, and must be there.
        let beginning = match (&request.snapshot, self.begin_activation(snapshot)?) {
            (None, Beginning::Nothing(_)) => {
                self.over(Outcome::Unchanged);
                return Err(Refused::NotPrepared.into());
            }
            (_, beginning) => beginning,
        };
        let husk = Arc::clone(self);
        let whole = async move {
            let (outcome, activated) = husk.activate_whole(request, beginning).await;
            husk.over(outcome);
            activated
        };
        let stages = self.in_time(deadline, whole, drop).await?;
        tracing::info!(state = "active", "active");
        Ok(Answer { stages, facts: Some(self.facts()), ..Answer::good() })
    }

    async fn activate_whole(
        self: &Arc<Self>,
        request: Activate,
        beginning: Beginning,
    ) -> (Outcome, Result<Stages, Refusal>) {
        let (id, mut stages) = match self.dormant(&request, beginning).await {
            Ok(dormant) => dormant,
            Err((outcome, refusal)) => return (outcome, Err(refusal)),
        };
        let Activate { environment, secrets, .. } = request;
        let identity = Identity { hostname: None, environment, secrets };
        match self.runtime.activate(&id, identity).await {
            Ok(vm) => {
                of_the_guest(&vm, &mut stages);
                (Outcome::Activated, Ok(stages))
            }
            Err(error) => {
                let refusal = Refusal::of_activation(error);
                tracing::error!(error = chain(&refusal), "the machine was not activated: the husk ends");
                (Outcome::NotActivated, Err(refusal))
            }
        }
    }

    /// The machine that is to go on, which has not been asked for anything yet.
    async fn dormant(
        self: &Arc<Self>,
        request: &Activate,
        beginning: Beginning,
    ) -> Result<(VmId, Stages), (Outcome, Refusal)> {
        match (beginning, &request.snapshot) {
            (Beginning::Nothing(snapshot), Some(named)) => {
                let made = self.make(snapshot, named, request.reach).await;
                made.map_err(|refusal| (Outcome::NotPrepared, refusal))
            }
            (Beginning::Dormant | Beginning::Nothing(_), _) => {
                let fits = self.fits(request);
                fits.map(|id| (id, Stages::default())).map_err(|refusal| (Outcome::Unchanged, refusal))
            }
        }
    }

    /// Whether the machine that is prepared is what the request says.
    fn fits(&self, request: &Activate) -> Result<VmId, Refusal> {
        let id = self.machine().ok_or(Refused::NotPrepared)?;
        let vm = self.vm_status(&id)?;
        if let (Some(is), Some(expected)) = (vm.made_of, request.expected)
            && is != expected
        {
            return Err(Refusal::OtherDigest { is, expected });
        }
        network::keeps(vm.network.mode, vm.network.egress.as_ref(), request.reach)?;
        Ok(id)
    }
}

/// What the engine and the guest say of how it went on.
fn of_the_guest(vm: &VmStatus, stages: &mut Stages) {
    let Some(wake) = &vm.wake else { return };
    stages.push("resume", wake.resume);
    stages.push("guest_ready", wake.reach);
    stages.push("handshake", wake.confirm);
    for (repair, took) in &wake.repairs {
        stages.push(format!("repair_{repair}"), *took);
    }
}
