//! Tests of the text module through its public face.

mod detokenizer;
mod huggingface;
mod parity;
mod sentence_piece;
mod support;
mod templates;
mod tokenizer;
