//! Checkpoints that MLX quantised, on MLX's CPU device: it takes their words as they are.
//!
//! `engine/tests/make_affine_fixtures.py` computed the logits with numpy from the same weights.
#![expect(clippy::unwrap_used, reason = "a failed assumption is a failed test")]

use std::path::Path;

use velox_engine::backend::reference::ReferenceBackend;
use velox_engine::files;
use velox_engine::load::assemble;
use velox_engine::probe::ProbeCase;
use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    LogitsWanted, OpenRow, PrefillChunk, PrefillGoal, Progress, RowId, Runner, ScorePart, StepPlan,
};
use velox_kernels::affine::StoredType;
use velox_kernels::label::BackendLabel;
use velox_kvcache::PageBudget;
use velox_mlx::backend::MlxBackend;
use velox_mlx::ffi::MlxCpuDevice;

/// Activations, scales and caches of this device are f32, so what is left is the order of additions.
const TOLERANCE: f32 = 2e-4;
/// The same for one stage, relative to its largest output.
const STAGE_TOLERANCE: f64 = 1e-5;
/// What a case of quantised matrices tolerates, relative to its largest output.
const CASE_TOLERANCE: f64 = 2e-2;

struct Silent;

impl Progress for Silent {
    fn layer_done(&self) {}
}

/// Returns the logits of every position.
fn score(runner: &mut dyn Runner, ids: &[u32]) -> Vec<f32> {
    let row = RowId(1);
    let plan = StepPlan {
        open_rows: vec![OpenRow {
            row,
            capacity_tokens: ids.len(),
            prompt_tokens: ids.len(),
            sampling: SamplingParameters::greedy(),
            end_token_ids: Vec::new(),
            top_logprobs: None,
        }],
        prefill: Some(PrefillChunk {
            row,
            start: 0,
            token_ids: ids.to_vec(),
            goal: PrefillGoal::Score(ScorePart {
                first_position: 0,
                top_n: 0,
                next_token: None,
                logits: LogitsWanted::Yes,
            }),
        }),
        ..StepPlan::default()
    };
    let ticket = runner.submit(plan, &Silent).unwrap();
    let mut outcome = runner.collect(ticket, &Silent).unwrap();
    outcome.rows.remove(0).result.unwrap().logits
}

#[test]
fn logits_are_those_of_the_weights_that_mlx_wrote() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/affine");
    for name in ["mixed", "uniform"] {
        let folder = fixtures.join(name);
        let source = files::open(&folder, &mut |_| {}).unwrap();
        let budget = PageBudget::new(1 << 24);
        let backend = MlxBackend::<MlxCpuDevice>::open(&source.tensor_types, budget).unwrap();
        let mut model = assemble(source, backend, &mut |_| {}).unwrap();
        assert_eq!(model.facts.backend, BackendLabel::MlxCpu);
        let ids = std::fs::read_to_string(folder.join("input.json")).unwrap();
        let ids: Vec<u32> = serde_json::from_str(&ids).unwrap();
        let found = score(model.runner.as_mut(), &ids);
        let logits = std::fs::read(folder.join("logits.f32")).unwrap();
        let (logits, _) = logits.as_chunks::<4>();
        // The second half has exact keys and values, as f32 caches have.
        let expected = &logits[logits.len() / 2..];
        assert_eq!(found.len(), expected.len());
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let expected = f32::from_le_bytes(*expected);
            assert!(
                (found - expected).abs() <= TOLERANCE,
                "{name}, logit {index}: {found}, not {expected}"
            );
        }
    }
}

#[test]
fn every_layout_multiplies_as_the_reference_does() {
    let budget = PageBudget::new(1 << 24);
    let mut backend = MlxBackend::<MlxCpuDevice>::open(&["F32"], budget.clone()).unwrap();
    let mut oracle = ReferenceBackend::new(1, budget);
    let mut compared = 0;
    for case in ProbeCase::all() {
        let Some(StoredType::Affine(_)) = case.matrices else {
            continue;
        };
        let outcome = case.run(&mut backend, &mut oracle).unwrap();
        let relative = outcome.max_error / outcome.tolerance * CASE_TOLERANCE;
        assert!(
            relative <= STAGE_TOLERANCE,
            "{:?} of {}: {relative:.1e}",
            case.stage,
            case.dtype()
        );
        compared += 1;
    }
    assert_eq!(compared, 18 * 5, "six widths, three groups, five stages");
}
