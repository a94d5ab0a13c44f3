//! Next-token choice: allowed set, bias, penalties, temperature, top-k, top-p, min-p, then one draw.

use crate::step::Alternative;

/// How a row's tokens are chosen; every field explicit.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParameters {
    /// 0 = greedy: arg-max after allowed set, bias and penalties, ties by lowest id, no draw.
    pub temperature: f32,
    /// Keeps exactly k; 0 = all.
    pub top_k: usize,
    /// Keeps the smallest set reaching p, including the token that crosses it; 1 = all.
    pub top_p: f32,
    /// Drops candidates below `min_p` times the best probability after temperature; 0 = none.
    pub min_p: f32,
    /// Key of the counter generator; the counter is the output index.
    pub seed: u64,
    /// Divides positive, multiplies negative logits of tokens in the window; 1 = off.
    pub repetition_penalty: f32,
    /// Per occurrence in the output.
    pub frequency_penalty: f32,
    /// Once if the token occurs in the output.
    pub presence_penalty: f32,
    /// Last tokens of prompt and output that the repetition penalty sees.
    pub penalty_window_tokens: usize,
    /// Added to logits.
    pub bias: Vec<(u32, f32)>,
    /// Only these, if not empty.
    pub allowed: Vec<u32>,
}

/// One row to sample.
#[derive(Debug)]
pub struct SampleRequest<'a> {
    /// Row of the logits.
    pub logits_row: usize,
    /// Its parameters.
    pub parameters: &'a SamplingParameters,
    /// All tokens of the row so far.
    pub history: &'a [u32],
    /// How many of them are prompt.
    pub prompt_tokens: usize,
    /// Index of the token in the output: counter of the generator.
    pub output_index: u64,
    /// Alternatives wanted; `None` = no log-probabilities.
    pub top_logprobs: Option<usize>,
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleResult {
    /// Token.
    pub token_id: u32,
    /// From the raw logits; only if asked for.
    pub logprob: Option<f32>,
    /// Best alternatives of the raw logits.
    pub top: Vec<Alternative>,
}
