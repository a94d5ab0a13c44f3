//! The model that copies its prompt, and the honest result of a plan.

use std::collections::HashMap;

use velox_e2e::copying::{END_TOKEN, LAYERS, POISON_TOKEN};
use velox_proto::op::{OpId, OpKind};
use velox_proto::v1;
use velox_proto::worker::v1 as wire;

/// Bytes of keys that a token is said to take.
pub(crate) const KEY_BYTES_PER_TOKEN: u64 = 64;

/// Bytes of values that a token is said to take.
pub(crate) const VALUE_BYTES_PER_TOKEN: u64 = 32;

/// What every token is said to have as its log-probability.
const LOGPROB: f32 = -0.5;

/// The rows of this process.
#[derive(Debug, Default)]
pub(crate) struct CopyModel {
    rows: HashMap<u64, Row>,
}

#[derive(Debug)]
struct Row {
    /// Prompt and output; the last sample is among them before it is fed.
    tokens: Vec<u32>,
    prompt_tokens: usize,
    end_token_ids: Vec<u32>,
    top_logprobs: Option<u32>,
}

/// Forward passes that a plan took: all, those with logits, those with a sample.
#[derive(Debug, Clone, Copy, Default)]
struct Passes {
    forward: u64,
    head: u64,
    sample: u64,
}

impl CopyModel {
    /// Whether the plan computes on a row whose prompt contains the poison.
    pub(crate) fn is_poisoned(&self, plan: &wire::StepPlan) -> bool {
        let in_chunk = plan
            .prefill
            .iter()
            .any(|chunk| chunk.token_ids.contains(&POISON_TOKEN));
        let in_row = |decode: &wire::DecodeRow| {
            self.rows
                .get(&decode.row)
                .is_some_and(|row| row.tokens.contains(&POISON_TOKEN))
        };
        in_chunk || plan.decode.iter().any(in_row)
    }

    /// Executes a plan as the contract says.
    pub(crate) fn execute(&mut self, plan: &wire::StepPlan) -> wire::StepResult {
        for row in &plan.close_rows {
            self.rows.remove(row);
        }
        for open in &plan.open_rows {
            let row = Row {
                tokens: Vec::new(),
                prompt_tokens: usize::try_from(open.prompt_tokens).unwrap_or(usize::MAX),
                end_token_ids: open.end_token_ids.clone(),
                top_logprobs: open.top_logprobs,
            };
            self.rows.insert(open.row, row);
        }
        let mut passes = Passes::default();
        let mut rows = Vec::new();
        if let Some(chunk) = &plan.prefill {
            rows.push(self.prefill(chunk, &mut passes));
        }
        for decode in &plan.decode {
            rows.push(self.decode(decode, &mut passes));
        }
        wire::StepResult {
            sequence: plan.sequence,
            rows,
            backend: v1::Backend::Cpu.into(),
            sampler: v1::Backend::Cpu.into(),
            op_counts: op_counts(passes),
            compute_us: 1,
        }
    }

    fn prefill(&mut self, chunk: &wire::PrefillChunk, passes: &mut Passes) -> wire::RowResult {
        let Some(row) = self.rows.get_mut(&chunk.row) else {
            return unknown(chunk.row);
        };
        if u32::try_from(row.tokens.len()) != Ok(chunk.start) || chunk.token_handle.is_some() {
            return failed(chunk.row, "the chunk does not begin where the row ends");
        }
        row.tokens.extend(&chunk.token_ids);
        passes.forward = 1;
        let mut result = wire::RowResult {
            row: chunk.row,
            ..wire::RowResult::default()
        };
        if chunk.sample {
            (passes.head, passes.sample) = (1, 1);
            result.tokens.push(row.sample());
        }
        if let Some(score) = &chunk.score {
            let end = chunk
                .start
                .saturating_add(u32::try_from(chunk.token_ids.len()).unwrap_or(0));
            let first = score.first_position.max(chunk.start);
            passes.head = u64::from(first < end);
            result.scores = (first..end)
                .map(|position| {
                    let known = position + 1 < end || score.next_token.is_some();
                    wire::ScoredToken {
                        position,
                        next_logprob: known.then_some(LOGPROB),
                        top: Vec::new(),
                    }
                })
                .collect();
        }
        row.account(result)
    }

    fn decode(&mut self, decode: &wire::DecodeRow, passes: &mut Passes) -> wire::RowResult {
        let Some(row) = self.rows.get_mut(&decode.row) else {
            return unknown(decode.row);
        };
        if let (Some(token), Some(last)) = (decode.token, row.tokens.last_mut()) {
            *last = token;
        }
        let mut result = wire::RowResult {
            row: decode.row,
            ..wire::RowResult::default()
        };
        let draft = decode.draft_token_ids.as_slice();
        if !draft.is_empty() {
            passes.forward = passes.forward.max(1);
            passes.head = passes.head.max(1);
            passes.sample = passes.sample.max(1);
            for place in 0..=draft.len() {
                let token = row.sample();
                let id = token.token_id;
                result.tokens.push(token);
                if draft.get(place) != Some(&id) || row.end_token_ids.contains(&id) {
                    break;
                }
            }
            return row.account(result);
        }
        for step in 1..=u64::from(decode.steps) {
            let token = row.sample();
            let ends = row.end_token_ids.contains(&token.token_id);
            result.tokens.push(token);
            passes.forward = passes.forward.max(step);
            passes.head = passes.head.max(step);
            passes.sample = passes.sample.max(step);
            if ends {
                break;
            }
        }
        row.account(result)
    }
}

impl Row {
    /// Chooses the next token: the output index decides, so a replayed row goes on where it was.
    fn sample(&mut self) -> wire::SampledToken {
        let index = self.tokens.len().saturating_sub(self.prompt_tokens);
        let prompt = self.tokens.get(..self.prompt_tokens).unwrap_or_default();
        let token_id = prompt.get(index).copied().unwrap_or(END_TOKEN);
        self.tokens.push(token_id);
        let top = match self.top_logprobs {
            Some(1..) => vec![wire::Alternative {
                token_id,
                logprob: LOGPROB,
            }],
            _ => Vec::new(),
        };
        wire::SampledToken {
            token_id,
            logprob: self.top_logprobs.map(|_| LOGPROB),
            top,
        }
    }

    fn account(&self, mut result: wire::RowResult) -> wire::RowResult {
        let tokens = u64::try_from(self.tokens.len()).unwrap_or(u64::MAX);
        result.key_bytes = tokens * KEY_BYTES_PER_TOKEN;
        result.value_bytes = tokens * VALUE_BYTES_PER_TOKEN;
        result
    }
}

fn op_counts(passes: Passes) -> Vec<v1::OpCount> {
    let stages = OpId::ALL.iter().filter(|op| op.kind() == OpKind::Stage);
    stages
        .map(|op| v1::OpCount {
            op: op.name().to_owned(),
            count: match op {
                OpId::Embed => passes.forward,
                OpId::Head => passes.head,
                OpId::Sample => passes.sample,
                _layer_stage => passes.forward * u64::from(LAYERS),
            },
        })
        .collect()
}

fn unknown(row: u64) -> wire::RowResult {
    failed(row, "the row is not open")
}

fn failed(row: u64, message: &str) -> wire::RowResult {
    wire::RowResult {
        row,
        error: Some(wire::RowError {
            reason: "INTERNAL".to_owned(),
            message: message.to_owned(),
        }),
        ..wire::RowResult::default()
    }
}
