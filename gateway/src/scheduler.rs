//! The one owner of every row: queues, places, plans and recovers them.
//!
//! An actor task lives on three things: jobs of callers (bounded channel), events of the pool, and time. After each
//! it takes a turn: rows whose reader left are closed, waiting rows are placed ([`crate::admission`]), and every
//! worker with a free plan gets one ([`crate::planner`]). It never waits for a reader: a row whose channel is
//! full pauses alone.
//!
//! **Cancellation** is dropping the [`RowHandle`], wherever the row is. **Recovery**: the rows of a lost worker go
//! to the front of the queue with their prompt and the tokens sent so far.

mod actor;
mod draft;
mod handle;
mod row;
mod worker;

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use velox_proto::worker::v1 as wire;
use velox_shm::Lease;

use crate::catalog::Catalog;
use crate::deadline::{self, CallDeadline};
use crate::error::GatewayError;
use crate::planner::PlanLimits;
use crate::pool::{PoolError, PoolEvent, WorkerKey};
use crate::request::Job;

pub use handle::{RowEnd, RowEvent, RowHandle, Step};

/// Jobs that wait for the actor's attention.
const COMMANDS: usize = 64;

/// How long a row may wait for a reader that takes nothing: it holds a place and cache that others want.
const READER_IDLE: Duration = Duration::from_secs(60);

/// A lease on its way: the worker must map its segment first.
pub type LeaseFuture = Pin<Box<dyn Future<Output = Result<Lease, PoolError>> + Send>>;

/// The part of a pool that the scheduler needs.
pub trait Workers: fmt::Debug + Send + 'static {
    /// Sends a plan.
    ///
    /// # Errors
    /// [`PoolError`] if the plan was not sent; after [`PoolError::WorkerLost`] the event follows.
    fn submit(&self, worker: WorkerKey, plan: wire::StepPlan) -> Result<(), PoolError>;

    /// Leases shared memory that the worker can write.
    fn lease(&self, worker: WorkerKey, byte_len: u64) -> LeaseFuture;
}

/// Bounds of the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most requests that wait for room.
    pub max_queue: usize,
    /// Most rows of one worker.
    pub max_rows: u32,
    /// Memory of the machine for caches, by worst case.
    pub kv_budget_bytes: u64,
    /// How long a row waits while no worker can run it.
    pub worker_wait: Duration,
    /// How many workers a row may lose.
    pub max_recoveries: u32,
    /// Shape of plans.
    pub plan: PlanLimits,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_queue: 256,
            max_rows: 64,
            kv_budget_bytes: 4 * 1024 * 1024 * 1024,
            worker_wait: Duration::from_secs(60),
            max_recoveries: 64,
            plan: PlanLimits::default(),
        }
    }
}

/// How much there is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Rows on a worker.
    pub running: usize,
    /// Rows in the queue.
    pub waiting: usize,
    /// Bytes that the caches of all rows have allocated, as their workers said last.
    pub kv_bytes: u64,
}

/// Who has how many rows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// Rows by model, running or waiting.
    pub by_model: HashMap<String, usize>,
    /// Rows by worker.
    pub by_worker: HashMap<WorkerKey, usize>,
}

#[derive(Debug)]
enum Command {
    Submit {
        job: Box<Job>,
        span: tracing::Span,
        output: mpsc::Sender<RowEvent>,
        deadline: Option<CallDeadline>,
    },
    Usage(oneshot::Sender<Usage>),
}

/// Handle of the scheduler.
#[derive(Debug, Clone)]
pub struct Scheduler {
    commands: mpsc::Sender<Command>,
    wake: Arc<Notify>,
    load: watch::Receiver<Load>,
}

impl Scheduler {
    /// Starts the actor on `tasks`; it ends with `shutdown` and then fails what is left with
    /// [`GatewayError::Draining`].
    #[must_use]
    pub fn start<W: Workers>(
        config: SchedulerConfig,
        workers: W,
        events: mpsc::Receiver<PoolEvent>,
        catalog: Arc<Catalog>,
        (tasks, shutdown): (&TaskTracker, CancellationToken),
    ) -> Self {
        let (commands, inbox) = mpsc::channel(COMMANDS);
        let (load_sender, load) = watch::channel(Load::default());
        let wake = Arc::new(Notify::new());
        let actor = actor::Actor::new(config, workers, catalog, load_sender);
        tasks.spawn(actor.run(inbox, events, Arc::clone(&wake), shutdown));
        Self {
            commands,
            wake,
            load,
        }
    }

    /// Hands a job over; `span` is the parent of the spans of its phases. The row ends at the deadline of the call
    /// that runs this, whether or not anybody polls its handle.
    ///
    /// # Errors
    /// [`GatewayError::Draining`] if the scheduler has ended. A refusal arrives as the handle's first event.
    ///
    /// # Cancel safety
    /// A job whose call is dropped is not run.
    pub async fn submit(&self, job: Job, span: tracing::Span) -> Result<RowHandle, GatewayError> {
        let (output, handle) = handle::channel(Arc::clone(&self.wake));
        let command = Command::Submit {
            job: Box::new(job),
            span,
            output,
            deadline: deadline::current(),
        };
        self.commands
            .send(command)
            .await
            .map_err(|_closed| GatewayError::Draining)?;
        Ok(handle)
    }

    /// Returns who has how many rows.
    ///
    /// # Errors
    /// [`GatewayError::Draining`] if the scheduler has ended.
    pub async fn usage(&self) -> Result<Usage, GatewayError> {
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(Command::Usage(reply))
            .await
            .map_err(|_closed| GatewayError::Draining)?;
        answer.await.map_err(|_closed| GatewayError::Draining)
    }

    /// Returns how much there is to do; the receiver sees every change.
    #[must_use]
    pub fn load(&self) -> watch::Receiver<Load> {
        self.load.clone()
    }
}

/// The scheduler's end of a row, for tests of readers.
#[cfg(test)]
pub(crate) mod for_tests {
    pub(crate) use super::handle::channel;
}

#[cfg(test)]
mod tests;
