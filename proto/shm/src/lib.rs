//! The memory half of the contract between gateway and workers.
//!
//! * [`Segment`]: anonymous shared memory, mapped by both processes; nothing named survives a crash.
//! * [`Arena`] and [`Lease`]: the gateway's side. It alone allocates, so the death of a worker leaves nothing to sweep.
//! * [`PeerSegments`], [`TensorRef`] and [`TensorMut`]: the worker's side, where a handle becomes memory.
//! * [`SegmentPool`]: keeps segments whose pages were already touched.
//! * [`Heartbeat`]: the counter by which the gateway sees that a tensor thread moves.
//! * [`descriptor`] and [`frame`]: how descriptors and messages travel on the step channel.
//!
//! Invariant: shared memory is read and written through relaxed atomic words, never through a slice, except in
//! [`TensorRef`] and [`TensorMut`], whose memory the gateway has handed over. Only `segment` and `view` contain unsafe
//! code.

mod allocator;
mod arena;
pub mod descriptor;
mod error;
pub mod frame;
mod heartbeat;
mod layout;
mod peer;
mod pool;
mod segment;
mod slot;
mod view;
mod words;

pub use arena::{Arena, Lease};
pub use error::ShmError;
pub use heartbeat::Heartbeat;
pub use peer::{MAX_PEER_SEGMENTS, PeerSegments};
pub use pool::{PooledArena, SegmentPool};
pub use segment::Segment;
pub use view::{TensorMut, TensorRef};

/// Settings of a property test: the interpreter gets few cases, and no file to remember failures in.
#[cfg(test)]
fn property(cases: u32) -> proptest::test_runner::Config {
    if cfg!(miri) {
        proptest::test_runner::Config {
            cases: 4,
            failure_persistence: None,
            ..Default::default()
        }
    } else {
        proptest::test_runner::Config::with_cases(cases)
    }
}
