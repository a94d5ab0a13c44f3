//! The engine's errors, by what the caller can do.

use velox_kernels::error::OpError;
use velox_kvcache::KvError;

/// Why the engine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The file is damaged, incomplete or hostile; the text names field, limit and value.
    #[error("{file}: {problem}")]
    InvalidModel {
        /// File at fault, without its folder.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The file is fine but of a kind that is not supported; the text names the field and its value.
    #[error("{file}: {what} is not supported")]
    UnsupportedModel {
        /// File at fault, without its folder.
        file: String,
        /// The unsupported field and its value.
        what: String,
    },
    /// Nothing lies at that path, or it cannot be read.
    #[error("cannot read {file}")]
    Unreadable {
        /// File, without its folder.
        file: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// No allowed backend can run the model.
    #[error("backend {backend} cannot run this model: {reason}")]
    BackendUnavailable {
        /// Label asked for.
        backend: &'static str,
        /// Why not.
        reason: String,
    },
    /// The device failed while it computed; the rows of the pass are lost.
    #[error("{backend}: {reason}")]
    Device {
        /// Label of the backend.
        backend: &'static str,
        /// What its library says.
        reason: String,
    },
    /// A plan breaks the contract between gateway and worker.
    #[error("invalid plan: {0}")]
    InvalidPlan(String),
    /// The cache cannot grow.
    #[error("out of memory: {what} needs {needed_bytes} bytes, {available_bytes} are left")]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// Bytes asked for.
        needed_bytes: u64,
        /// Bytes left of the limit.
        available_bytes: u64,
    },
    /// Operands do not fit each other: a fault of the graph or of the model's sizes.
    #[error("kernel refused its operands")]
    Kernel(#[from] OpError),
    /// The model produced values that are not numbers.
    #[error("{0}")]
    Numeric(String),
}

impl From<KvError> for EngineError {
    fn from(error: KvError) -> Self {
        match error {
            KvError::BudgetExceeded {
                needed_bytes,
                available_bytes,
            } => Self::OutOfMemory {
                what: "cache of a row".to_owned(),
                needed_bytes,
                available_bytes,
            },
            KvError::AllocatorRefused { bytes } => Self::OutOfMemory {
                what: "page of a cache".to_owned(),
                needed_bytes: bytes as u64,
                available_bytes: 0,
            },
            KvError::OutOfRange { .. } => Self::Numeric(error.to_string()),
            KvError::Shape(error) => Self::Kernel(error),
            // Plans are checked against capacity and layers come in order: the caller broke the contract.
            KvError::CapacityExceeded { .. }
            | KvError::LayerOutOfStep { .. }
            | KvError::NoSuchLayer { .. }
            | KvError::UnknownMethod { .. } => Self::InvalidPlan(error.to_string()),
        }
    }
}
