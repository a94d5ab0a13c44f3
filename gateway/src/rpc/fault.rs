//! Breaks a worker on request: only in builds for the end-to-end tests.

use std::sync::Arc;

use tonic::{Request, Response, Status};
use velox_proto::worker::v1::fault_service_server::{FaultService, FaultServiceServer};
use velox_proto::worker::v1::{InjectFaultRequest, InjectFaultResponse};

use super::{Context, refuse};

/// The service.
#[derive(Debug)]
pub(super) struct Faults {
    context: Arc<Context>,
}

/// Makes the server.
pub(super) fn server(context: Arc<Context>) -> FaultServiceServer<Faults> {
    FaultServiceServer::new(Faults { context })
}

#[tonic::async_trait]
impl FaultService for Faults {
    async fn inject_fault(
        &self,
        request: Request<InjectFaultRequest>,
    ) -> Result<Response<InjectFaultResponse>, Status> {
        let pool = &self.context.pool;
        let injected = pool.inject_fault(request.into_inner()).await;
        injected.map_err(|error| refuse(error.into()))?;
        Ok(Response::new(InjectFaultResponse {}))
    }
}
