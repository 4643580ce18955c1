//! What VMs use of this machine, and what their guests say of themselves.

use std::time::Duration;

use imp_protocol::guest::machine_client::MachineClient;
use imp_protocol::guest::{VitalsRequest, VitalsResponse};
use imp_protocol::runtime as wire;
use imp_runtime::VmId;
use imp_runtime::status::VmStatus;

use super::Server;
use crate::report;

/// How long a guest, or its VMM, may take to answer when it is only asked how it is.
const PATIENCE: Duration = Duration::from_secs(2);

impl Server {
    /// None: the VM has ended meanwhile.
    pub(super) async fn usage_of(&self, vm: &VmStatus) -> Option<wire::Usage> {
        let host = self.runtime.usage(&vm.id).await.ok()?;
        Some(wire::Usage {
            id: vm.id.to_string(),
            name: vm.name.to_string(),
            guest: tokio::time::timeout(PATIENCE, self.vitals(&vm.id)).await.ok().flatten(),
            host_cpu_nanoseconds: host.cpu_nanoseconds,
            host_resident_bytes: host.resident_bytes,
            host_private_bytes: host.private_bytes,
            host_shared_bytes: host.shared_bytes,
            host_proportional_bytes: host.proportional_bytes,
            host_private_dirty_bytes: host.memory.private_dirty,
            host_common: report::common_to_wire(&host.memory),
            scratch_bytes: host.scratch_bytes,
            memory_bytes: vm.memory.bytes(),
            given_bytes: self.given(&vm.id).await,
        })
    }

    /// None: it has no balloon, or its VMM does not answer in time.
    async fn given(&self, id: &VmId) -> Option<u64> {
        let balloon = tokio::time::timeout(PATIENCE, self.runtime.balloon(id)).await.ok()?.ok()?;
        balloon.map(|balloon| balloon.given_bytes)
    }

    async fn vitals(&self, id: &VmId) -> Option<VitalsResponse> {
        let hold = self.runtime.connection(id).await.ok()?;
        let vitals = MachineClient::new(hold.connection()).vitals(VitalsRequest {}).await.ok()?;
        Some(vitals.into_inner())
    }
}
