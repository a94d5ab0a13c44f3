//! The arithmetic behind the evidence: which counts and rows a plan allows.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use velox_proto::op::{OpId, OpKind};
use velox_proto::v1;
use velox_proto::worker::v1 as wire;

use super::Violation;
use crate::pool::facts::ModelFacts;
use crate::pool::plan::{PlanExpectation, RowExpectation, Work};

/// Rounding of a log-probability above 0 that is forgiven.
const LOGPROB_EPSILON: f32 = 1e-3;

/// Whether the worker says that anything was computed. A result that lies about this has no tokens to show.
pub(super) fn ran_a_pass(result: &wire::StepResult) -> bool {
    result.op_counts.iter().any(|entry| entry.count > 0)
}

/// Reads counts of stages; each at most once.
pub(super) fn stage_counts(wire: &[v1::OpCount]) -> Result<Vec<(OpId, u64)>, Violation> {
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
    fn exactly(count: u64) -> Self {
        Self {
            min: count,
            max: count,
        }
    }

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
        match &expected.work {
            Work::Fill => Self {
                forward: once,
                ..Self::default()
            },
            Work::Sample | Work::Verify { .. } => Self {
                forward: once,
                head: once,
                sample: once,
            },
            Work::Score { first, end, .. } => {
                // The last position may have nothing to score, and then nothing needs the head.
                let needs_head = !failed && !row.scores.is_empty();
                let head = Passes {
                    min: u64::from(needs_head),
                    max: u64::from(*first < *end),
                };
                Self {
                    forward: once,
                    head,
                    sample: Passes::default(),
                }
            }
            Work::Decode { steps } => {
                let done = u64::try_from(row.tokens.len()).unwrap_or(u64::MAX);
                // A device that draws ahead learns of an end token after further passes, which yield nothing.
                let ends = &expected.terms.end_token_ids;
                let ended = |token: &wire::SampledToken| ends.contains(&token.token_id);
                let may_be_ahead = failed || row.tokens.last().is_some_and(ended);
                let max = if may_be_ahead {
                    u64::from(*steps)
                } else {
                    done
                };
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

/// The embedding tells how many passes there were, within what the rows allow; every layer ran as often, and so did head
/// and sampler where rows decode: such a row is in every pass, unless it failed.
pub(super) fn check_counts(
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
    let count_of = |op: OpId| {
        let counted = counts.iter().find(|(counted, _count)| *counted == op);
        counted.map_or(0, |(_op, count)| *count)
    };
    let check = |op: OpId, allowed: RangeInclusive<u64>| {
        let actual = count_of(op);
        if allowed.contains(&actual) {
            return Ok(());
        }
        Err(Violation::OpCount {
            op: op.name(),
            min: *allowed.start(),
            max: *allowed.end(),
            actual,
        })
    };
    check(OpId::Embed, all.forward.times(1))?;
    let forward = Passes::exactly(count_of(OpId::Embed));
    let decodes = |expected: &RowExpectation| matches!(expected.work, Work::Decode { .. });
    let nothing_failed = rows.iter().all(|row| row.error.is_none());
    if nothing_failed && expectation.rows.iter().any(decodes) {
        (all.head, all.sample) = (forward, forward);
    }
    let layers = u64::from(model.n_layers());
    for &op in OpId::ALL.iter().filter(|op| op.kind() == OpKind::Stage) {
        let allowed = match op {
            OpId::Embed => forward.times(1),
            OpId::Head => all.head.times(1),
            OpId::Sample => all.sample.times(1),
            _layer_stage => forward.times(layers),
        };
        check(op, allowed)?;
    }
    Ok(())
}

/// A result without any count: every row failed before its first pass, or there are no rows.
pub(super) fn check_nothing_ran(
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
pub(super) fn check_rows(
    expectation: &PlanExpectation,
    rows: &[wire::RowResult],
) -> Result<(), Violation> {
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

    /// Fewer tokens than steps only after an end token or with an error; none after an end token. A draft yields its right
    /// tokens and one more.
    fn check_token_count(&self) -> Result<(), Violation> {
        let max = match &self.expected.work {
            Work::Fill | Work::Score { .. } => 0,
            Work::Sample => 1,
            Work::Decode { steps } => *steps,
            Work::Verify { draft } => {
                let right = draft.iter().zip(&self.row.tokens);
                let right = right.take_while(|(guess, token)| **guess == token.token_id);
                u32::try_from(right.count() + 1).unwrap_or(u32::MAX)
            }
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
