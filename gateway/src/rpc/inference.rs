//! Text generation and scoring.

mod input;

use std::hash::{BuildHasher as _, Hasher as _};
use std::sync::Arc;

use tokio_stream::StreamExt as _;
use tonic::{Request, Response, Status};
use velox_proto::v1::inference_service_server::InferenceService;
use velox_proto::v1::{self, GenerationEvent};

use self::input::{Input, Prompt, check_bytes, markup, max_prompt_bytes};

use super::{Answers, Call, Context, refuse};
use crate::catalog::ResidentModel;
use crate::error::GatewayError;
use crate::request::{Delivery, Job, ValidRequest, Work};
use crate::response::{Generation, Scoring};
use crate::text::{Bos, MAX_TEXT_BYTES, Markup, SpecialTokens};
use crate::texts::ModelText;

/// Longest text of a Tokenize call.
const MAX_TOKENIZE_BYTES: usize = 4 * 1024 * 1024;

/// Most ids of a Detokenize call.
const MAX_DETOKENIZE_IDS: usize = 1024 * 1024;

/// The service.
#[derive(Debug)]
pub(super) struct Inference {
    context: Arc<Context>,
}

impl Inference {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    /// The one way to an answer, streamed or whole.
    async fn generation<M>(
        &self,
        call: Call<M>,
        delivery: Delivery,
    ) -> Result<Generation, GatewayError>
    where
        M: TryInto<Prompt, Error = GatewayError>,
    {
        let Prompt {
            model,
            input,
            parts,
            opening,
        } = call.message.try_into()?;
        self.context.admit()?;
        let (model, text) = self.model(&model).await?;
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

    /// Answers event by event; `wrap` makes the message of the call.
    async fn stream<M, T>(
        &self,
        method: &'static str,
        request: Request<M>,
        wrap: fn(Option<GenerationEvent>) -> T,
    ) -> Result<Response<Answers<T>>, Status>
    where
        M: TryInto<Prompt, Error = GatewayError>,
        T: 'static,
    {
        let call = Call::new(method, request);
        let answer = self.generation(call, Delivery::Stream).await;
        let events = answer.map_err(refuse)?;
        let stream = events.map(move |event| Ok(wrap(Some(event.map_err(refuse)?))));
        Ok(Response::new(Box::pin(stream)))
    }

    /// Answers with one event.
    async fn whole<M>(
        &self,
        method: &'static str,
        request: Request<M>,
    ) -> Result<Option<GenerationEvent>, Status>
    where
        M: TryInto<Prompt, Error = GatewayError>,
    {
        let call = Call::new(method, request);
        let answer = self.generation(call, Delivery::Whole).await;
        let event = answer.map_err(refuse)?.whole().await;
        Ok(Some(event.map_err(refuse)?))
    }

    async fn scored(
        &self,
        call: Call<v1::ScoreRequest>,
    ) -> Result<v1::ScoreResponse, GatewayError> {
        self.context.admit()?;
        let mut request = call.message;
        let input = input::scored(request.input.take(), request.parse_special)?;
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
        let wrap = |event| v1::ChatResponse { event };
        self.stream("velox.v1.InferenceService/Chat", request, wrap)
            .await
    }

    async fn chat_complete(
        &self,
        request: Request<v1::ChatCompleteRequest>,
    ) -> Result<Response<v1::ChatCompleteResponse>, Status> {
        let request = request.map(|message| message.request.unwrap_or_default());
        let event = self
            .whole("velox.v1.InferenceService/ChatComplete", request)
            .await?;
        Ok(Response::new(v1::ChatCompleteResponse { event }))
    }

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let wrap = |event| v1::GenerateResponse { event };
        self.stream("velox.v1.InferenceService/Generate", request, wrap)
            .await
    }

    async fn generate_complete(
        &self,
        request: Request<v1::GenerateCompleteRequest>,
    ) -> Result<Response<v1::GenerateCompleteResponse>, Status> {
        let request = request.map(|message| message.request.unwrap_or_default());
        let event = self
            .whole("velox.v1.InferenceService/GenerateComplete", request)
            .await?;
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

/// A seed for a caller who gave none: the standard library's random hasher keys, not for secrets.
fn fresh_seed() -> u64 {
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ() {
        assert_ne!(fresh_seed(), fresh_seed());
    }
}
