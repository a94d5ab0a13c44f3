//! The pool of worker processes: spawns them, keeps them alive, believes nothing that they cannot show.
//!
//! * [`Pool`] is the handle; [`PoolEvent`]s are what the scheduler lives on.
//! * [`config`]: what a pool is told; [`event`]: what it tells; [`error`]: why it refuses.
//! * [`facts`], [`plan`], [`attest`]: what a worker is, what a plan promises, whether the result keeps it.
//! * `supervisor` owns one slot: `process` spawns, `control` and `step_channel` talk, `session` serves,
//!   `liveness` decides who is wedged; `memory` leases shared memory of a slot.
//!
//! The supervisor's task is the only owner of a process. What others may see of it lies on the slot's `board`;
//! once the process no longer takes plans, the board has no way to reach it.

pub mod attest;
mod board;
pub mod config;
mod control;
pub mod error;
pub mod event;
pub mod facts;
mod liveness;
mod memory;
mod models;
mod operations;
pub mod plan;
mod process;
mod program;
#[cfg(test)]
pub(crate) mod scripted;
mod session;
mod step_channel;
mod supervisor;

pub use attest::{AttestedOp, AttestedProvenance, AttestedResult, Violation};
pub use config::{LoadShape, ModelSource, PoolConfig, PoolTimeouts, RestartPolicy};
pub use error::PoolError;
pub use event::{LoadEvent, LossCause, PoolEvent, SlotState, WorkerKey, WorkerSnapshot};
pub use facts::{ModelFacts, WorkerFacts};
pub use models::MAX_RESIDENT_MODELS;
pub use plan::MAX_PLANS_IN_FLIGHT;
pub use program::WorkerProgram;

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use velox_proto::worker::v1 as wire;
use velox_shm::{Lease, SegmentPool};

use board::Board;
use models::ModelList;
use session::Command;
use supervisor::Supervisor;

/// Events of one slot that wait for the scheduler: results in flight, and a restart or two.
const EVENTS_PER_SLOT: usize = 64;

/// Commands of one slot that wait for its supervisor.
const COMMANDS_PER_SLOT: usize = 16;

/// Handle of a pool of workers. The pool ends when the token given to [`Pool::start`] is cancelled, not when
/// its handles are dropped.
#[derive(Debug, Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

/// What the handle and the supervisors have in common.
#[derive(Debug)]
struct Shared {
    config: PoolConfig,
    slots: Vec<Slot>,
    models: ModelList,
    segments: SegmentPool,
    events: mpsc::Sender<PoolEvent>,
    tracker: TaskTracker,
    shutdown: CancellationToken,
}

/// A place in the pool as the handle sees it.
#[derive(Debug)]
struct Slot {
    board: Board,
    commands: mpsc::Sender<Command>,
}

impl Pool {
    /// Starts a supervisor per slot on `tracker`. All end, and with them their processes, when `shutdown` is
    /// cancelled; the event channel closes after the last one, when no handle is left.
    #[must_use]
    pub fn start(
        config: PoolConfig,
        tracker: TaskTracker,
        shutdown: CancellationToken,
    ) -> (Self, mpsc::Receiver<PoolEvent>) {
        let workers = config.workers.max(1);
        let (events, receiver) = mpsc::channel(workers.saturating_mul(EVENTS_PER_SLOT));
        let (slots, inboxes): (Vec<_>, Vec<_>) = (0_u32..)
            .take(workers)
            .map(|index| {
                let (commands, inbox) = mpsc::channel(COMMANDS_PER_SLOT);
                let slot = Slot {
                    board: Board::new(index),
                    commands,
                };
                (slot, inbox)
            })
            .unzip();
        let shared = Arc::new(Shared {
            models: ModelList::new(config.models.clone()),
            segments: SegmentPool::new(config.shm_limit_bytes),
            config,
            slots,
            events,
            tracker: tracker.clone(),
            shutdown,
        });
        for (index, inbox) in inboxes.into_iter().enumerate() {
            let supervisor = Supervisor::new(Arc::clone(&shared), index, inbox);
            tracker.spawn(supervisor.run());
        }
        (Self { shared }, receiver)
    }

    /// Sends a plan. Never waits: a worker holds at most [`MAX_PLANS_IN_FLIGHT`] plans, and there is room for
    /// so many. Its result arrives as [`PoolEvent::Result`], or the worker's [`PoolEvent::Lost`] voids it.
    ///
    /// # Errors
    /// [`PoolError::WorkerLost`] if the process takes no plans, [`PoolError::InvalidPlan`] if the plan breaks
    /// the contract; nothing was sent then.
    pub fn submit(&self, worker: WorkerKey, plan: wire::StepPlan) -> Result<(), PoolError> {
        self.slot(worker)?.board.submit(worker, plan)
    }

    /// Leases a slot of shared memory that the worker has mapped; offers it a new segment when the present
    /// ones have no room. Drop the lease after the plan that names it retired or its worker's
    /// [`PoolEvent::Lost`] arrived, not before.
    ///
    /// # Errors
    /// [`PoolError::Memory`] above the pool's budget, [`PoolError::WorkerLost`] if the process is gone.
    pub async fn lease(&self, worker: WorkerKey, byte_len: u64) -> Result<Lease, PoolError> {
        let live = self.slot(worker)?.board.live(worker)?;
        match live.memory.try_lease(byte_len)? {
            Some(lease) => Ok(lease),
            None => self.shared.grow_and_lease(&live, byte_len).await,
        }
    }

    /// Returns how every slot is, in order.
    #[must_use]
    pub fn snapshots(&self) -> Vec<WorkerSnapshot> {
        let slots = self.shared.slots.iter();
        slots.map(|slot| slot.board.snapshot()).collect()
    }

    /// Loads a model on every ready worker; workers that start later load it too. Once begun it goes
    /// on when the caller goes away; a load whose `progress` is closed while it waits for others never begins.
    /// Progress that nobody takes is dropped.
    ///
    /// # Errors
    /// [`PoolError::ModelExists`] if the name belongs to another file or to other options, [`PoolError::TooManyModels`] and
    /// [`PoolError::TooManyLoads`] above the limits, else the first worker's refusal: then
    /// no worker keeps the model.
    pub async fn load_model(
        &self,
        source: ModelSource,
        progress: mpsc::Sender<LoadEvent>,
    ) -> Result<Arc<ModelFacts>, PoolError> {
        let shared = Arc::clone(&self.shared);
        let task = async move { shared.load_everywhere(source, progress).await };
        self.shared.detached(task).await
    }

    /// Unloads a model from every worker. Goes on when the caller goes away.
    ///
    /// # Errors
    /// [`PoolError::UnknownModel`] if it is not loaded, [`PoolError::Refused`] while a worker has rows of it.
    pub async fn unload_model(&self, name: &str) -> Result<(), PoolError> {
        let shared = Arc::clone(&self.shared);
        let name = name.to_owned();
        let task = async move { shared.unload_everywhere(&name).await };
        self.shared.detached(task).await
    }

    /// Fetches the description of a model's tokenizer from a worker that has the model, and checks its digest.
    ///
    /// # Errors
    /// [`PoolError::UnknownModel`] if no ready worker has the model, [`PoolError::DamagedTokenizer`] if the
    /// description is too long or is not what the worker announced at load.
    pub async fn tokenizer(&self, model: &str) -> Result<wire::TokenizerDescription, PoolError> {
        let (live, facts) = self.shared.worker_with(model)?;
        let encoded = live.control.tokenizer(model).await?;
        let announced = facts.tokenizer_sha256().to_owned();
        let decode = move || control::decode_tokenizer(&encoded, &announced);
        self.shared.tracker.spawn_blocking(decode).await?
    }

    /// Runs one op on a given worker, or on the first that is ready.
    ///
    /// # Errors
    /// The worker's refusal, or [`PoolError::NotAttested`] if its answer does not hold.
    pub async fn run_op(
        &self,
        worker: Option<WorkerKey>,
        request: wire::RunOpRequest,
    ) -> Result<AttestedOp, PoolError> {
        let live = match worker {
            Some(worker) => self.slot(worker)?.board.live(worker)?,
            None => {
                let first = self.shared.ready_workers().into_iter().next();
                first.ok_or(PoolError::NoWorkerReady)?
            }
        };
        let shared = Arc::clone(&self.shared);
        let task = async move { shared.run_op(&live, request).await };
        self.shared.detached(task).await
    }

    /// Moves a slot's work elsewhere and replaces its process: no new plans, those in flight answer, the
    /// process ends. Returns when it is reaped; a fresh one is starting then.
    ///
    /// # Errors
    /// [`PoolError::UnknownWorker`] if there is no such slot, [`PoolError::NoWorkerReady`] if it is not ready,
    /// [`PoolError::Unanswered`] if it does not end; the drain goes on then.
    pub async fn drain(&self, slot_id: &str) -> Result<(), PoolError> {
        let slot = self.slot_of_id(slot_id)?;
        let live = slot.board.ready_worker().ok_or(PoolError::NoWorkerReady)?;
        let (key, (reply, reaped)) = (live.key, oneshot::channel());
        let drain = Command::Drain { key, reply };
        self.shared.command(&slot.commands, drain).await?;
        // The supervisor drops the sender when the process is gone. It waits for the plans in flight, for the
        // worker's answer and for its end.
        let timeouts = &self.shared.config.timeouts;
        let limit = timeouts.grace * 2 + timeouts.control * 2;
        let (call, dropped) = ("Drain", tokio::time::timeout(limit, reaped).await);
        let _reaped = dropped.map_err(|_elapsed| PoolError::Unanswered { call, limit })?;
        Ok(())
    }

    /// Breaks a worker on purpose.
    ///
    /// # Errors
    /// [`PoolError::UnknownWorker`] if the request names no slot.
    #[cfg(feature = "fault-hooks")]
    pub async fn inject_fault(&self, request: wire::InjectFaultRequest) -> Result<(), PoolError> {
        let slot = self.slot_of_id(&request.worker_id)?;
        let live = slot.board.ready_worker().ok_or(PoolError::NoWorkerReady)?;
        live.control.inject_fault(request).await
    }

    /// Returns the bytes of shared memory that are leased at this moment.
    #[must_use]
    pub fn shm_leased_bytes(&self) -> u64 {
        self.shared.segments.leased_bytes()
    }

    /// Returns the bytes of all shared segments, leased or not.
    #[must_use]
    pub fn shm_segment_bytes(&self) -> u64 {
        self.shared.segments.created_bytes()
    }

    fn slot(&self, worker: WorkerKey) -> Result<&Slot, PoolError> {
        usize::try_from(worker.slot)
            .ok()
            .and_then(|index| self.shared.slots.get(index))
            .ok_or_else(|| PoolError::UnknownWorker(worker.to_string()))
    }

    fn slot_of_id(&self, id: &str) -> Result<&Slot, PoolError> {
        self.shared
            .slots
            .iter()
            .find(|slot| slot.board.snapshot().key.slot_id() == id)
            .ok_or_else(|| PoolError::UnknownWorker(id.to_owned()))
    }
}
