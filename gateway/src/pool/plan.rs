//! What a plan promises: the rows it will answer for, and the terms under which each was opened.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use velox_proto::limits::{MAX_DECODE_STEPS, MAX_DRAFT_TOKENS, MAX_PLAN_ROWS};
use velox_proto::tensor::{DType, HandleError, TensorHandle};
use velox_proto::worker::v1 as wire;

use super::facts::ModelFacts;

/// Plans of one worker that are sent and not collected: one runs, one waits.
pub const MAX_PLANS_IN_FLIGHT: usize = 2;

/// Why a plan was not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Results are matched by order.
    #[error("sequence number {actual} does not follow {last}")]
    Sequence {
        /// Number of the plan before.
        last: u64,
        /// Number of this plan.
        actual: u64,
    },
    /// The worker holds as many plans as it may.
    #[error("{MAX_PLANS_IN_FLIGHT} plans are in flight, that is the limit")]
    TooManyPlans,
    /// Too many rows compute.
    #[error("plan has {0} rows, limit is {MAX_PLAN_ROWS}")]
    TooManyRows(usize),
    /// A row computes twice.
    #[error("row {0} appears twice")]
    RowTwice(u64),
    /// A row is opened twice.
    #[error("row {0} is open already")]
    RowOpen(u64),
    /// A row computes that was not opened.
    #[error("row {0} is not open")]
    UnknownRow(u64),
    /// A row of a model that the worker does not have.
    #[error("model {0:?} is not loaded on the worker")]
    UnknownModel(String),
    /// Rows of two models cannot share a forward pass.
    #[error("rows of models {0:?} and {1:?} are in one plan")]
    MixedModels(String, String),
    /// Outside the allowed number of steps.
    #[error("row {row} has {steps} decode steps, allowed are 1 to {MAX_DECODE_STEPS}")]
    Steps {
        /// The row.
        row: u64,
        /// Its steps.
        steps: u32,
    },
    /// A draft that is too long, or goes with several steps or without the token before it.
    #[error(
        "row {row} has a draft of {tokens} tokens and {steps} steps; allowed are {MAX_DRAFT_TOKENS}, with 1 step and the token before them"
    )]
    Draft {
        /// The row.
        row: u64,
        /// Length of its draft.
        tokens: usize,
        /// Its steps.
        steps: u32,
    },
    /// The chunk has no tokens, or tokens inline and in memory, or wants a sample and scores.
    #[error("prefill chunk is not valid: {0}")]
    Chunk(&'static str),
    /// The chunk's tokens are described by a bad handle.
    #[error("prefill chunk has a bad handle: {0}")]
    Handle(#[from] HandleError),
}

/// What a row was opened with, as far as its results depend on it.
#[derive(Debug)]
pub(super) struct RowTerms {
    pub(super) model: Arc<ModelFacts>,
    pub(super) end_token_ids: HashSet<u32>,
    pub(super) top_logprobs: Option<u32>,
}

/// What a plan asks of one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Work {
    /// Tokens enter the cache, nothing comes back.
    Fill,
    /// Tokens enter the cache, one token comes back.
    Sample,
    /// Scores of positions `first..end` come back, of the last one only if its next token is known.
    Score {
        first: u32,
        end: u32,
        last_known: bool,
        top_n: u32,
    },
    /// Up to `steps` tokens come back.
    Decode { steps: u32 },
    /// One pass checks the draft; its right tokens come back and one more.
    Verify { draft: Vec<u32> },
}

/// What a plan promises for one row.
#[derive(Debug)]
pub(super) struct RowExpectation {
    pub(super) row: u64,
    pub(super) terms: Arc<RowTerms>,
    pub(super) work: Work,
}

/// Everything that the result of a plan is checked against.
#[derive(Debug)]
pub struct PlanExpectation {
    pub(super) sequence: u64,
    /// Model of the rows that compute; `None` if the plan only opens and closes.
    pub(super) model: Option<Arc<ModelFacts>>,
    /// In the order in which the result lists them.
    pub(super) rows: Vec<RowExpectation>,
    /// Rows that are opened and do not compute yet; one is listed only if it fails.
    pub(super) only_opened: HashSet<u64>,
    /// Tokens of the largest pass, for the stall limit.
    pub(super) pass_tokens: u32,
}

/// The rows that are open in one worker, as the plans sent to it say.
#[derive(Debug, Default)]
pub(super) struct RowLedger {
    rows: HashMap<u64, Arc<RowTerms>>,
    last_sequence: u64,
}

impl RowLedger {
    /// Returns the number of open rows.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns how many rows of a model are open.
    pub(super) fn rows_of(&self, model: &str) -> usize {
        self.rows
            .values()
            .filter(|terms| terms.model.name() == model)
            .count()
    }

    /// Forgets a row that the worker freed because it failed.
    pub(super) fn free(&mut self, row: u64) {
        self.rows.remove(&row);
    }

    /// Derives what a plan promises and takes over its opened and closed rows; changes nothing on an error.
    pub(super) fn expect(
        &mut self,
        plan: &wire::StepPlan,
        models: &HashMap<String, Arc<ModelFacts>>,
    ) -> Result<PlanExpectation, PlanError> {
        if plan.sequence <= self.last_sequence {
            return Err(PlanError::Sequence {
                last: self.last_sequence,
                actual: plan.sequence,
            });
        }
        let opened = self.opened_rows(plan, models)?;
        let closed: HashSet<u64> = plan.close_rows.iter().copied().collect();
        let terms = |row: u64| {
            opened
                .get(&row)
                .or_else(|| self.rows.get(&row).filter(|_terms| !closed.contains(&row)))
                .cloned()
                .ok_or(PlanError::UnknownRow(row))
        };

        let mut rows = Vec::with_capacity(plan.decode.len() + 1);
        let mut pass_tokens = u32::try_from(plan.decode.len()).unwrap_or(u32::MAX);
        if let Some(chunk) = &plan.prefill {
            let chunk_tokens = chunk_tokens(chunk)?;
            pass_tokens = pass_tokens.saturating_add(chunk_tokens);
            rows.push(RowExpectation {
                row: chunk.row,
                terms: terms(chunk.row)?,
                work: chunk_work(chunk, chunk_tokens)?,
            });
        }
        for decode in &plan.decode {
            let work = decode_work(decode)?;
            if let Work::Verify { draft } = &work {
                let tokens = u32::try_from(draft.len()).unwrap_or(u32::MAX);
                pass_tokens = pass_tokens.saturating_add(tokens);
            }
            rows.push(RowExpectation {
                row: decode.row,
                terms: terms(decode.row)?,
                work,
            });
        }
        let model = common_model(&rows)?;
        let computes = |row: &u64| rows.iter().any(|expected| expected.row == *row);
        let only_opened = opened
            .keys()
            .copied()
            .filter(|row| !computes(row))
            .collect();

        for row in &closed {
            self.rows.remove(row);
        }
        self.rows.extend(opened);
        self.last_sequence = plan.sequence;
        Ok(PlanExpectation {
            sequence: plan.sequence,
            model,
            rows,
            only_opened,
            pass_tokens,
        })
    }

    fn opened_rows(
        &self,
        plan: &wire::StepPlan,
        models: &HashMap<String, Arc<ModelFacts>>,
    ) -> Result<HashMap<u64, Arc<RowTerms>>, PlanError> {
        let mut opened = HashMap::with_capacity(plan.open_rows.len());
        for open in &plan.open_rows {
            let model = models
                .get(&open.model)
                .ok_or_else(|| PlanError::UnknownModel(open.model.clone()))?;
            let terms = Arc::new(RowTerms {
                model: Arc::clone(model),
                end_token_ids: open.end_token_ids.iter().copied().collect(),
                top_logprobs: open.top_logprobs,
            });
            let stays_open =
                self.rows.contains_key(&open.row) && !plan.close_rows.contains(&open.row);
            if stays_open || opened.insert(open.row, terms).is_some() {
                return Err(PlanError::RowOpen(open.row));
            }
        }
        Ok(opened)
    }
}

fn chunk_tokens(chunk: &wire::PrefillChunk) -> Result<u32, PlanError> {
    let tokens = match &chunk.token_handle {
        Some(_) if !chunk.token_ids.is_empty() => {
            return Err(PlanError::Chunk("tokens are inline and in memory"));
        }
        Some(handle) => {
            let handle = TensorHandle::try_from(handle.clone())?;
            match (handle.dtype(), handle.shape()) {
                (DType::U32, &[tokens]) => tokens,
                _ => return Err(PlanError::Chunk("handle is not a u32 tensor of rank 1")),
            }
        }
        None => u64::try_from(chunk.token_ids.len()).unwrap_or(u64::MAX),
    };
    match u32::try_from(tokens) {
        Ok(tokens) if tokens > 0 && chunk.start.checked_add(tokens).is_some() => Ok(tokens),
        _ => Err(PlanError::Chunk("no tokens, or more than positions exist")),
    }
}

fn chunk_work(chunk: &wire::PrefillChunk, chunk_tokens: u32) -> Result<Work, PlanError> {
    match &chunk.score {
        Some(_) if chunk.sample => Err(PlanError::Chunk("it is both sampled and scored")),
        Some(score) => Ok(Work::Score {
            first: score.first_position.max(chunk.start),
            end: chunk.start.saturating_add(chunk_tokens),
            last_known: score.next_token.is_some(),
            top_n: score.top_n,
        }),
        None if chunk.sample => Ok(Work::Sample),
        None => Ok(Work::Fill),
    }
}

fn decode_work(decode: &wire::DecodeRow) -> Result<Work, PlanError> {
    let (row, steps) = (decode.row, decode.steps);
    if steps == 0 || steps > MAX_DECODE_STEPS {
        return Err(PlanError::Steps { row, steps });
    }
    let tokens = decode.draft_token_ids.len();
    if tokens == 0 {
        return Ok(Work::Decode { steps });
    }
    let too_long = u32::try_from(tokens).map_or(true, |tokens| tokens > MAX_DRAFT_TOKENS);
    if too_long || steps != 1 || decode.token.is_none() {
        return Err(PlanError::Draft { row, tokens, steps });
    }
    Ok(Work::Verify {
        draft: decode.draft_token_ids.clone(),
    })
}

/// Checks that the rows are distinct and of one model.
fn common_model(rows: &[RowExpectation]) -> Result<Option<Arc<ModelFacts>>, PlanError> {
    if rows.len() > MAX_PLAN_ROWS {
        return Err(PlanError::TooManyRows(rows.len()));
    }
    let mut seen = HashSet::with_capacity(rows.len());
    let mut model: Option<&Arc<ModelFacts>> = None;
    for expected in rows {
        if !seen.insert(expected.row) {
            return Err(PlanError::RowTwice(expected.row));
        }
        let own = &expected.terms.model;
        match model {
            Some(first) if first.name() != own.name() => {
                return Err(PlanError::MixedModels(
                    first.name().to_owned(),
                    own.name().to_owned(),
                ));
            }
            Some(_) => {}
            None => model = Some(own),
        }
    }
    Ok(model.cloned())
}

#[cfg(test)]
mod tests;
