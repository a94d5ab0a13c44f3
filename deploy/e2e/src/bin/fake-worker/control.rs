//! The control service on standard input.

use std::os::unix::net::UnixStream;
use std::pin::Pin;

use anyhow::Context as _;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};
use velox_e2e::copying::{LAYERS, VOCABULARY_TOKENS};
use velox_proto::limits::MAX_TOKENIZER_CHUNK_BYTES;
use velox_proto::v1;
use velox_proto::worker::v1 as wire;
use wire::worker_control_service_server::{WorkerControlService, WorkerControlServiceServer};

use crate::behaviour::{Behaviour, Mode};
use crate::copy_model::{KEY_BYTES_PER_TOKEN, VALUE_BYTES_PER_TOKEN};
use crate::vocabulary;

/// Serves the one connection. The end of the gateway shows on the step channel: this never returns without an error.
pub(crate) async fn serve(socket: UnixStream, behaviour: Behaviour) -> anyhow::Result<()> {
    socket.set_nonblocking(true)?;
    let socket = tokio::net::UnixStream::from_std(socket)?;
    // A server whose connections have ended would end, and drop the one that it has.
    let connection =
        tokio_stream::once(Ok::<_, std::io::Error>(socket)).chain(tokio_stream::pending());
    tonic::transport::Server::builder()
        .add_service(WorkerControlServiceServer::new(Service { behaviour }))
        .serve_with_incoming(connection)
        .await
        .context("the control channel failed")
}

#[derive(Debug)]
struct Service {
    behaviour: Behaviour,
}

impl Service {
    fn backends(&self) -> Vec<v1::BackendCapability> {
        let mut backends = vec![
            available(v1::Backend::Cpu),
            available(v1::Backend::Reference),
            v1::BackendCapability {
                backend: v1::Backend::MlxCpu.into(),
                available: false,
                reason: "a fake has no MLX".to_owned(),
                ..v1::BackendCapability::default()
            },
        ];
        if self.behaviour.mode == Mode::ImpossibleBackend {
            let impossible = if cfg!(target_os = "macos") {
                v1::Backend::MlxCuda
            } else {
                v1::Backend::Metal
            };
            backends.push(available(impossible));
        }
        backends
    }
}

fn available(backend: v1::Backend) -> v1::BackendCapability {
    v1::BackendCapability {
        backend: backend.into(),
        available: true,
        reason: String::new(),
        ..v1::BackendCapability::default()
    }
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WorkerControlService for Service {
    type LoadModelStream = Events<wire::LoadModelResponse>;
    type GetTokenizerStream = Events<wire::GetTokenizerResponse>;

    async fn get_facts(
        &self,
        _request: Request<wire::GetFactsRequest>,
    ) -> Result<Response<wire::GetFactsResponse>, Status> {
        let pid = std::process::id();
        let facts = wire::WorkerFacts {
            protocol_min: 1,
            protocol_max: 1,
            build: "velox-fake-worker".to_owned(),
            pid: if self.behaviour.mode == Mode::WrongPid {
                pid ^ 1
            } else {
                pid
            },
            device: "a fake".to_owned(),
            kernel: "copy".to_owned(),
            os: std::env::consts::OS.to_owned(),
            arch: std::env::consts::ARCH.to_owned(),
            threads: 1,
            backends: self.backends(),
            ops: Vec::new(),
            batch_invariant: true,
            memory_limit_bytes: 1 << 30,
        };
        Ok(Response::new(wire::GetFactsResponse { facts: Some(facts) }))
    }

    async fn load_model(
        &self,
        request: Request<wire::LoadModelRequest>,
    ) -> Result<Response<Self::LoadModelStream>, Status> {
        let request = request.into_inner();
        let tokenizer_sha256 = match self.behaviour.mode {
            Mode::WrongTokenizer => "0".repeat(64),
            _ => vocabulary::sha256(&vocabulary::description()),
        };
        let backend = match self.behaviour.mode {
            Mode::UnavailableBackend => v1::Backend::MlxCpu,
            _ => v1::Backend::Cpu,
        };
        let facts = wire::ModelFacts {
            model: Some(v1::Model {
                name: request.name,
                architecture: "copy".to_owned(),
                format: "fake".to_owned(),
                context_length: self.behaviour.context_length,
                vocab_size: VOCABULARY_TOKENS,
                n_layers: LAYERS,
                end_tokens: vocabulary::end_tokens(),
                has_chat_template: true,
                kv: Some(v1::KvGeometry {
                    method: "none".to_owned(),
                    page_tokens: 16,
                    key_bytes_per_token: KEY_BYTES_PER_TOKEN,
                    value_bytes_per_token: VALUE_BYTES_PER_TOKEN,
                    shareable: false,
                    replay: "exact".to_owned(),
                }),
                ..v1::Model::default()
            }),
            backend: backend.into(),
            fallback_reason: String::new(),
            n_layers: LAYERS,
            max_rows: self.behaviour.max_rows,
            fingerprint: "a fake".to_owned(),
            tokenizer_sha256,
            ..wire::ModelFacts::default()
        };
        let event = |phase: &str, facts| {
            Ok(wire::LoadModelResponse {
                phase: phase.to_owned(),
                facts,
                ..wire::LoadModelResponse::default()
            })
        };
        let events = vec![event("open", None), event("ready", Some(facts))];
        Ok(Response::new(Box::pin(tokio_stream::iter(events))))
    }

    async fn unload_model(
        &self,
        _request: Request<wire::UnloadModelRequest>,
    ) -> Result<Response<wire::UnloadModelResponse>, Status> {
        Ok(Response::new(wire::UnloadModelResponse {}))
    }

    async fn get_tokenizer(
        &self,
        _request: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let description = vocabulary::description();
        let mut messages: Vec<_> = description
            .chunks(MAX_TOKENIZER_CHUNK_BYTES)
            .map(|chunk| wire::GetTokenizerResponse {
                chunk: chunk.to_vec().into(),
                ..wire::GetTokenizerResponse::default()
            })
            .collect();
        messages.push(wire::GetTokenizerResponse {
            sha256: vocabulary::sha256(&description),
            total_bytes: u64::try_from(description.len()).unwrap_or(u64::MAX),
            ..wire::GetTokenizerResponse::default()
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(
            messages.into_iter().map(Ok),
        ))))
    }

    async fn run_op(
        &self,
        _request: Request<wire::RunOpRequest>,
    ) -> Result<Response<wire::RunOpResponse>, Status> {
        Err(Status::unimplemented("a fake has no ops"))
    }

    async fn drain(
        &self,
        _request: Request<wire::DrainRequest>,
    ) -> Result<Response<wire::DrainResponse>, Status> {
        Ok(Response::new(wire::DrainResponse { open_rows: 0 }))
    }
}
