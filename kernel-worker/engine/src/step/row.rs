//! An open row, and its part in a plan.

use std::collections::HashSet;

use super::{OpenRow, PrefillGoal, RowId, RowOutput, SampledToken, ScorePart};
use crate::error::EngineError;
use crate::sampler::{SampleRequest, SampleResult, SamplingParameters};

/// A sequence with its cache.
#[derive(Debug)]
pub(super) struct Row<C> {
    pub(super) cache: C,
    /// Every token fed so far, by position.
    pub(super) token_ids: Vec<u32>,
    pub(super) last_sample: Option<u32>,
    pub(super) capacity_tokens: usize,
    pub(super) prompt_tokens: usize,
    sampling: SamplingParameters,
    end_token_ids: HashSet<u32>,
    top_logprobs: Option<usize>,
}

impl<C> Row<C> {
    pub(super) fn new(opened: OpenRow, cache: C) -> Self {
        Self {
            cache,
            token_ids: Vec::new(),
            last_sample: None,
            capacity_tokens: opened.capacity_tokens,
            prompt_tokens: opened.prompt_tokens,
            sampling: opened.sampling,
            end_token_ids: opened.end_token_ids.into_iter().collect(),
            top_logprobs: opened.top_logprobs,
        }
    }

    /// Returns the request to sample after the row's first `length` tokens: it sees nothing of those behind. Plans were
    /// checked: the length is at least `prompt_tokens` when something is sampled.
    pub(super) fn sample_request(&self, logits_row: usize, length: usize) -> SampleRequest<'_> {
        let output_index = length.saturating_sub(self.prompt_tokens);
        SampleRequest {
            logits_row,
            parameters: &self.sampling,
            history: self.token_ids.get(..length).unwrap_or(&self.token_ids),
            prompt_tokens: self.prompt_tokens,
            output_index: output_index as u64,
            top_logprobs: self.top_logprobs,
        }
    }
}

/// What a row still has to do in a plan.
#[derive(Debug)]
pub(super) enum Work {
    Prefill {
        token_ids: Vec<u32>,
        goal: PrefillGoal,
    },
    Decode {
        /// Fed next.
        token_id: u32,
        steps_left: usize,
    },
    /// A decode step with guesses of the steps after it.
    Verify {
        token_id: u32,
        draft: Vec<u32>,
    },
    Done,
}

/// What a pass is run for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PassGoal {
    /// More chunks follow.
    Fill,
    /// The predictions of the last `positions` tokens are sampled.
    Sample { positions: usize },
    /// The positions are scored.
    Score(ScorePart),
}

impl From<PrefillGoal> for PassGoal {
    fn from(goal: PrefillGoal) -> Self {
        match goal {
            PrefillGoal::Fill => Self::Fill,
            PrefillGoal::Sample => Self::Sample { positions: 1 },
            PrefillGoal::Score(part) => Self::Score(part),
        }
    }
}

/// A row while a plan runs.
#[derive(Debug)]
pub(super) struct Participant<C> {
    pub(super) id: RowId,
    pub(super) row: Row<C>,
    pub(super) work: Work,
    pub(super) output: RowOutput,
    pub(super) failure: Option<EngineError>,
    /// Whether a pass has begun to append to the cache and has not ended.
    pub(super) in_pass: bool,
}

impl<C> Participant<C> {
    pub(super) fn new(id: RowId, row: Row<C>, work: Work) -> Self {
        Self {
            id,
            row,
            work,
            output: RowOutput::default(),
            failure: None,
            in_pass: false,
        }
    }

    /// Returns how many tokens the row feeds in the next pass; a decode row without room is done.
    pub(super) fn next_tokens(&mut self) -> usize {
        if self.failure.is_some() {
            return 0;
        }
        if matches!(self.work, Work::Decode { .. })
            && self.row.token_ids.len() >= self.row.capacity_tokens
        {
            self.work = Work::Done;
        }
        match &self.work {
            Work::Prefill { token_ids, .. } => token_ids.len(),
            Work::Decode { .. } => 1,
            Work::Verify { draft, .. } => 1 + draft.len(),
            Work::Done => 0,
        }
    }

    /// Feeds the next tokens to the history and returns what is wanted of the pass.
    pub(super) fn feed(&mut self) -> Option<PassGoal> {
        match std::mem::replace(&mut self.work, Work::Done) {
            Work::Prefill { token_ids, goal } => {
                self.row.token_ids.extend(token_ids);
                Some(goal.into())
            }
            Work::Decode {
                token_id,
                steps_left,
            } => {
                self.row.token_ids.push(token_id);
                self.work = Work::Decode {
                    token_id,
                    steps_left,
                };
                Some(PassGoal::Sample { positions: 1 })
            }
            Work::Verify { token_id, draft } => {
                let positions = 1 + draft.len();
                self.row.token_ids.push(token_id);
                self.row.token_ids.extend(draft);
                Some(PassGoal::Sample { positions })
            }
            Work::Done => None,
        }
    }

    /// Takes the samples behind the row's last tokens, one for each, up to the first that is not the token fed after it
    /// or that ends the row. The history is cut to what was sampled after; returns whether tokens were cut off.
    pub(super) fn take_samples(
        &mut self,
        samples: impl ExactSizeIterator<Item = Result<SampleResult, EngineError>>,
    ) -> bool {
        let fed = self.row.token_ids.len();
        let mut length = fed.saturating_sub(samples.len());
        for sample in samples {
            length += 1;
            self.take_sample(sample);
            let guessed = self.row.token_ids.get(length).copied();
            let went_on = self.failure.is_none()
                && guessed == self.row.last_sample
                && !guessed.is_some_and(|token_id| self.row.end_token_ids.contains(&token_id));
            if !went_on {
                break;
            }
        }
        self.row.token_ids.truncate(length);
        length < fed
    }

    /// Takes the sampled token, or the reason why there is none.
    fn take_sample(&mut self, sample: Result<SampleResult, EngineError>) {
        let sample = match sample {
            Ok(sample) => sample,
            Err(error) => {
                self.failure = Some(error);
                return;
            }
        };
        self.row.last_sample = Some(sample.token_id);
        if let Work::Decode {
            token_id,
            steps_left,
        } = &mut self.work
        {
            *token_id = sample.token_id;
            *steps_left -= 1;
            if *steps_left == 0 || self.row.end_token_ids.contains(&sample.token_id) {
                self.work = Work::Done;
            }
        }
        self.output.tokens.push(SampledToken {
            token_id: sample.token_id,
            logprob: sample.logprob,
            top: sample.top,
        });
    }
}
