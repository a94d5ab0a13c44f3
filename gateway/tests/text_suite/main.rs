//! Tests of the text module through its public face.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests stand outside of test functions"
)]

mod detokenizer;
mod huggingface;
mod parity;
mod sentence_piece;
mod support;
mod templates;
mod tokenizer;
