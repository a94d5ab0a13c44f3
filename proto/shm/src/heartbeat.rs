//! The counter by which the gateway sees that a tensor thread moves.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::ShmError;
use crate::layout::WORD_BYTES;
use crate::segment::Segment;

/// A segment of one page whose first word the tensor thread bumps.
#[derive(Debug)]
pub struct Heartbeat {
    segment: Segment,
}

impl Heartbeat {
    /// Creates a counter at 0.
    ///
    /// # Errors
    /// Those of [`Segment::create`].
    pub fn create(id: u64) -> Result<Self, ShmError> {
        Ok(Self {
            segment: Segment::create(id, WORD_BYTES)?,
        })
    }

    /// Maps a counter that the gateway offered.
    ///
    /// # Errors
    /// Those of [`Segment::open`].
    pub fn open(id: u64, byte_len: u64, fd: OwnedFd) -> Result<Self, ShmError> {
        Ok(Self {
            segment: Segment::open(id, byte_len, fd)?,
        })
    }

    /// Says: I moved.
    pub fn bump(&self) {
        if let Some(counter) = self.counter() {
            // Relaxed: the number itself is the message, it publishes nothing else.
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of bumps; a peer can write any number here, so only compare it with the last one seen.
    #[must_use]
    pub fn value(&self) -> u64 {
        // Relaxed: see `bump`.
        self.counter()
            .map_or(0, |counter| counter.load(Ordering::Relaxed))
    }

    /// Returns the number of the segment.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.segment.id()
    }

    /// Returns the length that an offer announces.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.segment.byte_len()
    }

    /// Returns the descriptor, to be sent with the offer.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.segment.descriptor()
    }

    /// Every segment has a first word of data.
    fn counter(&self) -> Option<&AtomicU64> {
        self.segment.data(0, WORD_BYTES).ok()?.first()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn the_gateway_sees_what_the_tensor_thread_bumps() {
        let gateway = Heartbeat::create(5).unwrap();
        let fd = gateway.descriptor().try_clone_to_owned().unwrap();
        let worker = Heartbeat::open(5, gateway.byte_len(), fd).unwrap();
        assert_eq!(gateway.value(), 0);
        worker.bump();
        worker.bump();
        assert_eq!((gateway.value(), gateway.id(), worker.id()), (2, 5, 5));
    }
}
