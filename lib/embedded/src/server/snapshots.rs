//! The service of `snapshots.proto` over the engine.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::Stream;
use imp_protocol::runtime as wire;
use imp_protocol::runtime::snapshots_server::Snapshots as Service;
use imp_runtime::template::{BuildStep, Template};
use imp_runtime::{Digest, ForkRequest, WithSecrets};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status};

use super::{Server, encode};
use crate::name::TemplateName;
use crate::pools::pool_of;
use crate::refusal::{chain, invalid, refusal};
use crate::under_way::NotDone;
use crate::wire as convert;

mod put_away;

/// Most children of one fork.
const MOST_CHILDREN: usize = 1000;

/// The part of an owner that makes and uses snapshots.
#[derive(Clone)]
pub(crate) struct Snapshots(pub(crate) Server);

#[tonic::async_trait]
impl Service for Snapshots {
    type BuildTemplateStream = Pin<Box<dyn Stream<Item = Result<wire::BuildTemplateAnswer, Status>> + Send>>;

    async fn build_template(
        &self,
        request: Request<wire::BuildTemplateRequest>,
    ) -> Result<Response<Self::BuildTemplateStream>, Status> {
        let request = request.into_inner();
        let name = match request.name.as_str() {
            "" => None,
            name => Some(name.parse::<TemplateName>().map_err(|error| invalid(&error))?),
        };
        let spec = request.spec.ok_or_else(|| Status::invalid_argument("no spec"))?;
        let spec = convert::template_from_wire(spec).map_err(|error| invalid(&error))?;
        // A few steps at the most: as many as the client has asked to be waited for.
        let (answers, stream) = mpsc::unbounded_channel();
        let server = self.0.clone();
        // Also while no machine of it runs, and only files are hashed.
        let step = self.0.under_way.begin()?;
        tokio::spawn(async move {
            let steps = answers.clone();
            // A client that hung up does not hear of it.
            let told = move |step: BuildStep| {
                let step = wire::build_template_answer::Answer::Step(convert::step_to_wire(&step));
                let _ = steps.send(Ok(wire::BuildTemplateAnswer { answer: Some(step) }));
            };
            let answer = match server.runtime.template_build(spec, told).await {
                Ok(snapshot) => match server.lead(name, snapshot).await {
                    Ok(()) => wire::build_template_answer::Answer::Made(snapshot.to_string()),
                    Err(status) => wire::build_template_answer::Answer::Failed(status.message().to_owned()),
                },
                // Whole: it has what the guest said, and does not travel in a header.
                Err(error) => {
                    wire::build_template_answer::Answer::Failed(imp_protocol::causes::chain(&error))
                }
            };
            drop(step);
            let _ = answers.send(Ok(wire::BuildTemplateAnswer { answer: Some(answer) }));
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(stream))))
    }

    async fn list_templates(
        &self,
        request: Request<wire::ListTemplatesRequest>,
    ) -> Result<Response<wire::ListTemplatesResponse>, Status> {
        let mut templates = self.0.runtime.templates().await.map_err(|error| refusal(&error))?;
        let asked = request.into_inner().templates;
        if !asked.is_empty() {
            templates = self.0.among(&templates, &asked).await?;
        }
        let names = self.0.on_records(|server| server.names.by_snapshot()).await?;
        let listed = templates.into_iter().map(|template| {
            let names = names.get(&template.snapshot).cloned().unwrap_or_default();
            convert::listed_to_wire(template, names)
        });
        Ok(Response::new(wire::ListTemplatesResponse { templates: listed.collect() }))
    }

    async fn remove_template(
        &self,
        request: Request<wire::RemoveTemplateRequest>,
    ) -> Result<Response<wire::RemoveTemplateResponse>, Status> {
        let _step = self.0.under_way.begin()?;
        let asked = request.into_inner().template;
        let snapshot = self.0.template(&asked).await?;
        let templates = self.0.runtime.templates().await.map_err(|error| refusal(&error))?;
        let users = templates.into_iter().find(|template| template.snapshot == snapshot);
        let users = users.map(|template| template.pinned_by).unwrap_or_default();
        if !users.is_empty() {
            return Err(Status::failed_precondition(self.0.in_use(&asked, &users)));
        }
        let removed = self.0.runtime.template_remove(&snapshot).await;
        let freed_bytes = removed.map_err(|error| refusal(&error))?;
        self.0.on_records(move |server| server.names.forget(&snapshot)).await?;
        Ok(Response::new(wire::RemoveTemplateResponse { snapshot: snapshot.to_string(), freed_bytes }))
    }

    async fn verify_template(
        &self,
        request: Request<wire::VerifyTemplateRequest>,
    ) -> Result<Response<wire::VerifyTemplateResponse>, Status> {
        let snapshot = self.0.template(&request.into_inner().template).await?;
        self.0.runtime.template_verify(&snapshot).await.map_err(|error| refusal(&error))?;
        Ok(Response::new(wire::VerifyTemplateResponse { snapshot: snapshot.to_string() }))
    }

    async fn would_restore(
        &self,
        request: Request<wire::WouldRestoreRequest>,
    ) -> Result<Response<wire::WouldRestoreResponse>, Status> {
        let wire::WouldRestoreRequest { snapshot, manifest } = request.into_inner();
        let snapshot = convert::digest_from_wire(&snapshot).map_err(|error| invalid(&error))?;
        let judged = self.0.runtime.would_restore(&snapshot, &manifest).await;
        judged.map_err(|error| refusal(&error))?;
        Ok(Response::new(wire::WouldRestoreResponse {}))
    }

    async fn keep_template(
        &self,
        request: Request<wire::KeepTemplateRequest>,
    ) -> Result<Response<wire::KeepTemplateResponse>, Status> {
        let _step = self.0.under_way.begin()?;
        let wire::KeepTemplateRequest { name, snapshot } = request.into_inner();
        let name: TemplateName = name.parse().map_err(|error| invalid(&error))?;
        let snapshot = convert::digest_from_wire(&snapshot).map_err(|error| invalid(&error))?;
        self.0.runtime.template_keep(&snapshot).await.map_err(|error| refusal(&error))?;
        self.0.lead(Some(name), snapshot).await?;
        Ok(Response::new(wire::KeepTemplateResponse {}))
    }

    async fn restore(
        &self,
        request: Request<wire::RestoreRequest>,
    ) -> Result<Response<wire::RestoreResponse>, Status> {
        let request = request.into_inner();
        let child = request.child.ok_or_else(|| Status::invalid_argument("no child"))?;
        let child = convert::child_from_wire(child).map_err(|error| invalid(&error))?;
        let identity = convert::identity_from_wire(request.identity).map_err(|error| invalid(&error))?;
        let snapshot = self.0.template(&request.template).await?;
        let runtime = self.0.runtime.clone();
        // Half way it would be what nobody knows of.
        let restored =
            self.0.under_way.whole(async move { runtime.restore(&snapshot, child, identity).await });
        let vm = restored.await?.map_err(|error| refusal(&error))?;
        tracing::info!(vm = %vm.id, template = %snapshot.short(), "restored");
        Ok(Response::new(wire::RestoreResponse { vm: Some(encode(&vm)?) }))
    }

    async fn fork(
        &self,
        request: Request<wire::ForkRequest>,
    ) -> Result<Response<wire::ForkResponse>, Status> {
        let request = request.into_inner();
        let id = self.0.resolve(&request.vm)?;
        if !(1..=MOST_CHILDREN).contains(&request.children.len()) {
            return Err(Status::invalid_argument(format!("1 to {MOST_CHILDREN} children are possible")));
        }
        let children = request.children.into_iter().map(|child| {
            let named = child.child.ok_or(convert::Error::Field("child"))?;
            Ok((convert::child_from_wire(named)?, convert::identity_from_wire(child.identity)?))
        });
        let children = children.collect::<Result<_, convert::Error>>().map_err(|error| invalid(&error))?;
        let secrets = with_secrets(request.with_secrets);
        let (runtime, asked) = (self.0.runtime.clone(), ForkRequest { children, secrets });
        let forked = self.0.under_way.whole(async move { runtime.fork(&id, asked).await });
        let forked = forked.await?.map_err(|error| refusal(&error))?;
        let children = forked.children.into_iter().map(|child| {
            let came = match child {
                Ok(vm) => wire::forked_child::Came::Vm(encode(&vm)?),
                Err(error) => wire::forked_child::Came::Failed(chain(&error)),
            };
            Ok(wire::ForkedChild { came: Some(came) })
        });
        let children = children.collect::<Result<_, Status>>()?;
        let paused_nanoseconds = u64::try_from(forked.paused.as_nanos()).unwrap_or(u64::MAX);
        Ok(Response::new(wire::ForkResponse { children, paused_nanoseconds }))
    }

    async fn pause(
        &self,
        request: Request<wire::PauseRequest>,
    ) -> Result<Response<wire::PauseResponse>, Status> {
        let id = self.0.resolve(&request.into_inner().vm)?;
        let vm = self.0.runtime.pause(&id).await.map_err(|error| refusal(&error))?;
        Ok(Response::new(wire::PauseResponse { vm: Some(encode(&vm)?) }))
    }

    async fn resume(
        &self,
        request: Request<wire::ResumeRequest>,
    ) -> Result<Response<wire::ResumeResponse>, Status> {
        let id = self.0.resolve(&request.into_inner().vm)?;
        let vm = self.0.runtime.resume(&id).await.map_err(|error| refusal(&error))?;
        Ok(Response::new(wire::ResumeResponse { vm: Some(encode(&vm)?) }))
    }

    async fn suspend(
        &self,
        request: Request<wire::SuspendRequest>,
    ) -> Result<Response<wire::SuspendResponse>, Status> {
        let request = request.into_inner();
        let id = self.0.resolve(&request.vm)?;
        let secrets = with_secrets(request.with_secrets);
        let name = self.0.runtime.get(&id).map_err(|error| refusal(&error))?.name.to_string();
        let runtime = self.0.runtime.clone();
        let suspended = self.0.under_way.whole(async move { runtime.suspend(&id, secrets).await });
        let snapshot = suspended.await?.map_err(|error| refusal(&error))?;
        Ok(Response::new(wire::SuspendResponse { name, snapshot: snapshot.to_string() }))
    }

    async fn list_suspended(
        &self,
        _: Request<wire::ListSuspendedRequest>,
    ) -> Result<Response<wire::ListSuspendedResponse>, Status> {
        let suspended = self.0.runtime.suspended().await.map_err(|error| refusal(&error))?;
        let suspended = suspended.into_iter().map(convert::suspended_to_wire).collect();
        Ok(Response::new(wire::ListSuspendedResponse { suspended }))
    }

    async fn wake(
        &self,
        request: Request<wire::WakeRequest>,
    ) -> Result<Response<wire::WakeResponse>, Status> {
        let all = self.0.runtime.suspended().await.map_err(|error| refusal(&error))?;
        let snapshot = put_away::to_wake(&all, &request.into_inner().suspended).map_err(unknown)?.snapshot;
        let runtime = self.0.runtime.clone();
        let woken = self.0.under_way.whole(async move { runtime.wake(&snapshot).await });
        let vm = woken.await?.map_err(|error| refusal(&error))?;
        Ok(Response::new(wire::WakeResponse { vm: Some(encode(&vm)?) }))
    }

    async fn discard(
        &self,
        request: Request<wire::DiscardRequest>,
    ) -> Result<Response<wire::DiscardResponse>, Status> {
        let all = self.0.runtime.suspended().await.map_err(|error| refusal(&error))?;
        let suspended = put_away::to_discard(&all, &request.into_inner().suspended).map_err(unknown)?;
        self.0.runtime.discard(&suspended.snapshot).await.map_err(|error| refusal(&error))?;
        Ok(Response::new(wire::DiscardResponse { name: suspended.name.to_string() }))
    }
}

impl Server {
    /// The snapshot of a template, by a name or the beginning of a digest.
    pub(super) async fn template(&self, asked: &str) -> Result<Digest, Status> {
        let text = asked.to_owned();
        let named = self.on_records(move |server| server.names.find(&text)).await?;
        let found = match named {
            // One that was pruned leaves its name behind.
            Some(snapshot) => self.runtime.find_template(&snapshot.to_string()).await,
            None => self.runtime.find_template(asked).await,
        };
        found.map_err(|error| {
            if let imp_runtime::Error::NotATemplate { .. } = error {
                return refusal(&error);
            }
            let shown: String = asked.chars().take(100).collect();
            let hint = "`imp template ls` lists all, `imp template build` makes one";
            Status::not_found(format!("there is no template {shown:?} ({}); {hint}", chain(&error)))
        })
    }

    /// Of these templates those that are asked for, in that order.
    async fn among(&self, templates: &[Template], asked: &[String]) -> Result<Vec<Template>, Status> {
        let mut found = Vec::new();
        for text in asked {
            let snapshot = self.template(text).await?;
            let one = templates.iter().find(|template| template.snapshot == snapshot);
            found.push(one.cloned().ok_or_else(|| {
                let shown = snapshot.short();
                let ways = format!(
                    "`imp template verify {shown}` says what is damaged, `imp template rm {shown}` removes it"
                );
                Status::failed_precondition(format!("the template {shown} cannot be described; {ways}"))
            })?);
        }
        Ok(found)
    }

    async fn lead(&self, name: Option<TemplateName>, snapshot: Digest) -> Result<(), Status> {
        let Some(name) = name else { return Ok(()) };
        self.on_records(move |server| server.names.lead(&name, &snapshot)).await
    }

    /// Reads or writes records where that may take its time.
    async fn on_records<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, crate::records::Error> + Send + 'static,
    ) -> Result<T, Status> {
        let server = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&server)).await;
        done.map_err(|_| NotDone::Ended)?.map_err(|error| Status::internal(chain(&error)))
    }

    /// Who uses a template, with the way out.
    fn in_use(&self, template: &str, users: &[String]) -> String {
        let vms = self.runtime.list();
        let of_vm = |user: &String| {
            let id = imp_runtime::pins::vm_of(user)?;
            let vm = vms.iter().find(|vm| vm.id == id);
            Some(vm.map_or_else(|| id.to_string(), |vm| vm.name.to_string()))
        };
        let pools: Vec<&str> = users.iter().filter_map(|user| pool_of(user)).collect();
        // Prepared VMs of a pool go with it.
        let of_pool = |vm: &Arc<imp_runtime::status::VmStatus>| {
            vm.state == imp_runtime::status::State::Prepared && vm.labels.contains_key(crate::pools::LABEL)
        };
        let pooled: Vec<String> = vms.iter().filter(|vm| of_pool(vm)).map(|vm| vm.name.to_string()).collect();
        let named: Vec<String> =
            users.iter().filter_map(of_vm).filter(|name| !pooled.contains(name)).collect();
        let others =
            users.iter().filter(|user| imp_runtime::pins::vm_of(user).is_none() && pool_of(user).is_none());
        let mut ways: Vec<String> = pools.iter().map(|pool| format!("`imp pool rm {pool}`")).collect();
        if !named.is_empty() {
            ways.push(format!("`imp rm -f {}`", named.join(" ")));
        }
        ways.extend(others.map(|user| format!("ending {user}")));
        format!("template {template} is in use; what frees it: {}", ways.join(", then "))
    }
}

fn unknown(error: put_away::Unknown) -> Status {
    Status::not_found(error.to_string())
}

fn with_secrets(asked: bool) -> WithSecrets {
    if asked { WithSecrets::Allowed } else { WithSecrets::Refused }
}
