//! The reader of Hugging Face folders against broken, hostile and unusual files.
#![expect(clippy::unwrap_used, reason = "a failed assumption is a failed test")]

mod affine;
mod container;
mod folder;
mod model;
mod tokens;
