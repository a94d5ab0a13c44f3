//! The engine against vectors of an independent implementation (f16 weights, f32 cache), on the real model.
//!
//! Needs `VELOX_TEST_MODEL` = SmolLM2-135M-Instruct.Q4_1.gguf; `VELOX_LONG_TESTS=1` and `VELOX_GOLDEN_DIR` (folder of
//! the whole `alice_ids.json`) score 16 windows instead of 2.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking and says what it measured"
)]

#[path = "golden/model.rs"]
mod model;
#[path = "golden/plans.rs"]
mod plans;

use std::path::PathBuf;

use serde_json::Value;
use velox_engine::load::{LoadOptions, load};
use velox_engine::probe::ProbedBackends;
use velox_engine::step::{
    DecodeRow, LogitsWanted, PrefillChunk, PrefillGoal, RowId, Runner, ScorePart, ScoredPosition,
    StepOutcome, StepPlan,
};
use velox_kernels::label::BackendLabel;

use model::{load_model, model_path};
use plans::{open, run};

const WINDOW: usize = 512;
/// Mean negative log-likelihood of windows 0, of 0 and 1, and of 0 to 15.
const MEAN_NLL: [(usize, f64); 3] = [(1, 2.905_920), (2, 2.974_131), (16, 2.946_998)];

/// What a backend owes.
struct Bounds {
    backend: BackendLabel,
    /// Relative deviation of perplexity.
    perplexity: f64,
    /// Two best log-probabilities closer than this may swap in the teacher-forced window.
    teacher_margin: f64,
    /// A greedy run is followed up to the first margin of logits below this.
    greedy_margin: f64,
}

const REFERENCE: Bounds = Bounds {
    backend: BackendLabel::Reference,
    perplexity: 0.002,
    teacher_margin: 0.0,
    greedy_margin: 0.02,
};

/// Activations are quantised.
const CPU: Bounds = Bounds {
    backend: BackendLabel::Cpu,
    perplexity: 0.01,
    teacher_margin: 0.15,
    greedy_margin: 0.15,
};

fn lines(content: &str) -> Vec<Value> {
    content
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Windows to score, and their tokens.
fn alice() -> (usize, Vec<u32>) {
    let long = std::env::var_os("VELOX_LONG_TESTS").is_some_and(|flag| flag == "1");
    let folder = std::env::var_os("VELOX_GOLDEN_DIR").map(PathBuf::from);
    if let (true, Some(folder)) = (long, folder) {
        let content = std::fs::read_to_string(folder.join("alice_ids.json")).unwrap();
        return (16, serde_json::from_str(&content).unwrap());
    }
    if long {
        eprintln!("SKIPPED: 14 of 16 windows: VELOX_GOLDEN_DIR names no folder");
    }
    (
        2,
        serde_json::from_str(include_str!("golden/alice_ids.json")).unwrap(),
    )
}

/// Scores a window from an empty cache in one chunk, and closes its row.
fn score_window(runner: &mut dyn Runner, window: &[u32], part: ScorePart) -> StepOutcome {
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

/// Every position of the first window, the second half of the others; as the golden vectors were made.
fn score_windows(runner: &mut dyn Runner, bounds: &Bounds) -> Vec<Vec<ScoredPosition>> {
    let (windows, tokens) = alice();
    tokens
        .chunks_exact(WINDOW)
        .take(windows)
        .enumerate()
        .map(|(index, window)| {
            let part = ScorePart {
                first_position: if index == 0 { 0 } else { WINDOW / 2 },
                top_n: if index == 0 { 1 } else { 0 },
                next_token: None,
                logits: LogitsWanted::No,
            };
            let mut outcome = score_window(runner, window, part);
            assert_eq!(outcome.label, bounds.backend);
            let output = outcome.rows.remove(0).result.unwrap();
            assert!(output.logits.is_empty());
            output.scores
        })
        .collect()
}

fn check_perplexity(windows: &[Vec<ScoredPosition>], bounds: &Bounds) {
    let mut sum = 0.0;
    let mut scored = 0_u32;
    for (index, window) in windows.iter().enumerate() {
        for position in window.iter().filter(|scored| scored.position >= WINDOW / 2) {
            if let Some(logprob) = position.next_logprob {
                sum -= f64::from(logprob);
                scored += 1;
            }
        }
        for (count, golden) in MEAN_NLL {
            if count == index + 1 {
                assert_eq!(scored as usize, 255 * count);
                let deviation = (sum / f64::from(scored) - golden).exp() - 1.0;
                eprintln!(
                    "{}: perplexity of {count} windows {:.4}, deviation {:+.4} %",
                    bounds.backend,
                    (sum / f64::from(scored)).exp(),
                    100.0 * deviation
                );
                assert!(deviation.abs() < bounds.perplexity, "{deviation}");
            }
        }
    }
}

fn check_teacher(window: &[ScoredPosition], bounds: &Bounds) {
    let golden = lines(include_str!("golden/teacher.jsonl"));
    assert_eq!(window.len(), golden.len());
    let (mut compared, mut agreed) = (0_u32, 0_u32);
    for (scored, golden) in window.iter().zip(&golden) {
        assert_eq!(golden["position"], scored.position);
        let best = golden["top5"][0][0].as_u64().unwrap();
        let logprob = |rank: usize| golden["top5"][rank][1].as_f64().unwrap();
        if logprob(0) - logprob(1) > bounds.teacher_margin {
            compared += 1;
            agreed += u32::from(u64::from(scored.top[0].token_id) == best);
        }
    }
    let share = f64::from(agreed) / f64::from(compared);
    eprintln!(
        "{}: top-1 agrees at {agreed} of {compared} positions",
        bounds.backend
    );
    assert!(compared > 400);
    assert!(share >= 0.99, "{share}");
}

/// Decodes all prompts together, each followed as far as its margins allow.
fn check_greedy(runner: &mut dyn Runner, bounds: &Bounds) {
    let golden = lines(include_str!("golden/greedy.jsonl"));
    let rows: Vec<RowId> = (0..).take(golden.len()).map(RowId).collect();
    let mut found: Vec<Vec<u32>> = Vec::new();
    for (row, case) in rows.iter().zip(&golden) {
        let prompt = ids(&case["prompt_ids"]);
        let expected = ids(&case["greedy_ids"]);
        let outcome = run(
            runner,
            StepPlan {
                open_rows: vec![open(*row, prompt.len() + expected.len(), prompt.len())],
                prefill: Some(PrefillChunk {
                    row: *row,
                    start: 0,
                    token_ids: prompt,
                    goal: PrefillGoal::Sample,
                }),
                ..StepPlan::default()
            },
        );
        let output = outcome.rows[0].result.as_ref().unwrap();
        found.push(output.tokens.iter().map(|token| token.token_id).collect());
    }
    let decode = rows.iter().zip(&golden).filter_map(|(row, case)| {
        let steps = ids(&case["greedy_ids"]).len() - 1;
        (steps > 0).then_some(DecodeRow {
            row: *row,
            token: None,
            steps,
            draft: vec![],
        })
    });
    let outcome = run(
        runner,
        StepPlan {
            decode: decode.collect(),
            ..StepPlan::default()
        },
    );
    for row in outcome.rows {
        let place = rows.iter().position(|other| *other == row.row).unwrap();
        found[place].extend(
            row.result
                .unwrap()
                .tokens
                .iter()
                .map(|token| token.token_id),
        );
    }
    let mut followed = 0;
    let mut departures = Vec::new();
    for (case, found) in golden.iter().zip(&found) {
        let expected = ids(&case["greedy_ids"]);
        let margins = floats(&case["margins"]);
        let certain = margins
            .iter()
            .position(|margin| *margin < bounds.greedy_margin)
            .unwrap_or(margins.len());
        let same = found
            .iter()
            .zip(&expected)
            .take_while(|(found, expected)| found == expected)
            .count();
        followed += same.min(certain);
        if same < certain {
            departures.push(format!(
                "{} at token {same}, margin {}",
                case["user"], margins[same]
            ));
        }
    }
    eprintln!("{}: followed {followed} greedy tokens", bounds.backend);
    assert!(followed > 0);
    assert!(departures.is_empty(), "{departures:#?}");
}

fn check(test: &str, bounds: &Bounds) {
    let Some(path) = model_path(test) else {
        return;
    };
    let Some(mut model) = load_model(test, &path, bounds.backend, 2) else {
        return;
    };
    let runner = model.runner.as_mut();
    let windows = score_windows(runner, bounds);
    check_teacher(&windows[0], bounds);
    check_perplexity(&windows, bounds);
    check_greedy(runner, bounds);
}

#[test]
fn reference_agrees_with_the_golden_vectors() {
    check("reference_agrees_with_the_golden_vectors", &REFERENCE);
}

#[test]
fn cpu_agrees_with_the_golden_vectors() {
    check("cpu_agrees_with_the_golden_vectors", &CPU);
}

#[test]
fn loading_tells_where_it_stands_and_why_a_backend_is_missing() {
    let test = "loading_tells_where_it_stands_and_why_a_backend_is_missing";
    let Some(path) = model_path(test) else {
        return;
    };
    let mut options = LoadOptions {
        backend: None,
        threads: 1,
        cache_limit_bytes: 1 << 20,
        quantise: None,
        max_context: None,
        probed: ProbedBackends::of_the_host(1),
    };
    let mut reports = Vec::new();
    let model = load(&path, &options, &mut |progress| reports.push(progress)).unwrap();
    assert_eq!(
        model.facts.weight_bytes,
        reports.last().unwrap().total_bytes
    );
    assert_eq!(model.facts.page_tokens, 32);
    assert_eq!(model.facts.key_bytes_per_token, 30 * 3 * 64 * 2);
    let mut phases: Vec<&str> = reports.iter().map(|progress| progress.phase).collect();
    phases.dedup();
    assert_eq!(phases, ["open", "check", "map", "ready"]);
    let counted = |phase: &str| {
        let progress = reports.iter().filter(|progress| progress.phase == phase);
        progress.map(|progress| progress.done_bytes).max()
    };
    assert!(counted("map") <= counted("ready"));
    options.backend = Some(BackendLabel::Metal);
    let error = load(&path, &options, &mut |_| {}).unwrap_err();
    assert_eq!(
        error.to_string(),
        "backend METAL cannot run this model: it is not part of this build"
    );
}
