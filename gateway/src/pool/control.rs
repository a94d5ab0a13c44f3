//! Calls on a worker's control channel: one connection that exists already, every call with a limit of time.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Status, Streaming};
use velox_proto::error::ServiceFault;
use velox_proto::limits::{MAX_MESSAGE_BYTES, MAX_TOKENIZER_BYTES, MAX_TOKENIZER_CHUNK_BYTES};
use velox_proto::v1;
use velox_proto::worker::v1 as wire;
use wire::worker_control_service_client::WorkerControlServiceClient;

use super::config::{ModelSource, PoolTimeouts};
use super::error::PoolError;

/// Base of the paths of calls; nothing is resolved or connected.
const ORIGIN: &str = "http://worker.invalid";

/// The gateway's side of the control service; clones share the connection.
#[derive(Debug, Clone)]
pub(super) struct Control {
    client: WorkerControlServiceClient<Channel>,
    #[cfg(feature = "fault-hooks")]
    faults: wire::fault_service_client::FaultServiceClient<Channel>,
    limit: Duration,
}

impl Control {
    /// Speaks HTTP/2 over the given socket. When it breaks there is no second one: the process is lost then.
    pub(super) async fn connect(
        stream: UnixStream,
        timeouts: &PoolTimeouts,
    ) -> Result<Self, PoolError> {
        let only = Mutex::new(Some(stream));
        let connector = tower::service_fn(move |_uri: Uri| {
            let stream = only
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take()
                .map(TokioIo::new)
                .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::NotConnected));
            std::future::ready(stream)
        });
        let endpoint = Endpoint::from_static(ORIGIN);
        let connect = endpoint.connect_with_connector(connector);
        let channel = within("connect", timeouts.handshake, async {
            connect.await.map_err(|error| {
                let status = Status::from_error(Box::new(error));
                PoolError::from(ServiceFault::from_status(&status))
            })
        })
        .await?;
        Ok(Self {
            #[cfg(feature = "fault-hooks")]
            faults: wire::fault_service_client::FaultServiceClient::new(channel.clone()),
            client: WorkerControlServiceClient::new(channel)
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
            limit: timeouts.control,
        })
    }

    pub(super) async fn facts(&self, limit: Duration) -> Result<wire::WorkerFacts, PoolError> {
        let mut client = self.client.clone();
        let call = client.get_facts(wire::GetFactsRequest {});
        let response = answered("GetFacts", limit, call).await?;
        response
            .facts
            .ok_or_else(|| super::facts::FactsError::Missing("its facts").into())
    }

    /// Loads a model and passes on the progress. Bounded by the caller.
    pub(super) async fn load(
        &self,
        source: &ModelSource,
        backend: Option<v1::Backend>,
        kv_method: Option<&str>,
        mut progress: impl FnMut(&wire::LoadModelResponse),
    ) -> Result<wire::ModelFacts, PoolError> {
        let request = wire::LoadModelRequest {
            name: source.name.clone(),
            path: path_text(&source.path)?,
            backend: backend.unwrap_or(v1::Backend::Unspecified).into(),
            kv_method: kv_method.unwrap_or_default().to_owned(),
            quantize_bits: source.shape.quantize_bits,
            max_context_tokens: source.shape.max_context_tokens,
        };
        let mut client = self.client.clone();
        let mut events = client
            .load_model(request)
            .await
            .map_err(fault)?
            .into_inner();
        while let Some(mut event) = events.message().await.map_err(fault)? {
            progress(&event);
            if let Some(facts) = event.facts.take() {
                return Ok(facts);
            }
        }
        Err(super::facts::FactsError::Missing("facts of the model").into())
    }

    /// Unloads a model. Bounded by the caller.
    pub(super) async fn unload(&self, name: &str) -> Result<(), PoolError> {
        let request = wire::UnloadModelRequest {
            name: name.to_owned(),
        };
        let mut client = self.client.clone();
        client.unload_model(request).await.map_err(fault)?;
        Ok(())
    }

    /// Runs an op. Bounded by the caller.
    pub(super) async fn run_op(
        &self,
        request: wire::RunOpRequest,
    ) -> Result<wire::RunOpResponse, PoolError> {
        let mut client = self.client.clone();
        let response = client.run_op(request).await.map_err(fault)?;
        Ok(response.into_inner())
    }

    pub(super) async fn drain(&self) -> Result<(), PoolError> {
        let mut client = self.client.clone();
        answered("Drain", self.limit, client.drain(wire::DrainRequest {})).await?;
        Ok(())
    }

    /// Fetches a tokenizer's description, still encoded; its digest is the worker's last word on it.
    pub(super) async fn tokenizer(&self, model: &str) -> Result<EncodedTokenizer, PoolError> {
        let request = wire::GetTokenizerRequest {
            model: model.to_owned(),
            destination: None,
        };
        let mut client = self.client.clone();
        let mut chunks =
            answered("GetTokenizer", self.limit, client.get_tokenizer(request)).await?;
        self.collect_tokenizer(&mut chunks).await
    }

    async fn collect_tokenizer(
        &self,
        chunks: &mut Streaming<wire::GetTokenizerResponse>,
    ) -> Result<EncodedTokenizer, PoolError> {
        let mut bytes = Vec::new();
        loop {
            let next = async { chunks.message().await.map_err(fault) };
            let Some(part) = within("GetTokenizer", self.limit, next).await? else {
                let text = "it ends without a digest".to_owned();
                return Err(PoolError::DamagedTokenizer(text));
            };
            let held = bytes.len() + part.chunk.len();
            if part.chunk.len() > MAX_TOKENIZER_CHUNK_BYTES || held > MAX_TOKENIZER_BYTES {
                return Err(PoolError::DamagedTokenizer(format!(
                    "{held} bytes with a chunk of {}, limits are {MAX_TOKENIZER_BYTES} and \
                     {MAX_TOKENIZER_CHUNK_BYTES}",
                    part.chunk.len()
                )));
            }
            bytes.extend_from_slice(&part.chunk);
            if !part.sha256.is_empty() {
                return Ok(EncodedTokenizer {
                    bytes,
                    sha256: part.sha256,
                    total_bytes: part.total_bytes,
                });
            }
        }
    }

    #[cfg(feature = "fault-hooks")]
    pub(super) async fn inject_fault(
        &self,
        request: wire::InjectFaultRequest,
    ) -> Result<(), PoolError> {
        let mut faults = self.faults.clone();
        answered("InjectFault", self.limit, faults.inject_fault(request)).await?;
        Ok(())
    }
}

/// A tokenizer's description as it arrived.
#[derive(Debug)]
pub(super) struct EncodedTokenizer {
    bytes: Vec<u8>,
    sha256: String,
    total_bytes: u64,
}

/// Checks the description against the digest sent with it and the one announced at load, and decodes it.
pub(super) fn decode_tokenizer(
    encoded: &EncodedTokenizer,
    announced: &str,
) -> Result<wire::TokenizerDescription, PoolError> {
    let damaged = |text: String| Err(PoolError::DamagedTokenizer(text));
    let length = u64::try_from(encoded.bytes.len()).unwrap_or(u64::MAX);
    if length != encoded.total_bytes {
        return damaged(format!(
            "{length} bytes arrived, {} were announced",
            encoded.total_bytes
        ));
    }
    let digest = hexadecimal(&Sha256::digest(&encoded.bytes));
    if digest != encoded.sha256 || digest != announced {
        return damaged(format!(
            "its digest is {digest}, sent was {:?}, announced {announced:?}",
            encoded.sha256
        ));
    }
    wire::TokenizerDescription::decode(encoded.bytes.as_slice())
        .or_else(|error| damaged(error.to_string()))
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

fn path_text(path: &Path) -> Result<String, PoolError> {
    let text = path.to_str().ok_or_else(|| {
        let reason = velox_proto::error::Reason::InvalidRequest;
        ServiceFault::new(reason, "model path is not UTF-8")
    })?;
    Ok(text.to_owned())
}

fn fault(status: Status) -> PoolError {
    ServiceFault::from_status(&status).into()
}

/// Bounds a unary call.
async fn answered<T>(
    call: &'static str,
    limit: Duration,
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, PoolError> {
    let answer = async { answer.await.map_err(fault) };
    Ok(within(call, limit, answer).await?.into_inner())
}

async fn within<T>(
    call: &'static str,
    limit: Duration,
    answer: impl Future<Output = Result<T, PoolError>>,
) -> Result<T, PoolError> {
    timeout(limit, answer)
        .await
        .unwrap_or(Err(PoolError::Unanswered { call, limit }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded() -> EncodedTokenizer {
        let description = wire::TokenizerDescription {
            vocab_size: 7,
            ..Default::default()
        };
        let bytes = description.encode_to_vec();
        EncodedTokenizer {
            sha256: hexadecimal(&Sha256::digest(&bytes)),
            total_bytes: 2,
            bytes,
        }
    }

    #[test]
    fn a_tokenizer_must_be_the_one_that_was_announced() {
        let good = encoded();
        let decoded = decode_tokenizer(&good, &good.sha256).unwrap();
        assert_eq!(decoded.vocab_size, 7);
        let other = "0".repeat(64);
        assert!(decode_tokenizer(&good, &other).is_err());
        let sent_with_other = EncodedTokenizer {
            sha256: other.clone(),
            ..encoded()
        };
        assert!(decode_tokenizer(&sent_with_other, &other).is_err());
        let short = EncodedTokenizer {
            total_bytes: 3,
            ..encoded()
        };
        assert!(decode_tokenizer(&short, &good.sha256).is_err());
    }
}
