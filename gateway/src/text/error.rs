use std::collections::HashMap;

use velox_proto::error::{Reason, ServiceError};

/// Why a model's text files cannot be used, or a request's text cannot be turned into tokens.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The description has neither a vocabulary nor a tokenizer.json.
    #[error("the model describes no tokenizer")]
    NoTokenizer,
    /// `tokenizer.ggml.model`, or the model in tokenizer.json, is of a kind without support.
    #[error("tokenizer model {0:?} is not supported")]
    UnsupportedTokenizer(String),
    /// `tokenizer.ggml.pre` is missing: guessing it would give wrong ids without a sign.
    #[error("the model file lacks tokenizer.ggml.pre, which says how text is split before merging")]
    MissingPreType,
    /// `tokenizer.ggml.pre` names a rule without support.
    #[error("tokenizer.ggml.pre {0:?} is not supported")]
    UnsupportedPreType(String),
    /// The vocabulary contradicts itself.
    #[error("vocabulary is invalid: {0}")]
    InvalidVocabulary(String),
    /// Some part of the tokenizer is larger than allowed.
    #[error("tokenizer has {actual} {what}, limit is {limit}")]
    TokenizerTooLarge {
        /// What was counted.
        what: &'static str,
        /// How many there are.
        actual: usize,
        /// How many there may be.
        limit: usize,
    },
    /// The tokenizer library refused the description or failed on a text.
    #[error("tokenizer failed: {0}")]
    Library(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A library panicked; the description is at fault.
    #[error("tokenizer or template of the model is malformed: the library for it panicked")]
    LibraryPanicked,
    /// The tokenizer made an id for which the model has no row.
    #[error("tokenizer made token {id}, the model has {limit} tokens")]
    TokenOutsideModel {
        /// The id.
        id: u32,
        /// Width of the logits.
        limit: u32,
    },
    /// The text is longer than what is tokenized at once.
    #[error("text has {actual} bytes, limit is {limit}")]
    TextTooLong {
        /// Length of the text.
        actual: usize,
        /// How long it may be.
        limit: usize,
    },
    /// The text spells a control token and the vocabulary has no other way to write it.
    #[error("text contains {0:?}, which the vocabulary can only write as a control token")]
    UnwritableMarkup(String),
    /// The model has no chat template: messages cannot be rendered, a prompt can.
    #[error("the model has no chat template, send a prompt instead of messages")]
    NoChatTemplate,
    /// A template of the model does not compile.
    #[error("chat template {name:?} is invalid: {source}")]
    InvalidTemplate {
        /// Name of the template.
        name: String,
        /// What the template engine says.
        #[source]
        source: Box<minijinja::Error>,
    },
    /// The template called `raise_exception`.
    #[error("chat template refused the messages: {0}")]
    TemplateRefused(String),
    /// The template failed on these messages.
    #[error("chat template failed: {0}")]
    TemplateFailed(#[source] Box<minijinja::Error>),
    /// The system has no thread for the template.
    #[error("no thread for the chat template: {0}")]
    NoThread(#[source] std::io::Error),
}

impl ServiceError for TextError {
    fn reason(&self) -> Reason {
        match self {
            Self::NoTokenizer
            | Self::UnsupportedTokenizer(_)
            | Self::MissingPreType
            | Self::UnsupportedPreType(_)
            | Self::InvalidVocabulary(_)
            | Self::TokenizerTooLarge { .. }
            | Self::Library(_)
            | Self::LibraryPanicked
            | Self::TokenOutsideModel { .. }
            | Self::InvalidTemplate { .. } => Reason::InvalidModel,
            Self::TextTooLong { .. } | Self::UnwritableMarkup(_) => Reason::InvalidRequest,
            Self::NoChatTemplate | Self::TemplateRefused(_) | Self::TemplateFailed(_) => {
                Reason::TemplateFailed
            }
            Self::NoThread(_) => Reason::Internal,
        }
    }

    fn metadata(&self) -> HashMap<String, String> {
        let (actual, limit) = match self {
            Self::TokenizerTooLarge { actual, limit, .. } | Self::TextTooLong { actual, limit } => {
                (actual.to_string(), limit.to_string())
            }
            Self::TokenOutsideModel { id, limit } => (id.to_string(), limit.to_string()),
            _ => return HashMap::new(),
        };
        HashMap::from([("actual".to_owned(), actual), ("limit".to_owned(), limit)])
    }

    fn field(&self) -> Option<&str> {
        match self {
            Self::NoChatTemplate | Self::TemplateRefused(_) | Self::TemplateFailed(_) => {
                Some("messages")
            }
            Self::TextTooLong { .. } | Self::UnwritableMarkup(_) => Some("prompt"),
            _ => None,
        }
    }
}
