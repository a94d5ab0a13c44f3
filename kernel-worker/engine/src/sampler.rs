//! Next-token choice: allowed set, bias, penalties, temperature, top-k, top-p, min-p, then one draw.
//!
//! The allowed set comes first, so that every later filter acts on legal tokens and at least one survives. All
//! arithmetic is f64 in a fixed order: equal logits give equal tokens on every backend. A tie goes to the lowest id.

mod draw;
mod exponential;
mod random;
mod ranking;

use crate::backend::{ScoreRequest, ScoreResult};
use crate::error::EngineError;
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
    /// Added to logits; finite, entries of one token add up.
    pub bias: Vec<(u32, f32)>,
    /// Only these, if not empty.
    pub allowed: Vec<u32>,
}

/// One row to sample.
#[derive(Debug, Clone, Copy)]
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

// === impl SamplingParameters ===

impl SamplingParameters {
    /// The most likely token, nothing else.
    #[must_use]
    pub fn greedy() -> Self {
        Self {
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

    /// Checks every field against its range and every token against the vocabulary.
    ///
    /// # Errors
    /// [`EngineError::InvalidPlan`] naming the field, its limit and its value.
    pub fn check(&self, vocab_size: usize) -> Result<(), EngineError> {
        let refuse = |text: String| Err(EngineError::InvalidPlan(text));
        let ranges = [
            ("temperature", self.temperature, 0.0..=f32::MAX),
            ("top_p", self.top_p, f32::MIN_POSITIVE..=1.0),
            ("min_p", self.min_p, 0.0..=1.0),
            (
                "repetition_penalty",
                self.repetition_penalty,
                f32::MIN_POSITIVE..=f32::MAX,
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                f32::MIN..=f32::MAX,
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                f32::MIN..=f32::MAX,
            ),
        ];
        for (name, value, range) in ranges {
            if !range.contains(&value) {
                return refuse(format!(
                    "{name} is {value}, it must lie in {:e} to {:e}",
                    range.start(),
                    range.end()
                ));
            }
        }
        if let Some((token_id, bias)) = self.bias.iter().find(|(_, bias)| !bias.is_finite()) {
            return refuse(format!(
                "bias of token {token_id} is {bias}, it must be finite"
            ));
        }
        let biased = self.bias.iter().map(|(token_id, _)| token_id);
        for token_id in biased.chain(&self.allowed) {
            if !usize::try_from(*token_id).is_ok_and(|id| id < vocab_size) {
                return refuse(format!(
                    "sampling names token {token_id}, the vocabulary has {vocab_size}"
                ));
            }
        }
        Ok(())
    }
}

// === impl SampleRequest ===

impl SampleRequest<'_> {
    /// Whether the choice is a function of the logits and of [`Self::uniform`] alone: nothing of the row's history, no
    /// list of tokens, no log-probabilities.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        let parameters = self.parameters;
        #[expect(clippy::float_cmp, reason = "the value that switches a penalty off")]
        let penalised = parameters.repetition_penalty != 1.0
            || parameters.frequency_penalty != 0.0
            || parameters.presence_penalty != 0.0;
        let listed = !parameters.bias.is_empty() || !parameters.allowed.is_empty();
        !penalised && !listed && self.top_logprobs.is_none()
    }

    /// Returns the row's draw for this token, in `[0, 1)`.
    #[must_use]
    pub fn uniform(&self) -> f64 {
        random::uniform(self.parameters.seed, self.output_index)
    }
}

/// Chooses the next token of a row from its logits `[V]`.
///
/// # Errors
/// [`EngineError::Numeric`] if a logit is NaN or positive infinity, or if no candidate is finite.
pub fn sample(logits: &[f32], request: &SampleRequest<'_>) -> Result<SampleResult, EngineError> {
    check_row(logits)?;
    let token_id = draw::choose(logits, request)?;
    let mut result = SampleResult {
        token_id,
        logprob: None,
        top: Vec::new(),
    };
    if let Some(top_n) = request.top_logprobs {
        let scores = score_checked(logits, Some(token_id), top_n);
        result.logprob = scores.next_logprob;
        result.top = scores.top;
    }
    Ok(result)
}

/// Log-probabilities of a row of logits `[V]`, before any processing.
///
/// # Errors
/// [`EngineError::Numeric`] if a logit is NaN or positive infinity, or if none is finite;
/// [`EngineError::InvalidPlan`] if the next token is no row of the head.
pub fn score(logits: &[f32], request: &ScoreRequest) -> Result<ScoreResult, EngineError> {
    check_row(logits)?;
    if let Some(token_id) = request.next_token
        && !usize::try_from(token_id).is_ok_and(|id| id < logits.len())
    {
        return Err(EngineError::InvalidPlan(format!(
            "token {token_id} is to be scored, the vocabulary has {}",
            logits.len()
        )));
    }
    Ok(score_checked(logits, request.next_token, request.top_n))
}

fn score_checked(logits: &[f32], next_token: Option<u32>, top_n: usize) -> ScoreResult {
    let normaliser = log_sum_exp(logits);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a log-probability is reported as f32; rounding is wanted"
    )]
    let logprob = |logit: f64| (logit - normaliser) as f32;
    ScoreResult {
        next_logprob: next_token
            .and_then(|token_id| logits.get(usize::try_from(token_id).ok()?))
            .map(|logit| logprob(f64::from(*logit))),
        top: ranking::best(logits.iter().copied().map(f64::from), top_n)
            .into_iter()
            .map(|ranked| Alternative {
                token_id: ranked.token_id,
                logprob: logprob(ranked.value),
            })
            .collect(),
    }
}

/// A row that holds NaN or infinity has no meaningful maximum: an error, never a silent choice.
fn check_row(logits: &[f32]) -> Result<(), EngineError> {
    // Without an early exit, so that the compiler vectorises it.
    let is_broken = |logit: f32| logit.is_nan() | (logit == f32::INFINITY);
    let broken = logits
        .iter()
        .fold(false, |broken, logit| broken | is_broken(*logit));
    if broken {
        let found = logits.iter().position(|logit| is_broken(*logit));
        return Err(EngineError::Numeric(match found {
            Some(token_id) => format!("logit of token {token_id} is {}", logits[token_id]),
            None => "a logit is not a number".to_owned(),
        }));
    }
    if ranking::maximum(logits) == f32::NEG_INFINITY {
        return Err(EngineError::Numeric("no logit is finite".to_owned()));
    }
    Ok(())
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let maximum = f64::from(ranking::maximum(logits));
    let sum = exponential::sum_of_exponentials(logits, maximum, 1.0);
    maximum + sum.ln()
}
