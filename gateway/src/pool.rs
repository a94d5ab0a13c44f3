//! The pool of worker processes: spawns them, keeps them alive, believes nothing that they cannot show.
//!
//! * [`Pool`] is the handle; [`PoolEvent`]s are what the scheduler lives on.
//! * [`config`]: what a pool is told; [`event`]: what it tells; [`error`]: why it refuses.
//! * [`facts`], [`plan`], [`attest`]: what a worker is, what a plan promises, whether the result keeps it.

pub mod attest;
pub mod config;
pub mod error;
pub mod event;
pub mod facts;
pub mod plan;

pub use attest::{AttestedProvenance, AttestedResult, Violation};
pub use config::{ModelSource, PoolConfig, PoolTimeouts, RestartPolicy};
pub use error::PoolError;
pub use event::{LoadEvent, LossCause, PoolEvent, SlotState, WorkerKey, WorkerSnapshot};
pub use facts::{ModelFacts, WorkerFacts};
