//! What a worker says of itself and of its models, checked once; `try_from` is the only constructor.

use velox_proto::worker::v1 as wire;
use velox_proto::{WORKER_PROTOCOL, v1};

use crate::request::ModelIdentity;

/// Most layers of a model that is believed.
const MAX_LAYERS: u32 = 4096;

/// Why facts are not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FactsError {
    /// No common protocol.
    #[error(
        "worker speaks protocols {min} to {max}, the gateway {} to {}",
        WORKER_PROTOCOL.start(),
        WORKER_PROTOCOL.end()
    )]
    Protocol {
        /// Oldest protocol of the worker.
        min: u32,
        /// Newest protocol of the worker.
        max: u32,
    },
    /// The peer is not the process that was spawned.
    #[error("worker says that it is process {actual}, process {expected} was spawned")]
    Pid {
        /// The child's id.
        expected: u32,
        /// What the peer says.
        actual: u32,
    },
    /// A label that cannot be true on this operating system.
    #[error("worker claims {backend} on {os}")]
    ImpossibleBackend {
        /// Name of the label.
        backend: &'static str,
        /// Operating system of this build.
        os: &'static str,
    },
    /// Nothing can run on it.
    #[error("worker has no available backend")]
    NoBackend,
    /// An answer without its content.
    #[error("worker left out {0}")]
    Missing(&'static str),
    /// A value outside its range.
    #[error("{field} is {value}, allowed are 1 to {max}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// What the worker says.
        value: u32,
        /// Largest allowed value.
        max: u32,
    },
    /// It loaded another model than it was asked to.
    #[error("worker loaded model {actual:?}, asked for was {expected:?}")]
    WrongModel {
        /// Name that was asked for.
        expected: String,
        /// Name in the answer.
        actual: String,
    },
    /// It loaded a model on a backend that its own probes call unavailable.
    #[error("worker loaded a model on {0}, which its probes call unavailable")]
    UnavailableBackend(&'static str),
}

impl FactsError {
    /// Returns whether the worker contradicts what the gateway knows, rather than being too old or too poor.
    #[must_use]
    pub fn is_lie(&self) -> bool {
        match self {
            Self::Pid { .. }
            | Self::ImpossibleBackend { .. }
            | Self::WrongModel { .. }
            | Self::UnavailableBackend(_)
            | Self::OutOfRange { .. } => true,
            Self::Protocol { .. } | Self::NoBackend | Self::Missing(_) => false,
        }
    }
}

/// A worker that speaks our protocol, is our child and claims nothing impossible.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerFacts {
    wire: wire::WorkerFacts,
}

impl WorkerFacts {
    /// Checks what the process `pid` says of itself.
    ///
    /// # Errors
    /// [`FactsError`] if it is not our child, speaks another protocol or claims an impossible backend.
    pub fn try_from_wire(wire: wire::WorkerFacts, pid: u32) -> Result<Self, FactsError> {
        let (min, max) = (wire.protocol_min, wire.protocol_max);
        if min > max || *WORKER_PROTOCOL.start() > max || *WORKER_PROTOCOL.end() < min {
            return Err(FactsError::Protocol { min, max });
        }
        if wire.pid != pid {
            return Err(FactsError::Pid {
                expected: pid,
                actual: wire.pid,
            });
        }
        let available = || wire.backends.iter().filter(|entry| entry.available);
        if let Some(entry) = available().find(|entry| !possible(entry.backend())) {
            return Err(FactsError::ImpossibleBackend {
                backend: entry.backend().as_str_name(),
                os: std::env::consts::OS,
            });
        }
        if available().next().is_none() {
            return Err(FactsError::NoBackend);
        }
        Ok(Self { wire })
    }

    /// Returns the message as the worker sent it.
    #[must_use]
    pub fn wire(&self) -> &wire::WorkerFacts {
        &self.wire
    }

    /// Returns whether the worker's probe found the backend available.
    #[must_use]
    pub fn has_backend(&self, backend: v1::Backend) -> bool {
        self.wire
            .backends
            .iter()
            .any(|entry| entry.available && entry.backend() == backend)
    }

    /// Returns whether the worker's probes withdrew the op on the backend: it was tried for at least one element
    /// type and failed for all.
    #[must_use]
    pub fn withdrew_op(&self, op: &str, backend: v1::Backend) -> bool {
        let mut probes = self
            .wire
            .ops
            .iter()
            .filter(|entry| entry.op == op && entry.backend() == backend)
            .peekable();
        probes.peek().is_some() && !probes.any(|entry| entry.available)
    }
}

/// Whether a label can be true at all in this build: Metal is an Apple interface.
pub(super) fn possible(backend: v1::Backend) -> bool {
    match backend {
        v1::Backend::Unspecified => false,
        v1::Backend::Metal => cfg!(target_os = "macos"),
        v1::Backend::MlxCuda => cfg!(target_os = "linux"),
        v1::Backend::Cpu | v1::Backend::MlxCpu | v1::Backend::Reference => true,
    }
}

/// A resident model of one worker.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    wire: wire::ModelFacts,
    model: v1::Model,
}

impl ModelFacts {
    /// Checks what a worker says of the model that it was asked to load as `name`.
    ///
    /// # Errors
    /// [`FactsError`] if a field is missing or impossible.
    pub fn try_from_wire(
        mut wire: wire::ModelFacts,
        name: &str,
        worker: &WorkerFacts,
    ) -> Result<Self, FactsError> {
        let model = wire.model.take().ok_or(FactsError::Missing("the model"))?;
        if model.name != name {
            return Err(FactsError::WrongModel {
                expected: name.to_owned(),
                actual: model.name,
            });
        }
        if !possible(wire.backend()) || !worker.has_backend(wire.backend()) {
            return Err(FactsError::UnavailableBackend(wire.backend().as_str_name()));
        }
        for (field, value, max) in [
            ("n_layers", wire.n_layers, MAX_LAYERS),
            ("max_rows", wire.max_rows, u32::MAX),
            ("vocab_size", model.vocab_size, u32::MAX),
            ("context_length", model.context_length, u32::MAX),
        ] {
            if value == 0 || value > max {
                return Err(FactsError::OutOfRange { field, value, max });
            }
        }
        Ok(Self { wire, model })
    }

    /// Returns the name under which it is served.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.model.name
    }

    /// Returns the public description.
    #[must_use]
    pub fn model(&self) -> &v1::Model {
        &self.model
    }

    /// Returns the backend that runs it.
    #[must_use]
    pub fn backend(&self) -> v1::Backend {
        self.wire.backend()
    }

    /// Returns why not the backend that was asked for; empty if it is.
    #[must_use]
    pub fn fallback_reason(&self) -> &str {
        &self.wire.fallback_reason
    }

    /// Returns the kernel set of the backend; `None` = the worker's.
    #[must_use]
    pub fn kernel(&self) -> Option<&str> {
        Some(self.wire.kernel.as_str()).filter(|kernel| !kernel.is_empty())
    }

    /// Returns the device of the backend; `None` = the worker's.
    #[must_use]
    pub fn device(&self) -> Option<&str> {
        Some(self.wire.device.as_str()).filter(|device| !device.is_empty())
    }

    /// Returns the layers that every forward pass visits.
    #[must_use]
    pub fn n_layers(&self) -> u32 {
        self.wire.n_layers
    }

    /// Returns how many rows may be open at a time.
    #[must_use]
    pub fn max_rows(&self) -> u32 {
        self.wire.max_rows
    }

    /// Returns the width of the logits; every token id lies below.
    #[must_use]
    pub fn vocab_size(&self) -> u32 {
        self.model.vocab_size
    }

    /// Returns the digest that is equal on every worker with the same file.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.wire.fingerprint
    }

    /// Returns what tells it from another model of the same name.
    #[must_use]
    pub fn identity(&self) -> ModelIdentity<'_> {
        ModelIdentity {
            name: self.name(),
            fingerprint: self.fingerprint(),
        }
    }

    /// Returns the digest of the tokenizer's description.
    #[must_use]
    pub fn tokenizer_sha256(&self) -> &str {
        &self.wire.tokenizer_sha256
    }
}
