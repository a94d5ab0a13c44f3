//! What can go wrong with shared memory.

use std::io;

use velox_proto::error::{Reason, ServiceError};
use velox_proto::limits::{MAX_SEGMENT_BYTES, MAX_STEP_FRAME_BYTES};
use velox_proto::tensor::HandleError;

use crate::peer::MAX_PEER_SEGMENTS;

/// Why an operation on shared memory was refused. No text names a segment: internal numbers stay inside.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// The handle is wrong in itself.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The handle names a segment that this process does not map.
    #[error("tensor lies in a segment that is not mapped")]
    UnknownSegment,
    /// The tensor ends behind its segment's data.
    #[error("tensor ends at byte {end}, its segment has {limit}")]
    OutOfRange {
        /// First byte after the tensor.
        end: u64,
        /// Bytes of data in the segment.
        limit: u64,
    },
    /// The slot was freed, leased again, or never leased as one.
    #[error("tensor handle is stale")]
    Stale,
    /// More bytes than the slot has, or another number than the tensor has.
    #[error("slot has {limit} bytes, {actual} were asked for")]
    Length {
        /// Bytes of the slot or the tensor.
        limit: u64,
        /// Bytes of the caller.
        actual: u64,
    },
    /// No free range of that size.
    #[error("no room for {asked} bytes of shared memory, {free} of {limit} are free")]
    Exhausted {
        /// Bytes asked for.
        asked: u64,
        /// Bytes that are free, perhaps in pieces.
        free: u64,
        /// Bytes in all.
        limit: u64,
    },
    /// A segment of that size cannot be.
    #[error("segment of {0} bytes, at least 1 and at most {MAX_SEGMENT_BYTES} are possible")]
    SegmentSize(u64),
    /// The offered descriptor is not what was announced.
    #[error("offered descriptor is no segment: {0}")]
    NotASegment(&'static str),
    /// The number is taken by a segment that is still mapped.
    #[error("segment was offered twice")]
    SegmentExists,
    /// The peer holds as many segments as it may.
    #[error("more than {MAX_PEER_SEGMENTS} segments were offered")]
    TooManySegments,
    /// A frame of the step channel is too long.
    #[error("frame has {0} bytes, limit is {MAX_STEP_FRAME_BYTES}")]
    FrameTooLarge(u64),
    /// Bytes were pushed faster than frames were taken.
    #[error("frame decoder holds {0} bytes that nobody took")]
    FramesNotTaken(u64),
    /// The operating system refused.
    #[error("{operation} of shared memory failed")]
    System {
        /// What was tried.
        operation: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl ShmError {
    /// Wraps a failed system call; for `map_err`.
    pub(crate) fn system<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::System {
            operation,
            source: error.into(),
        }
    }
}

impl ServiceError for ShmError {
    fn reason(&self) -> Reason {
        match self {
            Self::Handle(_)
            | Self::UnknownSegment
            | Self::OutOfRange { .. }
            | Self::Stale
            | Self::Length { .. } => Reason::InvalidHandle,
            Self::Exhausted { .. } | Self::TooManySegments => Reason::OutOfMemory,
            Self::System { source, .. } if is_memory(source) => Reason::OutOfMemory,
            Self::SegmentSize(_)
            | Self::NotASegment(_)
            | Self::SegmentExists
            | Self::FrameTooLarge(_)
            | Self::FramesNotTaken(_)
            | Self::System { .. } => Reason::Internal,
        }
    }
}

/// Whether the system had no memory, or no room in the file system that backs shared memory.
fn is_memory(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_system_is_told_from_a_fault() {
        let full = ShmError::system("allocation")(rustix::io::Errno::NOSPC);
        assert_eq!(full.reason(), Reason::OutOfMemory);
        let fault = ShmError::system("mapping")(rustix::io::Errno::INVAL);
        assert_eq!(fault.reason(), Reason::Internal);
    }
}
