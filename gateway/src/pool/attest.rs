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

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::time::Duration;

use velox_proto::op::{OpId, OpKind};
use velox_proto::v1;
use velox_proto::worker::v1 as wire;

use super::event::WorkerKey;
use super::facts::{FactsError, ModelFacts, WorkerFacts, possible};
use super::plan::{PlanExpectation, RowExpectation, Work};

/// Rounding of a log-probability above 0 that is forgiven.
const LOGPROB_EPSILON: f32 = 1e-3;

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
            device: facts.wire().device.clone(),
            kernel: facts.wire().kernel.clone(),
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

/// Whether the worker says that anything was computed. A result that lies about this has no tokens to show.
fn ran_a_pass(result: &wire::StepResult) -> bool {
    result.op_counts.iter().any(|entry| entry.count > 0)
}

/// Reads counts of stages; each at most once.
fn stage_counts(wire: &[v1::OpCount]) -> Result<Vec<(OpId, u64)>, Violation> {
    let mut counts: Vec<(OpId, u64)> = Vec::with_capacity(wire.len());
    for entry in wire {
        let op = entry
            .op
            .parse::<OpId>()
            .ok()
            .filter(|op| op.kind() == OpKind::Stage)
            .filter(|op| counts.iter().all(|(seen, _count)| seen != op))
            .ok_or_else(|| Violation::UnknownOp(entry.op.clone()))?;
        counts.push((op, entry.count));
    }
    counts.sort_unstable_by_key(|&(op, _count)| op);
    Ok(counts)
}

/// Least and most passes of a kind.
#[derive(Debug, Clone, Copy, Default)]
struct Passes {
    min: u64,
    max: u64,
}

impl Passes {
    /// Passes of two rows share forward passes, from the first on.
    fn joined(self, other: Self) -> Self {
        Self {
            min: self.min.max(other.min),
            max: self.max.max(other.max),
        }
    }

    fn times(self, factor: u64) -> RangeInclusive<u64> {
        self.min.saturating_mul(factor)..=self.max.saturating_mul(factor)
    }
}

/// Passes that a row took part in: all, those with logits, those with a sample.
#[derive(Debug, Clone, Copy, Default)]
struct RowPasses {
    forward: Passes,
    head: Passes,
    sample: Passes,
}

impl RowPasses {
    fn of(expected: &RowExpectation, row: &wire::RowResult) -> Self {
        let failed = row.error.is_some();
        let once = Passes {
            min: u64::from(!failed),
            max: 1,
        };
        match expected.work {
            Work::Fill => Self {
                forward: once,
                ..Self::default()
            },
            Work::Sample => Self {
                forward: once,
                head: once,
                sample: once,
            },
            Work::Score { first, end, .. } => {
                // The last position may have nothing to score, and then nothing needs the head.
                let needs_head = !failed && !row.scores.is_empty();
                let head = Passes {
                    min: u64::from(needs_head),
                    max: u64::from(first < end),
                };
                Self {
                    forward: once,
                    head,
                    sample: Passes::default(),
                }
            }
            Work::Decode { steps } => {
                let done = u64::try_from(row.tokens.len()).unwrap_or(u64::MAX);
                let max = if failed { u64::from(steps) } else { done };
                let passes = Passes { min: done, max };
                Self {
                    forward: passes,
                    head: passes,
                    sample: passes,
                }
            }
        }
    }
}

fn check_counts(
    expectation: &PlanExpectation,
    model: &ModelFacts,
    rows: &[wire::RowResult],
    counts: &[(OpId, u64)],
) -> Result<(), Violation> {
    let mut all = RowPasses::default();
    for (expected, row) in expectation.rows.iter().zip(rows) {
        let passes = RowPasses::of(expected, row);
        all.forward = all.forward.joined(passes.forward);
        all.head = all.head.joined(passes.head);
        all.sample = all.sample.joined(passes.sample);
    }
    let layers = u64::from(model.n_layers());
    for &op in OpId::ALL.iter().filter(|op| op.kind() == OpKind::Stage) {
        let allowed = match op {
            OpId::Embed => all.forward.times(1),
            OpId::Head => all.head.times(1),
            OpId::Sample => all.sample.times(1),
            _layer_stage => all.forward.times(layers),
        };
        let actual = counts
            .iter()
            .find_map(|&(counted, count)| (counted == op).then_some(count))
            .unwrap_or(0);
        if !allowed.contains(&actual) {
            return Err(Violation::OpCount {
                op: op.name(),
                min: *allowed.start(),
                max: *allowed.end(),
                actual,
            });
        }
    }
    Ok(())
}

/// A result without any count: every row failed before its first pass, or there are no rows.
fn check_nothing_ran(
    expectation: &PlanExpectation,
    result: &wire::StepResult,
) -> Result<(), Violation> {
    stage_counts(&result.op_counts)?;
    let no_model_ran = expectation.model.is_none() && ran_a_pass(result);
    let idle = |row: &wire::RowResult| row.error.is_some() && row.tokens.is_empty();
    if no_model_ran || !result.rows.iter().all(idle) {
        let min = u64::from(!no_model_ran);
        let actual = result.op_counts.iter().map(|entry| entry.count).max();
        return Err(Violation::OpCount {
            op: OpId::Embed.name(),
            min,
            max: min,
            actual: actual.unwrap_or(0),
        });
    }
    Ok(())
}

/// The rows that compute, in the plan's order; behind them only rows that failed while they were opened.
fn check_rows(expectation: &PlanExpectation, rows: &[wire::RowResult]) -> Result<(), Violation> {
    let expected = || expectation.rows.iter().map(|expected| expected.row);
    let (computing, opened) = rows
        .split_at_checked(expectation.rows.len())
        .unwrap_or((rows, &[]));
    let in_order = expected().eq(computing.iter().map(|row| row.row));
    let mut seen = HashSet::with_capacity(opened.len());
    let failed_to_open = |row: &wire::RowResult| {
        let silent = row.tokens.is_empty() && row.scores.is_empty();
        let asked = expectation.only_opened.contains(&row.row);
        row.error.is_some() && silent && asked && seen.insert(row.row)
    };
    if !in_order || !opened.iter().all(failed_to_open) {
        return Err(Violation::Rows {
            expected: expected().collect(),
            actual: rows.iter().map(|row| row.row).collect(),
        });
    }
    for (expected, row) in expectation.rows.iter().zip(rows) {
        RowCheck { expected, row }.check()?;
    }
    Ok(())
}

/// One row of a result beside what the plan promised for it.
struct RowCheck<'a> {
    expected: &'a RowExpectation,
    row: &'a wire::RowResult,
}

impl RowCheck<'_> {
    fn check(&self) -> Result<(), Violation> {
        self.check_token_count()?;
        self.check_scores()?;
        let wanted = self.expected.terms.top_logprobs;
        for token in &self.row.tokens {
            self.check_token_id(token.token_id)?;
            self.check_presence("log-probability", token.logprob, wanted.is_some())?;
            self.check_alternatives(&token.top, wanted.unwrap_or(0))?;
        }
        Ok(())
    }

    /// Fewer tokens than steps only after an end token or with an error; none after an end token.
    fn check_token_count(&self) -> Result<(), Violation> {
        let max = match self.expected.work {
            Work::Fill | Work::Score { .. } => 0,
            Work::Sample => 1,
            Work::Decode { steps } => steps,
        };
        let ends = &self.expected.terms.end_token_ids;
        let ended_after = self
            .row
            .tokens
            .iter()
            .position(|token| ends.contains(&token.token_id))
            .map(|index| index + 1);
        let full = usize::try_from(max).unwrap_or(usize::MAX);
        let last = ended_after.map_or(full, |ended| ended.min(full));
        let allowed = if self.row.error.is_some() { 0 } else { last }..=last;
        self.within("number of tokens", self.row.tokens.len(), allowed)
    }

    fn check_scores(&self) -> Result<(), Violation> {
        let Work::Score {
            first,
            end,
            last_known,
            top_n,
        } = self.expected.work
        else {
            return self.within("number of scores", self.row.scores.len(), 0..=0);
        };
        let positions = usize::try_from(end.saturating_sub(first)).unwrap_or(usize::MAX);
        let fewest = match (&self.row.error, last_known) {
            (Some(_), _) => 0,
            (None, true) => positions,
            (None, false) => positions.saturating_sub(1),
        };
        self.within(
            "number of scores",
            self.row.scores.len(),
            fewest..=positions,
        )?;
        for (position, score) in (first..end).zip(&self.row.scores) {
            if score.position != position {
                let allowed = u64::from(position);
                return Err(self.output(
                    "scored position",
                    score.position.into(),
                    allowed..=allowed,
                ));
            }
            let known = last_known || position + 1 < end;
            self.check_presence("log-probability of a score", score.next_logprob, known)?;
            self.check_alternatives(&score.top, top_n)?;
        }
        Ok(())
    }

    fn check_alternatives(&self, top: &[wire::Alternative], most: u32) -> Result<(), Violation> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        self.within("number of alternatives", top.len(), 0..=most)?;
        for alternative in top {
            self.check_token_id(alternative.token_id)?;
            self.check_logprob(alternative.logprob)?;
        }
        Ok(())
    }

    fn check_presence(
        &self,
        what: &'static str,
        logprob: Option<f32>,
        wanted: bool,
    ) -> Result<(), Violation> {
        let wanted_count = usize::from(wanted);
        let present = usize::from(logprob.is_some());
        self.within(what, present, wanted_count..=wanted_count)?;
        logprob.map_or(Ok(()), |logprob| self.check_logprob(logprob))
    }

    fn check_logprob(&self, logprob: f32) -> Result<(), Violation> {
        if logprob.is_finite() && logprob <= LOGPROB_EPSILON {
            return Ok(());
        }
        Err(Violation::Logprob {
            row: self.row.row,
            logprob,
        })
    }

    fn check_token_id(&self, token_id: u32) -> Result<(), Violation> {
        let last = self.expected.terms.model.vocab_size() - 1;
        if token_id <= last {
            return Ok(());
        }
        Err(self.output("token id", token_id.into(), 0..=last.into()))
    }

    fn within(
        &self,
        what: &'static str,
        actual: usize,
        allowed: RangeInclusive<usize>,
    ) -> Result<(), Violation> {
        if allowed.contains(&actual) {
            return Ok(());
        }
        let wide = |value: usize| u64::try_from(value).unwrap_or(u64::MAX);
        Err(self.output(
            what,
            wide(actual),
            wide(*allowed.start())..=wide(*allowed.end()),
        ))
    }

    fn output(&self, what: &'static str, actual: u64, allowed: RangeInclusive<u64>) -> Violation {
        Violation::Output {
            row: self.row.row,
            what,
            actual,
            min: *allowed.start(),
            max: *allowed.end(),
        }
    }
}

#[cfg(test)]
mod tests;
