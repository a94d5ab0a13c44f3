//! From a path to a runner.

use std::path::Path;

use velox_kernels::cpu::CpuKernelSet;
use velox_kernels::label::BackendLabel;
use velox_kernels::ran::Device;
use velox_kvcache::{KvShape, PageBudget};

use crate::backend::Backend;
use crate::backend::cpu::CpuBackend;
use crate::backend::reference::ReferenceBackend;
use crate::error::EngineError;
use crate::files::{self, ModelSource, TokenizerSource};
use crate::graph::Transformer;
use crate::probe::ProbeCase;
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

/// Opens a GGUF file or a Hugging Face folder and prepares it for a backend. A backend is available if every stage
/// that the model needs passes its probe; without a choice the strongest available one is taken.
///
/// # Errors
/// [`EngineError`] by what is wrong with the file or missing on this machine.
pub fn load(
    path: &Path,
    options: &LoadOptions,
    report: &mut dyn FnMut(LoadProgress),
) -> Result<LoadedModel, EngineError> {
    let source = files::open(path, report)?;
    let budget = PageBudget::new(options.cache_limit_bytes);
    let unavailable = |label: BackendLabel, reason: String| EngineError::BackendUnavailable {
        backend: label.name(),
        reason,
    };
    match options.backend {
        Some(BackendLabel::Reference) => {}
        None | Some(BackendLabel::Cpu) => {
            match probed_cpu(&source.tensor_types, options.threads, &budget) {
                Ok(backend) => return assemble(source, backend, report),
                Err(_) if options.backend.is_none() => {}
                Err(reason) => return Err(unavailable(BackendLabel::Cpu, reason)),
            }
        }
        Some(label) => {
            return Err(unavailable(
                label,
                "it is not part of this build".to_owned(),
            ));
        }
    }
    let backend = ReferenceBackend::new(options.threads, budget);
    assemble(source, backend, report)
}

/// Makes a `CPU` backend if every stage that the model needs comes out right on this machine, or says why not.
fn probed_cpu(
    tensor_types: &[&'static str],
    threads: usize,
    budget: &PageBudget,
) -> Result<CpuBackend, String> {
    let kernels = CpuKernelSet::detect();
    let mut backend =
        CpuBackend::new(kernels, threads, budget.clone()).map_err(|error| error.to_string())?;
    let mut oracle = ReferenceBackend::new(1, budget.clone());
    let needed = |case: &ProbeCase| {
        case.block_type
            .is_none_or(|block_type| tensor_types.contains(&block_type.name()))
    };
    for case in ProbeCase::all().iter().filter(|case| needed(case)) {
        let (stage, dtype) = (case.stage, case.dtype());
        let outcome = case
            .run(&mut backend, &mut oracle)
            .map_err(|error| format!("{stage:?} of {dtype} by {}: {error}", kernels.name()))?;
        if !outcome.is_right() {
            return Err(format!(
                "{stage:?} of {dtype} by {} is off by {:e}, limit is {:e}",
                kernels.name(),
                outcome.max_error,
                outcome.tolerance
            ));
        }
    }
    Ok(backend)
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
            fingerprint: source.fingerprint,
            key_bytes_per_token: geometry.key_bytes_per_token,
            value_bytes_per_token: geometry.value_bytes_per_token,
            page_tokens: geometry.page_tokens,
        },
        tokenizer: source.tokenizer,
        runner,
    })
}
