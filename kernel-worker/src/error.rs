//! The worker's errors and their reasons.

use std::collections::HashMap;

use velox_engine::error::EngineError;
use velox_proto::error::{Reason, ServiceError};
use velox_proto::op::UnknownOp;
use velox_proto::tensor::HandleError;
use velox_shm::ShmError;

/// Why the worker could not do what the gateway asked.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// Standard input or output is no socket: the process was not started by a gateway.
    #[error("{channel} is not a socket; this program is started by velox-gateway")]
    NotSpawned {
        /// Which of the two.
        channel: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A channel to the gateway failed.
    #[error("the {channel} channel failed")]
    Channel {
        /// Which one.
        channel: &'static str,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The gateway sent a frame that is none.
    #[error("the step channel carried an undecodable frame: {0}")]
    Frame(String),
    /// The tensor thread ended before the process did.
    #[error("the tensor thread ended: {0}")]
    TensorThread(&'static str),
    /// The worker is draining.
    #[error("the worker is draining")]
    Draining,
    /// No model of that name is resident.
    #[error("model {0:?} is not loaded")]
    ModelNotFound(String),
    /// The name is taken.
    #[error("model {0:?} is already loaded")]
    ModelExists(String),
    /// The model has open rows.
    #[error("model {name:?} has {rows} open rows")]
    ModelBusy {
        /// Its name.
        name: String,
        /// Rows open on it.
        rows: usize,
    },
    /// A field of a control request is missing or out of range.
    #[error("{field}: {problem}")]
    Invalid {
        /// Field at fault.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// A backend lacks an op for these arguments.
    #[error("op {op} is not supported: {problem}")]
    OpUnsupported {
        /// Op of the table.
        op: &'static str,
        /// What it lacks.
        problem: String,
    },
    /// Not in the op table.
    #[error(transparent)]
    UnknownOp(#[from] UnknownOp),
    /// From the engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// From shared memory.
    #[error(transparent)]
    Memory(#[from] ShmError),
    /// A handle that its own fields refute.
    #[error(transparent)]
    Handle(#[from] HandleError),
}

/// Returns the reason that an engine error travels with.
#[must_use]
pub fn engine_reason(error: &EngineError) -> Reason {
    match error {
        // The gateway has checked that the model's path exists: what cannot be read belongs to a broken model.
        EngineError::InvalidModel { .. }
        | EngineError::UnsupportedModel { .. }
        | EngineError::Unreadable { .. } => Reason::InvalidModel,
        EngineError::BackendUnavailable { .. } => Reason::BackendUnavailable,
        EngineError::OutOfMemory { .. } => Reason::OutOfMemory,
        EngineError::Numeric(_) => Reason::NumericError,
        EngineError::Device { .. } | EngineError::InvalidPlan(_) | EngineError::Kernel(_) => {
            Reason::Internal
        }
    }
}

impl ServiceError for WorkerError {
    fn reason(&self) -> Reason {
        match self {
            Self::NotSpawned { .. }
            | Self::Channel { .. }
            | Self::Frame(_)
            | Self::TensorThread(_) => Reason::Internal,
            Self::Draining => Reason::Draining,
            Self::ModelNotFound(_) => Reason::ModelNotFound,
            Self::ModelExists(_) => Reason::ModelExists,
            Self::ModelBusy { .. } => Reason::ModelBusy,
            Self::Invalid { .. } => Reason::InvalidRequest,
            Self::OpUnsupported { .. } | Self::UnknownOp(_) => Reason::OpUnsupported,
            Self::Engine(error) => engine_reason(error),
            Self::Memory(error) => error.reason(),
            Self::Handle(_) => Reason::InvalidHandle,
        }
    }

    fn metadata(&self) -> HashMap<String, String> {
        match self {
            Self::Engine(EngineError::OutOfMemory {
                needed_bytes,
                available_bytes,
                ..
            }) => HashMap::from([
                ("needed_bytes".to_owned(), needed_bytes.to_string()),
                ("available_bytes".to_owned(), available_bytes.to_string()),
            ]),
            _ => HashMap::new(),
        }
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } => Some(field),
            _ => None,
        }
    }
}
