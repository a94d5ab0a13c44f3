//! A resident model: `submit` computes, or has the device begin; `collect` hands over.

use std::collections::{HashMap, HashSet, VecDeque};

use velox_kernels::ran::Device;

use super::pass::{Begun, Evidence};
use super::row::{AwaitedSample, Participant, Row, Work};
use super::validation::PlanRules;
use super::{Progress, RowId, RowOutcome, Runner, SampledToken, StepOutcome, StepPlan, Ticket};
use crate::backend::{Backend, FedToken};
use crate::error::EngineError;
use crate::graph::Transformer;
use crate::spec::ModelSpec;

/// Plans that may wait to be collected.
const MAX_UNCOLLECTED: usize = 2;

/// A model with its rows.
#[derive(Debug)]
pub struct Engine<B: Backend> {
    pub(super) backend: B,
    pub(super) model: Transformer<B>,
    vocab_size: usize,
    context_length: usize,
    rows: HashMap<RowId, Row<B>>,
    /// Rows that the last plan closed by their failure.
    lost: HashSet<RowId>,
    uncollected: VecDeque<Submitted<B>>,
    submitted: u64,
}

/// A plan that nobody has collected.
#[derive(Debug)]
struct Submitted<B: Backend> {
    number: u64,
    /// Without the samples that are awaited.
    outcome: Result<StepOutcome, EngineError>,
    begun: Begun<B>,
}

// === impl Engine ===

impl<B: Backend> Engine<B> {
    /// Makes an engine without rows. `model` was prepared by `backend` from a source with this `spec`.
    #[must_use]
    pub fn new(backend: B, model: Transformer<B>, spec: &ModelSpec) -> Self {
        Self {
            backend,
            model,
            vocab_size: spec.vocab_size,
            context_length: spec.context_length,
            rows: HashMap::new(),
            lost: HashSet::new(),
            uncollected: VecDeque::new(),
            submitted: 0,
        }
    }

    /// Runs a checked plan.
    fn execute(
        &mut self,
        plan: StepPlan,
        progress: &dyn Progress,
    ) -> Result<(StepOutcome, Begun<B>), EngineError> {
        let order: HashMap<RowId, usize> = plan
            .prefill
            .iter()
            .map(|chunk| chunk.row)
            .chain(plan.decode.iter().map(|decode| decode.row))
            .zip(0..)
            .collect();
        // A plan that only closes says nothing of the one that was sent after the failure.
        let works = plan.prefill.is_some() || !plan.decode.is_empty();
        let lost_before = if works {
            std::mem::take(&mut self.lost)
        } else {
            HashSet::new()
        };
        for id in &plan.close_rows {
            self.rows.remove(id);
        }
        let mut outcomes = Vec::new();
        for open in plan.open_rows {
            let id = open.row;
            match self
                .model
                .new_cache(&mut self.backend, open.capacity_tokens)
            {
                Ok(cache) => {
                    self.rows.insert(id, Row::new(open, cache));
                }
                Err(error) => {
                    self.lost.insert(id);
                    outcomes.push(failed(id, error));
                }
            }
        }
        let prefill = plan.prefill.map(|chunk| {
            let work = Work::Prefill {
                token_ids: chunk.token_ids,
                goal: chunk.goal,
            };
            (chunk.row, None, work)
        });
        let decode = plan.decode.into_iter().map(|decode| {
            // Without a token of the plan the row's own last sample is fed.
            let token = FedToken::Known(decode.token.unwrap_or(0));
            let work = if decode.draft.is_empty() {
                Work::Decode {
                    token,
                    steps_left: decode.steps,
                }
            } else {
                Work::Verify {
                    token,
                    draft: decode.draft,
                }
            };
            (decode.row, decode.token, work)
        });
        let mut participants = Vec::new();
        for (id, forced, mut work) in prefill.into_iter().chain(decode) {
            let Some(mut row) = self.rows.remove(&id) else {
                if lost_before.contains(&id) {
                    outcomes.push(failed(id, closed_by_failure(id)));
                }
                continue;
            };
            if let Work::Decode { token, .. } = &mut work
                && forced.is_none()
                && let Some(last_sample) = &row.last_sample
            {
                *token = last_sample.clone();
            }
            row.last_plan = self.submitted;
            participants.push(Participant::new(id, row, work));
        }
        let mut evidence = Evidence::default();
        let result = self.passes(&mut participants, &mut evidence, progress);
        self.settle(participants, &mut outcomes);
        let begun = result?;
        outcomes.sort_by_key(|outcome| order.get(&outcome.row).copied().unwrap_or(order.len()));
        let outcome = StepOutcome {
            rows: outcomes,
            label: evidence.label.unwrap_or(B::Device::LABEL),
            sampler: evidence.sampler.unwrap_or(B::Sampler::LABEL),
            stages: evidence.stages,
        };
        Ok((outcome, begun))
    }

    /// Puts rows back and closes those that failed. A pass that broke off left its rows' caches of unequal length.
    fn settle(&mut self, participants: Vec<Participant<B>>, outcomes: &mut Vec<RowOutcome>) {
        for participant in participants {
            let bytes = self.backend.cache_bytes(&participant.row.cache);
            let id = participant.id;
            let result = match participant.failure {
                Some(error) => Err(error),
                None => Ok(participant.output),
            };
            if result.is_ok() && !participant.in_pass {
                self.rows.insert(id, participant.row);
            } else {
                self.lost.insert(id);
            }
            outcomes.push(RowOutcome {
                row: id,
                result,
                key_bytes: bytes.keys,
                value_bytes: bytes.values,
            });
        }
    }

    /// Puts a sample into the outcome of its plan and into the history of its row.
    fn take_drawn(
        &mut self,
        number: u64,
        awaited: &AwaitedSample<B::Awaited>,
        drawn: Result<u32, EngineError>,
        outcome: &mut StepOutcome,
    ) {
        let mut rows = outcome.rows.iter_mut();
        let Some(reported) = rows.find(|reported| reported.row == awaited.row) else {
            return;
        };
        let Ok(output) = &mut reported.result else {
            return;
        };
        let ends = |token_id: u32| awaited.end_token_ids.contains(&token_id);
        if output.tokens.last().is_some_and(|last| ends(last.token_id)) {
            // Computed before anybody knew that the row had ended.
            return;
        }
        let token_id = match drawn {
            Ok(token_id) => token_id,
            Err(error) => {
                reported.result = Err(error);
                self.lose(awaited.row);
                return;
            }
        };
        output.tokens.push(SampledToken {
            token_id,
            logprob: None,
            top: Vec::new(),
        });
        let Some(row) = self.rows.get_mut(&awaited.row) else {
            return;
        };
        row.learn(awaited.length, token_id);
        if ends(token_id) && row.last_plan == number && row.token_ids.len() > awaited.length {
            row.cut(awaited.length, token_id);
            self.backend.truncate_cache(&mut row.cache, awaited.length);
        }
    }

    /// Closes a row that failed when its sample was read; a plan that was submitted since computed on nonsense.
    fn lose(&mut self, row: RowId) {
        self.rows.remove(&row);
        self.lost.insert(row);
        for submitted in &mut self.uncollected {
            if let Ok(outcome) = &mut submitted.outcome {
                for reported in outcome.rows.iter_mut().filter(|later| later.row == row) {
                    reported.result = Err(closed_by_failure(row));
                }
            }
        }
    }
}

fn closed_by_failure(row: RowId) -> EngineError {
    EngineError::InvalidPlan(format!("row {} was closed by its failure", row.0))
}

fn failed(row: RowId, error: EngineError) -> RowOutcome {
    RowOutcome {
        row,
        result: Err(error),
        key_bytes: 0,
        value_bytes: 0,
    }
}

// === impl Runner ===

impl<B: Backend> Runner for Engine<B> {
    fn submit(&mut self, plan: StepPlan, progress: &dyn Progress) -> Result<Ticket, EngineError> {
        if self.uncollected.len() >= MAX_UNCOLLECTED {
            return Err(EngineError::InvalidPlan(format!(
                "{} plans are uncollected, limit is {MAX_UNCOLLECTED}",
                self.uncollected.len()
            )));
        }
        let rules = PlanRules {
            vocab_size: self.vocab_size,
            context_length: self.context_length,
            rows: &self.rows,
            lost: &self.lost,
        };
        rules.check(&plan)?;
        let number = self.submitted;
        let (outcome, begun) = match self.execute(plan, progress) {
            Ok((outcome, begun)) => (Ok(outcome), begun),
            Err(error) => (Err(error), Begun::default()),
        };
        self.submitted += 1;
        self.uncollected.push_back(Submitted {
            number,
            outcome,
            begun,
        });
        Ok(Ticket::new(number))
    }

    fn is_ready(&self, ticket: &Ticket) -> bool {
        let mut plans = self.uncollected.iter();
        plans
            .find(|plan| plan.number == ticket.number())
            .is_none_or(|plan| {
                let mut flights = plan.begun.flights.iter();
                flights.all(|flight| self.backend.is_finished(flight))
            })
    }

    fn collect(
        &mut self,
        ticket: Ticket,
        progress: &dyn Progress,
    ) -> Result<StepOutcome, EngineError> {
        let place = self
            .uncollected
            .iter()
            .position(|plan| plan.number == ticket.number());
        let Some(submitted) = place.and_then(|place| self.uncollected.remove(place)) else {
            return Err(EngineError::InvalidPlan(format!(
                "ticket {} is of another model",
                ticket.number()
            )));
        };
        let mut outcome = submitted.outcome?;
        let Begun { flights, samples } = submitted.begun;
        let tokens: Vec<B::Awaited> = samples.iter().map(|sample| sample.token.clone()).collect();
        match self.backend.finish(flights, &tokens, progress) {
            Ok(drawn) => {
                for (sample, drawn) in samples.iter().zip(drawn) {
                    self.take_drawn(submitted.number, sample, drawn, &mut outcome);
                }
                Ok(outcome)
            }
            Err(error) => {
                for reported in &outcome.rows {
                    self.lose(reported.row);
                }
                Err(error)
            }
        }
    }

    fn open_rows(&self) -> usize {
        self.rows.len()
    }
}
