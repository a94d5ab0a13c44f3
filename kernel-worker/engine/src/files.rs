//! Model files, read as hostile input.

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
