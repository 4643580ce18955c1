//! What a client asks of an owner about snapshots and pools.

use std::time::Duration;

use imp_protocol::runtime as wire;
use imp_protocol::runtime::pools_client::PoolsClient;
use imp_protocol::runtime::snapshots_client::SnapshotsClient;
use imp_runtime::spec::{Child, Claim, Identity};
use imp_runtime::status::VmStatus;
use imp_runtime::template::{BuildStep, TemplateSpec};
use imp_runtime::{Digest, WithSecrets};
use tonic::Streaming;

use super::{Error, Owner};
use crate::name::{PoolName, TemplateName};
use crate::report::{Pool, Suspended, Template};
use crate::wire as convert;

/// A template that is being made.
pub struct Build(Streaming<wire::BuildTemplateAnswer>);

/// What becomes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Building {
    Step(BuildStep),
    Made(Digest),
    /// At which step, and what the guest said.
    Failed(String),
}

impl Build {
    /// None: the owner went away before the end was known.
    pub async fn next(&mut self) -> Result<Option<Building>, Error> {
        use wire::build_template_answer::Answer;
        let Some(answer) = self.0.message().await? else { return Ok(None) };
        Ok(Some(match answer.answer.ok_or(convert::Error::Field("answer"))? {
            Answer::Step(step) => Building::Step(convert::step_from_wire(step)?),
            Answer::Made(digest) => Building::Made(convert::digest_from_wire(&digest)?),
            Answer::Failed(why) => Building::Failed(why),
        }))
    }
}

/// What became of a fork.
#[derive(Debug, Clone)]
pub struct Forked {
    /// In the order in which they were asked for; an error says why one did not come up.
    pub children: Vec<Result<VmStatus, String>>,
    /// How long the parent stood still.
    pub paused: Duration,
}

/// A VM of a pool.
#[derive(Debug, Clone)]
pub struct Claimed {
    pub vm: VmStatus,
    /// Whether it had been prepared before.
    pub was_ready: bool,
}

impl Owner {
    fn snapshots(&self) -> SnapshotsClient<imp_protocol::connection::Connection> {
        SnapshotsClient::new(self.connection.clone())
    }

    fn pools(&self) -> PoolsClient<imp_protocol::connection::Connection> {
        PoolsClient::new(self.connection.clone())
    }

    /// The build goes on when its client goes away.
    pub async fn build_template(
        &self,
        name: Option<&TemplateName>,
        spec: &TemplateSpec,
    ) -> Result<Build, Error> {
        let name = name.map(|name| name.as_str().to_owned()).unwrap_or_default();
        let request = wire::BuildTemplateRequest { name, spec: Some(convert::template_to_wire(spec)) };
        Ok(Build(self.snapshots().build_template(request).await?.into_inner()))
    }

    /// All templates, those used last first.
    pub async fn templates(&self) -> Result<Vec<Template>, Error> {
        self.listed(&[]).await
    }

    /// The template that a name, or the beginning of a digest, means.
    pub async fn template(&self, template: &str) -> Result<Template, Error> {
        let listed = self.listed(&[template.to_owned()]).await?;
        Ok(listed.into_iter().next().ok_or(convert::Error::Field("templates"))?)
    }

    async fn listed(&self, templates: &[String]) -> Result<Vec<Template>, Error> {
        let request = wire::ListTemplatesRequest { templates: templates.to_vec() };
        let answer = self.snapshots().list_templates(request).await?.into_inner();
        Ok(answer.templates.into_iter().map(convert::listed_from_wire).collect::<Result<_, _>>()?)
    }

    /// Its digest, and the bytes that became free.
    pub async fn remove_template(&self, template: &str) -> Result<(Digest, u64), Error> {
        let request = wire::RemoveTemplateRequest { template: template.to_owned() };
        let answer = self.snapshots().remove_template(request).await?.into_inner();
        Ok((convert::digest_from_wire(&answer.snapshot)?, answer.freed_bytes))
    }

    /// Hashes it again.
    pub async fn verify_template(&self, template: &str) -> Result<Digest, Error> {
        let request = wire::VerifyTemplateRequest { template: template.to_owned() };
        let answer = self.snapshots().verify_template(request).await?.into_inner();
        Ok(convert::digest_from_wire(&answer.snapshot)?)
    }

    /// Whether VMs could be made here of a template that is on its way; an error says why not.
    pub async fn would_restore(&self, snapshot: &Digest, manifest: Vec<u8>) -> Result<(), Error> {
        let request = wire::WouldRestoreRequest { snapshot: snapshot.to_string(), manifest: manifest.into() };
        self.snapshots().would_restore(request).await?;
        Ok(())
    }

    /// Has a template stay that was brought here, under this name.
    pub async fn keep_template(&self, name: &TemplateName, snapshot: &Digest) -> Result<(), Error> {
        let request =
            wire::KeepTemplateRequest { name: name.as_str().to_owned(), snapshot: snapshot.to_string() };
        self.snapshots().keep_template(request).await?;
        Ok(())
    }

    /// A VM made of a template, once its processes run.
    pub async fn restore(
        &self,
        template: &str,
        child: &Child,
        identity: &Identity,
    ) -> Result<VmStatus, Error> {
        let request = wire::RestoreRequest {
            template: template.to_owned(),
            child: Some(convert::child_to_wire(child)),
            identity: Some(convert::identity_to_wire(identity)),
        };
        Ok(convert::status_from_wire(self.snapshots().restore(request).await?.into_inner().vm)?)
    }

    pub async fn fork(
        &self,
        vm: &str,
        children: &[(Child, Identity)],
        secrets: WithSecrets,
    ) -> Result<Forked, Error> {
        let children = children.iter().map(|(child, identity)| wire::ForkChild {
            child: Some(convert::child_to_wire(child)),
            identity: Some(convert::identity_to_wire(identity)),
        });
        let request = wire::ForkRequest {
            vm: vm.to_owned(),
            children: children.collect(),
            with_secrets: secrets == WithSecrets::Allowed,
        };
        let answer = self.snapshots().fork(request).await?.into_inner();
        let children = answer.children.into_iter().map(|child| match child.came {
            Some(wire::forked_child::Came::Vm(vm)) => Ok(Ok(convert::status_from_wire(Some(vm))?)),
            Some(wire::forked_child::Came::Failed(why)) => Ok(Err(why)),
            None => Err(convert::Error::Field("came")),
        });
        Ok(Forked {
            children: children.collect::<Result<_, convert::Error>>()?,
            paused: Duration::from_nanos(answer.paused_nanoseconds),
        })
    }

    pub async fn pause(&self, vm: &str) -> Result<VmStatus, Error> {
        let request = wire::PauseRequest { vm: vm.to_owned() };
        Ok(convert::status_from_wire(self.snapshots().pause(request).await?.into_inner().vm)?)
    }

    pub async fn resume(&self, vm: &str) -> Result<VmStatus, Error> {
        let request = wire::ResumeRequest { vm: vm.to_owned() };
        Ok(convert::status_from_wire(self.snapshots().resume(request).await?.into_inner().vm)?)
    }

    /// Its name, and the digest of its snapshot.
    pub async fn suspend(&self, vm: &str, secrets: WithSecrets) -> Result<(String, Digest), Error> {
        let request =
            wire::SuspendRequest { vm: vm.to_owned(), with_secrets: secrets == WithSecrets::Allowed };
        let answer = self.snapshots().suspend(request).await?.into_inner();
        Ok((answer.name, convert::digest_from_wire(&answer.snapshot)?))
    }

    /// VMs that are put away, those used last first.
    pub async fn suspended(&self) -> Result<Vec<Suspended>, Error> {
        let answer = self.snapshots().list_suspended(wire::ListSuspendedRequest {}).await?.into_inner();
        Ok(answer.suspended.into_iter().map(convert::suspended_from_wire).collect::<Result<_, _>>()?)
    }

    /// Has one go on, by its name or the beginning of its snapshot's digest.
    pub async fn wake(&self, suspended: &str) -> Result<VmStatus, Error> {
        let request = wire::WakeRequest { suspended: suspended.to_owned() };
        Ok(convert::status_from_wire(self.snapshots().wake(request).await?.into_inner().vm)?)
    }

    /// Removes one for good.
    pub async fn discard(&self, suspended: &str) -> Result<String, Error> {
        let request = wire::DiscardRequest { suspended: suspended.to_owned() };
        Ok(self.snapshots().discard(request).await?.into_inner().name)
    }

    pub async fn create_pool(&self, name: &PoolName, template: &str, size: u32) -> Result<Pool, Error> {
        let request = wire::CreatePoolRequest { name: name.to_string(), template: template.to_owned(), size };
        Ok(convert::pool_from_wire(self.pools().create(request).await?.into_inner().pool)?)
    }

    pub async fn list_pools(&self) -> Result<Vec<Pool>, Error> {
        let answer = self.pools().list(wire::ListPoolsRequest {}).await?.into_inner();
        let pools = answer.pools.into_iter().map(|pool| convert::pool_from_wire(Some(pool)));
        Ok(pools.collect::<Result<_, _>>()?)
    }

    pub async fn remove_pool(&self, name: &str) -> Result<(), Error> {
        self.pools().remove(wire::RemovePoolRequest { name: name.to_owned() }).await?;
        Ok(())
    }

    /// Exactly one VM of the pool, which nobody else gets.
    pub async fn claim(&self, pool: &str, claim: &Claim, identity: &Identity) -> Result<Claimed, Error> {
        let request = wire::ClaimRequest {
            pool: pool.to_owned(),
            identity: Some(convert::identity_to_wire(identity)),
            claim: Some(convert::claim_to_wire(claim)),
        };
        let answer = self.pools().claim(request).await?.into_inner();
        Ok(Claimed { vm: convert::status_from_wire(answer.vm)?, was_ready: answer.was_ready })
    }
}
