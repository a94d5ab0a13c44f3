//! What this installation can do, as its workers probed.

use std::sync::Arc;

use tonic::{Request, Response, Status};
use velox_proto::v1;
use velox_proto::v1::capability_service_server::CapabilityService;

use super::Context;
use crate::pool::WorkerSnapshot;

/// The service.
#[derive(Debug)]
pub(super) struct Capabilities {
    context: Arc<Context>,
}

impl Capabilities {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }
}

#[tonic::async_trait]
impl CapabilityService for Capabilities {
    async fn get_capabilities(
        &self,
        _request: Request<v1::GetCapabilitiesRequest>,
    ) -> Result<Response<v1::GetCapabilitiesResponse>, Status> {
        let limits = &self.context.limits;
        let snapshots = self.context.pool.snapshots();
        Ok(Response::new(v1::GetCapabilitiesResponse {
            protocol: velox_proto::PROTOCOL.to_owned(),
            gateway: Some(v1::GatewayCapabilities {
                build: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                os: std::env::consts::OS.to_owned(),
                arch: std::env::consts::ARCH.to_owned(),
                max_queued_requests: u32::try_from(limits.max_queue).unwrap_or(u32::MAX),
                max_message_bytes: u64::try_from(velox_proto::limits::MAX_MESSAGE_BYTES)
                    .unwrap_or(u64::MAX),
            }),
            workers: snapshots.iter().filter_map(worker).collect(),
        }))
    }
}

/// Describes a worker that has introduced itself.
fn worker(snapshot: &WorkerSnapshot) -> Option<v1::WorkerCapabilities> {
    let facts = snapshot.facts.as_ref()?.wire();
    Some(v1::WorkerCapabilities {
        id: snapshot.key.slot_id(),
        pid: facts.pid,
        build: facts.build.clone(),
        device: facts.device.clone(),
        kernel: facts.kernel.clone(),
        backends: facts.backends.clone(),
        ops: facts.ops.clone(),
        batch_invariant: facts.batch_invariant,
    })
}
