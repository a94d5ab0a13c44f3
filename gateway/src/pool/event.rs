//! What a pool tells the scheduler.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use velox_proto::error::ServiceFault;
use velox_proto::v1;

use super::attest::{AttestedResult, Violation};
use super::facts::{ModelFacts, WorkerFacts};

/// One process in the life of a pool. A slot keeps its number over restarts, its processes are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerKey {
    /// Place in the pool.
    pub slot: u32,
    /// Which process of the slot, from 1.
    pub incarnation: u32,
}

impl WorkerKey {
    /// Returns the id of the slot, stable over restarts: "w0".
    #[must_use]
    pub fn slot_id(self) -> String {
        format!("w{}", self.slot)
    }
}

impl fmt::Display for WorkerKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "w{}.{}", self.slot, self.incarnation)
    }
}

/// Something that happened to a worker. The events of one worker arrive in order: `Ready` first, `Lost` last.
/// A process that never became ready sends `Lost` alone, so that a scheduler knows why nothing is ready.
#[derive(Debug)]
pub enum PoolEvent {
    /// It takes plans from now on.
    Ready {
        /// The process.
        worker: WorkerKey,
        /// What it is and what its probes found.
        facts: Arc<WorkerFacts>,
        /// What it has loaded.
        models: Vec<Arc<ModelFacts>>,
    },
    /// A plan retired; checked against the plan and the facts.
    Result {
        /// The process.
        worker: WorkerKey,
        /// What it computed.
        result: AttestedResult,
    },
    /// It takes no new plans; those in flight still answer, then `Lost` with [`LossCause::Drained`] follows.
    Draining {
        /// The process.
        worker: WorkerKey,
    },
    /// The process is reaped: its plans in flight are void, nothing writes to its memory any more, its leases
    /// may be dropped.
    Lost {
        /// The process.
        worker: WorkerKey,
        /// Why.
        cause: LossCause,
    },
    /// It has a further model.
    ModelLoaded {
        /// The process.
        worker: WorkerKey,
        /// The model.
        model: Arc<ModelFacts>,
    },
    /// It has a model less.
    ModelUnloaded {
        /// The process.
        worker: WorkerKey,
        /// Name of the model.
        model: String,
    },
    /// A model that it should have could not be loaded; it serves the others.
    ModelFailed {
        /// The process.
        worker: WorkerKey,
        /// Name of the model.
        model: String,
        /// What the worker said.
        fault: ServiceFault,
    },
}

/// Why a process is gone.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LossCause {
    /// It could not be started.
    #[error("worker could not be started: {0}")]
    SpawnFailed(String),
    /// It ended by itself.
    #[error("worker exited with status {0}")]
    Exited(i32),
    /// A signal that we did not send ended it.
    #[error("worker was ended by signal {0}")]
    Killed(i32),
    /// Its tensor thread had work and made no progress; it was killed.
    #[error("worker made no progress for {silence:?}, limit is {limit:?}")]
    Wedged {
        /// Time without a sign of life.
        silence: Duration,
        /// What was allowed.
        limit: Duration,
    },
    /// A call that occupies its tensor thread did not return; it was killed.
    #[error("worker did not answer {call} within {limit:?}")]
    Unresponsive {
        /// Name of the call.
        call: &'static str,
        /// What was allowed.
        limit: Duration,
    },
    /// It closed a channel and did not exit; it was killed.
    #[error("worker closed its step channel")]
    ChannelClosed,
    /// A channel to it failed, or a plan did not fit a frame; it was killed.
    #[error("channel to the worker failed: {0}")]
    ChannelFailed(String),
    /// Its evidence did not hold; it was killed.
    #[error("worker is quarantined: {0}")]
    Quarantined(#[from] Violation),
    /// It did not become ready; it was killed.
    #[error("handshake with the worker failed: {0}")]
    HandshakeFailed(String),
    /// It was asked to stop.
    #[error("worker was drained")]
    Drained,
}

/// Where a slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotState {
    /// Process spawned, facts awaited.
    Starting,
    /// Loads models.
    Loading,
    /// Takes plans.
    Ready,
    /// Finishes its plans, takes no new ones.
    Draining,
    /// Waits before the next start.
    Backoff,
    /// Given up: evidence of its processes did not hold.
    Quarantined,
    /// The pool is shut down.
    Stopped,
}

impl From<SlotState> for v1::WorkerState {
    fn from(state: SlotState) -> Self {
        match state {
            SlotState::Starting => Self::Starting,
            SlotState::Loading => Self::Loading,
            SlotState::Ready => Self::Ready,
            SlotState::Draining => Self::Draining,
            SlotState::Backoff => Self::Backoff,
            SlotState::Quarantined => Self::Quarantined,
            SlotState::Stopped => Self::Stopped,
        }
    }
}

/// A slot at one moment, for people and for the capability table.
#[derive(Debug, Clone)]
pub struct WorkerSnapshot {
    /// The slot's process, or its last one.
    pub key: WorkerKey,
    /// Process id; `None` while no process lives.
    pub pid: Option<u32>,
    /// Where the slot is.
    pub state: SlotState,
    /// Processes started after the first.
    pub restarts: u32,
    /// What the process is; `None` before its handshake.
    pub facts: Option<Arc<WorkerFacts>>,
    /// What it has loaded.
    pub models: Vec<Arc<ModelFacts>>,
    /// Why the last process ended.
    pub last_exit: Option<LossCause>,
    /// Plans sent and not collected.
    pub in_flight: usize,
    /// Rows open in the worker, counted from the plans sent.
    pub rows: usize,
}

/// Progress of loading a model on one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadEvent {
    /// The process.
    pub worker: WorkerKey,
    /// "open", "check", "map", "probe" or "ready".
    pub phase: String,
    /// Bytes done in this phase.
    pub done_bytes: u64,
    /// Bytes of this phase.
    pub total_bytes: u64,
}
