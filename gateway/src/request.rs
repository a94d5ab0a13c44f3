//! What a caller asked for, checked once: a [`Job`] for the scheduler and a [`Presentation`] for the answer.
//!
//! Everything here is pure. Text was turned into token ids before ([`crate::catalog`] has the tokenizers); the
//! constructors are the only way to a job, so whatever the scheduler sees is within the model's limits.

mod sampling;
mod truncation;

use std::collections::BTreeSet;
use std::sync::Arc;

use velox_proto::limits::{
    MAX_DECODE_STEPS, MAX_DRAFT_TOKENS, MAX_LOOKUP_NGRAM_TOKENS, MAX_MESSAGE_BYTES,
    MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, MAX_TOKEN_LIST, MAX_TOP_LOGPROBS,
};
use velox_proto::v1::{self, Backend, KvGeometry};
use velox_proto::worker::v1 as wire;

use crate::admission::worst_case_kv_bytes;
use crate::error::GatewayError;
use crate::policy::Policy;

/// Tokens of an answer whose length the caller left open.
pub const DEFAULT_MAX_TOKENS: u32 = 512;

/// Decode steps of one plan for a row that nobody watches token by token.
const UNWATCHED_STEPS: u32 = 4;

/// Length of the n-gram that a draft is looked up by, unless the caller says.
const DEFAULT_NGRAM_TOKENS: u32 = 3;

/// Longest draft, unless the caller says.
const DEFAULT_DRAFT_TOKENS: u32 = 8;

/// Room in a message for what travels beside logits.
const LOGITS_MESSAGE_MARGIN_BYTES: usize = 4 * 1024 * 1024;

/// What a request may not exceed, as the model's worker said.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelLimits {
    /// Name of the model.
    pub name: Arc<str>,
    /// Digest of what the model is made of: a name may come to mean another one.
    pub fingerprint: Arc<str>,
    /// Positions of a row at most.
    pub context_length: u32,
    /// Every token id lies below.
    pub vocab_size: u32,
    /// Bytes of cache per token.
    pub kv: KvGeometry,
    /// Tokens that end an answer.
    pub end_token_ids: Vec<u32>,
    /// Backends that run the model, now or after a restart.
    pub backends: Vec<Backend>,
    /// Why other backends do not, for a message.
    pub missing: String,
}

/// A model as workers hold it: rows never go on with another one of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelIdentity<'a> {
    /// Name under which it is served.
    pub name: &'a str,
    /// Digest of its content, and of what was made of it when it was loaded.
    pub fingerprint: &'a str,
}

/// How the answer leaves: token by token, or in one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// The reader wants each token as soon as it is there.
    Stream,
    /// The reader waits for the end.
    Whole,
}

/// The optional parts of a generation request.
#[derive(Debug, Clone, Default)]
pub struct GenerationParts {
    /// How tokens are chosen.
    pub sampling: Option<v1::SamplingOptions>,
    /// What ends the answer and what comes with it.
    pub generation: Option<v1::GenerationOptions>,
    /// Which backends may answer.
    pub policy: Option<v1::BackendPolicy>,
}

/// Why an answer ends at its longest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LengthLimit {
    /// The caller's `max_tokens`, or the default.
    MaxTokens,
    /// The model's context.
    Context,
}

/// What a row computes.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// It continues the prompt.
    Generate(Generate),
    /// It scores the prompt.
    Score(Score),
}

/// How a prompt is continued.
#[derive(Debug, Clone, PartialEq)]
pub struct Generate {
    pub(crate) sampling: wire::Sampling,
    pub(crate) max_tokens: u32,
    pub(crate) limit: LengthLimit,
    pub(crate) end_token_ids: BTreeSet<u32>,
    pub(crate) top_logprobs: Option<u32>,
    pub(crate) steps: u32,
    pub(crate) prompt_lookup: Option<PromptLookup>,
}

/// How drafts are looked up in the tokens of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLookup {
    pub(crate) ngram_tokens: usize,
    pub(crate) max_draft_tokens: usize,
}

/// What is wanted of a given text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Score {
    pub(crate) first_position: u32,
    pub(crate) top_n: u32,
    /// Width of a row of logits if they are wanted.
    pub(crate) logits_width: Option<u32>,
}

/// Work that is within the limits of its model.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    model: Arc<str>,
    fingerprint: Arc<str>,
    prompt: Vec<u32>,
    capacity_tokens: u32,
    kv_bytes: u64,
    policy: Policy,
    work: Work,
    traceparent: String,
}

/// What the reader of an answer wants to see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Presentation {
    pub(crate) model: Arc<str>,
    pub(crate) stop: Vec<String>,
    pub(crate) token_ids: bool,
    pub(crate) logprobs: bool,
    pub(crate) seed: u64,
    pub(crate) prompt_tokens: u32,
    pub(crate) truncated_tokens: u32,
}

/// A generation request that was accepted.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidRequest {
    /// For the scheduler.
    pub job: Job,
    /// For the answer.
    pub presentation: Presentation,
}

// === impl ValidRequest ===

impl ValidRequest {
    /// Checks a request to continue `prompt`; `fresh_seed` is used if the caller gave none.
    ///
    /// # Errors
    /// [`GatewayError::Invalid`], [`GatewayError::PromptTooLong`] or [`GatewayError::BackendUnavailable`].
    pub fn generate(
        model: &ModelLimits,
        mut prompt: Vec<u32>,
        parts: GenerationParts,
        delivery: Delivery,
        fresh_seed: u64,
    ) -> Result<Self, GatewayError> {
        let options = parts.generation.unwrap_or_default();
        let policy = available_policy(model, parts.policy)?;
        check_prompt(model, &prompt)?;
        let truncated_tokens = truncation::fit(model, &mut prompt, &options)?;
        let prompt_tokens = count(&prompt);
        let left = model.context_length.saturating_sub(prompt_tokens);
        let wanted = options.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        if wanted == 0 {
            return Err(GatewayError::invalid(
                "generation.max_tokens",
                "max_tokens is 0, allowed are 1 and more",
            ));
        }
        let (max_tokens, limit) = if wanted <= left {
            (wanted, LengthLimit::MaxTokens)
        } else {
            (left, LengthLimit::Context)
        };
        check_stops(&options.stop)?;
        check_tokens(model, "generation.stop_token_ids", &options.stop_token_ids)?;
        let top_logprobs = top_logprobs(&options)?;
        let mut end_token_ids: BTreeSet<u32> = options.stop_token_ids.iter().copied().collect();
        if !options.ignore_eos {
            end_token_ids.extend(&model.end_token_ids);
        }
        let sampling = sampling::complete(model, parts.sampling.unwrap_or_default(), fresh_seed)?;
        // A stop string is found by us, not by the worker: unless told otherwise, each token is seen before more are made.
        let steps = match (options.tokens_per_plan, delivery) {
            (Some(steps), _) => within("generation.tokens_per_plan", steps, MAX_DECODE_STEPS)?,
            // A draft is looked up between plans: several steps would leave no chance for one.
            (None, Delivery::Whole)
                if options.stop.is_empty() && options.prompt_lookup.is_none() =>
            {
                UNWATCHED_STEPS
            }
            (None, Delivery::Whole | Delivery::Stream) => 1,
        };
        let prompt_lookup = options.prompt_lookup.map(prompt_lookup).transpose()?;
        let presentation = Presentation {
            model: Arc::clone(&model.name),
            stop: options.stop,
            token_ids: options.return_token_ids,
            logprobs: options.return_logprobs,
            seed: sampling.seed,
            prompt_tokens,
            truncated_tokens,
        };
        let work = Work::Generate(Generate {
            sampling,
            max_tokens,
            limit,
            end_token_ids,
            top_logprobs,
            steps,
            prompt_lookup,
        });
        Ok(Self {
            job: Job::new(model, prompt, max_tokens, policy, work),
            presentation,
        })
    }
}

// === impl Job ===

impl Job {
    fn new(
        model: &ModelLimits,
        prompt: Vec<u32>,
        output_tokens: u32,
        policy: Policy,
        work: Work,
    ) -> Self {
        let capacity_tokens = count(&prompt).saturating_add(output_tokens);
        Self {
            model: Arc::clone(&model.name),
            fingerprint: Arc::clone(&model.fingerprint),
            kv_bytes: worst_case_kv_bytes(&model.kv, capacity_tokens),
            prompt,
            capacity_tokens,
            policy,
            work,
            traceparent: String::new(),
        }
    }

    /// Checks a request to score `tokens`.
    ///
    /// # Errors
    /// [`GatewayError::Invalid`], [`GatewayError::PromptTooLong`] or [`GatewayError::BackendUnavailable`].
    pub fn score(
        model: &ModelLimits,
        tokens: Vec<u32>,
        request: &v1::ScoreRequest,
    ) -> Result<Self, GatewayError> {
        let policy = available_policy(model, request.policy.clone())?;
        check_prompt(model, &tokens)?;
        if tokens.len() > index(model.context_length) {
            return Err(GatewayError::PromptTooLong {
                tokens: tokens.len(),
                limit: model.context_length,
            });
        }
        if index(request.first_position) >= tokens.len() {
            return Err(GatewayError::invalid(
                "first_position",
                format!(
                    "first_position is {}, the text has {} tokens",
                    request.first_position,
                    tokens.len()
                ),
            ));
        }
        check_top("top_n", request.top_n)?;
        if request.return_logits {
            let positions = tokens.len() - index(request.first_position);
            let bytes = positions
                .saturating_mul(index(model.vocab_size))
                .saturating_mul(size_of::<f32>());
            let limit = MAX_MESSAGE_BYTES - LOGITS_MESSAGE_MARGIN_BYTES;
            if bytes > limit {
                return Err(GatewayError::invalid(
                    "return_logits",
                    format!("logits of {positions} positions have {bytes} bytes, limit is {limit}"),
                ));
            }
        }
        let work = Work::Score(Score {
            first_position: request.first_position,
            top_n: request.top_n,
            logits_width: request.return_logits.then_some(model.vocab_size),
        });
        Ok(Self::new(model, tokens, 0, policy, work))
    }

    /// Sets the W3C trace context that the worker's spans continue.
    #[must_use]
    pub fn with_traceparent(mut self, traceparent: String) -> Self {
        self.traceparent = traceparent;
        self
    }

    /// Returns the name of the model.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Returns which model it was made for, whatever its name comes to mean.
    #[must_use]
    pub fn identity(&self) -> ModelIdentity<'_> {
        ModelIdentity {
            name: &self.model,
            fingerprint: &self.fingerprint,
        }
    }

    /// Returns the prompt, never empty.
    #[must_use]
    pub fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// Returns the number of prompt tokens.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        count(&self.prompt)
    }

    /// Returns the positions that the row uses at most.
    #[must_use]
    pub fn capacity_tokens(&self) -> u32 {
        self.capacity_tokens
    }

    /// Returns the worst case of the row's cache.
    #[must_use]
    pub fn kv_bytes(&self) -> u64 {
        self.kv_bytes
    }

    /// Returns the backends that it may run on.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns what the row computes.
    #[must_use]
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// Returns whether logits come back.
    #[must_use]
    pub fn wants_logits(&self) -> bool {
        matches!(&self.work, Work::Score(score) if score.logits_width.is_some())
    }

    /// Returns the shape of the logits of a chunk, if any are wanted: `[scored positions, vocabulary]`.
    #[must_use]
    pub fn logits_shape(&self, start: u32, tokens: u32) -> Option<[u64; 2]> {
        let Work::Score(score) = &self.work else {
            return None;
        };
        let end = start.saturating_add(tokens);
        let positions = end.saturating_sub(score.first_position.max(start));
        let width = score.logits_width.filter(|_width| positions > 0)?;
        Some([u64::from(positions), u64::from(width)])
    }

    /// Returns the bytes of the logits of the largest chunk, if any are wanted.
    #[must_use]
    pub fn logits_bytes(&self, chunk_tokens: u32) -> Option<u64> {
        let [positions, width] = self.logits_shape(0, self.prompt_tokens())?;
        let positions = positions.min(u64::from(chunk_tokens));
        Some(positions * width * u64::try_from(size_of::<f32>()).unwrap_or(4))
    }

    /// Returns the trace context; may be empty.
    #[must_use]
    pub fn traceparent(&self) -> &str {
        &self.traceparent
    }
}

fn available_policy(
    model: &ModelLimits,
    wire: Option<v1::BackendPolicy>,
) -> Result<Policy, GatewayError> {
    let policy = Policy::try_from(wire)?;
    if model
        .backends
        .iter()
        .any(|&backend| policy.rank(backend).is_some())
    {
        return Ok(policy);
    }
    Err(GatewayError::BackendUnavailable {
        model: model.name.to_string(),
        allowed: policy.allowed_labels(),
        found: model.missing.clone(),
    })
}

fn check_prompt(model: &ModelLimits, prompt: &[u32]) -> Result<(), GatewayError> {
    if prompt.is_empty() {
        return Err(GatewayError::invalid("prompt", "prompt has no tokens"));
    }
    match prompt.iter().find(|&&id| id >= model.vocab_size) {
        Some(id) => Err(outside(model, "prompt", *id)),
        None => Ok(()),
    }
}

/// Cuts the begin of a prompt that leaves no room for one token of answer; returns how much was cut.
fn check_stops(stops: &[String]) -> Result<(), GatewayError> {
    let field = "generation.stop";
    if stops.len() > MAX_STOP_STRINGS {
        return Err(GatewayError::invalid(
            field,
            format!("{} stop strings, limit is {MAX_STOP_STRINGS}", stops.len()),
        ));
    }
    for stop in stops {
        if stop.is_empty() || stop.len() > MAX_STOP_STRING_BYTES {
            return Err(GatewayError::invalid(
                field,
                format!(
                    "a stop string has {} bytes, allowed are 1 to {MAX_STOP_STRING_BYTES}",
                    stop.len()
                ),
            ));
        }
    }
    Ok(())
}

fn check_tokens(model: &ModelLimits, field: &'static str, ids: &[u32]) -> Result<(), GatewayError> {
    if ids.len() > MAX_TOKEN_LIST {
        return Err(GatewayError::invalid(
            field,
            format!("{} tokens, limit is {MAX_TOKEN_LIST}", ids.len()),
        ));
    }
    match ids.iter().find(|&&id| id >= model.vocab_size) {
        Some(&id) => Err(outside(model, field, id)),
        None => Ok(()),
    }
}

fn outside(model: &ModelLimits, field: &'static str, id: u32) -> GatewayError {
    GatewayError::invalid(
        field,
        format!(
            "token id {id} is outside the vocabulary of {} tokens",
            model.vocab_size
        ),
    )
}

fn top_logprobs(options: &v1::GenerationOptions) -> Result<Option<u32>, GatewayError> {
    let field = "generation.top_logprobs";
    if options.return_logprobs {
        check_top(field, options.top_logprobs)?;
        return Ok(Some(options.top_logprobs));
    }
    if options.top_logprobs > 0 {
        return Err(GatewayError::invalid(
            field,
            format!(
                "top_logprobs is {} and return_logprobs is not set",
                options.top_logprobs
            ),
        ));
    }
    Ok(None)
}

fn prompt_lookup(wire: v1::PromptLookup) -> Result<PromptLookup, GatewayError> {
    let ngram = wire.ngram_tokens.unwrap_or(DEFAULT_NGRAM_TOKENS);
    let draft = wire.max_draft_tokens.unwrap_or(DEFAULT_DRAFT_TOKENS);
    Ok(PromptLookup {
        ngram_tokens: index(within(
            "generation.prompt_lookup.ngram_tokens",
            ngram,
            MAX_LOOKUP_NGRAM_TOKENS,
        )?),
        max_draft_tokens: index(within(
            "generation.prompt_lookup.max_draft_tokens",
            draft,
            MAX_DRAFT_TOKENS,
        )?),
    })
}

/// Refuses a number of tokens that is 0 or above its limit.
fn within(field: &'static str, value: u32, limit: u32) -> Result<u32, GatewayError> {
    if (1..=limit).contains(&value) {
        return Ok(value);
    }
    let name = field.rsplit('.').next().unwrap_or(field);
    Err(GatewayError::invalid(
        field,
        format!("{name} is {value}, must be 1 to {limit}"),
    ))
}

fn check_top(field: &'static str, top: u32) -> Result<(), GatewayError> {
    if top > MAX_TOP_LOGPROBS {
        return Err(GatewayError::invalid(
            field,
            format!("{top} alternatives, limit is {MAX_TOP_LOGPROBS}"),
        ));
    }
    Ok(())
}

/// Number of tokens; a prompt was bounded by a context length or a message size, both below 2^32.
fn count(tokens: &[u32]) -> u32 {
    u32::try_from(tokens.len()).unwrap_or(u32::MAX)
}

fn index(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
