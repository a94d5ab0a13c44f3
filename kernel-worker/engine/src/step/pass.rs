//! The forward passes of a plan.

use std::ops::Range;

use velox_kernels::label::BackendLabel;
use velox_kernels::ran::{Device, Ran};

use super::engine::Engine;
use super::row::{AwaitedSample, Participant, PassGoal};
use super::{LogitsWanted, Progress, ScorePart, ScoredPosition};
use crate::backend::{Backend, RowSpan, ScoreRequest, Stage, StageCounts};
use crate::error::EngineError;
use crate::graph::{Batch, Watch};
use crate::sampler::{SampleRequest, SampleResult};

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

/// What a plan has begun and not finished.
#[derive(Debug)]
pub(super) struct Begun<B: Backend> {
    /// One a pass.
    pub(super) flights: Vec<B::Flight>,
    /// Samples that the device has yet to draw, in the order of the passes.
    pub(super) samples: AwaitedSamples<B>,
}

type AwaitedSamples<B> = Vec<AwaitedSample<<B as Backend>::Awaited>>;

impl<B: Backend> Default for Begun<B> {
    fn default() -> Self {
        Self {
            flights: Vec::new(),
            samples: Vec::new(),
        }
    }
}

/// A sample, drawn or not.
enum Draw<P> {
    Known(Result<SampleResult, EngineError>),
    Awaited(P),
}

/// A token whose prediction is sampled.
struct Place {
    /// Index among the participants.
    participant: usize,
    /// Its place in the batch.
    token: usize,
    /// Tokens of the row up to there.
    length: usize,
    /// Whether the row goes on without looking at the sample.
    alone: bool,
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
        participants: &mut [Participant<B>],
        evidence: &mut Evidence,
        progress: &dyn Progress,
    ) -> Result<Begun<B>, EngineError> {
        let mut begun = Begun::default();
        loop {
            let mut wanted = Vec::new();
            let mut tokens = Vec::new();
            let mut positions = Vec::new();
            for (index, participant) in participants.iter_mut().enumerate() {
                let n_tokens = participant.next_tokens();
                if n_tokens == 0 {
                    continue;
                }
                // Before the pass, so that a row without memory fails alone.
                if let Err(error) = self.backend.reserve(&mut participant.row.cache, n_tokens) {
                    participant.failure = Some(error);
                    continue;
                }
                let start = participant.row.token_ids.len();
                let first = tokens.len();
                let Some(goal) = participant.feed(&mut tokens) else {
                    continue;
                };
                participant.in_pass = true;
                positions.extend(start..start + n_tokens);
                wanted.push(Wanted {
                    participant: index,
                    first,
                    end: tokens.len(),
                    goal,
                });
            }
            if wanted.is_empty() {
                return Ok(begun);
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
                tokens: &tokens,
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
            let samples = self.conclude(participants, &wanted, &hidden, evidence)?;
            let drawn: Vec<B::Awaited> = samples.iter().map(|s| s.token.clone()).collect();
            begun.flights.push(self.backend.dispatch(&drawn)?);
            begun.samples.extend(samples);
            for participant in participants.iter_mut() {
                participant.in_pass = false;
            }
        }
    }

    /// Samples and scores what a pass was run for; returns the samples that the device has yet to draw.
    fn conclude(
        &mut self,
        participants: &mut [Participant<B>],
        wanted: &[Wanted],
        hidden: &Ran<B::Device, B::Activation>,
        evidence: &mut Evidence,
    ) -> Result<AwaitedSamples<B>, EngineError> {
        let (mut heads, awaited) = self.sample(participants, wanted, hidden, evidence)?;
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
        Ok(awaited)
    }

    /// Samples block by block, then lets each row take its samples; returns how often the head ran and what the device
    /// has yet to draw.
    fn sample(
        &mut self,
        participants: &mut [Participant<B>],
        wanted: &[Wanted],
        hidden: &Ran<B::Device, B::Activation>,
        evidence: &mut Evidence,
    ) -> Result<(usize, AwaitedSamples<B>), EngineError> {
        let mut places = Vec::new();
        for wanted in wanted {
            let length = participants[wanted.participant].row.token_ids.len();
            let sampled = wanted.sampled();
            let alone = sampled.len() == 1;
            places.extend(sampled.map(|token| Place {
                participant: wanted.participant,
                token,
                length: length - (wanted.end - 1 - token),
                alone,
            }));
        }
        let mut heads = 0;
        let mut draws = Vec::with_capacity(places.len());
        for block in places.chunks(SAMPLE_BLOCK) {
            let rows: Vec<usize> = block.iter().map(|place| place.token).collect();
            let logits = self.model.logits(&mut self.backend, hidden, &rows)?;
            evidence.computed(&logits);
            heads += 1;
            draws.extend(self.sample_block(participants, block, &logits, evidence)?);
        }
        let mut draws = draws.into_iter();
        let mut awaited = Vec::new();
        for wanted in wanted {
            let participant = &mut participants[wanted.participant];
            let mut known = Vec::new();
            for draw in draws.by_ref().take(wanted.sampled().len()) {
                match draw {
                    Draw::Known(sample) => known.push(sample),
                    Draw::Awaited(token) => awaited.push(participant.await_sample(token)),
                }
            }
            if !known.is_empty() && participant.take_samples(known.into_iter()) {
                let length = participant.row.token_ids.len();
                let cache = &mut participant.row.cache;
                self.backend.truncate_cache(cache, length);
            }
        }
        Ok((heads, awaited))
    }

    /// Leaves to the device what it can draw itself and samples the rest.
    fn sample_block(
        &mut self,
        participants: &[Participant<B>],
        block: &[Place],
        logits: &Ran<B::Device, B::Logits>,
        evidence: &mut Evidence,
    ) -> Result<Vec<Draw<B::Awaited>>, EngineError> {
        let (mut drawn, mut sampled): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
        let mut by_device = Vec::with_capacity(block.len());
        for (logits_row, place) in block.iter().enumerate() {
            let row = &participants[place.participant].row;
            let request: SampleRequest<'_> = row.sample_request(logits_row, place.length);
            let can_draw = place.alone && self.backend.can_draw(&request);
            by_device.push(can_draw);
            if can_draw { &mut drawn } else { &mut sampled }.push(request);
        }
        let mut awaited = Vec::new().into_iter();
        if !drawn.is_empty() {
            let tokens = self.backend.draw(logits, &drawn)?;
            evidence.sampled(&tokens);
            awaited = tokens.into_value().into_iter();
        }
        let mut known = Vec::new().into_iter();
        if !sampled.is_empty() {
            let samples = self.backend.sample(logits, &mut sampled)?;
            evidence.sampled(&samples);
            known = samples.into_value().into_iter();
        }
        let draws = by_device.into_iter().filter_map(|can_draw| {
            if can_draw {
                awaited.next().map(Draw::Awaited)
            } else {
                known.next().map(Draw::Known)
            }
        });
        Ok(draws.collect())
    }

    /// Scores a chunk block by block; returns how often the head ran.
    fn score(
        &mut self,
        participant: &mut Participant<B>,
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
