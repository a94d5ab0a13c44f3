//! Evidence: the only way from what a worker says to what a client sees.
//!
//! A result is believed if the worker is our child (its facts were accepted), its own probes found the label
//! available, the label is the one its model was loaded on, the op counts are those of the plan, and every row
//! and token is one that the plan asked for. A malicious worker binary is out of scope: it could compute on
//! whatever it likes and count correctly.
//!
//! The counts follow from the rows of the result. A row without an error ran a known number of passes; a row
//! that failed ran one pass more than it has tokens, or none more. So each count lies in an interval, and the
//! interval is one number when no row failed.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use velox_proto::op::{OpId, OpKind};
use velox_proto::v1;
use velox_proto::worker::v1 as wire;

use super::event::WorkerKey;
use super::facts::{ModelFacts, WorkerFacts, possible};
use super::plan::{PlanExpectation, RowExpectation, Work};

/// Rounding of a log-probability above 0 that is forgiven.
const LOGPROB_EPSILON: f32 = 1e-3;

/// Why a result is not believed. Its worker is quarantined.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Violation {
    /// A frame that is too long or no message.
    #[error("bad frame: {0}")]
    Frame(String),
    /// A result that no plan waits for, or out of order.
    #[error("result has sequence number {actual}, expected {expected:?}")]
    Sequence {
        /// Number of the oldest plan in flight.
        expected: Option<u64>,
        /// Number in the result.
        actual: u64,
    },
    /// An answer to a question that was not asked.
    #[error("unexpected {0}")]
    Unexpected(&'static str),
    /// A label that this worker cannot have.
    #[error("label is {actual}, expected {expected}")]
    Label {
        /// Label of the model.
        expected: &'static str,
        /// Label in the result.
        actual: &'static str,
    },
    /// A sampler label that the worker's probes do not know.
    #[error("sampler label is {0}, which is not available")]
    SamplerLabel(&'static str),
    /// An op that is not in the table, is no stage, or is listed twice.
    #[error("op count of {0:?} does not belong there")]
    UnknownOp(String),
    /// An op whose probe failed ran all the same.
    #[error("op {op} ran on {backend}, its probe failed there")]
    WithdrawnOp {
        /// Name of the op.
        op: &'static str,
        /// Name of the label.
        backend: &'static str,
    },
    /// Other work than the plan's.
    #[error("op {op} ran {actual} times, the plan needs {min} to {max}")]
    OpCount {
        /// Name of the op.
        op: &'static str,
        /// Least allowed.
        min: u64,
        /// Most allowed.
        max: u64,
        /// Count in the result.
        actual: u64,
    },
    /// Other rows than the plan's, or in another order.
    #[error("result has rows {actual:?}, expected {expected:?}")]
    Rows {
        /// Rows of the plan.
        expected: Vec<u64>,
        /// Rows of the result.
        actual: Vec<u64>,
    },
    /// A row has tokens or scores that the plan does not account for.
    #[error("row {row}: {what} ({actual}, allowed {min} to {max})")]
    Output {
        /// The row.
        row: u64,
        /// What is wrong.
        what: &'static str,
        /// What the result has.
        actual: u64,
        /// Least allowed.
        min: u64,
        /// Most allowed.
        max: u64,
    },
    /// A log-probability that is none.
    #[error("row {row}: log-probability {logprob} is not one")]
    Logprob {
        /// The row.
        row: u64,
        /// The value.
        logprob: f32,
    },
}

/// Which code ran, as far as the gateway could convince itself.
#[derive(Debug, Clone, PartialEq)]
pub struct AttestedProvenance {
    worker: WorkerKey,
    backend: v1::Backend,
    sampler: Option<v1::Backend>,
    device: String,
    kernel: String,
    fallback_reason: String,
    op_counts: Vec<(OpId, u64)>,
}

impl AttestedProvenance {
    /// Returns the process that computed.
    #[must_use]
    pub fn worker(&self) -> WorkerKey {
        self.worker
    }

    /// Returns the weakest label from embedding to logits.
    #[must_use]
    pub fn backend(&self) -> v1::Backend {
        self.backend
    }

    /// Returns the label of the sampler, if anything was sampled.
    #[must_use]
    pub fn sampler(&self) -> Option<v1::Backend> {
        self.sampler
    }

    /// Returns the device of the worker.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Returns the kernel set of the worker.
    #[must_use]
    pub fn kernel(&self) -> &str {
        &self.kernel
    }

    /// Returns why not the backend that was asked for; empty if it is.
    #[must_use]
    pub fn fallback_reason(&self) -> &str {
        &self.fallback_reason
    }

    /// Returns how often each op ran, in the order of the table.
    #[must_use]
    pub fn op_counts(&self) -> &[(OpId, u64)] {
        &self.op_counts
    }
}

/// A result that was checked against its plan.
#[derive(Debug, Clone, PartialEq)]
pub struct AttestedResult {
    sequence: u64,
    rows: Vec<wire::RowResult>,
    provenance: Option<AttestedProvenance>,
    compute: Duration,
}

impl AttestedResult {
    /// Returns the number of the plan.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns the rows, in the order of the plan.
    #[must_use]
    pub fn rows(&self) -> &[wire::RowResult] {
        &self.rows
    }

    /// Returns the rows, in the order of the plan.
    #[must_use]
    pub fn into_rows(self) -> Vec<wire::RowResult> {
        self.rows
    }

    /// Returns which code ran; `None` exactly if no forward pass ran.
    #[must_use]
    pub fn provenance(&self) -> Option<&AttestedProvenance> {
        self.provenance.as_ref()
    }

    /// Returns the time that the worker says it computed.
    #[must_use]
    pub fn compute(&self) -> Duration {
        self.compute
    }
}

/// What a worker says about a plan, and everything to check it against.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// The process that answered.
    pub worker: WorkerKey,
    /// What it is.
    pub facts: &'a WorkerFacts,
    /// What the plan promised.
    pub expectation: &'a PlanExpectation,
    /// What it says.
    pub result: &'a wire::StepResult,
}
