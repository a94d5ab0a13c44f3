//! The strongest device of MLX that is there against vectors of an independent implementation, on the real model.
//!
//! Needs `VELOX_TEST_MODEL` = SmolLM2-135M-Instruct.Q4_1.gguf. One window of 512 tokens: the CPU device computes about
//! two billion operations a second.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking and says what it measured"
)]

use std::path::PathBuf;

use serde_json::Value;
use velox_engine::load::{LoadOptions, LoadedModel, load as load_model};
use velox_engine::offer::Offer;
use velox_engine::probe::ProbedBackends;
use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    DecodeRow, LogitsWanted, OpenRow, PrefillChunk, PrefillGoal, Progress, RowId, ScorePart,
    StepOutcome, StepPlan,
};
use velox_kernels::label::BackendLabel;
use velox_mlx::offers;

/// Mean negative log-likelihood of positions 256 to 510 of the first window.
const MEAN_NLL: f64 = 2.905_920;
/// Relative deviation of perplexity.
const PERPLEXITY_DEVIATION: f64 = 0.005;

/// What a device owes.
struct Bounds {
    /// Bytes of a cached element.
    element_bytes: u64,
    /// Of 512 positions, those where the best token is the golden one.
    agreeing: usize,
    /// Margin of logits below which two paths may choose differently.
    greedy_margin: f64,
}

fn bounds(label: BackendLabel) -> Bounds {
    match label {
        // Weights are exact, sums are f32.
        BackendLabel::MlxCpu => Bounds {
            element_bytes: 4,
            agreeing: 507,
            greedy_margin: 0.02,
        },
        // Activations of 16 bits.
        _ => Bounds {
            element_bytes: 2,
            agreeing: 497,
            greedy_margin: 0.15,
        },
    }
}

struct Undisturbed;

impl Progress for Undisturbed {
    fn layer_done(&self) {}
}

fn lines(content: &str) -> Vec<Value> {
    let parse = |line| serde_json::from_str(line).unwrap();
    content.lines().map(parse).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn open(row: RowId, capacity_tokens: usize, prompt_tokens: usize) -> OpenRow {
    OpenRow {
        row,
        capacity_tokens,
        prompt_tokens,
        sampling: SamplingParameters::greedy(),
        end_token_ids: Vec::new(),
        top_logprobs: None,
    }
}

fn run(model: &mut LoadedModel, plan: StepPlan) -> StepOutcome {
    let ticket = model.runner.submit(plan, &Undisturbed).unwrap();
    model.runner.collect(ticket, &Undisturbed).unwrap()
}

fn load(test: &str) -> Option<LoadedModel> {
    let Some(path) = std::env::var_os("VELOX_TEST_MODEL").map(PathBuf::from) else {
        eprintln!("SKIPPED: {test}: VELOX_TEST_MODEL names no model file");
        return None;
    };
    let offers = offers::linked().offers;
    let strongest = offers
        .iter()
        .map(Offer::label)
        .find(|&label| label != BackendLabel::Cpu)
        .unwrap();
    let options = LoadOptions {
        backend: Some(strongest),
        threads: 1,
        cache_limit_bytes: 1 << 30,
        quantise: None,
        max_context: None,
        probed: ProbedBackends::of(offers, 1, &mut |_, _, _| {}),
    };
    let model = load_model(&path, &options, &mut |_| {}).unwrap();
    eprintln!("device under test: {strongest}");
    assert_eq!(model.facts.backend, strongest);
    Some(model)
}

#[test]
fn mlx_agrees_with_the_golden_window() {
    let Some(mut model) = load("mlx_agrees_with_the_golden_window") else {
        return;
    };
    let label = model.facts.backend;
    let bounds = bounds(label);
    let golden = lines(include_str!("../../engine/tests/golden/teacher.jsonl"));
    let tokens = ids(&serde_json::from_str(include_str!(
        "../../engine/tests/golden/alice_ids.json"
    ))
    .unwrap());
    let row = RowId(1);
    // Two chunks, so that the second one attends to a cache.
    let mut scores = Vec::new();
    for (start, end) in [(0, 200), (200, 512)] {
        let chunk = PrefillChunk {
            row,
            start,
            token_ids: tokens[start..end].to_vec(),
            goal: PrefillGoal::Score(ScorePart {
                first_position: 0,
                top_n: 1,
                next_token: (end < 512).then(|| tokens[end]),
                logits: LogitsWanted::No,
            }),
        };
        let plan = StepPlan {
            open_rows: if start == 0 {
                vec![open(row, 512, 0)]
            } else {
                Vec::new()
            },
            prefill: Some(chunk),
            ..StepPlan::default()
        };
        let mut outcome = run(&mut model, plan);
        assert_eq!(outcome.label, label);
        // Room in steps of 256 tokens.
        assert_eq!(
            outcome.rows[0].key_bytes,
            if end == 200 { 256 } else { 512 } * 30 * 3 * 64 * bounds.element_bytes
        );
        scores.extend(outcome.rows.remove(0).result.unwrap().scores);
    }
    let agreed = scores
        .iter()
        .zip(&golden)
        .filter(|(scored, golden)| golden["top5"][0][0] == scored.top[0].token_id)
        .count();
    let second_half = scores.iter().filter(|scored| scored.position >= 256);
    let logprobs: Vec<f64> = second_half
        .filter_map(|scored| scored.next_logprob.map(f64::from))
        .collect();
    assert_eq!((scores.len(), logprobs.len()), (512, 255));
    let deviation = (-logprobs.iter().sum::<f64>() / 255.0 - MEAN_NLL).exp() - 1.0;
    eprintln!(
        "{label}: top-1 agrees at {agreed} of 512, perplexity deviates by {:+.4} %",
        100.0 * deviation
    );
    assert!(agreed >= bounds.agreeing, "{agreed}");
    assert!(deviation.abs() < PERPLEXITY_DEVIATION, "{deviation}");
}

#[test]
fn mlx_follows_a_greedy_run_beside_another_row() {
    let Some(mut model) = load("mlx_follows_a_greedy_run_beside_another_row") else {
        return;
    };
    let bounds = bounds(model.facts.backend);
    let golden = lines(include_str!("../../engine/tests/golden/greedy.jsonl"));
    let mut found: Vec<Vec<u32>> = Vec::new();
    let steps = 12;
    for (case, row) in golden.iter().take(2).zip(0..) {
        let prompt = ids(&case["prompt_ids"]);
        let outcome = run(
            &mut model,
            StepPlan {
                open_rows: vec![open(RowId(row), prompt.len() + steps, prompt.len())],
                prefill: Some(PrefillChunk {
                    row: RowId(row),
                    start: 0,
                    token_ids: prompt,
                    goal: PrefillGoal::Sample,
                }),
                ..StepPlan::default()
            },
        );
        found.push(
            outcome.rows[0]
                .result
                .as_ref()
                .unwrap()
                .tokens
                .iter()
                .map(|token| token.token_id)
                .collect(),
        );
    }
    let decode = (0..2).map(|row| DecodeRow {
        row: RowId(row),
        token: None,
        steps: steps - 1,
        draft: vec![],
    });
    let outcome = run(
        &mut model,
        StepPlan {
            decode: decode.collect(),
            ..StepPlan::default()
        },
    );
    for (row, found) in outcome.rows.iter().zip(&mut found) {
        found.extend(
            row.result
                .as_ref()
                .unwrap()
                .tokens
                .iter()
                .map(|token| token.token_id),
        );
    }
    let mut followed = 0;
    for (case, found) in golden.iter().zip(&found) {
        let margins: Vec<f64> = serde_json::from_value(case["margins"].clone()).unwrap();
        let certain = margins
            .iter()
            .position(|&margin| margin < bounds.greedy_margin)
            .unwrap_or(margins.len());
        let certain = certain.min(steps);
        followed += certain;
        assert_eq!(
            found[..certain],
            ids(&case["greedy_ids"])[..certain],
            "{}",
            case["user"]
        );
    }
    assert!(followed > 0);
}
