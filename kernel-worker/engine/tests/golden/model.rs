//! The real model and short ways to run it.

use std::path::{Path, PathBuf};

use velox_engine::error::EngineError;
use velox_engine::load::{LoadOptions, LoadedModel, load};
use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    OpenRow, PrefillChunk, PrefillGoal, Progress, RowId, Runner, ScorePart, StepOutcome, StepPlan,
};
use velox_kernels::label::BackendLabel;

/// Never cancels.
pub(crate) struct Undisturbed;

impl Progress for Undisturbed {
    fn layer_done(&self) {}

    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Returns the path in `VELOX_TEST_MODEL`, or says loudly that the test is skipped.
pub(crate) fn model_path(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("VELOX_TEST_MODEL").map(PathBuf::from);
    if path.is_none() {
        eprintln!("SKIPPED: {test}: VELOX_TEST_MODEL names no model file");
    }
    path
}

/// Loads the model for a backend, or says loudly that the test is skipped because the backend is missing.
pub(crate) fn load_model(
    test: &str,
    path: &Path,
    backend: BackendLabel,
    threads: usize,
) -> Option<LoadedModel> {
    let options = LoadOptions {
        backend: Some(backend),
        threads,
        cache_limit_bytes: 1 << 30,
    };
    match load(path, &options, &mut |_| {}) {
        Ok(model) => {
            assert_eq!(model.facts.backend, backend);
            Some(model)
        }
        Err(EngineError::BackendUnavailable { backend, reason }) => {
            eprintln!("SKIPPED: {test}: {backend} is not available here: {reason}");
            None
        }
        Err(error) => panic!("{}: {error}", path.display()),
    }
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

/// Scores a window from an empty cache in one chunk, and closes its row.
pub(crate) fn score_window(runner: &mut dyn Runner, window: &[u32], part: ScorePart) -> StepOutcome {
    let row = RowId(1 << 40);
    let outcome = run(
        runner,
        StepPlan {
            open_rows: vec![open(row, window.len(), 0)],
            prefill: Some(PrefillChunk {
                row,
                start: 0,
                token_ids: window.to_vec(),
                goal: PrefillGoal::Score(part),
            }),
            ..StepPlan::default()
        },
    );
    let closed = StepPlan {
        close_rows: vec![row],
        ..StepPlan::default()
    };
    run(runner, closed);
    outcome
}
