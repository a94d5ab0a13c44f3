//! Short ways to say what a client says.

use std::time::Duration;

use anyhow::Context as _;
use velox_client::Client;
use velox_client::answer::Answer;
use velox_client::error::ClientError;
use velox_proto::error::{Reason, ServiceFault};
use velox_proto::v1::{
    Backend, BackendPolicy, ChatMessage, ChatRequest, Finish, GenerateRequest, GenerationEvent,
    GenerationOptions, OnMissing, Provenance, SamplingOptions, Timings, TokenIds, TokenLogprob,
    Usage, generate_request::Prompt,
};

/// Makes a chat of one user turn with token ids in the events.
#[must_use]
pub fn chat(user: &str, max_tokens: u32) -> ChatRequest {
    ChatRequest {
        messages: vec![message("user", user)],
        generation: Some(options(max_tokens)),
        ..ChatRequest::default()
    }
}

/// Makes a turn.
#[must_use]
pub fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
    }
}

/// Makes a continuation of text with token ids in the events.
#[must_use]
pub fn generate(text: &str, max_tokens: u32) -> GenerateRequest {
    with_prompt(Prompt::Text(text.to_owned()), max_tokens)
}

/// Makes a continuation of text by so many tokens, whatever they are.
#[must_use]
pub fn exactly(text: &str, tokens: u32) -> GenerateRequest {
    let mut request = generate(text, tokens);
    request.generation.get_or_insert_default().ignore_eos = true;
    request
}

/// Makes a continuation of tokens with token ids in the events.
#[must_use]
pub fn generate_ids(ids: Vec<u32>, max_tokens: u32) -> GenerateRequest {
    with_prompt(Prompt::TokenIds(TokenIds { ids }), max_tokens)
}

fn with_prompt(prompt: Prompt, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(prompt),
        generation: Some(options(max_tokens)),
        ..GenerateRequest::default()
    }
}

/// Makes options with token ids.
#[must_use]
pub fn options(max_tokens: u32) -> GenerationOptions {
    GenerationOptions {
        max_tokens: Some(max_tokens),
        return_token_ids: true,
        ..GenerationOptions::default()
    }
}

/// Makes sampling that draws, with a seed.
#[must_use]
pub fn seeded(seed: u64) -> SamplingOptions {
    SamplingOptions {
        temperature: Some(0.9),
        top_k: Some(50),
        top_p: Some(0.95),
        seed: Some(seed),
        ..SamplingOptions::default()
    }
}

/// Makes a policy.
#[must_use]
pub fn policy(allowed: &[Backend], on_missing: OnMissing) -> BackendPolicy {
    BackendPolicy {
        allowed: allowed.iter().map(|&backend| backend.into()).collect(),
        on_missing: on_missing.into(),
    }
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Whole {
    /// All text.
    pub text: String,
    /// All ids.
    pub token_ids: Vec<u32>,
    /// All log-probabilities.
    pub logprobs: Vec<TokenLogprob>,
    /// The last event's.
    pub finish: Finish,
    /// Number of events.
    pub events: usize,
}

impl Whole {
    /// Returns the usage.
    ///
    /// # Errors
    /// If there is none.
    pub fn usage(&self) -> anyhow::Result<&Usage> {
        self.finish
            .usage
            .as_ref()
            .context("the answer has no usage")
    }

    /// Returns the timings.
    ///
    /// # Errors
    /// If there are none.
    pub fn timings(&self) -> anyhow::Result<&Timings> {
        self.finish
            .timings
            .as_ref()
            .context("the answer has no timings")
    }

    /// Returns the provenance.
    ///
    /// # Errors
    /// If there is none.
    pub fn provenance(&self) -> anyhow::Result<&Provenance> {
        self.finish
            .provenance
            .as_ref()
            .context("the answer has no provenance")
    }
}

/// Reads an answer to its end.
///
/// # Errors
/// How the gateway ended it.
pub async fn whole(mut answer: Answer) -> Result<Whole, ClientError> {
    let mut collected = Collected::default();
    while let Some(event) = answer.next().await? {
        collected.take(event);
    }
    collected.end()
}

/// Makes an answer of one message comparable with a streamed one.
///
/// # Errors
/// If it has no finish.
pub fn whole_of(event: Option<GenerationEvent>) -> anyhow::Result<Whole> {
    let mut collected = Collected::default();
    collected.take(event.context("the answer is empty")?);
    Ok(collected.end()?)
}

#[derive(Debug, Default)]
struct Collected {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<TokenLogprob>,
    finish: Option<Finish>,
    events: usize,
}

impl Collected {
    fn take(&mut self, event: GenerationEvent) {
        self.text.push_str(&event.text);
        self.token_ids.extend(event.token_ids);
        self.logprobs.extend(event.logprobs);
        self.finish = event.finish;
        self.events += 1;
    }

    fn end(self) -> Result<Whole, ClientError> {
        Ok(Whole {
            text: self.text,
            token_ids: self.token_ids,
            logprobs: self.logprobs,
            finish: self.finish.ok_or(ClientError::Truncated)?,
            events: self.events,
        })
    }
}

/// Streams a continuation to its end.
///
/// # Errors
/// How the gateway refused or ended it.
pub async fn streamed(client: &Client, request: GenerateRequest) -> Result<Whole, ClientError> {
    whole(client.clone().generate(request, None).await?).await
}

/// Streams a chat to its end.
///
/// # Errors
/// How the gateway refused or ended it.
pub async fn chatted(client: &Client, request: ChatRequest) -> Result<Whole, ClientError> {
    whole(client.clone().chat(request, None).await?).await
}

/// Waits for the first event of an answer that has text or ids.
///
/// # Errors
/// If it ends before.
pub async fn first_token(answer: &mut Answer) -> anyhow::Result<GenerationEvent> {
    while let Some(event) = answer.next().await? {
        if !event.text.is_empty() || !event.token_ids.is_empty() {
            return Ok(event);
        }
    }
    anyhow::bail!("the answer ended without a token")
}

/// Asks for a short answer, to see that the gateway still works.
///
/// # Errors
/// If it does not.
pub async fn still_works(client: &Client) -> anyhow::Result<()> {
    let deadline = Some(Duration::from_secs(90));
    let answer = client
        .clone()
        .generate(generate("Hello", 2), deadline)
        .await?;
    let answer = whole(answer)
        .await
        .context("the gateway does not work any more")?;
    anyhow::ensure!(!answer.token_ids.is_empty(), "the answer has no tokens");
    Ok(())
}

/// Returns why a call was refused.
///
/// # Errors
/// If it was not refused, or failed otherwise.
pub fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> anyhow::Result<ServiceFault> {
    match result {
        Err(ClientError::Refused(fault)) => Ok(*fault),
        Err(other) => Err(other).context("the call failed instead of being refused"),
        Ok(answer) => anyhow::bail!("the call was not refused, it answered {answer:?}"),
    }
}

/// Checks that a call was refused for a reason.
///
/// # Errors
/// If it was not, or for another one.
pub fn refused_for<T: std::fmt::Debug>(
    result: Result<T, ClientError>,
    reason: Reason,
) -> anyhow::Result<ServiceFault> {
    let fault = refused(result)?;
    anyhow::ensure!(
        fault.reason == reason,
        "refused for {}, expected {}: {}",
        fault.reason.name(),
        reason.name(),
        fault.message
    );
    Ok(fault)
}
