//! One row: what is known of it, where it runs, and what a result or a loss does to it.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;
use velox_proto::v1::Backend;
use velox_proto::worker::v1 as wire;

use super::draft;
use super::handle::{RowEnd, RowEvent, Step, has_room};
use crate::deadline::CallDeadline;
use crate::error::GatewayError;
use crate::planner::{Company, Decode, Goal, ModelIndex, Reader, RowId, RowView, Source};
use crate::pool::{AttestedProvenance, WorkerKey};
use crate::request::{Job, PromptLookup, Score, Work};

/// How many workers in a row must die with nothing but this request on them, without any progress between, before the
/// request is called poison. A worker may also die of something else, such as the system's memory killer: one such
/// coincidence, or two, must not end a harmless request.
const SOLO_CRASHES_OF_POISON: u32 = 3;

/// How far a row came: tokens that are out, then prompt tokens whose result is in.
type Progress = (u32, u32);

/// Where a row runs.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) worker: WorkerKey,
    /// Number of the row in the worker, new for each placement: a late result of an earlier one finds nobody.
    pub(super) wire_row: u64,
    pub(super) model: ModelIndex,
    pub(super) fallback_reason: Arc<str>,
    /// Whether a plan opened the row.
    pub(super) is_open: bool,
    pub(super) in_flight: usize,
    /// Known tokens at the time of placement: they are prefilled.
    target: u32,
    /// Tokens that plans fed, whether or not their results are in.
    fed: u32,
    /// Prefilled tokens whose results are in.
    collected: u32,
    /// Outputs that are out or asked for.
    planned_outputs: u32,
    /// A guess of the next outputs, made of the last result.
    draft: Vec<u32>,
}

/// Who produced the tokens so far.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Producer {
    backend: Backend,
    kernel: String,
}

/// A request in the scheduler.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) id: RowId,
    pub(super) job: Job,
    pub(super) placed: Option<Placed>,
    pub(super) deadline: Option<CallDeadline>,
    /// Since when its reader takes nothing while it could run.
    pub(super) behind: Option<Instant>,
    /// Since when no ready worker can run it.
    pub(super) stranded: Option<Instant>,
    /// Why its last worker was lost.
    pub(super) last_loss: Option<String>,
    pub(super) recoveries: u32,
    pub(super) kv_bytes: (u64, u64),
    replay: &'static str,
    company: Company,
    /// How far it came when a worker died with it, if one did.
    crashed_at: Option<Progress>,
    /// Workers that died while it ran alone, since it last made progress.
    solo_crashes: u32,
    producer: Option<Producer>,
    outputs: Vec<u32>,
    has_started: bool,
    output: mpsc::Sender<RowEvent>,
    span: tracing::Span,
    phase: tracing::Span,
}

/// Whether a row stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Lives,
    Ends,
}

impl Row {
    pub(super) fn new(
        id: RowId,
        job: Job,
        span: tracing::Span,
        output: mpsc::Sender<RowEvent>,
        deadline: Option<CallDeadline>,
    ) -> Self {
        let phase = tracing::info_span!(parent: &span, "queue");
        Self {
            id,
            job,
            placed: None,
            deadline,
            behind: None,
            stranded: None,
            last_loss: None,
            recoveries: 0,
            kv_bytes: (0, 0),
            replay: "",
            company: Company::Any,
            crashed_at: None,
            solo_crashes: 0,
            producer: None,
            outputs: Vec::new(),
            has_started: false,
            output,
            span,
            phase,
        }
    }

    /// Returns whether nobody reads any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.output.is_closed()
    }

    /// Returns whether it waits for its reader.
    pub(super) fn is_behind(&self) -> bool {
        let room = |placed: &Placed| has_room(&self.output, placed.in_flight);
        self.placed.as_ref().is_some_and(|placed| !room(placed))
    }

    /// Returns the backend that produced its tokens so far.
    pub(super) fn ran_on(&self) -> Option<Backend> {
        self.producer.as_ref().map(|producer| producer.backend)
    }

    /// Index of the first token that its reader did not get.
    pub(super) fn next_token_index(&self) -> u32 {
        u32::try_from(self.outputs.len()).unwrap_or(u32::MAX)
    }

    /// Tells the reader something; there is room by the rule of [`has_room`], and nobody may be there to hear it.
    fn tell(&self, event: RowEvent) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.output.try_send(event) {
            tracing::error!(row = self.id.0, "output channel overran");
            debug_assert!(false, "a row was planned without room for its result");
        }
    }

    /// Ends the row with an error.
    pub(super) fn fail(&self, error: GatewayError) {
        self.tell(RowEvent::Failed(error));
    }

    /// Starts the row on a worker.
    pub(super) fn place(
        &mut self,
        worker: (WorkerKey, ModelIndex),
        wire_row: u64,
        fallback_reason: Arc<str>,
        now: Instant,
    ) {
        let outputs = self.next_token_index();
        self.placed = Some(Placed {
            worker: worker.0,
            wire_row,
            model: worker.1,
            fallback_reason,
            is_open: false,
            in_flight: 0,
            target: self.job.prompt_tokens().saturating_add(outputs),
            fed: 0,
            collected: 0,
            planned_outputs: outputs,
            draft: Vec::new(),
        });
        self.stranded = None;
        if !self.has_started {
            self.has_started = true;
            self.tell(RowEvent::Started(now));
        }
        self.phase = tracing::info_span!(parent: &self.span, "prefill", worker = %worker.0);
    }

    /// Returns what the planner must know; `None` while the row waits.
    pub(super) fn view(&self) -> Option<RowView> {
        let placed = self.placed.as_ref()?;
        Some(RowView {
            id: self.id,
            model: placed.model,
            position: placed.fed,
            unfed: placed.target.saturating_sub(placed.fed),
            goal: match self.job.work() {
                Work::Generate(generate) => Goal::Generate {
                    left: generate.max_tokens.saturating_sub(placed.planned_outputs),
                    steps: generate.steps,
                },
                Work::Score(_) => Goal::Score,
            },
            source: match self.prompt_lookup() {
                None => Source::OwnSample,
                Some(_) => Source::Draft {
                    tokens: u32::try_from(placed.draft.len()).unwrap_or(u32::MAX),
                },
            },
            company: self.company,
            reader: if has_room(&self.output, placed.in_flight) {
                Reader::Ready
            } else {
                Reader::Behind
            },
            in_flight: placed.in_flight,
        })
    }

    fn prompt_lookup(&self) -> Option<PromptLookup> {
        match self.job.work() {
            Work::Generate(generate) => generate.prompt_lookup,
            Work::Score(_) => None,
        }
    }

    /// Makes the message that opens the row, unless it is open.
    pub(super) fn open(&mut self) -> Option<wire::OpenRow> {
        let placed = self.placed.as_mut()?;
        if std::mem::replace(&mut placed.is_open, true) {
            return None;
        }
        let mut open = wire::OpenRow {
            row: placed.wire_row,
            model: self.job.model().to_owned(),
            capacity_tokens: self.job.capacity_tokens(),
            prompt_tokens: self.job.prompt_tokens(),
            sampling: Some(greedy()),
            traceparent: self.job.traceparent().to_owned(),
            ..wire::OpenRow::default()
        };
        if let Work::Generate(generate) = self.job.work() {
            open.sampling = Some(generate.sampling.clone());
            open.end_token_ids = generate.end_token_ids.iter().copied().collect();
            open.top_logprobs = generate.top_logprobs;
        }
        Some(open)
    }

    /// Makes a chunk of the known tokens and counts it as fed.
    pub(super) fn feed(&mut self, tokens: u32) -> Option<wire::PrefillChunk> {
        let placed = self.placed.as_mut()?;
        let start = placed.fed;
        let end = start.saturating_add(tokens);
        let known = |position: u32| {
            let position = usize::try_from(position).ok()?;
            let prompt = self.job.prompt();
            let output = || self.outputs.get(position.checked_sub(prompt.len())?);
            prompt.get(position).or_else(output).copied()
        };
        let token_ids: Vec<u32> = (start..end).filter_map(known).collect();
        placed.fed = end;
        placed.in_flight += 1;
        let last = end == placed.target;
        let mut chunk = wire::PrefillChunk {
            row: placed.wire_row,
            start,
            token_ids,
            ..wire::PrefillChunk::default()
        };
        match *self.job.work() {
            Work::Generate(_) => {
                chunk.sample = last;
                placed.planned_outputs += u32::from(last);
            }
            Work::Score(Score {
                first_position,
                top_n,
                ..
            }) if first_position < end => {
                chunk.score = Some(wire::ScorePart {
                    first_position: first_position.max(start),
                    top_n,
                    next_token: known(end),
                    logits: None,
                });
            }
            Work::Score(_) => {}
        }
        Some(chunk)
    }

    /// Makes the entry of a plan that continues the row and counts its outputs as asked for.
    pub(super) fn decode(&mut self, decision: Decode) -> Option<wire::DecodeRow> {
        let placed = self.placed.as_mut()?;
        placed.in_flight += 1;
        placed.fed = placed.fed.saturating_add(decision.steps);
        placed.target = placed.fed;
        placed.planned_outputs = placed.planned_outputs.saturating_add(decision.steps);
        // The next guess is made of what this one comes to.
        let mut draft_token_ids = std::mem::take(&mut placed.draft);
        draft_token_ids.truncate(usize::try_from(decision.draft).unwrap_or(usize::MAX));
        let token = self.outputs.last().copied();
        Some(wire::DecodeRow {
            row: placed.wire_row,
            token: token.filter(|_| !draft_token_ids.is_empty()),
            steps: decision.steps,
            draft_token_ids,
        })
    }

    /// Takes what a plan did for the row: publishes it up to the end, and says whether there is one.
    pub(super) fn take(
        &mut self,
        (prefilled, drafted): (u32, &[u32]),
        result: wire::RowResult,
        (provenance, logits): (Option<Arc<AttestedProvenance>>, Option<bytes::Bytes>),
        at: Instant,
    ) -> Fate {
        let Some(placed) = self.placed.as_mut() else {
            return Fate::Lives;
        };
        placed.in_flight = placed.in_flight.saturating_sub(1);
        placed.collected = placed.collected.saturating_add(prefilled);
        let scored = matches!(self.job.work(), Work::Score(_)) && placed.collected == placed.target;
        if !drafted.is_empty() {
            // One token was counted on; each right guess is a token more in the cache, and an output.
            let right = u32::try_from(result.tokens.len().saturating_sub(1)).unwrap_or(u32::MAX);
            placed.fed = placed.fed.saturating_add(right);
            placed.target = placed.fed;
            placed.planned_outputs = placed.planned_outputs.saturating_add(right);
        }
        let fallback_reason = Arc::clone(&placed.fallback_reason);
        self.kv_bytes = (result.key_bytes, result.value_bytes);
        if let Some(provenance) = &provenance {
            self.note_producer(provenance);
        }
        let (tokens, mut end) = self.accept(result.tokens);
        if scored {
            end = Some(RowEnd::Scored);
        }
        if !tokens.is_empty() && end.is_none() {
            self.look_up();
        }
        let guessed = tokens.iter().map(|token| token.token_id).zip(drafted);
        let accepted_drafts = guessed.take_while(|(id, guess)| id == *guess).count();
        if self
            .crashed_at
            .is_some_and(|crashed| self.progress() > crashed)
        {
            self.company = Company::Any;
            self.solo_crashes = 0;
        }
        self.tell(RowEvent::Step(Box::new(Step {
            at,
            tokens,
            drafted: u32::try_from(drafted.len()).unwrap_or(u32::MAX),
            accepted_drafts,
            scores: result.scores,
            logits,
            provenance,
            fallback_reason,
            kv_bytes: self.kv_bytes,
            recoveries: (self.recoveries, self.replay),
            end,
        })));
        if end.is_some() {
            Fate::Ends
        } else {
            Fate::Lives
        }
    }

    /// Guesses what comes next, if the row is to.
    fn look_up(&mut self) {
        let lookup = self.prompt_lookup();
        if let (Some(placed), Some(lookup)) = (&mut self.placed, lookup) {
            placed.draft = draft::draft((self.job.prompt(), &self.outputs), lookup);
        }
    }

    /// Keeps the tokens up to the end; what was computed past it is dropped here.
    fn accept(
        &mut self,
        sampled: Vec<wire::SampledToken>,
    ) -> (Vec<wire::SampledToken>, Option<RowEnd>) {
        let Work::Generate(generate) = self.job.work() else {
            return (Vec::new(), None);
        };
        let mut tokens = Vec::with_capacity(sampled.len());
        let mut end = None;
        for token in sampled {
            let id = token.token_id;
            if self.outputs.is_empty() {
                self.phase = tracing::info_span!(parent: &self.span, "decode");
            }
            self.outputs.push(id);
            tokens.push(token);
            if generate.end_token_ids.contains(&id) {
                end = Some(RowEnd::EndToken(id));
                break;
            }
            if self.outputs.len() >= usize::try_from(generate.max_tokens).unwrap_or(usize::MAX) {
                end = Some(RowEnd::Length);
                break;
            }
        }
        (tokens, end)
    }

    /// Remembers who computes; after a change of worker says how faithful the replay was.
    fn note_producer(&mut self, provenance: &AttestedProvenance) {
        let producer = Producer {
            backend: provenance.backend(),
            kernel: provenance.kernel().to_owned(),
        };
        if self.recoveries > 0 && self.producer.as_ref() != Some(&producer) {
            self.replay = if self.producer.is_some() {
                "equivalent"
            } else {
                self.replay
            };
        }
        self.producer = Some(producer);
    }

    /// Takes the row off its worker, to wait again. `suspicion` says whether the worker may have died of it.
    ///
    /// # Errors
    /// The error with which the row ends: it is poison, or it lost too many workers.
    pub(super) fn evict(
        &mut self,
        cause: &str,
        suspicion: Suspicion,
        max_recoveries: u32,
    ) -> Result<(), GatewayError> {
        let progress = self.progress();
        let Some(placed) = self.placed.take() else {
            return Ok(());
        };
        self.last_loss = Some(cause.to_owned());
        self.kv_bytes = (0, 0);
        self.phase = tracing::info_span!(parent: &self.span, "queue", recovery = true);
        if !placed.is_open {
            return Ok(());
        }
        self.recoveries += 1;
        if self.replay.is_empty() {
            self.replay = match self.ran_on() {
                Some(Backend::Cpu | Backend::Reference) | None => "exact",
                Some(_) => "equivalent",
            };
        }
        if suspicion == Suspicion::InLostPlan && placed.in_flight > 0 {
            if self.company == Company::Alone {
                self.solo_crashes += 1;
            }
            if self.solo_crashes >= SOLO_CRASHES_OF_POISON {
                return Err(GatewayError::Poison {
                    cause: cause.to_owned(),
                    next_token_index: self.next_token_index(),
                });
            }
            self.company = Company::Alone;
            self.crashed_at = Some(progress);
        }
        if self.recoveries > max_recoveries {
            return Err(GatewayError::TooManyRecoveries {
                recoveries: self.recoveries,
                limit: max_recoveries,
                next_token_index: self.next_token_index(),
            });
        }
        Ok(())
    }

    fn progress(&self) -> Progress {
        let collected = self.placed.as_ref().map_or(0, |placed| placed.collected);
        (
            self.next_token_index(),
            collected.min(self.job.prompt_tokens()),
        )
    }
}

/// Whether the plans that a worker left unanswered are under suspicion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Suspicion {
    /// The worker ended on its own: one of the plans may be the reason.
    InLostPlan,
    /// The worker was stopped on purpose, or for its own lies.
    None,
}

/// Sampling of a row that samples nothing.
fn greedy() -> wire::Sampling {
    wire::Sampling {
        top_p: 1.0,
        repetition_penalty: 1.0,
        ..wire::Sampling::default()
    }
}
