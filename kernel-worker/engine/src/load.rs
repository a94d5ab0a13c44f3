//! From a path to a runner.

use std::path::Path;

use velox_kernels::label::BackendLabel;

use crate::error::EngineError;
use crate::files::TokenizerSource;
use crate::spec::ModelSpec;
use crate::step::Runner;

/// What the loader may choose and what it must not.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// `None` = the strongest that is available.
    pub backend: Option<BackendLabel>,
    /// Compute threads, at least 1.
    pub threads: usize,
    /// Bytes that caches may allocate together.
    pub cache_limit_bytes: u64,
}

/// Where loading stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// "open", "check", "map" or "ready".
    pub phase: &'static str,
    /// Bytes of tensors done.
    pub done_bytes: u64,
    /// Bytes of all tensors.
    pub total_bytes: u64,
}

/// A token that ends generation and the field that says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndToken {
    /// Token.
    pub token_id: u32,
    /// Its text in the vocabulary.
    pub text: String,
    /// File field it was read from.
    pub source: String,
}

/// Facts about a loaded model that outlive its tensors.
#[derive(Debug, Clone)]
pub struct ModelFacts {
    /// Sizes and constants.
    pub spec: ModelSpec,
    /// "gguf" or "safetensors".
    pub format: &'static str,
    /// Elements of all tensors; a tied head counts once.
    pub parameters: u64,
    /// Bytes of the tensors as stored.
    pub weight_bytes: u64,
    /// Block types present, sorted by name.
    pub tensor_types: Vec<&'static str>,
    /// Label of the backend that will run it.
    pub backend: BackendLabel,
    /// sha256 in hex over the header and sampled content.
    pub fingerprint: String,
    /// Bytes per token that the cache allocates for keys, all layers (whole pages / page tokens).
    pub key_bytes_per_token: u64,
    /// The same for values.
    pub value_bytes_per_token: u64,
    /// Tokens of a cache page.
    pub page_tokens: usize,
}

/// A model ready to run.
pub struct LoadedModel {
    /// Facts for the gateway.
    pub facts: ModelFacts,
    /// Everything the gateway needs to build the tokenizer.
    pub tokenizer: TokenizerSource,
    /// Runs plans; stays on the thread that made it.
    pub runner: Box<dyn Runner>,
}

impl std::fmt::Debug for LoadedModel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("LoadedModel")
            .field("facts", &self.facts)
            .finish_non_exhaustive()
    }
}

/// Opens a GGUF file or a Hugging Face folder and prepares it for a backend.
///
/// # Errors
/// [`EngineError`] by what is wrong with the file or missing on this machine.
pub fn load(
    path: &Path,
    options: &LoadOptions,
    report: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, EngineError> {
    let _ = (path, options, report);
    Err(EngineError::InvalidPlan("not built yet".to_owned()))
}
