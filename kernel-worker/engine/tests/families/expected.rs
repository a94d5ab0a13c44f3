//! Models with expected logits, and how to get ours.

use std::path::{Path, PathBuf};

use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    LogitsWanted, OpenRow, PrefillChunk, PrefillGoal, Progress, RowId, Runner, ScorePart, StepPlan,
};

/// Folders of tiny random models that Hugging Face transformers computed.
pub(crate) const FAMILIES: [&str; 11] = [
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
/// Quantised by MLX.
pub(crate) const AFFINE: [&str; 2] = ["mixed", "uniform"];
/// Same tensors as GGUF with interleaved rows of q and k.
pub(crate) const GGUF_FILES: [&str; 3] = ["llama-tied", "llama-biases", "llama-rope-llama3"];

struct Silent;

impl Progress for Silent {
    fn layer_done(&self) {}
}

/// Folder of fixtures: `VELOX_FIXTURES` where the test does not run beside its sources.
pub(crate) fn fixtures(kind: &str) -> PathBuf {
    std::env::var_os("VELOX_FIXTURES")
        .map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures"),
            PathBuf::from,
        )
        .join(kind)
}

/// Token ids and the two expectations of a family.
pub(crate) struct Expected {
    pub(crate) ids: Vec<u32>,
    pub(crate) stored_form: Vec<f32>,
    pub(crate) exact_form: Vec<f32>,
}

impl Expected {
    pub(crate) fn read(folder: &Path) -> Self {
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

/// Feeds the ids in chunks and returns the logits of every position.
pub(crate) fn score(runner: &mut dyn Runner, ids: &[u32], chunk: usize) -> Vec<f32> {
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
pub(crate) fn differences(found: &[f32], expected: &[f32]) -> (f32, f32) {
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
