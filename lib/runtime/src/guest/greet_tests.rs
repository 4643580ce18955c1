use std::collections::VecDeque;
use std::sync::Mutex;

use futures_util::future::BoxFuture;
use imp_protocol::connection::serve_guest;
use imp_protocol::guest::machine_server::{self, MachineServer};
use imp_protocol::guest::{PingResponse, VitalsRequest, VitalsResponse};
use imp_protocol::guest::{ShutdownRequest, ShutdownResponse};
use tonic::{Request, Response};

use super::*;
use crate::status::VmmEnd;
use crate::vmm::snapshot::{SnapshotFiles, SnapshotKind};

/// What becomes of a channel that is opened to a guest whose transport is still being reset.
#[derive(Debug, Clone, Copy)]
enum Fate {
    HungUp,
    Silent,
    Answered,
}

/// A machine whose first channels have these fates, and all later ones an agent.
#[derive(Default)]
struct Resetting {
    fates: Mutex<VecDeque<Fate>>,
    patiences: Mutex<Vec<Duration>>,
    /// Of channels that stay open.
    held: Mutex<Vec<UnixStream>>,
}

impl Machine for Resetting {
    fn connect_channel(&self, patience: Duration) -> BoxFuture<'_, Result<UnixStream, vmm::Error>> {
        Box::pin(async move {
            self.patiences.lock().unwrap().push(patience);
            let (near, far) = UnixStream::pair().unwrap();
            match self.fates.lock().unwrap().pop_front().unwrap_or(Fate::Answered) {
                Fate::HungUp => drop(far),
                Fate::Silent => self.held.lock().unwrap().push(far),
                Fate::Answered => {
                    let routes = tonic::service::Routes::new(MachineServer::new(Agent));
                    drop(tokio::spawn(serve_guest(far, routes, "1.2.3")));
                }
            }
            Ok(near)
        })
    }

    fn pause(&self) -> BoxFuture<'_, Result<(), vmm::Error>> {
        Box::pin(std::future::pending())
    }

    fn resume(&self) -> BoxFuture<'_, Result<(), vmm::Error>> {
        Box::pin(std::future::pending())
    }

    fn snapshot<'a>(
        &'a self,
        _: SnapshotKind,
        _: &'a SnapshotFiles,
    ) -> BoxFuture<'a, Result<(), vmm::Error>> {
        Box::pin(std::future::pending())
    }

    fn ended(&self) -> BoxFuture<'_, VmmEnd> {
        Box::pin(std::future::pending())
    }
}

struct Agent;

#[tonic::async_trait]
impl machine_server::Machine for Agent {
    async fn ping(&self, _: Request<PingRequest>) -> Result<Response<PingResponse>, Status> {
        Ok(Response::new(PingResponse::default()))
    }
    async fn configure(&self, _: Request<ConfigureRequest>) -> Result<Response<ConfigureResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
    async fn vitals(&self, _: Request<VitalsRequest>) -> Result<Response<VitalsResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Result<Response<ShutdownResponse>, Status> {
        Err(Status::unimplemented("not in this test"))
    }
}

#[tokio::test]
async fn a_transport_that_hangs_up_or_says_nothing_at_first_is_asked_again_with_more_patience_for_silence() {
    let fates = [Fate::HungUp, Fate::HungUp, Fate::Silent, Fate::Silent];
    let machine = Resetting { fates: Mutex::new(fates.into()), ..Resetting::default() };
    let (_, agent, _) = greet(&machine).await.unwrap();
    assert_eq!(agent.version, "1.2.3");
    let patiences = machine.patiences.into_inner().unwrap();
    let times = [1, 1, 1, 2, 4].map(|times| FIRST_ANSWER * times);
    assert_eq!(patiences[..times.len()], times);
}
