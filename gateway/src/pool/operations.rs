//! What the handle asks of workers and supervisors, beside plans and models.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use velox_proto::worker::v1 as wire;
use velox_shm::{Lease, PooledArena};

use super::Shared;
use super::attest::AttestedOp;
use super::board::LiveWorker;
use super::error::PoolError;
use super::event::PoolEvent;
use super::session::Command;

impl Shared {
    /// Tells the scheduler; waits while it is behind. Without a scheduler there is nobody to tell.
    pub(super) async fn emit(&self, event: PoolEvent) {
        let _nobody = self.events.send(event).await;
    }

    /// Runs a task to its end also if the caller goes away meanwhile.
    pub(super) async fn detached<T: Send + 'static>(
        &self,
        task: impl Future<Output = Result<T, PoolError>> + Send + 'static,
    ) -> Result<T, PoolError> {
        if self.shutdown.is_cancelled() {
            return Err(PoolError::ShuttingDown);
        }
        self.tracker.spawn(task).await?
    }

    /// Hands a command to a supervisor.
    pub(super) async fn command(
        &self,
        commands: &mpsc::Sender<Command>,
        command: Command,
    ) -> Result<(), PoolError> {
        let key = command.key();
        let limit = self.config.timeouts.control;
        match timeout(limit, commands.send(command)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_gone)) => Err(PoolError::WorkerLost(key)),
            Err(_elapsed) => Err(PoolError::Unanswered {
                call: "command",
                limit,
            }),
        }
    }

    /// Takes an arena from the pool of segments, or makes one: touching fresh pages blocks.
    pub(super) async fn acquire_arena(&self, byte_len: u64) -> Result<PooledArena, PoolError> {
        let segments = self.segments.clone();
        let acquire = move || segments.acquire(byte_len);
        Ok(self.tracker.spawn_blocking(acquire).await??)
    }

    /// Lets the worker map a further arena and leases from it.
    pub(super) async fn grow_and_lease(
        &self,
        live: &LiveWorker,
        byte_len: u64,
    ) -> Result<Lease, PoolError> {
        let _growing = live.memory.growth.lock().await;
        // Whoever held the lock may have made room.
        if let Some(lease) = live.memory.try_lease(byte_len)? {
            return Ok(lease);
        }
        live.memory.check_count()?;
        let arena = self
            .acquire_arena(byte_len.max(self.config.segment_bytes))
            .await?;
        let (key, (reply, mapped)) = (live.key, oneshot::channel());
        let offer = Command::Offer { key, arena, reply };
        self.command(&live.commands, offer).await?;
        // A load is the longest that a worker may be at before it maps; one that never answers is wedged, and its
        // end drops the reply.
        let (call, limit) = ("SegmentOffer", self.config.timeouts.load);
        let mapped = timeout(limit, mapped)
            .await
            .map_err(|_elapsed| PoolError::Unanswered { call, limit })?;
        mapped.map_err(|_dropped| PoolError::WorkerLost(key))??;
        live.memory
            .try_lease(byte_len)?
            .ok_or(PoolError::WorkerLost(key))
    }

    /// Runs an op and checks its provenance; a worker whose answer does not hold is quarantined.
    pub(super) async fn run_op(
        self: Arc<Self>,
        live: &LiveWorker,
        request: wire::RunOpRequest,
    ) -> Result<AttestedOp, PoolError> {
        let limit = self.config.timeouts.op;
        let run = live.control.run_op(request.clone());
        let response = live.on_tensor_thread("RunOp", limit, run).await?;
        let attested = AttestedOp::attest(live.key, &live.facts, &request, response);
        if let Err(violation) = &attested {
            live.quarantine(violation.clone());
        }
        Ok(attested?)
    }
}
