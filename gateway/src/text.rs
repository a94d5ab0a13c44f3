//! Text: from messages to token ids and from token ids back to text.
//!
//! * [`ChatTemplates`] renders messages with the model's own template.
//! * [`Tokenizer`] turns text into ids and knows the bytes of every token.
//! * [`Detokenizer`] turns a stream of ids into text that never splits a character.
//! * [`StopMatcher`] ends the text before a stop string, wherever the tokens are cut.
//!
//! Everything here is pure and synchronous. Vocabulary, template and text come from outside: sizes are bounded,
//! templates run on fuel, and nothing panics on what they contain. Long texts take milliseconds, so callers on a
//! runtime move the work to a blocking thread.

mod detokenizer;
mod error;
mod pre_type;
mod stop;
mod template;
mod token_table;
mod tokenizer;
mod vocabulary;

pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use stop::{StopMatcher, StopStep};
pub use template::{ChatTemplates, Clock, Message};
pub use tokenizer::Tokenizer;

/// Longest text that is tokenized at once.
pub const MAX_TEXT_BYTES: usize = 8 * 1024 * 1024;

/// Most tokens of a vocabulary.
pub const MAX_VOCABULARY_TOKENS: usize = 1 << 20;

/// How control markup such as `<|im_start|>` in a text is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Markup {
    /// As characters like any other: no text can smuggle in a control token.
    Plain,
    /// As the control tokens that it names: for text that a template rendered.
    Special,
}

/// Whether the encoder puts the begin-of-sequence token in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bos {
    /// Once, if the model wants one and the text does not begin with it.
    Add,
    /// Never.
    Omit,
}

/// Whether the text of control tokens is part of decoded text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Control tokens leave no trace.
    Hide,
    /// Control tokens appear as their markup.
    Show,
}
