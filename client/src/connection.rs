//! Connections and calls.

use std::time::Duration;

use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Uri};
use tower::service_fn;
use velox_proto::limits::MAX_MESSAGE_BYTES;
use velox_proto::v1;
use velox_proto::v1::admin_service_client::AdminServiceClient;
use velox_proto::v1::capability_service_client::CapabilityServiceClient;
use velox_proto::v1::inference_service_client::InferenceServiceClient;
use velox_proto::v1::model_service_client::ModelServiceClient;

use crate::answer::Answer;
use crate::endpoint::Endpoint;
use crate::error::ClientError;
use crate::trace::traced;

/// Longest wait for a connection on this machine.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to a gateway. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Client {
    endpoint: Endpoint,
    channel: Channel,
}

impl Client {
    /// Connects to the first endpoint that answers.
    ///
    /// # Errors
    /// [`ClientError::NotRunning`] if none does.
    pub async fn connect(candidates: &[Endpoint]) -> Result<Self, ClientError> {
        let mut last = None;
        for endpoint in candidates {
            match open(endpoint).await {
                Ok(channel) => {
                    return Ok(Self {
                        endpoint: endpoint.clone(),
                        channel,
                    });
                }
                Err(error) => last = Some(error),
            }
        }
        Err(ClientError::NotRunning {
            tried: candidates.iter().map(ToString::to_string).collect(),
            source: last,
        })
    }

    /// Returns where the gateway was found.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns a stub of the inference service, for calls that this type has no method for.
    #[must_use]
    pub fn inference(&self) -> InferenceServiceClient<Channel> {
        InferenceServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Returns a stub of the model service.
    #[must_use]
    pub fn models(&self) -> ModelServiceClient<Channel> {
        ModelServiceClient::new(self.channel.clone())
    }

    /// Returns a stub of the capability service.
    #[must_use]
    pub fn capabilities(&self) -> CapabilityServiceClient<Channel> {
        CapabilityServiceClient::new(self.channel.clone())
    }

    /// Returns a stub of the admin service.
    #[must_use]
    pub fn admin(&self) -> AdminServiceClient<Channel> {
        AdminServiceClient::new(self.channel.clone())
    }

    /// Returns the channel, for services that this library does not know.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Starts a chat. Dropping the answer cancels it.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub async fn chat(
        &mut self,
        request: v1::ChatRequest,
        deadline: Option<Duration>,
    ) -> Result<Answer, ClientError> {
        let stream = self
            .inference()
            .chat(traced(request, deadline))
            .await?
            .into_inner();
        Ok(Answer::of_chat(stream))
    }

    /// Starts the continuation of a prompt. Dropping the answer cancels it.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub async fn generate(
        &mut self,
        request: v1::GenerateRequest,
        deadline: Option<Duration>,
    ) -> Result<Answer, ClientError> {
        let stream = self
            .inference()
            .generate(traced(request, deadline))
            .await?
            .into_inner();
        Ok(Answer::of_generate(stream))
    }
}

async fn open(endpoint: &Endpoint) -> Result<Channel, tonic::transport::Error> {
    match endpoint {
        Endpoint::Tcp(address) => {
            tonic::transport::Endpoint::from_shared(format!("http://{address}"))?
                .connect_timeout(CONNECT_TIMEOUT)
                .connect()
                .await
        }
        Endpoint::Unix(path) => {
            let path = path.clone();
            // The authority is only a name: the connector below decides where the bytes go.
            tonic::transport::Endpoint::from_static("http://localhost")
                .connect_timeout(CONNECT_TIMEOUT)
                .connect_with_connector(service_fn(move |_: Uri| {
                    let path = path.clone();
                    async move {
                        tokio::net::UnixStream::connect(path)
                            .await
                            .map(TokioIo::new)
                    }
                }))
                .await
        }
    }
}
