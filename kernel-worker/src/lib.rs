//! The process around the engine.
//!
//! Standard input is the control channel (tonic, [`control`]), standard output the step channel
//! ([`step_channel`]), standard error the log. One thread, the tensor thread ([`tensor_thread`]), owns every model and
//! all tensor work; control calls reach it as [`command`]s.
//!
//! The executable is a shell around [`lifecycle::run`], so that another executable (MLX) can bring its own backends.

#![forbid(unsafe_code)]

pub mod command;
pub mod config;
pub mod control;
pub mod convert;
pub mod error;
pub mod facts;
#[cfg(feature = "fault-hooks")]
pub mod fault;
pub mod kernel_set;
pub mod lifecycle;
pub mod probe;
mod residents;
pub mod run_op;
pub mod step_channel;
pub mod tensor_thread;
