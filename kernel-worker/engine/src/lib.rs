//! Model files, the model graph over a backend trait, sampler and step execution.
//!
//! No tokio, no tonic, no clock: time and transport belong to the process around it.
//!
//! * [`files`]: GGUF, safetensors and config.json to a checked [`files::ModelSource`].
//! * [`spec`]: what a model is, independent of its file.
//! * [`backend`]: the fused stages of a transformer block as a trait, and its implementations.
//! * [`graph`]: the transformer written once over that trait.
//! * [`sampler`]: next-token choice.
//! * [`step`]: plans and outcomes, `submit` and `collect`.
//! * [`load`]: from a path to a [`step::Runner`].
//! * [`offer`]: which backends an executable has.
//! * [`probe`]: tiny cases that capabilities are made of.

#![forbid(unsafe_code)]

pub mod backend;
pub mod error;
pub mod files;
pub mod graph;
pub mod load;
pub mod offer;
pub mod probe;
pub mod sampler;
pub mod spec;
pub mod step;
