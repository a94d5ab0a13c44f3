//! Text generation and scoring.

use std::hash::{BuildHasher as _, Hasher as _};
use std::sync::Arc;

use tokio_stream::StreamExt as _;
use tonic::{Request, Response, Status};
use velox_proto::v1::inference_service_server::InferenceService;
use velox_proto::v1::{self, generate_request, score_request};

use super::{Answers, Call, Context, refuse};
use crate::catalog::ResidentModel;
use crate::error::GatewayError;
use crate::request::{Delivery, GenerationParts, Job, ValidRequest, Work};
use crate::response::{Generation, Opening, Scoring};
use crate::text::{Bos, MAX_TEXT_BYTES, Markup, Message, SpecialTokens};
use crate::texts::ModelText;

/// Longest JSON object of template arguments.
const MAX_ARGUMENTS_BYTES: usize = 1024 * 1024;

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 16_384;

/// Longest text of a Tokenize call.
const MAX_TOKENIZE_BYTES: usize = 4 * 1024 * 1024;

/// Most ids of a Detokenize call.
const MAX_DETOKENIZE_IDS: usize = 1024 * 1024;

/// Bytes of prompt for each position of the context above which a text cannot fit, so that nobody counts its
/// tokens: published vocabularies average 3 to 5 bytes a token.
const MAX_BYTES_PER_TOKEN: usize = 64;

/// A text of so many bytes is tokenized whatever the context is, so that the refusal can name tokens.
const SHORT_TEXT_BYTES: usize = 64 * 1024;

/// The service.
#[derive(Debug)]
pub(super) struct Inference {
    context: Arc<Context>,
}

/// What tokens are made of.
enum Input {
    Chat {
        messages: Vec<Message>,
        arguments: serde_json::Map<String, serde_json::Value>,
    },
    Text {
        text: String,
        markup: Markup,
        bos: Bos,
    },
    Ids(Vec<u32>),
}

impl Input {
    /// Bytes of the text before a template adds to it.
    fn text_bytes(&self) -> usize {
        match self {
            Self::Chat { messages, .. } => messages
                .iter()
                .map(|message| message.role.len().saturating_add(message.content.len()))
                .fold(0, usize::saturating_add),
            Self::Text { text, .. } => text.len(),
            Self::Ids(_) => 0,
        }
    }
}

impl Inference {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    async fn chat_generation(
        &self,
        call: Call<v1::ChatRequest>,
        delivery: Delivery,
    ) -> Result<Generation, GatewayError> {
        let request = call.message;
        let input = Input::Chat {
            messages: messages(request.messages)?,
            arguments: arguments(&request.template_arguments_json)?,
        };
        let parts = GenerationParts {
            sampling: request.sampling,
            generation: request.generation,
            policy: request.policy,
        };
        let call = Call {
            message: (request.model, input, parts),
            span: call.span,
            traceparent: call.traceparent,
        };
        self.generation(call, delivery, Opening::Fresh).await
    }

    async fn text_generation(
        &self,
        call: Call<v1::GenerateRequest>,
        delivery: Delivery,
    ) -> Result<Generation, GatewayError> {
        let request = call.message;
        let input = match request.prompt {
            Some(generate_request::Prompt::Text(text)) => Input::Text {
                text,
                markup: markup(request.parse_special),
                bos: Bos::Add,
            },
            Some(generate_request::Prompt::TokenIds(ids)) => Input::Ids(ids.ids),
            None => return Err(GatewayError::invalid("prompt", "prompt is missing")),
        };
        let parts = GenerationParts {
            sampling: request.sampling,
            generation: request.generation,
            policy: request.policy,
        };
        let call = Call {
            message: (request.model, input, parts),
            span: call.span,
            traceparent: call.traceparent,
        };
        self.generation(call, delivery, Opening::Continuing).await
    }

    /// The one way to an answer, streamed or whole.
    async fn generation(
        &self,
        call: Call<(String, Input, GenerationParts)>,
        delivery: Delivery,
        opening: Opening,
    ) -> Result<Generation, GatewayError> {
        self.context.admit()?;
        let (name, input, parts) = call.message;
        let (model, text) = self.model(&name).await?;
        let truncates = parts
            .generation
            .as_ref()
            .is_some_and(|options| options.truncate_prompt);
        let limit_bytes = if truncates {
            MAX_TEXT_BYTES
        } else {
            max_prompt_bytes(model.limits.context_length)
        };
        let prompt = self.tokens(&text, input, limit_bytes).await?;
        let request = ValidRequest::generate(&model.limits, prompt, parts, delivery, fresh_seed())?;
        let limit = match request.job.work() {
            Work::Generate(generate) => generate.limit,
            Work::Score(_) => return Err(GatewayError::Internal("a generation became a score")),
        };
        let job = request.job.with_traceparent(call.traceparent);
        let row = self.context.scheduler.submit(job, call.span).await?;
        let tokenizer = Arc::clone(&text.tokenizer);
        Ok(Generation::new(
            row,
            tokenizer,
            opening,
            request.presentation,
            limit,
        ))
    }

    async fn scored(
        &self,
        call: Call<v1::ScoreRequest>,
    ) -> Result<v1::ScoreResponse, GatewayError> {
        self.context.admit()?;
        let mut request = call.message;
        let input = match request.input.take() {
            Some(score_request::Input::Text(text)) => Input::Text {
                text,
                markup: markup(request.parse_special),
                bos: Bos::Add,
            },
            Some(score_request::Input::TokenIds(ids)) => Input::Ids(ids.ids),
            None => return Err(GatewayError::invalid("input", "input is missing")),
        };
        let (model, text) = self.model(&request.model).await?;
        let limit_bytes = max_prompt_bytes(model.limits.context_length);
        let tokens = self.tokens(&text, input, limit_bytes).await?;
        let job = Job::score(&model.limits, tokens, &request)?.with_traceparent(call.traceparent);
        let scoring = Scoring::new(&job);
        let row = self.context.scheduler.submit(job, call.span).await?;
        scoring.whole(row, &model.limits.kv.method).await
    }

    async fn model(&self, name: &str) -> Result<(ResidentModel, Arc<ModelText>), GatewayError> {
        let context = &self.context;
        let limit = context.limits.worker_wait;
        let (mut model, text) = context.texts.model(&context.catalog, name, limit).await?;
        // The union of what the worker and what the tokenizer's description call an end.
        let ends = &mut model.limits.end_token_ids;
        ends.extend(text.tokenizer.end_token_ids());
        Ok((model, text))
    }

    async fn tokens(
        &self,
        text: &Arc<ModelText>,
        input: Input,
        limit_bytes: usize,
    ) -> Result<Vec<u32>, GatewayError> {
        if let Input::Ids(ids) = input {
            return Ok(ids);
        }
        check_bytes(input.text_bytes(), limit_bytes)?;
        let text = Arc::clone(text);
        let work = move || match input {
            Input::Ids(ids) => Ok(ids),
            Input::Text {
                text: prompt,
                markup,
                bos,
            } => Ok(text.tokenizer.encode(&prompt, markup, bos)?),
            Input::Chat {
                messages,
                arguments,
            } => {
                let prompt = text.templates.render(&messages, &arguments)?;
                check_bytes(prompt.len(), limit_bytes)?;
                Ok(text.tokenizer.encode(&prompt, Markup::Special, Bos::Add)?)
            }
        };
        self.context.texts.run(work).await?
    }

    async fn tokenized(
        &self,
        request: v1::TokenizeRequest,
    ) -> Result<v1::TokenizeResponse, GatewayError> {
        if request.text.len() > MAX_TOKENIZE_BYTES {
            return Err(GatewayError::invalid(
                "text",
                format!(
                    "text has {} bytes, limit is {MAX_TOKENIZE_BYTES}",
                    request.text.len()
                ),
            ));
        }
        let (_model, text) = self.model(&request.model).await?;
        let input = Input::Text {
            text: request.text,
            markup: markup(request.parse_special),
            bos: if request.add_bos { Bos::Add } else { Bos::Omit },
        };
        Ok(v1::TokenizeResponse {
            ids: self.tokens(&text, input, MAX_TOKENIZE_BYTES).await?,
        })
    }

    async fn detokenized(
        &self,
        request: v1::DetokenizeRequest,
    ) -> Result<v1::DetokenizeResponse, GatewayError> {
        if request.ids.len() > MAX_DETOKENIZE_IDS {
            return Err(GatewayError::invalid(
                "ids",
                format!("{} ids, limit is {MAX_DETOKENIZE_IDS}", request.ids.len()),
            ));
        }
        let (model, text) = self.model(&request.model).await?;
        let vocabulary = model.limits.vocab_size;
        if let Some(id) = request.ids.iter().find(|&&id| id >= vocabulary) {
            return Err(GatewayError::invalid(
                "ids",
                format!("token id {id} is outside the vocabulary of {vocabulary} tokens"),
            ));
        }
        let special = if request.show_special {
            SpecialTokens::Show
        } else {
            SpecialTokens::Hide
        };
        let work = move || text.tokenizer.decode(&request.ids, special);
        Ok(v1::DetokenizeResponse {
            text: self.context.texts.run(work).await?,
        })
    }
}

#[tonic::async_trait]
impl InferenceService for Inference {
    type ChatStream = Answers<v1::ChatResponse>;
    type GenerateStream = Answers<v1::GenerateResponse>;

    async fn chat(
        &self,
        request: Request<v1::ChatRequest>,
    ) -> Result<Response<Self::ChatStream>, Status> {
        let call = Call::new("velox.v1.InferenceService/Chat", request);
        let answer = self
            .chat_generation(call, Delivery::Stream)
            .await
            .map_err(refuse)?;
        let stream = answer.map(|event| {
            let event = Some(event.map_err(refuse)?);
            Ok(v1::ChatResponse { event })
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn chat_complete(
        &self,
        request: Request<v1::ChatCompleteRequest>,
    ) -> Result<Response<v1::ChatCompleteResponse>, Status> {
        let request = request.map(|message| message.request.unwrap_or_default());
        let call = Call::new("velox.v1.InferenceService/ChatComplete", request);
        let answer = self
            .chat_generation(call, Delivery::Whole)
            .await
            .map_err(refuse)?;
        let event = Some(answer.whole().await.map_err(refuse)?);
        Ok(Response::new(v1::ChatCompleteResponse { event }))
    }

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let call = Call::new("velox.v1.InferenceService/Generate", request);
        let answer = self
            .text_generation(call, Delivery::Stream)
            .await
            .map_err(refuse)?;
        let stream = answer.map(|event| {
            let event = Some(event.map_err(refuse)?);
            Ok(v1::GenerateResponse { event })
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn generate_complete(
        &self,
        request: Request<v1::GenerateCompleteRequest>,
    ) -> Result<Response<v1::GenerateCompleteResponse>, Status> {
        let request = request.map(|message| message.request.unwrap_or_default());
        let call = Call::new("velox.v1.InferenceService/GenerateComplete", request);
        let answer = self
            .text_generation(call, Delivery::Whole)
            .await
            .map_err(refuse)?;
        let event = Some(answer.whole().await.map_err(refuse)?);
        Ok(Response::new(v1::GenerateCompleteResponse { event }))
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        let answer = self.tokenized(request.into_inner()).await;
        answer.map(Response::new).map_err(refuse)
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        let answer = self.detokenized(request.into_inner()).await;
        answer.map(Response::new).map_err(refuse)
    }

    async fn score(
        &self,
        request: Request<v1::ScoreRequest>,
    ) -> Result<Response<v1::ScoreResponse>, Status> {
        let call = Call::new("velox.v1.InferenceService/Score", request);
        let answer = self.scored(call).await;
        answer.map(Response::new).map_err(refuse)
    }
}

fn markup(parse_special: bool) -> Markup {
    if parse_special {
        Markup::Special
    } else {
        Markup::Plain
    }
}

/// Returns the longest text that may fit a context.
fn max_prompt_bytes(context_length: u32) -> usize {
    usize::try_from(context_length)
        .unwrap_or(usize::MAX)
        .saturating_mul(MAX_BYTES_PER_TOKEN)
        .clamp(SHORT_TEXT_BYTES, MAX_TEXT_BYTES)
}

fn check_bytes(bytes: usize, limit: usize) -> Result<(), GatewayError> {
    if bytes > limit {
        return Err(GatewayError::PromptTextTooLong { bytes, limit });
    }
    Ok(())
}

fn messages(wire: Vec<v1::ChatMessage>) -> Result<Vec<Message>, GatewayError> {
    if wire.is_empty() || wire.len() > MAX_MESSAGES {
        return Err(GatewayError::invalid(
            "messages",
            format!("{} messages, allowed are 1 to {MAX_MESSAGES}", wire.len()),
        ));
    }
    let messages = wire.into_iter().map(|message| Message {
        role: message.role,
        content: message.content,
    });
    Ok(messages.collect())
}

fn arguments(json: &str) -> Result<serde_json::Map<String, serde_json::Value>, GatewayError> {
    let field = "template_arguments_json";
    if json.is_empty() {
        return Ok(serde_json::Map::new());
    }
    if json.len() > MAX_ARGUMENTS_BYTES {
        return Err(GatewayError::invalid(
            field,
            format!(
                "template arguments have {} bytes, limit is {MAX_ARGUMENTS_BYTES}",
                json.len()
            ),
        ));
    }
    serde_json::from_str(json).map_err(|error| {
        GatewayError::invalid(
            field,
            format!("template arguments are no JSON object: {error}"),
        )
    })
}

/// A seed for a caller who gave none: the standard library's random hasher keys, not for secrets.
fn fresh_seed() -> u64 {
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use velox_proto::error::{Reason, ServiceError as _};

    #[test]
    fn template_arguments_are_a_bounded_json_object() {
        assert!(arguments("").unwrap().is_empty());
        assert_eq!(arguments("{\"enable_thinking\": false}").unwrap().len(), 1);
        for bad in ["[]", "1", "{", "null"] {
            assert!(arguments(bad).is_err(), "{bad}");
        }
        let long = format!("{{\"a\":\"{}\"}}", "x".repeat(MAX_ARGUMENTS_BYTES));
        assert!(
            arguments(&long)
                .unwrap_err()
                .to_string()
                .contains("limit is")
        );
    }

    #[test]
    fn a_conversation_has_at_least_one_message() {
        assert!(messages(vec![]).is_err());
        assert_eq!(messages(vec![v1::ChatMessage::default()]).unwrap().len(), 1);
    }

    #[test]
    fn a_prompt_that_cannot_fit_is_refused_by_its_bytes() {
        assert_eq!(max_prompt_bytes(8), SHORT_TEXT_BYTES);
        assert_eq!(max_prompt_bytes(2048), 128 * 1024);
        assert_eq!(max_prompt_bytes(u32::MAX), MAX_TEXT_BYTES);
        assert!(check_bytes(5, 5).is_ok());
        let error = check_bytes(131_073, max_prompt_bytes(2048)).unwrap_err();
        assert_eq!(error.reason(), Reason::PromptTooLong);
        assert_eq!(
            error.to_string(),
            "prompt has 131073 bytes, limit is 131072"
        );
        let chat = Input::Chat {
            messages: messages(vec![v1::ChatMessage {
                role: "user".to_owned(),
                content: "12345".to_owned(),
            }])
            .unwrap(),
            arguments: serde_json::Map::new(),
        };
        assert_eq!(chat.text_bytes(), 9);
    }

    #[test]
    fn seeds_differ() {
        assert_ne!(fresh_seed(), fresh_seed());
    }
}
