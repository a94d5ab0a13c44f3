//! Short ways to write and run plans.

use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{OpenRow, Progress, RowId, Runner, StepOutcome, StepPlan};

/// Does not listen.
pub(crate) struct Undisturbed;

impl Progress for Undisturbed {
    fn layer_done(&self) {}
}

/// A greedy row without log-probabilities.
pub(crate) fn open(row: RowId, capacity_tokens: usize, prompt_tokens: usize) -> OpenRow {
    OpenRow {
        row,
        capacity_tokens,
        prompt_tokens,
        sampling: SamplingParameters::greedy(),
        end_token_ids: Vec::new(),
        top_logprobs: None,
    }
}

/// Submits and collects.
pub(crate) fn run(runner: &mut dyn Runner, plan: StepPlan) -> StepOutcome {
    let ticket = runner.submit(plan, &Undisturbed).expect("a valid plan");
    runner.collect(ticket, &Undisturbed).expect("a result")
}
