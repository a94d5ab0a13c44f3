//! The forward passes of a plan.

use std::ops::Range;

use velox_kernels::label::BackendLabel;
use velox_kernels::ran::{Device, Ran};

use super::engine::Engine;
use super::row::{Participant, PassGoal};
use super::{LogitsWanted, Progress, ScorePart, ScoredPosition};
use crate::backend::{Backend, RowSpan, ScoreRequest, Stage, StageCounts};
use crate::error::EngineError;
use crate::graph::{Batch, Watch};

/// Positions whose logits are held at a time while a chunk is scored, so that `[T, V]` never exists unasked.
const SCORE_BLOCK: usize = 64;

/// Positions whose logits are held at a time while drafts are checked: as many as a plan has rows.
const SAMPLE_BLOCK: usize = 256;

/// What the passes of a plan prove: labels come from values that ran, never from what was asked for.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    pub(super) label: Option<BackendLabel>,
    pub(super) sampler: Option<BackendLabel>,
    pub(super) stages: StageCounts,
}

impl Evidence {
    fn computed<D: Device, T>(&mut self, value: &Ran<D, T>) {
        weaken(&mut self.label, value.label());
    }

    fn sampled<D: Device, T>(&mut self, value: &Ran<D, T>) {
        weaken(&mut self.sampler, value.label());
    }
}

fn weaken(weakest: &mut Option<BackendLabel>, label: BackendLabel) {
    *weakest = Some(weakest.map_or(label, |known| known.min(label)));
}

/// What is wanted of a pass for one row.
struct Wanted {
    /// Index among the participants.
    participant: usize,
    /// First of the row's tokens in the batch.
    first: usize,
    /// Behind the last of them.
    end: usize,
    goal: PassGoal,
}

impl Wanted {
    /// The tokens whose predictions are sampled, by their places in the batch.
    fn sampled(&self) -> Range<usize> {
        match self.goal {
            PassGoal::Sample { positions } => self.end - positions..self.end,
            PassGoal::Fill | PassGoal::Score(_) => self.end..self.end,
        }
    }
}

/// A chunk whose positions are scored.
struct Scored<'a> {
    part: &'a ScorePart,
    /// First of the chunk's tokens in the batch.
    first: usize,
    /// Tokens of the chunk.
    tokens: usize,
}

impl<B: Backend> Engine<B> {
    /// Runs passes until no participant has anything left to feed.
    pub(super) fn passes(
        &mut self,
        participants: &mut [Participant<B::Cache>],
        evidence: &mut Evidence,
        progress: &dyn Progress,
    ) -> Result<(), EngineError> {
        loop {
            let mut wanted = Vec::new();
            let mut token_ids = Vec::new();
            let mut positions = Vec::new();
            for (index, participant) in participants.iter_mut().enumerate() {
                let tokens = participant.next_tokens();
                if tokens == 0 {
                    continue;
                }
                // Before the pass, so that a row without memory fails alone.
                if let Err(error) = self.backend.reserve(&mut participant.row.cache, tokens) {
                    participant.failure = Some(error);
                    continue;
                }
                let start = participant.row.token_ids.len();
                let Some(goal) = participant.feed() else {
                    continue;
                };
                participant.in_pass = true;
                let first = token_ids.len();
                token_ids.extend_from_slice(&participant.row.token_ids[start..]);
                positions.extend(start..start + tokens);
                wanted.push(Wanted {
                    participant: index,
                    first,
                    end: first + tokens,
                    goal,
                });
            }
            if wanted.is_empty() {
                return Ok(());
            }
            let mut spans: Vec<RowSpan<'_, B::Cache>> = participants
                .iter_mut()
                .filter(|participant| participant.in_pass)
                .zip(&wanted)
                .map(|(participant, wanted)| RowSpan {
                    cache: &mut participant.row.cache,
                    tokens: wanted.first..wanted.end,
                    start: positions[wanted.first],
                    failure: None,
                })
                .collect();
            let batch = Batch {
                token_ids: &token_ids,
                positions: &positions,
                spans: &mut spans,
            };
            let mut watch = Watch {
                progress,
                stages: &mut evidence.stages,
            };
            let hidden = self.model.forward(&mut self.backend, batch, &mut watch)?;
            evidence.computed(&hidden);
            let failures: Vec<_> = spans.into_iter().map(|span| span.failure).collect();
            for (wanted, failure) in wanted.iter().zip(failures) {
                participants[wanted.participant].failure = failure;
            }
            wanted.retain(|wanted| participants[wanted.participant].failure.is_none());
            self.conclude(participants, &wanted, &hidden, evidence)?;
            self.backend.synchronize(progress)?;
            for participant in participants.iter_mut() {
                participant.in_pass = false;
            }
        }
    }

    /// Samples and scores what a pass was run for.
    fn conclude(
        &mut self,
        participants: &mut [Participant<B::Cache>],
        wanted: &[Wanted],
        hidden: &Ran<B::Device, B::Activation>,
        evidence: &mut Evidence,
    ) -> Result<(), EngineError> {
        let mut heads = self.sample(participants, wanted, hidden, evidence)?;
        if heads > 0 {
            evidence.stages.record(Stage::Sample);
        }
        for wanted in wanted {
            if let PassGoal::Score(part) = &wanted.goal {
                let scored = Scored {
                    part,
                    first: wanted.first,
                    tokens: wanted.end - wanted.first,
                };
                let participant = &mut participants[wanted.participant];
                heads += self.score(participant, &scored, hidden, evidence)?;
            }
        }
        if heads > 0 {
            evidence.stages.record(Stage::Head);
        }
        Ok(())
    }

    /// Samples block by block, then lets each row take its samples; returns how often the head ran.
    fn sample(
        &mut self,
        participants: &mut [Participant<B::Cache>],
        wanted: &[Wanted],
        hidden: &Ran<B::Device, B::Activation>,
        evidence: &mut Evidence,
    ) -> Result<usize, EngineError> {
        // Participant, place in the batch, and tokens of the row up to there.
        let mut places: Vec<(usize, usize, usize)> = Vec::new();
        for wanted in wanted {
            let length = participants[wanted.participant].row.token_ids.len();
            let sampled = wanted.sampled();
            places.extend(
                sampled.map(|place| (wanted.participant, place, length - (wanted.end - 1 - place))),
            );
        }
        let mut heads = 0;
        let mut samples = Vec::with_capacity(places.len());
        for block in places.chunks(SAMPLE_BLOCK) {
            let rows: Vec<usize> = block.iter().map(|(_, place, _)| *place).collect();
            let logits = self.model.logits(&mut self.backend, hidden, &rows)?;
            evidence.computed(&logits);
            heads += 1;
            let mut requests: Vec<_> = block
                .iter()
                .enumerate()
                .map(|(logits_row, (participant, _, length))| {
                    let row = &participants[*participant].row;
                    row.sample_request(logits_row, *length)
                })
                .collect();
            let block = self.backend.sample(&logits, &mut requests)?;
            evidence.sampled(&block);
            samples.extend(block.into_value());
        }
        let mut samples = samples.into_iter();
        for wanted in wanted {
            let own: Vec<_> = samples.by_ref().take(wanted.sampled().len()).collect();
            if own.is_empty() {
                continue;
            }
            let participant = &mut participants[wanted.participant];
            if participant.take_samples(own.into_iter()) {
                let length = participant.row.token_ids.len();
                let cache = &mut participant.row.cache;
                self.backend.truncate_cache(cache, length);
            }
        }
        Ok(heads)
    }

    /// Scores a chunk block by block; returns how often the head ran.
    fn score(
        &mut self,
        participant: &mut Participant<B::Cache>,
        scored: &Scored<'_>,
        hidden: &Ran<B::Device, B::Activation>,
        evidence: &mut Evidence,
    ) -> Result<usize, EngineError> {
        let length = participant.row.token_ids.len();
        let start = length - scored.tokens;
        let positions: Vec<usize> = (scored.part.first_position.max(start)..length).collect();
        let mut heads = 0;
        for block in positions.chunks(SCORE_BLOCK) {
            let rows: Vec<usize> = block
                .iter()
                .map(|position| scored.first + position - start)
                .collect();
            let logits = self.model.logits(&mut self.backend, hidden, &rows)?;
            evidence.computed(&logits);
            heads += 1;
            let requests: Vec<ScoreRequest> = block
                .iter()
                .enumerate()
                .map(|(logits_row, position)| ScoreRequest {
                    logits_row,
                    next_token: match participant.row.token_ids.get(position + 1) {
                        Some(token_id) => Some(*token_id),
                        None => scored.part.next_token,
                    },
                    top_n: scored.part.top_n,
                })
                .collect();
            match self.backend.score(logits.value(), &requests) {
                Ok(scores) => {
                    let scores = block.iter().zip(scores);
                    participant
                        .output
                        .scores
                        .extend(scores.map(|(position, score)| ScoredPosition {
                            position: *position,
                            next_logprob: score.next_logprob,
                            top: score.top,
                        }));
                }
                Err(error) => {
                    participant.failure = Some(error);
                    return Ok(heads);
                }
            }
            if scored.part.logits == LogitsWanted::Yes {
                let values = self.backend.read_logits(logits.value())?;
                participant.output.logits.extend(values);
            }
        }
        Ok(heads)
    }
}
