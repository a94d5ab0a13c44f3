//! The reader of Hugging Face folders against broken, hostile and unusual files.

mod container;
mod folder;
mod model;
mod tokens;
