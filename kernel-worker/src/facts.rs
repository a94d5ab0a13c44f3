//! What the worker says of itself and of its models.

use prost::Message as _;
use sha2::{Digest as _, Sha256};
use velox_engine::files::{TokenizerSource, Vocabulary, hexadecimal};
use velox_engine::load::{EndToken, ModelFacts};
use velox_proto::WORKER_PROTOCOL;
use velox_proto::v1;
use velox_proto::worker::v1 as wire;

use crate::config::Config;
use crate::convert::wire_backend;
use crate::probe::ProbeReport;

/// Rows that a model may have open at a time.
pub const MAX_ROWS: u32 = 128;

/// Build of this executable.
pub const BUILD: &str = concat!("velox-kernel-worker ", env!("CARGO_PKG_VERSION"));

/// Makes the handshake's facts.
#[must_use]
pub fn worker_facts(config: &Config, probes: &ProbeReport) -> wire::WorkerFacts {
    wire::WorkerFacts {
        protocol_min: *WORKER_PROTOCOL.start(),
        protocol_max: *WORKER_PROTOCOL.end(),
        build: BUILD.to_owned(),
        pid: std::process::id(),
        device: probes.device.clone(),
        kernel: probes.kernel.clone(),
        os: std::env::consts::OS.to_owned(),
        arch: std::env::consts::ARCH.to_owned(),
        threads: u32::try_from(config.compute_threads().get()).unwrap_or(u32::MAX),
        backends: probes.backends.clone(),
        ops: probes.ops.clone(),
        batch_invariant: probes.probed.is_batch_invariant(),
        memory_limit_bytes: config.cache_limit_bytes,
    }
}

/// Makes the facts of a loaded model.
#[must_use]
pub fn model_facts(
    name: &str,
    facts: &ModelFacts,
    tokenizer: &TokenizerSource,
    tokenizer_sha256: &str,
) -> wire::ModelFacts {
    let count = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    wire::ModelFacts {
        backend: wire_backend(facts.backend).into(),
        fallback_reason: facts.fallback_reason.clone(),
        kernel: facts.kernel.clone(),
        device: facts.device.clone().unwrap_or_default(),
        n_layers: count(facts.spec.n_layers),
        max_rows: MAX_ROWS,
        fingerprint: facts.fingerprint.clone(),
        tokenizer_sha256: tokenizer_sha256.to_owned(),
        model: Some(v1::Model {
            name: name.to_owned(),
            architecture: facts.spec.architecture.name().to_owned(),
            format: facts.format.to_owned(),
            parameters: facts.parameters,
            weight_bytes: facts.weight_bytes,
            context_length: count(facts.spec.context_length),
            vocab_size: count(facts.spec.vocab_size),
            n_layers: count(facts.spec.n_layers),
            tensor_types: facts
                .tensor_types
                .iter()
                .map(|&name| name.to_owned())
                .collect(),
            end_tokens: tokenizer.end_tokens.iter().map(end_token).collect(),
            has_chat_template: !tokenizer.chat_templates.is_empty(),
            kv: Some(v1::KvGeometry {
                method: "none".to_owned(),
                page_tokens: count(facts.page_tokens),
                key_bytes_per_token: facts.key_bytes_per_token,
                value_bytes_per_token: facts.value_bytes_per_token,
                shareable: false,
                replay: "exact".to_owned(),
            }),
            is_default: false,
            quantized_to: facts.quantised_to.unwrap_or_default().to_owned(),
            fallback_reason: facts.fallback_reason.clone(),
        }),
    }
}

fn end_token(token: &EndToken) -> v1::EndToken {
    v1::EndToken {
        token_id: token.token_id,
        text: token.text.clone(),
        source: token.source.clone(),
    }
}

/// A tokenizer description, encoded once per model.
#[derive(Debug, Clone)]
pub struct TokenizerBlob {
    /// Encoded `TokenizerDescription`.
    pub bytes: bytes::Bytes,
    /// In hex.
    pub sha256: String,
}

/// Encodes the description of a model's tokenizer.
#[must_use]
pub fn tokenizer_blob(source: &TokenizerSource) -> TokenizerBlob {
    let bytes = bytes::Bytes::from(description(source).encode_to_vec());
    let sha256 = hexadecimal(&Sha256::digest(&bytes));
    TokenizerBlob { bytes, sha256 }
}

fn description(source: &TokenizerSource) -> wire::TokenizerDescription {
    use wire::tokenizer_description::Source;
    let vocabulary = match &source.vocabulary {
        Vocabulary::HuggingFaceJson(json) => Source::HuggingfaceJson(json.clone().into()),
        Vocabulary::Gguf(gguf) => Source::Gguf(wire::GgufVocabulary {
            model: gguf.model.clone(),
            pre: gguf.pre.clone(),
            tokens: gguf.tokens.clone(),
            token_types: gguf.token_types.clone(),
            scores: gguf.scores.clone(),
            merges: gguf.merges.clone(),
            add_space_prefix: gguf.add_space_prefix,
        }),
    };
    wire::TokenizerDescription {
        source: Some(vocabulary),
        chat_templates: source
            .chat_templates
            .iter()
            .map(|(name, source)| wire::ChatTemplate {
                name: name.clone(),
                source: source.clone(),
            })
            .collect(),
        bos_token_id: source.bos_token_id,
        eos_token_id: source.eos_token_id,
        unknown_token_id: source.unknown_token_id,
        padding_token_id: source.padding_token_id,
        add_bos: source.add_bos,
        add_eos: source.add_eos,
        end_tokens: source.end_tokens.iter().map(end_token).collect(),
        vocab_size: source.vocab_size,
    }
}
