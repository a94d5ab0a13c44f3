//! What an independent engine said about the real model; the files lie beside the crates that they test first.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::Value;

/// Below this margin between the two best logits a path with quantised activations may choose either.
pub const CPU_MARGIN: f64 = 0.15;

/// Below this margin an f32 path may choose either.
pub const REFERENCE_MARGIN: f64 = 0.02;

/// A chat turn and its greedy answer.
#[derive(Debug, Clone)]
pub struct GreedyRun {
    /// What the user says.
    pub user: String,
    /// The rendered prompt.
    pub prompt_ids: Vec<u32>,
    /// The answer.
    pub greedy_ids: Vec<u32>,
    /// Difference of the two best logits for each token of the answer.
    pub margins: Vec<f64>,
}

impl GreedyRun {
    /// Returns the tokens that a path must reproduce: up to the first margin below the limit.
    #[must_use]
    pub fn certain(&self, limit: f64) -> &[u32] {
        let open = self.margins.iter().position(|&margin| margin < limit);
        &self.greedy_ids[..open.unwrap_or(self.greedy_ids.len())]
    }
}

/// Reads the greedy runs.
///
/// # Errors
/// If the file is missing or damaged.
pub fn greedy_runs() -> anyhow::Result<Vec<GreedyRun>> {
    lines("kernel-worker/engine/tests/golden/greedy.jsonl")?
        .iter()
        .map(|line| {
            let margins = line["margins"].as_array().context("no margins")?;
            Ok(GreedyRun {
                user: line["user"].as_str().context("no user")?.to_owned(),
                prompt_ids: ids(&line["prompt_ids"])?,
                greedy_ids: ids(&line["greedy_ids"])?,
                margins: margins.iter().filter_map(Value::as_f64).collect(),
            })
        })
        .collect()
}

/// Returns the path of the texts with their ids, one JSON object a line: `text`, `plain`, `with_special`.
#[must_use]
pub fn tokens_file() -> PathBuf {
    repository().join("gateway/tests/fixtures/tokens.jsonl")
}

/// Reads the texts with their ids.
///
/// # Errors
/// If the file is missing or damaged.
pub fn tokens() -> anyhow::Result<Vec<Value>> {
    lines("gateway/tests/fixtures/tokens.jsonl")
}

/// Returns the path of the beginning of `alice.txt`: a little more than one window of 512 tokens.
#[must_use]
pub fn alice_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/alice_head.txt")
}

/// Perplexity of the first window of `alice.txt`.
pub const ALICE_FIRST_WINDOW: f64 = 18.2821;

/// Reads an array of token ids.
///
/// # Errors
/// If it is none.
pub fn ids(value: &Value) -> anyhow::Result<Vec<u32>> {
    let array = value.as_array().context("not an array of ids")?;
    array
        .iter()
        .map(|id| {
            let id = id.as_u64().context("not an id")?;
            Ok(u32::try_from(id)?)
        })
        .collect()
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn lines(file: &str) -> anyhow::Result<Vec<Value>> {
    let path = repository().join(file);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    text.lines()
        .map(|line| Ok(serde_json::from_str(line)?))
        .collect()
}
