//! From a path to a runner.

use std::num::NonZeroUsize;
use std::path::Path;

use velox_kernels::label::BackendLabel;
use velox_kernels::ran::Device;
use velox_kvcache::{KvShape, PageBudget};

use crate::backend::Backend;
use crate::error::EngineError;
use crate::files::blame::Blame;
use crate::files::{self, ModelSource, Quantisation, TokenizerSource};
use crate::graph::Transformer;
use crate::offer::{Offer, Opening};
use crate::probe::ProbedBackends;
use crate::spec::ModelSpec;
use crate::step::{Engine, Runner};

/// What the loader may choose and what it must not.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// `None` = the strongest that is available.
    pub backend: Option<BackendLabel>,
    /// Compute threads, at least 1.
    pub threads: usize,
    /// Bytes that caches may allocate together.
    pub cache_limit_bytes: u64,
    /// Turns float matrices into blocks.
    pub quantise: Option<Quantisation>,
    /// Most positions of a row; `None` = as many as the model was trained for, which is never exceeded.
    pub max_context: Option<NonZeroUsize>,
    /// What this process found out about its backends when it started.
    pub probed: ProbedBackends,
}

/// Where loading stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// "open", "check", "quantize", "map" or "ready".
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
    /// Bytes of the tensors as stored, or as held after quantisation at load. A backend may hold them in another layout.
    pub weight_bytes: u64,
    /// Types of the tensors, sorted by name.
    pub tensor_types: Vec<&'static str>,
    /// Label of the backend that will run it.
    pub backend: BackendLabel,
    /// Its kernel set, for people.
    pub kernel: String,
    /// Its device, for people; `None` = the processor.
    pub device: Option<String>,
    /// Why not a stronger one of this build; empty if it is the strongest, or the one that was asked for.
    pub fallback_reason: String,
    /// Block type that float matrices were turned into; `None` if all weights are as stored.
    pub quantised_to: Option<&'static str>,
    /// sha256 in hex over the header and sampled content, and over the quantisation if there was one.
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

/// Opens a GGUF file or a Hugging Face folder and prepares it for a backend. A backend is available if every stage
/// that the model needs came out right when it was probed; without a choice the strongest available one is taken, and
/// the facts say why not a stronger one of this build.
///
/// # Errors
/// [`EngineError`] by what is wrong with the file or missing on this machine.
pub fn load(
    path: &Path,
    options: &LoadOptions,
    report: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, EngineError> {
    let mut source = files::open(path, report)?;
    if let Some(limit) = options.max_context {
        let own = &mut source.spec.context_length;
        *own = limit.get().min(*own);
    }
    let stored_types = source.tensor_types.clone();
    let mut quantised_to = None;
    if let Some(to) = options.quantise {
        let blame = Blame::of(path);
        if files::quantise(&mut source, to, (options.threads, &blame), report)? {
            quantised_to = Some(to.block_type().name());
        }
    }
    let (offer, fallback_reason) = choose(options, &source.tensor_types)?;
    let opening = Opening {
        stored_types: &stored_types,
        threads: options.threads,
        budget: PageBudget::new(options.cache_limit_bytes),
    };
    let mut loaded = offer.load(source, &opening, report)?;
    loaded.facts.fallback_reason = fallback_reason;
    loaded.facts.quantised_to = quantised_to;
    Ok(loaded)
}

/// Takes the backend that was asked for, or the strongest that may run a model of these block types; and why not a
/// stronger one.
fn choose<'a>(
    options: &'a LoadOptions,
    tensor_types: &[&'static str],
) -> Result<(&'a dyn Offer, String), EngineError> {
    let probed = &options.probed;
    let offers = probed.offers();
    let may_run = |label: BackendLabel| match probed.why_not(label, tensor_types) {
        None => offers.find(label),
        Some(reason) => Err(reason),
    };
    if let Some(label) = options.backend {
        let offer = may_run(label).map_err(|reason| unavailable(label, reason))?;
        return Ok((offer, String::new()));
    }
    let mut why_not = Vec::new();
    for offer in offers.iter() {
        match may_run(offer.label()) {
            Ok(offer) => return Ok((offer, why_not.join("; "))),
            Err(reason) => why_not.push(format!("{}: {reason}", offer.label())),
        }
    }
    Err(unavailable(BackendLabel::Reference, why_not.join("; ")))
}

fn unavailable(label: BackendLabel, reason: String) -> EngineError {
    EngineError::BackendUnavailable {
        backend: label.name(),
        reason,
    }
}

/// Hands a checked source to a backend.
///
/// # Errors
/// What the backend cannot take.
pub fn assemble<B: Backend + 'static>(
    source: ModelSource,
    mut backend: B,
    report: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, EngineError> {
    let spec = source.spec;
    let geometry = backend.kv_geometry(KvShape {
        n_layers: spec.n_layers,
        n_kv_heads: spec.n_kv_heads,
        head_dim: spec.head_dim,
    })?;
    let total_bytes = source.weight_bytes;
    let mut done_bytes = 0;
    let mut prepared = |stored_bytes: u64| {
        done_bytes += stored_bytes;
        report(LoadProgress {
            phase: "map",
            done_bytes,
            total_bytes,
        });
    };
    let model = Transformer::new(&mut backend, &spec, source.tensors, &mut prepared)?;
    report(LoadProgress {
        phase: "ready",
        done_bytes: total_bytes,
        total_bytes,
    });
    let runner = Box::new(Engine::new(backend, model, &spec));
    Ok(LoadedModel {
        facts: ModelFacts {
            spec,
            format: source.format,
            parameters: source.parameters,
            weight_bytes: source.weight_bytes,
            tensor_types: source.tensor_types,
            backend: B::Device::LABEL,
            fallback_reason: String::new(),
            quantised_to: None,
            kernel: String::new(),
            device: None,
            fingerprint: source.fingerprint,
            key_bytes_per_token: geometry.key_bytes_per_token,
            value_bytes_per_token: geometry.value_bytes_per_token,
            page_tokens: geometry.page_tokens,
        },
        tokenizer: source.tokenizer,
        runner,
    })
}
