//! The control service: forwards to the tensor thread and answers facts itself.

mod socket;

use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};
use velox_proto::error::to_status;
use velox_proto::limits::{MAX_MESSAGE_BYTES, MAX_TOKENIZER_CHUNK_BYTES};
use velox_proto::worker::v1 as wire;
use velox_proto::worker::v1::worker_control_service_server::{
    WorkerControlService, WorkerControlServiceServer,
};

use self::socket::WatchedSocket;
use crate::command::{Command, CommandSender, Reply};
use crate::error::WorkerError;

/// Load events that wait for a slow reader; more are dropped.
const MAX_WAITING_LOAD_EVENTS: usize = 16;

/// The service on standard input.
#[derive(Debug, Clone)]
pub struct ControlService {
    facts: Arc<wire::WorkerFacts>,
    commands: Arc<CommandSender>,
}

impl ControlService {
    /// Makes the service.
    #[must_use]
    pub fn new(facts: wire::WorkerFacts, commands: Arc<CommandSender>) -> Self {
        Self {
            facts: Arc::new(facts),
            commands,
        }
    }

    /// Sends a command and waits for its answer.
    pub(crate) async fn ask<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        self.commands
            .send(command(reply))
            .map_err(|error| to_status(&error))?;
        match answer.await {
            Ok(result) => result.map_err(|error| to_status(&error)),
            Err(_dropped) => Err(to_status(&WorkerError::TensorThread(
                "it dropped a command",
            ))),
        }
    }
}

/// Serves one connection until the gateway closes it.
///
/// # Errors
/// [`WorkerError::Channel`] if the connection fails.
pub async fn serve(socket: UnixStream, service: ControlService) -> Result<(), WorkerError> {
    let failed = |source| WorkerError::Channel {
        channel: "control",
        source,
    };
    let socket = tokio::net::UnixStream::from_std(socket).map_err(failed)?;
    let (socket, gone) = WatchedSocket::new(socket);
    // The server ends with its stream of connections, so that must not end before the connection does.
    let connection =
        tokio_stream::once(Ok::<_, std::io::Error>(socket)).chain(tokio_stream::pending());
    let control = WorkerControlServiceServer::new(service.clone())
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let router = tonic::transport::Server::builder().add_service(control);
    #[cfg(feature = "fault-hooks")]
    let router = router.add_service(
        velox_proto::worker::v1::fault_service_server::FaultServiceServer::new(service),
    );
    tokio::select! {
        served = router.serve_with_incoming(connection) => {
            served.map_err(|error| failed(std::io::Error::other(error)))
        }
        _ = gone => Ok(()),
    }
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WorkerControlService for ControlService {
    type LoadModelStream = Events<wire::LoadModelResponse>;
    type GetTokenizerStream = Events<wire::GetTokenizerResponse>;

    async fn get_facts(
        &self,
        _request: Request<wire::GetFactsRequest>,
    ) -> Result<Response<wire::GetFactsResponse>, Status> {
        Ok(Response::new(wire::GetFactsResponse {
            facts: Some((*self.facts).clone()),
        }))
    }

    async fn load_model(
        &self,
        request: Request<wire::LoadModelRequest>,
    ) -> Result<Response<Self::LoadModelStream>, Status> {
        let (events, received) = mpsc::channel(MAX_WAITING_LOAD_EVENTS);
        self.commands
            .send(Command::Load {
                request: request.into_inner(),
                events,
            })
            .map_err(|error| to_status(&error))?;
        let stream =
            ReceiverStream::new(received).map(|event| event.map_err(|error| to_status(&error)));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn unload_model(
        &self,
        request: Request<wire::UnloadModelRequest>,
    ) -> Result<Response<wire::UnloadModelResponse>, Status> {
        let name = request.into_inner().name;
        self.ask(|reply| Command::Unload { name, reply }).await?;
        Ok(Response::new(wire::UnloadModelResponse {}))
    }

    async fn get_tokenizer(
        &self,
        request: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let request = request.into_inner();
        let tokenizer = self
            .ask(|reply| Command::Tokenizer { request, reply })
            .await?;
        let mut messages: Vec<_> = (0..tokenizer.inline.len())
            .step_by(MAX_TOKENIZER_CHUNK_BYTES)
            .map(|start| {
                let end = (start + MAX_TOKENIZER_CHUNK_BYTES).min(tokenizer.inline.len());
                wire::GetTokenizerResponse {
                    chunk: tokenizer.inline.slice(start..end),
                    ..wire::GetTokenizerResponse::default()
                }
            })
            .collect();
        messages.push(wire::GetTokenizerResponse {
            sha256: tokenizer.sha256,
            total_bytes: tokenizer.total_bytes,
            ..wire::GetTokenizerResponse::default()
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(
            messages.into_iter().map(Ok),
        ))))
    }

    async fn run_op(
        &self,
        request: Request<wire::RunOpRequest>,
    ) -> Result<Response<wire::RunOpResponse>, Status> {
        let request = request.into_inner();
        self.ask(|reply| Command::RunOp { request, reply })
            .await
            .map(Response::new)
    }

    async fn drain(
        &self,
        _request: Request<wire::DrainRequest>,
    ) -> Result<Response<wire::DrainResponse>, Status> {
        let open_rows = self.ask(|reply| Command::Drain { reply }).await?;
        Ok(Response::new(wire::DrainResponse {
            open_rows: u32::try_from(open_rows).unwrap_or(u32::MAX),
        }))
    }
}
