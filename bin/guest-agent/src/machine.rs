//! The service for the machine as a whole: heartbeat, configuration, vitals, end.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use imp_protocol::guest::machine_server::Machine;
use imp_protocol::guest::{
    ConfigureRequest, ConfigureResponse, PingRequest, PingResponse, ShutdownRequest, ShutdownResponse,
    VitalsRequest, VitalsResponse,
};
use tonic::{Request, Response, Status};

use crate::agent::Guest;
use crate::configure::{self, Wanted};
use crate::vitals;

#[tonic::async_trait]
impl Machine for Guest {
    async fn ping(&self, request: Request<PingRequest>) -> Result<Response<PingResponse>, Status> {
        // /proc answers from memory: no need for a thread.
        let uptime = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Ok(Response::new(PingResponse {
            nonce: request.into_inner().nonce,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel_release: rustix::system::uname().release().to_string_lossy().into_owned(),
            uptime_milliseconds: uptime.tv_sec.unsigned_abs() * 1000
                + uptime.tv_nsec.unsigned_abs() / 1_000_000,
            boot_id: boot_id.trim_end().to_owned(),
        }))
    }

    async fn configure(
        &self,
        request: Request<ConfigureRequest>,
    ) -> Result<Response<ConfigureResponse>, Status> {
        let wanted = Wanted::parse(request.into_inner())
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        let agent = Arc::clone(&self.0);
        let done = crate::blocking(move || configure::configure(&wanted, agent.scratch())).await?;
        Ok(Response::new(done))
    }

    async fn vitals(&self, _: Request<VitalsRequest>) -> Result<Response<VitalsResponse>, Status> {
        Ok(Response::new(crate::blocking(vitals::sample).await?))
    }

    async fn shutdown(
        &self,
        request: Request<ShutdownRequest>,
    ) -> Result<Response<ShutdownResponse>, Status> {
        self.shut_down(Duration::from_millis(request.into_inner().grace_milliseconds));
        Ok(Response::new(ShutdownResponse {}))
    }
}
