//! Which models are resident.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use velox_proto::v1;
use velox_proto::v1::model_service_server::ModelService;

use super::{Answers, Context, refuse};
use crate::config::resolve_model;
use crate::error::GatewayError;
use crate::pool::{LoadEvent, LoadShape, ModelSource};

/// Models on a page unless told otherwise.
const DEFAULT_PAGE: u32 = 100;

/// Most models on a page.
const MAX_PAGE: u32 = 1000;

/// Progress events that wait for their reader; more are dropped by the pool.
const PROGRESS: usize = 64;

/// The service.
#[derive(Debug)]
pub(super) struct Models {
    context: Arc<Context>,
}

impl Models {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    async fn unloaded(&self, name: &str) -> Result<(), GatewayError> {
        let usage = self.context.scheduler.usage().await?;
        match usage.by_model.get(name) {
            Some(&rows) if rows > 0 => Err(GatewayError::ModelBusy {
                model: name.to_owned(),
                rows,
            }),
            _ => Ok(self.context.pool.unload_model(name).await?),
        }
    }
}

#[tonic::async_trait]
impl ModelService for Models {
    type LoadModelStream = Answers<v1::LoadModelResponse>;

    async fn list_models(
        &self,
        request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let request = request.into_inner();
        let models = self.context.catalog.models();
        Ok(Response::new(page(models, &request)))
    }

    async fn get_model(
        &self,
        request: Request<v1::GetModelRequest>,
    ) -> Result<Response<v1::GetModelResponse>, Status> {
        let name = request.into_inner().name;
        let models = self.context.catalog.models();
        let model = models
            .into_iter()
            .find(|model| model.name == name || (name.is_empty() && model.is_default))
            .ok_or_else(|| refuse(GatewayError::ModelNotFound(name)))?;
        Ok(Response::new(v1::GetModelResponse { model: Some(model) }))
    }

    async fn load_model(
        &self,
        request: Request<v1::LoadModelRequest>,
    ) -> Result<Response<Self::LoadModelStream>, Status> {
        self.context.admit().map_err(refuse)?;
        let request = request.into_inner();
        let folder = &self.context.model_folder;
        let mut source = resolve_model(&request.source, &request.name, folder).map_err(refuse)?;
        source.shape = LoadShape {
            quantize_bits: request.quantize_bits,
            max_context_tokens: request.max_context_tokens,
        };
        let (answers, stream) = mpsc::channel(PROGRESS);
        let context = Arc::clone(&self.context);
        self.context
            .tasks
            .spawn(async move { load(context, source, answers).await });
        Ok(Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn unload_model(
        &self,
        request: Request<v1::UnloadModelRequest>,
    ) -> Result<Response<v1::UnloadModelResponse>, Status> {
        let name = request.into_inner().name;
        self.unloaded(&name).await.map_err(refuse)?;
        Ok(Response::new(v1::UnloadModelResponse {}))
    }
}

/// Loads a model and tells the progress as long as somebody listens; a load that has begun goes on without.
async fn load(
    context: Arc<Context>,
    source: ModelSource,
    answers: mpsc::Sender<Result<v1::LoadModelResponse, Status>>,
) {
    let (progress, mut events) = mpsc::channel(PROGRESS);
    let loaded = context.pool.load_model(source, progress);
    let forward = async {
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                // Closing the events in turn tells the pool, which need not begin then.
                () = answers.closed() => None,
            };
            let Some(event) = event else { break };
            // A reader that is behind misses progress, not the end.
            let _missed = answers.try_send(Ok(progress_response(event)));
        }
        events.close();
    };
    let (loaded, ()) = tokio::join!(loaded, forward);
    let last = match loaded {
        Ok(facts) => Ok(v1::LoadModelResponse {
            phase: "ready".to_owned(),
            model: Some(facts.model().clone()),
            ..v1::LoadModelResponse::default()
        }),
        Err(error) => Err(refuse(error.into())),
    };
    // Nobody may be there to hear it.
    let _gone = answers.send(last).await;
}

fn progress_response(event: LoadEvent) -> v1::LoadModelResponse {
    v1::LoadModelResponse {
        phase: event.phase,
        done_bytes: event.done_bytes,
        total_bytes: event.total_bytes,
        worker_id: event.worker.slot_id(),
        model: None,
    }
}

/// Cuts a page out of the models, which are in the order of their names; the token is the last name before it.
fn page(models: Vec<v1::Model>, request: &v1::ListModelsRequest) -> v1::ListModelsResponse {
    let size = match request.page_size {
        0 => DEFAULT_PAGE,
        size => size.min(MAX_PAGE),
    };
    let mut rest = models
        .into_iter()
        .filter(|model| model.name > request.page_token)
        .peekable();
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let models: Vec<v1::Model> = rest.by_ref().take(size).collect();
    let next_page_token = match (rest.peek(), models.last()) {
        (Some(_), Some(last)) => last.name.clone(),
        _ => String::new(),
    };
    v1::ListModelsResponse {
        models,
        next_page_token,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_put_together_are_the_list() {
        let models: Vec<v1::Model> = ["a", "b", "c", "d", "e"]
            .map(|name| v1::Model {
                name: name.to_owned(),
                ..v1::Model::default()
            })
            .into();
        for page_size in 1..7 {
            let mut names = Vec::new();
            let mut page_token = String::new();
            loop {
                let request = v1::ListModelsRequest {
                    page_size,
                    page_token,
                };
                let response = page(models.clone(), &request);
                names.extend(response.models.into_iter().map(|model| model.name));
                page_token = response.next_page_token;
                if page_token.is_empty() {
                    break;
                }
            }
            assert_eq!(names, ["a", "b", "c", "d", "e"], "{page_size}");
        }
    }
}
