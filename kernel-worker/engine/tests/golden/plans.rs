//! Short ways to write and run plans.

use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{OpenRow, Progress, RowId, Runner, StepOutcome, StepPlan};

/// Does not listen.
pub(crate) struct Undisturbed;

impl Progress for Undisturbed {
    fn layer_done(&self) {}
}

/// Greedy, nothing else.
pub(crate) fn greedy() -> SamplingParameters {
    SamplingParameters {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        repetition_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        penalty_window_tokens: 0,
        bias: Vec::new(),
        allowed: Vec::new(),
    }
}

/// A greedy row without log-probabilities.
pub(crate) fn open(row: RowId, capacity_tokens: usize, prompt_tokens: usize) -> OpenRow {
    OpenRow {
        row,
        capacity_tokens,
        prompt_tokens,
        sampling: greedy(),
        end_token_ids: Vec::new(),
        top_logprobs: None,
    }
}

/// Submits and collects.
pub(crate) fn run(runner: &mut dyn Runner, plan: StepPlan) -> StepOutcome {
    let ticket = runner.submit(plan, &Undisturbed).expect("a valid plan");
    runner.collect(ticket).expect("a result")
}
