//! The pool and its workers.

use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Response, Status};
use velox_proto::v1;
use velox_proto::v1::admin_service_server::AdminService;

use super::{Context, refuse};
use crate::error::GatewayError;
use crate::pool::WorkerSnapshot;

/// Grace for running requests unless told otherwise.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// The service.
#[derive(Debug)]
pub(super) struct Admin {
    context: Arc<Context>,
}

impl Admin {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    fn workers(&self) -> Vec<v1::Worker> {
        self.context.pool.snapshots().iter().map(worker).collect()
    }

    async fn drained(&self, id: &str) -> Result<u32, GatewayError> {
        let usage = self.context.scheduler.usage().await?;
        let snapshots = self.context.pool.snapshots();
        let rows = snapshots
            .iter()
            .find(|snapshot| snapshot.key.slot_id() == id)
            .and_then(|snapshot| usage.by_worker.get(&snapshot.key))
            .copied();
        self.context.pool.drain(id).await?;
        Ok(u32::try_from(rows.unwrap_or(0)).unwrap_or(u32::MAX))
    }
}

#[tonic::async_trait]
impl AdminService for Admin {
    async fn get_pool(
        &self,
        _request: Request<v1::GetPoolRequest>,
    ) -> Result<Response<v1::GetPoolResponse>, Status> {
        let context = &self.context;
        let load = *context.scheduler.load().borrow();
        Ok(Response::new(v1::GetPoolResponse {
            endpoints: context.endpoints.clone(),
            gateway_pid: std::process::id(),
            workers: self.workers(),
            running: u32::try_from(load.running).unwrap_or(u32::MAX),
            waiting: u32::try_from(load.waiting).unwrap_or(u32::MAX),
            kv_bytes: load.kv_bytes,
            shm_leased_bytes: context.pool.shm_leased_bytes(),
            shm_segment_bytes: context.pool.shm_segment_bytes(),
            default_model: context.catalog.implied_model().unwrap_or_default(),
        }))
    }

    async fn list_workers(
        &self,
        _request: Request<v1::ListWorkersRequest>,
    ) -> Result<Response<v1::ListWorkersResponse>, Status> {
        Ok(Response::new(v1::ListWorkersResponse {
            workers: self.workers(),
        }))
    }

    async fn drain_worker(
        &self,
        request: Request<v1::DrainWorkerRequest>,
    ) -> Result<Response<v1::DrainWorkerResponse>, Status> {
        let id = request.into_inner().id;
        let moved_rows = self.drained(&id).await.map_err(refuse)?;
        Ok(Response::new(v1::DrainWorkerResponse { moved_rows }))
    }

    async fn shutdown(
        &self,
        request: Request<v1::ShutdownRequest>,
    ) -> Result<Response<v1::ShutdownResponse>, Status> {
        let grace = request.into_inner().grace_ms;
        let grace = grace.map_or(DEFAULT_GRACE, |ms| Duration::from_millis(u64::from(ms)));
        self.context.closing.send_replace(Some(grace));
        Ok(Response::new(v1::ShutdownResponse {}))
    }
}

fn worker(snapshot: &WorkerSnapshot) -> v1::Worker {
    let model = snapshot.models.first();
    let backend = model.map_or(v1::Backend::Unspecified, |model| model.backend());
    let exit = snapshot.last_exit.as_ref();
    v1::Worker {
        id: snapshot.key.slot_id(),
        pid: snapshot.pid.unwrap_or(0),
        state: v1::WorkerState::from(snapshot.state).into(),
        restarts: snapshot.restarts,
        backend: backend.into(),
        model: model
            .map(|model| model.name().to_owned())
            .unwrap_or_default(),
        last_exit: exit.map(ToString::to_string).unwrap_or_default(),
        rows: u32::try_from(snapshot.rows).unwrap_or(u32::MAX),
    }
}
