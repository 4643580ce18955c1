//! The service of `runtime.proto` over the engine.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use futures_util::future::join_all;
use imp_protocol::guest::processes_client::ProcessesClient;
use imp_protocol::guest::{SignalRequest, signal_request};
use imp_protocol::runtime as wire;
use imp_protocol::runtime::runtime_server::Runtime as Service;
use imp_protocol::signal;
use imp_runtime::spec::Memory;
use imp_runtime::status::{State, VmStatus};
use imp_runtime::{LogEnd, LogQuery, Runtime, VmId};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::attach;
use crate::client::Identity;
use crate::pools::Pools;
use crate::reach::{reach, resolve};
use crate::refusal::{chain, invalid, refusal};
use crate::report;
use crate::template_names::TemplateNames;
use crate::under_way::UnderWay;
use crate::wire as convert;

pub(crate) mod pools;
pub(crate) mod snapshots;
mod usage;

/// How long a client may take to say what it wants to attach to.
const PATIENCE: Duration = Duration::from_secs(10);
/// Messages on their way to a client.
const QUEUE: usize = 8;
/// The signal that no process survives, by its number.
const KILL: i32 = 9;

#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) runtime: Runtime,
    pub(crate) identity: Identity,
    /// Becomes true when the owner is to end.
    pub(crate) ending: Arc<watch::Sender<bool>>,
    /// What a hand-over waits for.
    pub(crate) under_way: UnderWay,
    pub(crate) names: Arc<TemplateNames>,
    pub(crate) pools: Pools,
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Service for Server {
    type AttachStream = Answers<wire::AttachOutput>;
    type LogsStream = Answers<wire::LogEntry>;

    async fn version(
        &self,
        _: Request<wire::VersionRequest>,
    ) -> Result<Response<wire::VersionResponse>, Status> {
        let Identity { version, build, pid } = self.identity.clone();
        Ok(Response::new(wire::VersionResponse { version, build, pid }))
    }

    async fn hand_over(
        &self,
        _: Request<wire::HandOverRequest>,
    ) -> Result<Response<wire::HandOverResponse>, Status> {
        tracing::info!("handing over");
        self.ending.send_replace(true);
        Ok(Response::new(wire::HandOverResponse {}))
    }

    async fn create(
        &self,
        request: Request<wire::CreateRequest>,
    ) -> Result<Response<wire::CreateResponse>, Status> {
        let _step = self.under_way.begin()?;
        let spec = request.into_inner().spec.ok_or_else(|| Status::invalid_argument("no spec"))?;
        let spec = convert::spec_from_wire(spec).map_err(|error| invalid(&error))?;
        let id = self.runtime.create(spec).await.map_err(|error| refusal(&error))?;
        tracing::info!(vm = %id, "created");
        Ok(Response::new(wire::CreateResponse { vm: Some(self.status(&id)?) }))
    }

    async fn start(
        &self,
        request: Request<wire::StartRequest>,
    ) -> Result<Response<wire::StartResponse>, Status> {
        let _step = self.under_way.begin()?;
        let id = self.resolve(&request.into_inner().vm)?;
        self.runtime.start(&id).await.map_err(|error| refusal(&error))?;
        Ok(Response::new(wire::StartResponse {}))
    }

    async fn attach(
        &self,
        request: Request<Streaming<wire::AttachInput>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let mut inputs = request.into_inner();
        let first = tokio::time::timeout(PATIENCE, inputs.message())
            .await
            .map_err(|_| Status::deadline_exceeded("nothing was said about what to attach to"))??;
        let Some(wire::AttachInput { message: Some(wire::attach_input::Message::Open(open)) }) = first else {
            return Err(Status::invalid_argument("the first input must say what to attach to"));
        };
        let id = self.resolve(&open.vm)?;
        let answers = attach::attach(self.runtime.clone(), id, open, inputs)?;
        Ok(Response::new(Box::pin(answers)))
    }

    async fn list(&self, _: Request<wire::ListRequest>) -> Result<Response<wire::ListResponse>, Status> {
        let vms = self.runtime.list();
        let vms = vms.iter().map(|vm| encode(vm)).collect::<Result<_, _>>()?;
        Ok(Response::new(wire::ListResponse { vms }))
    }

    async fn inspect(
        &self,
        request: Request<wire::InspectRequest>,
    ) -> Result<Response<wire::InspectResponse>, Status> {
        let id = self.resolve(&request.into_inner().vm)?;
        Ok(Response::new(wire::InspectResponse { vm: Some(self.status(&id)?) }))
    }

    async fn wait(
        &self,
        request: Request<wire::WaitRequest>,
    ) -> Result<Response<wire::WaitResponse>, Status> {
        let request = request.into_inner();
        let id = self.resolve(&request.vm)?;
        let wanted = convert::state_from_wire(request.state());
        let mut watch = self.runtime.watch(&id).map_err(|error| refusal(&error))?;
        // An error: the VM has been removed, and its last status stays.
        let _ = watch.wait_for(|vm| reached(vm.state) >= reached(wanted)).await;
        let vm = watch.borrow().clone();
        Ok(Response::new(wire::WaitResponse { vm: Some(encode(&vm)?) }))
    }

    async fn stop(
        &self,
        request: Request<wire::StopRequest>,
    ) -> Result<Response<wire::StopResponse>, Status> {
        let request = request.into_inner();
        let id = self.resolve(&request.vm)?;
        let grace = request.grace_milliseconds.map(Duration::from_millis);
        let vm = self.runtime.stop(&id, grace).await.map_err(|error| refusal(&error))?;
        Ok(Response::new(wire::StopResponse { vm: Some(encode(&vm)?) }))
    }

    async fn kill(
        &self,
        request: Request<wire::KillRequest>,
    ) -> Result<Response<wire::KillResponse>, Status> {
        let request = request.into_inner();
        let id = self.resolve(&request.vm)?;
        if request.signal.is_empty() || signal::number(&request.signal) == Ok(KILL) {
            self.runtime.kill(&id).await.map_err(|error| refusal(&error))?;
        } else {
            let hold = reach(&self.runtime, &id).await?;
            let target = Some(signal_request::Target::Id("main".to_owned()));
            let signal = SignalRequest { target, signal: request.signal, whole_tree: false };
            ProcessesClient::new(hold.connection()).signal(signal).await?;
        }
        Ok(Response::new(wire::KillResponse {}))
    }

    async fn remove(
        &self,
        request: Request<wire::RemoveRequest>,
    ) -> Result<Response<wire::RemoveResponse>, Status> {
        let request = request.into_inner();
        let id = self.resolve(&request.vm)?;
        loop {
            let vm = self.runtime.get(&id).map_err(|error| refusal(&error))?;
            if request.force && vm.state.lives() {
                self.runtime.kill(&id).await.map_err(|error| refusal(&error))?;
            } else if vm.state == State::Stopping {
                // It is on its way out already.
                let mut watch = self.runtime.watch(&id).map_err(|error| refusal(&error))?;
                let _ = watch.wait_for(|vm| vm.state == State::Stopped).await;
            }
            match self.runtime.remove(&id).await {
                // A VM that removes itself when it has stopped may be gone by now.
                Err(_) if request.force && self.runtime.get(&id).is_err() => break,
                // It was started between the look and the removal.
                Err(imp_runtime::Error::NotRemoved { .. }) if request.force && self.lives(&id) => {}
                result => break result.map_err(|error| refusal(&error))?,
            }
        }
        Ok(Response::new(wire::RemoveResponse { id: id.to_string() }))
    }

    async fn logs(&self, request: Request<wire::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let id = self.resolve(&request.vm)?;
        if request.console {
            let lines = self.runtime.console(&id).await.map_err(|error| refusal(&error))?;
            let tail = request.tail.and_then(|tail| usize::try_from(tail).ok()).unwrap_or(usize::MAX);
            let earlier = lines.len().saturating_sub(tail);
            let entries = lines.into_iter().skip(earlier).map(|line| Ok(console_entry(&line)));
            return Ok(Response::new(Box::pin(tokio_stream::iter(entries.collect::<Vec<_>>()))));
        }
        let query = LogQuery {
            tail: request.tail.map(|tail| usize::try_from(tail).unwrap_or(usize::MAX)),
            since: (request.since_unix_nanoseconds != 0)
                .then(|| convert::time(request.since_unix_nanoseconds)),
            end: if request.follow { LogEnd::Follow } else { LogEnd::Now },
        };
        let mut log = self.runtime.logs(&id, query).await.map_err(|error| refusal(&error))?;
        let (entries, stream) = mpsc::channel(QUEUE);
        tokio::spawn(async move {
            loop {
                let entry = tokio::select! {
                    () = entries.closed() => return,
                    entry = log.next() => entry,
                };
                let entry = match entry {
                    Ok(Some(entry)) => Ok(convert::entry_to_wire(entry)),
                    Ok(None) => return,
                    Err(error) => Err(Status::internal(chain(&error))),
                };
                if entries.send(entry).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn usage(
        &self,
        request: Request<wire::UsageRequest>,
    ) -> Result<Response<wire::UsageResponse>, Status> {
        let named = request.into_inner().vms;
        let vms: Vec<Arc<VmStatus>> = if named.is_empty() {
            self.runtime.list().into_iter().filter(|vm| vm.state == State::Running).collect()
        } else {
            let get = |name: &String| {
                let id = self.resolve(name)?;
                self.runtime.get(&id).map_err(|error| refusal(&error))
            };
            named.iter().map(get).collect::<Result<_, _>>()?
        };
        let usages = join_all(vms.iter().map(|vm| self.usage_of(vm))).await;
        Ok(Response::new(wire::UsageResponse { usages: usages.into_iter().flatten().collect() }))
    }

    async fn set_memory(
        &self,
        request: Request<wire::SetMemoryRequest>,
    ) -> Result<Response<wire::SetMemoryResponse>, Status> {
        let request = request.into_inner();
        let id = self.resolve(&request.vm)?;
        let left = Memory::from_bytes(request.memory_bytes).map_err(|error| invalid(&error))?;
        let balloon = self.runtime.set_memory(&id, left).await.map_err(|error| refusal(&error))?;
        let (wanted_bytes, given_bytes) = (balloon.wanted_bytes, balloon.given_bytes);
        Ok(Response::new(wire::SetMemoryResponse { wanted_bytes, given_bytes }))
    }

    async fn doctor(
        &self,
        _: Request<wire::DoctorRequest>,
    ) -> Result<Response<wire::DoctorResponse>, Status> {
        let checks = self.runtime.doctor().await.into_iter().map(report::finding_to_wire);
        Ok(Response::new(wire::DoctorResponse { checks: checks.collect() }))
    }
}

impl Server {
    fn resolve(&self, vm: &str) -> Result<VmId, Status> {
        resolve(&self.runtime, vm)
    }

    fn lives(&self, id: &VmId) -> bool {
        self.runtime.get(id).is_ok_and(|vm| vm.state.lives())
    }

    fn status(&self, id: &VmId) -> Result<wire::Status, Status> {
        encode(&*self.runtime.get(id).map_err(|error| refusal(&error))?)
    }
}

/// How far a VM is in its life, to be compared.
fn reached(state: State) -> u8 {
    match state {
        State::Created => 0,
        State::Starting | State::Prepared => 1,
        State::Running | State::Asleep | State::Paused => 2,
        State::Stopping => 3,
        State::Stopped => 4,
    }
}

fn encode(vm: &VmStatus) -> Result<wire::Status, Status> {
    convert::status_to_wire(vm).map_err(|error| Status::internal(chain(&error)))
}

fn console_entry(line: &str) -> wire::LogEntry {
    let data = format!("{line}\n").into_bytes().into();
    wire::LogEntry { stream: wire::log_entry::Stream::Console.into(), unix_nanoseconds: 0, data }
}
