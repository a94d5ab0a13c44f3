//! A plan against the contract, before anything changes.

use std::collections::{HashMap, HashSet};

use super::row::Row;
use super::{DecodeRow, OpenRow, PrefillChunk, PrefillGoal, RowId, StepPlan};
use crate::backend::Backend;
use crate::error::EngineError;

/// What a plan may count on.
#[derive(Debug)]
pub(super) struct PlanRules<'a, B: Backend> {
    /// `V`.
    pub(super) vocab_size: usize,
    /// Positions that the rotary embedding was prepared for.
    pub(super) context_length: usize,
    /// Open rows.
    pub(super) rows: &'a HashMap<RowId, Row<B>>,
    /// Rows that the plan before this one closed by their failure; the gateway did not know when it sent this one.
    pub(super) lost: &'a HashSet<RowId>,
}

/// What the rest of the plan needs to know of a row.
#[derive(Debug, Clone, Copy)]
struct RowState {
    length: usize,
    capacity_tokens: usize,
    prompt_tokens: usize,
    has_sample: bool,
}

fn refuse<T>(text: String) -> Result<T, EngineError> {
    Err(EngineError::InvalidPlan(text))
}

impl<B: Backend> PlanRules<'_, B> {
    /// Checks a plan.
    ///
    /// # Errors
    /// [`EngineError::InvalidPlan`] naming row, limit and value.
    pub(super) fn check(&self, plan: &StepPlan) -> Result<(), EngineError> {
        let closed: HashSet<RowId> = plan.close_rows.iter().copied().collect();
        let mut opened = HashMap::new();
        for open in &plan.open_rows {
            let id = open.row;
            let still_open = self.rows.contains_key(&id) && !closed.contains(&id);
            if still_open || opened.insert(id, self.opened(open)?).is_some() {
                return refuse(format!("row {} is open already", id.0));
            }
        }
        let state = |id: RowId| -> Result<Option<RowState>, EngineError> {
            if let Some(state) = opened.get(&id) {
                return Ok(Some(*state));
            }
            if closed.contains(&id) {
                return refuse(format!("row {} is closed and used in one plan", id.0));
            }
            match self.rows.get(&id) {
                Some(row) => Ok(Some(RowState {
                    length: row.token_ids.len(),
                    capacity_tokens: row.capacity_tokens,
                    prompt_tokens: row.prompt_tokens,
                    has_sample: row.last_sample.is_some(),
                })),
                None if self.lost.contains(&id) => Ok(None),
                None => refuse(format!("row {} is not open", id.0)),
            }
        };
        let mut used = HashSet::new();
        if let Some(chunk) = &plan.prefill {
            used.insert(chunk.row);
            self.chunk(chunk, state(chunk.row)?)?;
        }
        for decode in &plan.decode {
            if !used.insert(decode.row) {
                return refuse(format!("row {} appears twice", decode.row.0));
            }
            self.decode(decode, state(decode.row)?)?;
        }
        Ok(())
    }

    fn token(&self, row: RowId, token_id: u32) -> Result<(), EngineError> {
        if usize::try_from(token_id).is_ok_and(|id| id < self.vocab_size) {
            return Ok(());
        }
        refuse(format!(
            "row {} is fed token {token_id}, the vocabulary has {}",
            row.0, self.vocab_size
        ))
    }

    fn opened(&self, open: &OpenRow) -> Result<RowState, EngineError> {
        if open.capacity_tokens == 0 || open.capacity_tokens > self.context_length {
            return refuse(format!(
                "row {} wants {} tokens of capacity, limits are 1 and {}",
                open.row.0, open.capacity_tokens, self.context_length
            ));
        }
        open.sampling.check(self.vocab_size)?;
        Ok(RowState {
            length: 0,
            capacity_tokens: open.capacity_tokens,
            prompt_tokens: open.prompt_tokens,
            has_sample: false,
        })
    }

    fn chunk(&self, chunk: &PrefillChunk, state: Option<RowState>) -> Result<(), EngineError> {
        let row = chunk.row.0;
        if chunk.token_ids.is_empty() {
            return refuse(format!("chunk of row {row} is empty"));
        }
        for token_id in &chunk.token_ids {
            self.token(chunk.row, *token_id)?;
        }
        if let PrefillGoal::Score(score) = &chunk.goal
            && let Some(next_token) = score.next_token
        {
            self.token(chunk.row, next_token)?;
        }
        let Some(state) = state else {
            return Ok(());
        };
        if chunk.start != state.length {
            return refuse(format!(
                "chunk of row {row} starts at {}, the row has {} tokens",
                chunk.start, state.length
            ));
        }
        let tokens = chunk.token_ids.len();
        if tokens > state.capacity_tokens - state.length {
            return refuse(format!(
                "chunk of row {row} has {tokens} tokens, {} are left of its capacity",
                state.capacity_tokens - state.length
            ));
        }
        if chunk.goal == PrefillGoal::Sample {
            sampled_behind_prompt(chunk.row, state.length + tokens, state)?;
        }
        Ok(())
    }

    fn decode(&self, decode: &DecodeRow, state: Option<RowState>) -> Result<(), EngineError> {
        let row = decode.row.0;
        if decode.steps == 0 {
            return refuse(format!("row {row} decodes 0 steps"));
        }
        if !decode.draft.is_empty() && (decode.steps != 1 || decode.token.is_none()) {
            return refuse(format!(
                "row {row} has a draft, {} steps and the token {:?}; a draft goes with 1 step and a token",
                decode.steps, decode.token
            ));
        }
        for token_id in decode.token.iter().chain(&decode.draft) {
            self.token(decode.row, *token_id)?;
        }
        let Some(state) = state else {
            return Ok(());
        };
        if decode.token.is_none() && !state.has_sample {
            return refuse(format!("row {row} goes on from a sample it does not have"));
        }
        // Going on without room is no fault: the gateway sends plan n+1 before it reads result n.
        if decode.token.is_some() && state.length >= state.capacity_tokens {
            return refuse(format!(
                "row {row} is fed a token, its capacity of {} is full",
                state.capacity_tokens
            ));
        }
        let left = state.capacity_tokens.saturating_sub(state.length + 1);
        if decode.draft.len() > left {
            return refuse(format!(
                "row {row} has a draft of {} tokens, {left} are left of its capacity",
                decode.draft.len()
            ));
        }
        sampled_behind_prompt(decode.row, state.length + 1, state)
    }
}

/// Output indices count from the prompt's end.
fn sampled_behind_prompt(id: RowId, length: usize, state: RowState) -> Result<(), EngineError> {
    if length >= state.prompt_tokens {
        return Ok(());
    }
    refuse(format!(
        "row {} samples after {length} tokens, its prompt has {}",
        id.0, state.prompt_tokens
    ))
}
