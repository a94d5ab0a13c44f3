//! An open row, and its part in a plan.

use std::collections::HashSet;
use std::rc::Rc;

use super::{OpenRow, PrefillGoal, RowId, RowOutput, SampledToken, ScorePart};
use crate::backend::{Backend, FedToken};
use crate::error::EngineError;
use crate::sampler::{SampleRequest, SampleResult, SamplingParameters};

/// Stands in the history for a token that was fed before anybody knew it.
const AWAITED_TOKEN: u32 = 0;

/// A sequence with its cache.
#[derive(Debug)]
pub(super) struct Row<B: Backend> {
    pub(super) cache: B::Cache,
    /// Every token fed so far, by position.
    pub(super) token_ids: Vec<u32>,
    /// Positions of those that are not known yet.
    awaited: Vec<usize>,
    pub(super) last_sample: Option<FedToken<B::Awaited>>,
    pub(super) capacity_tokens: usize,
    pub(super) prompt_tokens: usize,
    /// Number of the last plan that fed it.
    pub(super) last_plan: u64,
    sampling: SamplingParameters,
    pub(super) end_token_ids: Rc<HashSet<u32>>,
    top_logprobs: Option<usize>,
}

impl<B: Backend> Row<B> {
    pub(super) fn new(opened: OpenRow, cache: B::Cache) -> Self {
        Self {
            cache,
            token_ids: Vec::new(),
            awaited: Vec::new(),
            last_sample: None,
            capacity_tokens: opened.capacity_tokens,
            prompt_tokens: opened.prompt_tokens,
            last_plan: 0,
            sampling: opened.sampling,
            end_token_ids: Rc::new(opened.end_token_ids.into_iter().collect()),
            top_logprobs: opened.top_logprobs,
        }
    }

    /// Feeds a token to the history.
    fn push(&mut self, token: &FedToken<B::Awaited>) {
        self.token_ids.push(match token {
            FedToken::Known(token_id) => *token_id,
            FedToken::Awaited(_) => {
                self.awaited.push(self.token_ids.len());
                AWAITED_TOKEN
            }
        });
    }

    /// Learns the token that was sampled behind the first `length`.
    pub(super) fn learn(&mut self, length: usize, token_id: u32) {
        if let Some(place) = self.awaited.iter().position(|position| *position == length) {
            self.awaited.swap_remove(place);
            if let Some(known) = self.token_ids.get_mut(length) {
                *known = token_id;
            }
        }
        if self.token_ids.len() == length {
            self.last_sample = Some(FedToken::Known(token_id));
        }
    }

    /// Cuts the history to `length` tokens, behind which `last_sample` was sampled.
    pub(super) fn cut(&mut self, length: usize, last_sample: u32) {
        self.token_ids.truncate(length);
        self.awaited.retain(|position| *position < length);
        self.last_sample = Some(FedToken::Known(last_sample));
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
pub(super) enum Work<P> {
    Prefill {
        token_ids: Vec<u32>,
        goal: PrefillGoal,
    },
    Decode {
        /// Fed next.
        token: FedToken<P>,
        steps_left: usize,
    },
    /// A decode step with guesses of the steps after it.
    Verify {
        token: FedToken<P>,
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

/// A sample that the device has yet to draw.
#[derive(Debug)]
pub(super) struct AwaitedSample<P> {
    pub(super) row: RowId,
    /// Tokens of the row that it was drawn behind.
    pub(super) length: usize,
    pub(super) token: P,
    /// What ends the row; it may be closed before the sample is known.
    pub(super) end_token_ids: Rc<HashSet<u32>>,
}

/// A row while a plan runs.
#[derive(Debug)]
pub(super) struct Participant<B: Backend> {
    pub(super) id: RowId,
    pub(super) row: Row<B>,
    pub(super) work: Work<B::Awaited>,
    pub(super) output: RowOutput,
    pub(super) failure: Option<EngineError>,
    /// Whether a pass has begun to append to the cache and has not ended.
    pub(super) in_pass: bool,
}

impl<B: Backend> Participant<B> {
    pub(super) fn new(id: RowId, row: Row<B>, work: Work<B::Awaited>) -> Self {
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

    /// Feeds the next tokens to the history and to the batch, and returns what is wanted of the pass.
    pub(super) fn feed(&mut self, batch: &mut Vec<FedToken<B::Awaited>>) -> Option<PassGoal> {
        match std::mem::replace(&mut self.work, Work::Done) {
            Work::Prefill { token_ids, goal } => {
                batch.extend(token_ids.iter().copied().map(FedToken::Known));
                self.row.token_ids.extend(token_ids);
                Some(goal.into())
            }
            Work::Decode { token, steps_left } => {
                self.row.push(&token);
                batch.push(token.clone());
                self.work = Work::Decode { token, steps_left };
                Some(PassGoal::Sample { positions: 1 })
            }
            Work::Verify { token, draft } => {
                let positions = 1 + draft.len();
                self.row.push(&token);
                batch.push(token);
                batch.extend(draft.iter().copied().map(FedToken::Known));
                self.row.token_ids.extend(draft);
                Some(PassGoal::Sample { positions })
            }
            Work::Done => None,
        }
    }

    /// Goes on without the sample behind the row's last token, which the device has yet to draw.
    pub(super) fn await_sample(&mut self, token: B::Awaited) -> AwaitedSample<B::Awaited> {
        self.go_on(&FedToken::Awaited(token.clone()));
        AwaitedSample {
            row: self.id,
            length: self.row.token_ids.len(),
            token,
            end_token_ids: Rc::clone(&self.row.end_token_ids),
        }
    }

    /// Makes the sampled token the next one to feed, if there is a step left for it.
    fn go_on(&mut self, sample: &FedToken<B::Awaited>) {
        self.row.last_sample = Some(sample.clone());
        if let Work::Decode { token, steps_left } = &mut self.work {
            *token = sample.clone();
            *steps_left -= 1;
            let ended =
                matches!(sample, FedToken::Known(id) if self.row.end_token_ids.contains(id));
            if *steps_left == 0 || ended {
                self.work = Work::Done;
            }
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
            let sampled = self.take_sample(sample);
            let guessed = self.row.token_ids.get(length).copied();
            let went_on = sampled.is_some()
                && guessed == sampled
                && !sampled.is_some_and(|token_id| self.row.end_token_ids.contains(&token_id));
            if !went_on {
                break;
            }
        }
        self.row.token_ids.truncate(length);
        length < fed
    }

    /// Takes the sampled token, or the reason why there is none.
    fn take_sample(&mut self, sample: Result<SampleResult, EngineError>) -> Option<u32> {
        let sample = match sample {
            Ok(sample) => sample,
            Err(error) => {
                self.failure = Some(error);
                return None;
            }
        };
        let token_id = sample.token_id;
        self.go_on(&FedToken::Known(token_id));
        self.output.tokens.push(SampledToken {
            token_id,
            logprob: sample.logprob,
            top: sample.top,
        });
        Some(token_id)
    }
}
