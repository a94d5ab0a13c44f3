//! Model files, read as hostile input.
//!
//! * [`gguf`] reads the GGUF container.
//! * [`safetensors`] reads the safetensors container.
//! * [`hf_config`] reads config.json.
//!
//! Tensors stay in the mapped file; only vectors (norms, biases) are copied, as f32. A file that asks for something
//! this engine does not compute is refused by the name of the field, never loaded approximately.

mod affine_rules;
mod assemble;
pub(crate) mod blame;
mod ends;
mod fingerprint;
pub mod gguf;
mod gguf_model;
mod gguf_spec;
mod gguf_vocabulary;
pub mod hf_config;
mod hf_folder;
mod hf_model;
mod hf_rope;
mod hf_tokenizer;
mod json_fields;
mod quantise;
mod rope;
pub mod safetensors;
mod sizes;
mod tensors;

use std::path::Path;
use std::sync::Arc;

use velox_kernels::affine::StoredMatrix;
use velox_kernels::buffer::FileMap;

use self::blame::Blame;
pub use self::fingerprint::hexadecimal;
pub use self::quantise::Quantisation;
pub(crate) use self::quantise::quantise;
pub use self::tensors::ElementType;
use crate::error::EngineError;
use crate::load::LoadProgress;
use crate::spec::{ModelSpec, ModelTensors};

/// A checked model whose matrices lie in mapped files.
#[derive(Debug)]
pub struct ModelSource {
    /// Sizes and constants.
    pub spec: ModelSpec,
    /// Every tensor, in the shapes that the spec demands.
    pub tensors: ModelTensors<StoredMatrix>,
    /// Everything the gateway needs to build the tokenizer.
    pub tokenizer: TokenizerSource,
    /// "gguf" or "safetensors".
    pub format: &'static str,
    /// Elements of all tensors; a tied head counts once.
    pub parameters: u64,
    /// Bytes of the tensors as stored.
    pub weight_bytes: u64,
    /// Types of the tensors, sorted by name.
    pub tensor_types: Vec<&'static str>,
    /// sha256 in hex over headers and sampled content.
    pub fingerprint: String,
}

/// Opens a GGUF file or a Hugging Face folder.
///
/// # Errors
/// [`EngineError::Unreadable`] if the system does not hand it out, [`EngineError::InvalidModel`] if it breaks its
/// format, [`EngineError::UnsupportedModel`] if it asks for something that is not computed here.
pub fn open(path: &Path, report: &mut dyn FnMut(LoadProgress)) -> Result<ModelSource, EngineError> {
    report(LoadProgress {
        phase: "open",
        done_bytes: 0,
        total_bytes: 0,
    });
    let blame = Blame::of(path);
    let kind = std::fs::metadata(path).map_err(|source| blame.unreadable(source))?;
    if kind.is_dir() {
        hf_model::open(path, report)
    } else {
        gguf_model::open(path, report)
    }
}

/// Maps a regular file; a pipe or device would block or never end.
fn map_file(path: &Path) -> Result<(Blame, Arc<FileMap>), EngineError> {
    let blame = Blame::of(path);
    let kind = std::fs::metadata(path).map_err(|source| blame.unreadable(source))?;
    if !kind.is_file() {
        return Err(blame.invalid("not a regular file"));
    }
    if kind.len() == 0 {
        return Err(blame.invalid("file is empty"));
    }
    let map = FileMap::open(path).map_err(|source| blame.unreadable(source))?;
    Ok((blame, map))
}

/// The tokenizer as the model file has it; mirrors `TokenizerDescription` of the worker contract.
#[derive(Debug, Clone, Default)]
pub struct TokenizerSource {
    /// Vocabulary in the form the file has it.
    pub vocabulary: Vocabulary,
    /// Name and Jinja source of each chat template.
    pub chat_templates: Vec<(String, String)>,
    /// BOS.
    pub bos_token_id: Option<u32>,
    /// EOS.
    pub eos_token_id: Option<u32>,
    /// Unknown.
    pub unknown_token_id: Option<u32>,
    /// Padding.
    pub padding_token_id: Option<u32>,
    /// Whether the encoder puts BOS in front; `None` = the tokenizer's own rule.
    pub add_bos: Option<bool>,
    /// Whether the encoder puts EOS behind.
    pub add_eos: Option<bool>,
    /// Union of all sources.
    pub end_tokens: Vec<crate::load::EndToken>,
    /// Rows of the head.
    pub vocab_size: u32,
}

/// Vocabulary in one of the two forms.
#[derive(Debug, Clone)]
pub enum Vocabulary {
    /// Content of tokenizer.json.
    HuggingFaceJson(Vec<u8>),
    /// `tokenizer.ggml.*`.
    Gguf(GgufVocabulary),
}

impl Default for Vocabulary {
    fn default() -> Self {
        Self::HuggingFaceJson(Vec::new())
    }
}

/// `tokenizer.ggml.*` of a GGUF file.
#[derive(Debug, Clone, Default)]
pub struct GgufVocabulary {
    /// "gpt2" or "llama".
    pub model: String,
    /// Pre-tokenizer; empty if missing.
    pub pre: String,
    /// Token texts by id.
    pub tokens: Vec<String>,
    /// 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    pub token_types: Vec<u32>,
    /// SentencePiece scores.
    pub scores: Vec<f32>,
    /// BPE merges, "left right".
    pub merges: Vec<String>,
    /// SentencePiece: put a space in front.
    pub add_space_prefix: Option<bool>,
}
