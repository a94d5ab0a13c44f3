//! Logits of tiny random models against Hugging Face transformers (made by `make_family_fixtures.py`), and of ones that
//! MLX quantised against numpy (made by `make_affine_fixtures.py`).
//!
//! The first expectation was computed with keys and values rounded to f16, as our cache stores them. What is left is
//! the order of f32 additions, about 1e-5, and where it moves a key over the border between two f16 neighbours, a
//! step of 2^-10 of that key, which every later position sees. Which family has such a key depends on the instruction
//! set: with AVX2 it is `llama-head-dim`, whose logits are within 3e-5 up to position 5 and 4e-4 away, 4e-3 at most,
//! from position 6. Hence the bounds of one family allow for such keys, and the median of all families does not. The
//! second expectation has exact keys and values and bounds what the 16-bit cache costs: its maker saw up to 2e-2.
//! Logits go up to 12.
#![expect(clippy::unwrap_used, reason = "a failed assumption is a failed test")]

use std::path::{Path, PathBuf};

use velox_engine::load::{LoadOptions, load};
use velox_engine::probe::ProbedBackends;
use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    LogitsWanted, OpenRow, PrefillChunk, PrefillGoal, Progress, RowId, Runner, ScorePart, StepPlan,
};
use velox_kernels::label::BackendLabel;

const STORED_FORM_MEAN_TOLERANCE: f32 = 1e-3;
const STORED_FORM_TOLERANCE: f32 = 1e-2;
const MEDIAN_OF_MEANS_TOLERANCE: f32 = 3e-5;
const EXACT_FORM_TOLERANCE: f32 = 3e-2;

const FAMILIES: [&str; 11] = [
    "llama-tied",
    "llama-untied",
    "llama-biases",
    "llama-head-dim",
    "llama-rope-llama3",
    "llama-rope-linear",
    "llama-rope-yarn",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
];
/// What `CPU` adds where weights are quantised: it rounds activations to 15 bits. Measured 1.2e-3 and 6.3e-3.
const ROUNDED_MEAN_TOLERANCE: f32 = 3e-3;
const ROUNDED_TOLERANCE: f32 = 1.5e-2;

/// Quantised by MLX.
const AFFINE: [&str; 2] = ["mixed", "uniform"];
/// Same tensors as GGUF with interleaved rows of q and k.
const GGUF_FILES: [&str; 3] = ["llama-tied", "llama-biases", "llama-rope-llama3"];

struct Silent;

impl Progress for Silent {
    fn layer_done(&self) {}
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families")
}

fn affine_fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/affine")
}

/// Token ids and the two expectations of a family.
struct Expected {
    ids: Vec<u32>,
    stored_form: Vec<f32>,
    exact_form: Vec<f32>,
}

impl Expected {
    fn read(folder: &Path) -> Self {
        let ids = std::fs::read_to_string(folder.join("input.json")).unwrap();
        let logits: Vec<f32> = std::fs::read(folder.join("logits.f32"))
            .unwrap()
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        let (stored_form, exact_form) = logits.split_at(logits.len() / 2);
        Self {
            ids: serde_json::from_str(&ids).unwrap(),
            stored_form: stored_form.to_vec(),
            exact_form: exact_form.to_vec(),
        }
    }
}

fn options(backend: BackendLabel) -> LoadOptions {
    LoadOptions {
        backend: Some(backend),
        threads: 1,
        cache_limit_bytes: 64 << 20,
        quantise: None,
        max_context: None,
        probed: ProbedBackends::of_the_host(1),
    }
}

/// Feeds the ids in chunks and returns the logits of every position.
fn score(runner: &mut dyn Runner, ids: &[u32], chunk: usize) -> Vec<f32> {
    let row = RowId(7);
    let mut open_rows = vec![OpenRow {
        row,
        capacity_tokens: ids.len(),
        prompt_tokens: ids.len(),
        sampling: SamplingParameters::greedy(),
        end_token_ids: Vec::new(),
        top_logprobs: None,
    }];
    let mut logits = Vec::new();
    for (index, part) in ids.chunks(chunk).enumerate() {
        let start = index * chunk;
        let plan = StepPlan {
            open_rows: std::mem::take(&mut open_rows),
            prefill: Some(PrefillChunk {
                row,
                start,
                token_ids: part.to_vec(),
                goal: PrefillGoal::Score(ScorePart {
                    first_position: start,
                    top_n: 0,
                    next_token: None,
                    logits: LogitsWanted::Yes,
                }),
            }),
            ..StepPlan::default()
        };
        let ticket = runner.submit(plan, &Silent).unwrap();
        let outcome = runner.collect(ticket, &Silent).unwrap();
        let [row_outcome] = outcome.rows.try_into().unwrap();
        logits.extend(row_outcome.result.unwrap().logits);
    }
    let close = StepPlan {
        close_rows: vec![row],
        ..StepPlan::default()
    };
    let ticket = runner.submit(close, &Silent).unwrap();
    runner.collect(ticket, &Silent).unwrap();
    logits
}

/// Mean and largest absolute difference.
fn differences(found: &[f32], expected: &[f32]) -> (f32, f32) {
    assert_eq!(found.len(), expected.len());
    let (mut sum, mut largest) = (0.0_f64, 0.0_f32);
    for (found, expected) in found.iter().zip(expected) {
        let difference = (found - expected).abs();
        sum += f64::from(difference);
        largest = largest.max(difference);
    }
    let count = f64::from(u32::try_from(found.len()).unwrap());
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a mean of f32 values fits f32"
    )]
    let mean = (sum / count) as f32;
    (mean, largest)
}

/// Checks models and their families one by one, and that most of them agree to the order of additions.
fn check(models: &[(PathBuf, &str)], backend: BackendLabel) {
    let mut means: Vec<f32> = models
        .iter()
        .map(|(path, family)| {
            let expected = Expected::read(&fixtures().join(family));
            let stored_form = (STORED_FORM_MEAN_TOLERANCE, STORED_FORM_TOLERANCE);
            check_within(path, &expected, backend, stored_form)
        })
        .collect();
    means.sort_by(f32::total_cmp);
    let median = means[means.len() / 2];
    assert!(
        median <= MEDIAN_OF_MEANS_TOLERANCE,
        "median of the means {median:.1e} on {backend:?}"
    );
}

/// Returns the larger of the mean differences from the stored form.
fn check_within(
    path: &Path,
    expected: &Expected,
    backend: BackendLabel,
    (mean_tolerance, tolerance): (f32, f32),
) -> f32 {
    let mut largest_mean = 0.0_f32;
    let mut model = load(path, &options(backend), &mut |_| {}).unwrap();
    assert_eq!(model.facts.backend, backend);
    for chunk in [expected.ids.len(), 5] {
        let logits = score(model.runner.as_mut(), &expected.ids, chunk);
        let (mean, largest) = differences(&logits, &expected.stored_form);
        let (_, exact) = differences(&logits, &expected.exact_form);
        let case = format!(
            "{} in chunks of {chunk}: mean {mean:.1e}, largest {largest:.1e} from stored form, {exact:.1e} from exact",
            path.file_name().unwrap().display()
        );
        assert!(mean <= mean_tolerance, "{case}");
        assert!(largest <= tolerance, "{case}");
        assert!(exact <= EXACT_FORM_TOLERANCE, "{case}");
        largest_mean = largest_mean.max(mean);
    }
    largest_mean
}

fn folders() -> Vec<(PathBuf, &'static str)> {
    FAMILIES
        .map(|family| (fixtures().join(family), family))
        .into()
}

fn gguf_files() -> Vec<(PathBuf, &'static str)> {
    GGUF_FILES
        .map(|family| (fixtures().join(format!("{family}.gguf")), family))
        .into()
}

#[test]
fn every_family_computes_what_transformers_computes() {
    check(&folders(), BackendLabel::Reference);
}

#[test]
fn weights_that_mlx_quantised_compute_the_same() {
    for family in AFFINE {
        let folder = affine_fixtures().join(family);
        let expected = Expected::read(&folder);
        let exact = (STORED_FORM_MEAN_TOLERANCE, STORED_FORM_TOLERANCE);
        check_within(&folder, &expected, BackendLabel::Reference, exact);
        let rounded = (ROUNDED_MEAN_TOLERANCE, ROUNDED_TOLERANCE);
        check_within(&folder, &expected, BackendLabel::Cpu, rounded);
    }
}

#[test]
fn gguf_with_interleaved_rows_computes_the_same() {
    check(&gguf_files(), BackendLabel::Reference);
}

#[test]
fn simd_kernels_compute_the_same() {
    check(&folders(), BackendLabel::Cpu);
    check(&gguf_files(), BackendLabel::Cpu);
}
