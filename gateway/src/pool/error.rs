//! The pool's one error type.

use std::time::Duration;

use velox_proto::error::{Reason, ServiceError, ServiceFault};

use velox_shm::ShmError;

use super::attest::Violation;
use super::event::WorkerKey;
use super::facts::FactsError;
use super::plan::PlanError;

/// How soon it makes sense to ask again after a worker was lost.
const RETRY_AFTER_LOSS: Duration = Duration::from_millis(500);

/// How soon it makes sense to ask for a load again: the order of one load.
const RETRY_AFTER_LOADS: Duration = Duration::from_secs(5);

/// Why the pool did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The process is gone, or leaves; the event says why.
    #[error("worker {0} is lost")]
    WorkerLost(WorkerKey),
    /// No worker takes work.
    #[error("no worker is ready")]
    NoWorkerReady,
    /// No slot of that id.
    #[error("no worker has the id {0:?}")]
    UnknownWorker(String),
    /// No worker has a model of that name.
    #[error("model {0:?} is not loaded")]
    UnknownModel(String),
    /// The name belongs to another file, or to the same one loaded with other options.
    #[error("name {0:?} is taken by another model, or by this one with other options")]
    ModelExists(String),
    /// As many models as a pool may have.
    #[error("{models} models are loaded, limit is {limit}; unload one first")]
    TooManyModels {
        /// Loaded models.
        models: usize,
        /// Most models.
        limit: usize,
    },
    /// Too many loads and unloads wait for the one at hand.
    #[error("{depth} loads of models wait, limit is {limit}")]
    TooManyLoads {
        /// Waiting calls.
        depth: usize,
        /// Most waiting calls.
        limit: usize,
    },
    /// The caller left before its load began.
    #[error("caller left before the load began")]
    CallerLeft,
    /// The plan breaks the contract; it was not sent.
    #[error("plan is not valid: {0}")]
    InvalidPlan(#[from] PlanError),
    /// The worker refused, with its reason.
    #[error(transparent)]
    Refused(#[from] ServiceFault),
    /// The worker's answer is not believed.
    #[error("worker's answer is not believed: {0}")]
    NotBelieved(#[from] FactsError),
    /// The worker's evidence does not hold.
    #[error("worker's answer is not attested: {0}")]
    NotAttested(#[from] Violation),
    /// Shared memory is exhausted, or the system refused it.
    #[error(transparent)]
    Memory(#[from] ShmError),
    /// The worker could not map a segment.
    #[error("worker refused shared memory: {0}")]
    SegmentRefused(String),
    /// The worker did not answer in time.
    #[error("worker did not answer {call} within {limit:?}")]
    Unanswered {
        /// Name of the call.
        call: &'static str,
        /// What was allowed.
        limit: Duration,
    },
    /// The tokenizer's description did not arrive as announced.
    #[error("tokenizer description is damaged: {0}")]
    DamagedTokenizer(String),
    /// The pool shuts down.
    #[error("worker pool shuts down")]
    ShuttingDown,
    /// A task of ours broke.
    #[error("task of the worker pool failed")]
    Task(#[from] tokio::task::JoinError),
}

impl ServiceError for PoolError {
    fn reason(&self) -> Reason {
        match self {
            Self::WorkerLost(_) | Self::NoWorkerReady | Self::Unanswered { .. } => {
                Reason::WorkerUnavailable
            }
            Self::UnknownWorker(_) => Reason::WorkerNotFound,
            Self::UnknownModel(_) => Reason::ModelNotFound,
            Self::ModelExists(_) => Reason::ModelExists,
            Self::TooManyModels { .. } => Reason::TooManyModels,
            Self::TooManyLoads { .. } => Reason::QueueFull,
            Self::CallerLeft => Reason::Cancelled,
            Self::Refused(fault) => fault.reason,
            Self::Memory(error) => error.reason(),
            Self::ShuttingDown => Reason::Draining,
            Self::InvalidPlan(_)
            | Self::NotBelieved(_)
            | Self::NotAttested(_)
            | Self::SegmentRefused(_)
            | Self::Task(_)
            | Self::DamagedTokenizer(_) => Reason::Internal,
        }
    }

    fn metadata(&self) -> std::collections::HashMap<String, String> {
        let counts = match self {
            Self::Refused(fault) => return fault.metadata(),
            Self::TooManyLoads { depth, limit } => [("queue_depth", depth), ("queue_limit", limit)],
            Self::TooManyModels { models, limit } => [("models", models), ("models_limit", limit)],
            _ => return std::collections::HashMap::new(),
        };
        counts
            .into_iter()
            .map(|(name, count)| (name.to_owned(), count.to_string()))
            .collect()
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Refused(fault) => fault.field(),
            _ => None,
        }
    }

    fn retry_delay(&self) -> Option<Duration> {
        match self {
            Self::WorkerLost(_) | Self::NoWorkerReady | Self::Unanswered { .. } => {
                Some(RETRY_AFTER_LOSS)
            }
            Self::TooManyLoads { .. } => Some(RETRY_AFTER_LOADS),
            Self::Refused(fault) => fault.retry_delay(),
            _ => None,
        }
    }
}
