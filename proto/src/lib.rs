//! What two Velox processes must agree on: messages, reasons, ops, tensor handles and limits.
//!
//! * [`v1`]: the public API; [`worker::v1`]: gateway to kernel worker.
//! * [`error`]: the closed table of reasons and its one mapping to gRPC status.
//! * [`op`]: the one table of ops.
//! * [`tensor`]: the validated form of a tensor handle.
//! * [`limits`]: bounds that both sides enforce.
//! * [`trace`]: the W3C trace context that every call carries.
//!
//! No I/O and no unsafe code here; the memory half of the contract is the crate `velox-shm`.

#![forbid(unsafe_code)]

pub mod error;
pub mod limits;
pub mod op;
pub mod tensor;
pub mod trace;

/// Generated from `velox/v1/*.proto`.
#[expect(
    missing_docs,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("velox.v1");
}

/// Generated from `velox/worker/v1/*.proto`.
pub mod worker {
    /// Gateway to kernel worker.
    #[expect(
        missing_docs,
        clippy::large_enum_variant,
        clippy::allow_attributes,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    pub mod v1 {
        tonic::include_proto!("velox.worker.v1");
    }
}

/// Encoded `FileDescriptorSet` of all protos, for reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Version of the public contract.
pub const PROTOCOL: &str = "velox.v1";

/// Oldest and newest worker protocol that this build speaks.
pub const WORKER_PROTOCOL: std::ops::RangeInclusive<u32> = 1..=1;
