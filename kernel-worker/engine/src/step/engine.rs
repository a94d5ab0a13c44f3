//! A resident model on an eager backend: `submit` computes, `collect` hands over.

use std::collections::{HashMap, HashSet, VecDeque};

use velox_kernels::ran::Device;

use super::pass::Evidence;
use super::row::{Participant, Row, Work};
use super::validation::PlanRules;
use super::{Progress, RowId, RowOutcome, Runner, StepOutcome, StepPlan, Ticket};
use crate::backend::Backend;
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
    rows: HashMap<RowId, Row<B::Cache>>,
    /// Rows that the last plan closed by their failure.
    lost: HashSet<RowId>,
    uncollected: VecDeque<(u64, Result<StepOutcome, EngineError>)>,
    submitted: u64,
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
    ) -> Result<StepOutcome, EngineError> {
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
            let work = if decode.draft.is_empty() {
                Work::Decode {
                    token_id: 0,
                    steps_left: decode.steps,
                }
            } else {
                Work::Verify {
                    token_id: 0,
                    draft: decode.draft,
                }
            };
            (decode.row, decode.token, work)
        });
        let mut participants = Vec::new();
        for (id, forced, mut work) in prefill.into_iter().chain(decode) {
            let Some(row) = self.rows.remove(&id) else {
                if lost_before.contains(&id) {
                    let text = format!("row {} was closed by its failure", id.0);
                    outcomes.push(failed(id, EngineError::InvalidPlan(text)));
                }
                continue;
            };
            if let Work::Decode { token_id, .. } | Work::Verify { token_id, .. } = &mut work
                && let Some(fed) = forced.or(row.last_sample)
            {
                *token_id = fed;
            }
            participants.push(Participant::new(id, row, work));
        }
        let mut evidence = Evidence::default();
        let result = self.passes(&mut participants, &mut evidence, progress);
        self.settle(participants, &mut outcomes);
        result?;
        outcomes.sort_by_key(|outcome| order.get(&outcome.row).copied().unwrap_or(order.len()));
        Ok(StepOutcome {
            rows: outcomes,
            label: evidence.label.unwrap_or(B::Device::LABEL),
            sampler: evidence.sampler.unwrap_or(B::Sampler::LABEL),
            stages: evidence.stages,
        })
    }

    /// Puts rows back and closes those that failed. A pass that broke off left its rows' caches of unequal length.
    fn settle(&mut self, participants: Vec<Participant<B::Cache>>, outcomes: &mut Vec<RowOutcome>) {
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
        let outcome = self.execute(plan, progress);
        let number = self.submitted;
        self.submitted += 1;
        self.uncollected.push_back((number, outcome));
        Ok(Ticket::new(number))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<StepOutcome, EngineError> {
        let place = self
            .uncollected
            .iter()
            .position(|(number, _)| *number == ticket.number());
        match place.and_then(|place| self.uncollected.remove(place)) {
            Some((_, outcome)) => outcome,
            None => Err(EngineError::InvalidPlan(format!(
                "ticket {} is of another model",
                ticket.number()
            ))),
        }
    }

    fn open_rows(&self) -> usize {
        self.rows.len()
    }
}
