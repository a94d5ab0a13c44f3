//! The worker's side: where a handle becomes memory.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use velox_proto::tensor::TensorHandle;

use crate::error::ShmError;
use crate::segment::Segment;
use crate::slot::Slot;
use crate::view::{TensorMut, TensorRef};

/// Most segments that a peer maps.
pub const MAX_PEER_SEGMENTS: usize = 64;

/// Segments that the gateway offered and this process mapped.
#[derive(Debug, Default)]
pub struct PeerSegments {
    segments: HashMap<u64, Segment>,
}

impl PeerSegments {
    /// Makes an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Maps an offered segment.
    ///
    /// # Errors
    /// Those of [`Segment::open`], [`ShmError::SegmentExists`] and [`ShmError::TooManySegments`].
    pub fn accept(&mut self, id: u64, byte_len: u64, fd: OwnedFd) -> Result<(), ShmError> {
        if self.segments.contains_key(&id) {
            return Err(ShmError::SegmentExists);
        }
        if self.segments.len() >= MAX_PEER_SEGMENTS {
            return Err(ShmError::TooManySegments);
        }
        self.segments.insert(id, Segment::open(id, byte_len, fd)?);
        Ok(())
    }

    /// Copies a tensor out, from its first to its last element (gaps between strided elements included).
    ///
    /// # Errors
    /// [`ShmError::UnknownSegment`], [`ShmError::OutOfRange`] or [`ShmError::Stale`].
    pub fn read(&self, handle: &TensorHandle) -> Result<Vec<u8>, ShmError> {
        self.slot(handle)?.read()
    }

    /// Copies a whole tensor in.
    ///
    /// # Errors
    /// Those of [`Self::read`], and [`ShmError::Length`] if `bytes` is not as long as the tensor.
    pub fn write(&self, handle: &TensorHandle, bytes: &[u8]) -> Result<(), ShmError> {
        self.slot(handle)?.write(bytes)
    }

    /// Opens a tensor for reading in place.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn view(&mut self, handle: &TensorHandle) -> Result<TensorRef<'_>, ShmError> {
        TensorRef::new(self.slot(handle)?)
    }

    /// Opens a tensor for writing in place.
    ///
    /// # Errors
    /// Those of [`Self::read`].
    pub fn view_mut(&mut self, handle: &TensorHandle) -> Result<TensorMut<'_>, ShmError> {
        TensorMut::new(self.slot(handle)?)
    }

    fn slot(&self, handle: &TensorHandle) -> Result<Slot<'_>, ShmError> {
        let segment = self
            .segments
            .get(&handle.segment())
            .ok_or(ShmError::UnknownSegment)?;
        Slot::new(
            segment,
            handle.generation(),
            handle.offset(),
            handle.byte_len(),
        )
    }
}
