//! Evidence: the only way from what a worker says to what a client sees.
//!
//! A result is believed if the worker is our child (its facts were accepted), its own probes found the label
//! available, the label is the one its model was loaded on, the op counts are those of the plan, and every row
//! and token is one that the plan asked for. A malicious worker binary is out of scope: it could compute on
//! whatever it likes and count correctly.
//!
//! The counts follow from the rows of the result. A row without an error ran a known number of passes; a row
//! that failed ran at least as many as it has tokens and at most as many as it was asked for (an engine may
//! drop the tokens of a failed row). So each count lies in an interval, and the interval is one number when no
//! row failed.

mod check;

use std::time::Duration;

use velox_proto::op::OpId;
use velox_proto::v1;
use velox_proto::worker::v1 as wire;

use super::event::WorkerKey;
use super::facts::{FactsError, ModelFacts, WorkerFacts, possible};
use super::plan::PlanExpectation;
use check::{check_counts, check_nothing_ran, check_rows, ran_a_pass, stage_counts};

/// Why a worker is not believed. It is quarantined.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Violation {
    /// It contradicts what the gateway knows of it.
    #[error(transparent)]
    Facts(#[from] FactsError),
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

    /// Returns the public form, without spans: a stream knows its own.
    #[must_use]
    pub fn to_wire(&self) -> v1::Provenance {
        v1::Provenance {
            backend: self.backend.into(),
            device: self.device.clone(),
            kernel: self.kernel.clone(),
            fallback_reason: self.fallback_reason.clone(),
            op_counts: self
                .op_counts
                .iter()
                .map(|&(op, count)| v1::OpCount {
                    op: op.name().to_owned(),
                    count,
                })
                .collect(),
            sampler: self.sampler.unwrap_or(v1::Backend::Unspecified).into(),
            spans: Vec::new(),
        }
    }
}

/// A step's evidence: what the worker says, and everything to check it against.
#[derive(Debug, Clone, Copy)]
pub struct StepEvidence<'a> {
    /// The process that answered.
    pub worker: WorkerKey,
    /// What it is.
    pub facts: &'a WorkerFacts,
    /// What the plan promised.
    pub expectation: &'a PlanExpectation,
    /// Model of the plan's rows.
    pub model: &'a ModelFacts,
    /// What the worker says.
    pub result: &'a wire::StepResult,
}

impl TryFrom<StepEvidence<'_>> for AttestedProvenance {
    type Error = Violation;

    fn try_from(evidence: StepEvidence<'_>) -> Result<Self, Violation> {
        let StepEvidence {
            worker,
            facts,
            expectation,
            model,
            result,
        } = evidence;
        let backend = result.backend();
        if backend != model.backend() || !facts.has_backend(backend) || !possible(backend) {
            return Err(Violation::Label {
                expected: model.backend().as_str_name(),
                actual: backend.as_str_name(),
            });
        }
        let counts = stage_counts(&result.op_counts)?;
        check_rows(expectation, &result.rows)?;
        check_counts(expectation, model, &result.rows, &counts)?;
        let withdrawn = |&&(op, count): &&(OpId, u64)| {
            count > 0 && op != OpId::Sample && facts.withdrew_op(op.name(), backend)
        };
        if let Some((op, _count)) = counts.iter().find(withdrawn) {
            return Err(Violation::WithdrawnOp {
                op: op.name(),
                backend: backend.as_str_name(),
            });
        }
        let sampled = counts.iter().any(|&(op, n)| op == OpId::Sample && n > 0);
        let sampler = sampled.then(|| result.sampler());
        if let Some(sampler) = sampler
            && !(possible(sampler) && facts.has_backend(sampler))
        {
            return Err(Violation::SamplerLabel(sampler.as_str_name()));
        }
        Ok(Self {
            worker,
            backend,
            sampler,
            device: model.device().unwrap_or(&facts.wire().device).to_owned(),
            kernel: model.kernel().unwrap_or(&facts.wire().kernel).to_owned(),
            fallback_reason: model.fallback_reason().to_owned(),
            op_counts: counts,
        })
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
    /// Checks what a worker says about the oldest plan in flight.
    ///
    /// # Errors
    /// The first [`Violation`] found.
    pub fn attest(
        worker: WorkerKey,
        facts: &WorkerFacts,
        expectation: &PlanExpectation,
        result: wire::StepResult,
    ) -> Result<Self, Violation> {
        if result.sequence != expectation.sequence {
            return Err(Violation::Sequence {
                expected: Some(expectation.sequence),
                actual: result.sequence,
            });
        }
        let provenance = match expectation.model.as_deref() {
            Some(model) if ran_a_pass(&result) => {
                Some(AttestedProvenance::try_from(StepEvidence {
                    worker,
                    facts,
                    expectation,
                    model,
                    result: &result,
                })?)
            }
            _ => {
                check_rows(expectation, &result.rows)?;
                check_nothing_ran(expectation, &result)?;
                None
            }
        };
        Ok(Self {
            sequence: result.sequence,
            rows: result.rows,
            provenance,
            compute: Duration::from_micros(result.compute_us),
        })
    }

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

/// Outputs of an op whose provenance was checked.
#[derive(Debug, Clone, PartialEq)]
pub struct AttestedOp {
    outputs: Vec<v1::Tensor>,
    provenance: AttestedProvenance,
}

impl AttestedOp {
    /// Checks what a worker says about an op that it was asked to run.
    ///
    /// # Errors
    /// The first [`Violation`] found.
    pub fn attest(
        worker: WorkerKey,
        facts: &WorkerFacts,
        request: &wire::RunOpRequest,
        response: wire::RunOpResponse,
    ) -> Result<Self, Violation> {
        let provenance = response.provenance.unwrap_or_default();
        let backend = provenance.backend();
        let asked = request.backend();
        let as_asked = asked == v1::Backend::Unspecified || asked == backend;
        if !as_asked || !possible(backend) || !facts.has_backend(backend) {
            return Err(Violation::Label {
                expected: asked.as_str_name(),
                actual: backend.as_str_name(),
            });
        }
        let mut op_counts = Vec::new();
        for entry in &provenance.op_counts {
            let unknown = || Violation::UnknownOp(entry.op.clone());
            let op: OpId = entry.op.parse().map_err(|_unknown| unknown())?;
            if op.name() != request.op || !op_counts.is_empty() {
                return Err(unknown());
            }
            if entry.count != 1 {
                return Err(Violation::OpCount {
                    op: op.name(),
                    min: 1,
                    max: 1,
                    actual: entry.count,
                });
            }
            if facts.withdrew_op(op.name(), backend) {
                return Err(Violation::WithdrawnOp {
                    op: op.name(),
                    backend: backend.as_str_name(),
                });
            }
            op_counts.push((op, entry.count));
        }
        if op_counts.is_empty() {
            return Err(Violation::Unexpected("answer without an op count"));
        }
        Ok(Self {
            outputs: response.outputs,
            provenance: AttestedProvenance {
                worker,
                backend,
                sampler: None,
                device: facts.wire().device.clone(),
                kernel: facts.wire().kernel.clone(),
                fallback_reason: provenance.fallback_reason,
                op_counts,
            },
        })
    }

    /// Returns the outputs, inline or in the destination that the request named.
    #[must_use]
    pub fn outputs(&self) -> &[v1::Tensor] {
        &self.outputs
    }

    /// Returns which code ran.
    #[must_use]
    pub fn provenance(&self) -> &AttestedProvenance {
        &self.provenance
    }
}

#[cfg(test)]
mod tests;
