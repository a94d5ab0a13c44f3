//! The gateway's one error type.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use velox_proto::error::{Reason, ServiceError, ServiceFault};

use crate::pool::PoolError;
use crate::text::TextError;

/// When a caller that found the queue full may come back: the order of one short answer.
const RETRY_QUEUE: Duration = Duration::from_secs(1);

/// When a caller that found no worker may come back: the order of a restart.
const RETRY_WORKER: Duration = Duration::from_secs(2);

/// Why a call was refused or ended, or why the gateway cannot start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// A field of the request is wrong.
    #[error("{message}")]
    Invalid {
        /// Path of the field.
        field: &'static str,
        /// Limit and value.
        message: String,
    },
    /// The prompt leaves no room for an answer.
    #[error("prompt has {tokens} tokens, limit is {limit}")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Most tokens of a prompt.
        limit: u32,
    },
    /// The text of the prompt is longer than any prompt of the model can be; its tokens were not counted.
    #[error("prompt has {bytes} bytes, limit is {limit}")]
    PromptTextTooLong {
        /// Bytes of the text.
        bytes: usize,
        /// Most bytes of a prompt for the model.
        limit: usize,
    },
    /// No such file or folder, as the caller wrote it.
    #[error("model {0:?}: no such file or folder")]
    NoSuchModelFile(String),
    /// No such model.
    #[error("model {0:?} is not loaded")]
    ModelNotFound(String),
    /// No model was named and there is no default.
    #[error("no model is named and the gateway has no default model")]
    NoDefaultModel,
    /// The model serves running requests.
    #[error("model {model:?} serves {rows} requests")]
    ModelBusy {
        /// Its name.
        model: String,
        /// Running and waiting requests.
        rows: usize,
    },
    /// No allowed backend runs the model.
    #[error("no allowed backend runs model {model:?}: allowed {allowed}; {found}")]
    BackendUnavailable {
        /// Its name.
        model: String,
        /// Labels of the policy.
        allowed: String,
        /// What there is, and why not the others.
        found: String,
    },
    /// Too many requests wait.
    #[error("{depth} requests wait, limit is {limit}")]
    QueueFull {
        /// Waiting requests.
        depth: usize,
        /// Most waiting requests.
        limit: usize,
    },
    /// The request alone exceeds the memory for caches.
    #[error("request needs {bytes} bytes of cache, limit is {budget}")]
    CacheTooSmall {
        /// Worst case of the request.
        bytes: u64,
        /// Budget of the machine.
        budget: u64,
    },
    /// The caller's deadline passed.
    #[error("deadline of {} ms passed", .0.as_millis())]
    DeadlineExceeded(Duration),
    /// The gateway goes down.
    #[error("gateway is shutting down")]
    Draining,
    /// No worker could run the request in time.
    #[error("no worker could run the request within {} ms: {cause}", .waited.as_millis())]
    WorkerUnavailable {
        /// Time that was given.
        waited: Duration,
        /// Why the last one was lost, or what is awaited.
        cause: String,
        /// Index of the first token that was not sent; absent before the first.
        next_token_index: Option<u32>,
    },
    /// The request lost too many workers.
    #[error("request lost {recoveries} workers, limit is {limit}")]
    TooManyRecoveries {
        /// Workers that it lost.
        recoveries: u32,
        /// Most workers that it may lose.
        limit: u32,
        /// Index of the first token that was not sent.
        next_token_index: u32,
    },
    /// The request crashed a worker while it was alone on it.
    #[error("request crashed a worker while it was alone on it: {cause}")]
    Poison {
        /// How the worker ended.
        cause: String,
        /// Index of the first token that was not sent.
        next_token_index: u32,
    },
    /// The worker ended the row, or the model could not be loaded.
    #[error(transparent)]
    Fault(#[from] ServiceFault),
    /// Text could not be made into tokens or back.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The pool refused.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Shared memory did not hold what it should.
    #[error(transparent)]
    SharedMemory(#[from] velox_shm::ShmError),
    /// A broken invariant.
    #[error("internal fault: {0}")]
    Internal(&'static str),
    /// The address cannot be reached by this machine only.
    #[error(
        "will not listen on {0}: only loopback addresses are allowed, because other connections would be neither \
         encrypted nor authenticated"
    )]
    AddressRefused(SocketAddr),
    /// Another gateway answers there.
    #[error("another gateway serves {}", .0.display())]
    SocketInUse(PathBuf),
    /// The socket's folder or file belongs to somebody else or is open to others.
    #[error("{}: {why}", .path.display())]
    SocketUnsafe {
        /// Folder or file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Workers end before they are ready.
    #[error("no worker starts: {0}")]
    NoWorkerStarts(String),
    /// The configuration contradicts itself.
    #[error("{0}")]
    Config(String),
    /// The operating system refused.
    #[error("{what} failed")]
    Io {
        /// What was tried.
        what: String,
        /// What it said.
        source: std::io::Error,
    },
}

impl GatewayError {
    /// Makes the error of a wrong field.
    #[must_use]
    pub fn invalid(field: &'static str, message: impl Into<String>) -> Self {
        Self::Invalid {
            field,
            message: message.into(),
        }
    }

    /// Makes the error of a refused system call.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

impl ServiceError for GatewayError {
    fn reason(&self) -> Reason {
        match self {
            Self::Invalid { .. } => Reason::InvalidRequest,
            Self::PromptTooLong { .. } | Self::PromptTextTooLong { .. } => Reason::PromptTooLong,
            Self::ModelNotFound(_) | Self::NoSuchModelFile(_) | Self::NoDefaultModel => {
                Reason::ModelNotFound
            }
            Self::ModelBusy { .. } => Reason::ModelBusy,
            Self::BackendUnavailable { .. } => Reason::BackendUnavailable,
            Self::QueueFull { .. } => Reason::QueueFull,
            Self::CacheTooSmall { .. } => Reason::OutOfMemory,
            Self::DeadlineExceeded(_) => Reason::DeadlineExceeded,
            Self::Draining => Reason::Draining,
            Self::WorkerUnavailable { .. } | Self::TooManyRecoveries { .. } => {
                Reason::WorkerUnavailable
            }
            Self::Poison { .. } => Reason::PoisonRequest,
            Self::Fault(fault) => fault.reason(),
            Self::Text(error) => error.reason(),
            Self::Pool(error) => error.reason(),
            Self::SharedMemory(error) => error.reason(),
            Self::Internal(_)
            | Self::AddressRefused(_)
            | Self::SocketInUse(_)
            | Self::SocketUnsafe { .. }
            | Self::NoWorkerStarts(_)
            | Self::Config(_)
            | Self::Io { .. } => Reason::Internal,
        }
    }

    fn metadata(&self) -> HashMap<String, String> {
        let facts: &[(&str, String)] = match self {
            Self::PromptTooLong { tokens, limit } => &[
                ("prompt_tokens", tokens.to_string()),
                ("limit_tokens", limit.to_string()),
            ],
            Self::PromptTextTooLong { bytes, limit } => &[
                ("prompt_bytes", bytes.to_string()),
                ("limit_bytes", limit.to_string()),
            ],
            Self::ModelNotFound(model) | Self::NoSuchModelFile(model) => {
                &[("model", model.clone())]
            }
            Self::ModelBusy { model, rows } => {
                &[("model", model.clone()), ("requests", rows.to_string())]
            }
            Self::BackendUnavailable { model, allowed, .. } => {
                &[("model", model.clone()), ("allowed", allowed.clone())]
            }
            Self::QueueFull { depth, limit } => &[
                ("queue_depth", depth.to_string()),
                ("queue_limit", limit.to_string()),
            ],
            Self::CacheTooSmall { bytes, budget } => &[
                ("kv_bytes", bytes.to_string()),
                ("kv_budget_bytes", budget.to_string()),
            ],
            Self::DeadlineExceeded(limit) => &[("timeout_ms", limit.as_millis().to_string())],
            Self::WorkerUnavailable {
                next_token_index: Some(index),
                ..
            }
            | Self::TooManyRecoveries {
                next_token_index: index,
                ..
            }
            | Self::Poison {
                next_token_index: index,
                ..
            } => &[("next_token_index", index.to_string())],
            Self::Fault(fault) => return fault.metadata(),
            Self::Text(error) => return error.metadata(),
            Self::Pool(error) => return error.metadata(),
            _ => &[],
        };
        facts
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect()
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::Invalid { field, .. } => Some(field),
            Self::PromptTooLong { .. } | Self::PromptTextTooLong { .. } => Some("prompt"),
            Self::NoSuchModelFile(_) => Some("source"),
            Self::ModelNotFound(_) | Self::NoDefaultModel => Some("model"),
            Self::Fault(fault) => fault.field(),
            Self::Text(error) => error.field(),
            Self::Pool(error) => error.field(),
            _ => None,
        }
    }

    fn retry_delay(&self) -> Option<Duration> {
        match self {
            Self::QueueFull { .. } => Some(RETRY_QUEUE),
            Self::Draining | Self::WorkerUnavailable { .. } | Self::TooManyRecoveries { .. } => {
                Some(RETRY_WORKER)
            }
            Self::Fault(fault) => fault.retry_delay(),
            Self::Text(error) => error.retry_delay(),
            Self::Pool(error) => error.retry_delay(),
            _ => None,
        }
    }
}
