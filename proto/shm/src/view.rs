//! Tensors used where they lie, without a copy.
//!
//! A plain slice over memory that another process maps is sound only while that process leaves it alone. The
//! hand-over of the contract says so: the gateway writes a slot before it sends the handle, then neither writes nor
//! frees it until the answer arrived. Within this process the views borrow [`PeerSegments`](crate::PeerSegments)
//! exclusively, so no copy and no other view can touch the same bytes.

#![expect(unsafe_code, reason = "handed-over memory becomes a slice here")]

use std::marker::PhantomData;

use crate::error::ShmError;
use crate::layout::to_index;
use crate::slot::Slot;

/// A tensor's bytes, read in place.
#[derive(Debug)]
pub struct TensorRef<'a> {
    slot: Slot<'a>,
    len: usize,
}

impl<'a> TensorRef<'a> {
    /// Looks at a slot of segments that the caller borrows exclusively for `'a`.
    pub(crate) fn new(slot: Slot<'a>) -> Result<Self, ShmError> {
        slot.check()?;
        Ok(Self {
            len: to_index(slot.byte_len())?,
            slot,
        })
    }

    /// Returns the bytes; the first one begins a page (of 16 KiB on Apple Silicon).
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY:
        // * valid and initialised: `Slot::new` found `len` bytes inside the mapping, which lives for `'a`;
        // * not written meanwhile: the module's hand-over keeps the gateway away, the exclusive borrow of `'a`
        //   the rest of this process.
        unsafe { std::slice::from_raw_parts(self.slot.words().as_ptr().cast::<u8>(), self.len) }
    }

    /// Ends the use and checks that the slot was ours all the time.
    ///
    /// # Errors
    /// [`ShmError::Stale`] if it was not; what was computed from the bytes is worthless then.
    pub fn finish(self) -> Result<(), ShmError> {
        self.slot.check_again()
    }
}

/// A tensor's bytes, written in place.
#[derive(Debug)]
pub struct TensorMut<'a> {
    slot: Slot<'a>,
    len: usize,
    /// Says that the bytes are borrowed exclusively.
    exclusive: PhantomData<&'a mut [u8]>,
}

impl<'a> TensorMut<'a> {
    /// Opens a slot of segments that the caller borrows exclusively for `'a`.
    pub(crate) fn new(slot: Slot<'a>) -> Result<Self, ShmError> {
        slot.check()?;
        Ok(Self {
            len: to_index(slot.byte_len())?,
            slot,
            exclusive: PhantomData,
        })
    }

    /// Returns the bytes; the first one begins a page (of 16 KiB on Apple Silicon).
    #[must_use]
    pub fn bytes(&mut self) -> &mut [u8] {
        let start = self.slot.words().as_ptr().cast::<u8>().cast_mut();
        // SAFETY:
        // * valid and initialised: `Slot::new` found `len` bytes inside the read-write mapping, which lives for `'a`;
        // * may be written: the pointer comes from atomics, which are mutable behind a shared reference;
        // * exclusive: the module's hand-over keeps the gateway away, the exclusive borrow of `'a` the rest of this
        //   process, and `&mut self` a second slice; the slot itself touches only generations until `self` is gone.
        unsafe { std::slice::from_raw_parts_mut(start, self.len) }
    }

    /// Ends the use and checks that the slot was ours all the time.
    ///
    /// # Errors
    /// [`ShmError::Stale`] if it was not.
    pub fn finish(self) -> Result<(), ShmError> {
        self.slot.check_again()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn what_is_written_in_place_is_read_in_place() {
        let words: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let generations = [AtomicU64::new(9)];
        let slot = Slot::of_words(&words, &generations, 9);
        let mut writer = TensorMut::new(slot).unwrap();
        writer.bytes().fill(3);
        writer.bytes()[31] = 4;
        writer.finish().unwrap();
        let reader = TensorRef::new(slot).unwrap();
        assert_eq!(reader.bytes().len(), 32);
        assert_eq!(reader.bytes()[30..], [3, 4]);
        slot.end();
        assert!(matches!(reader.finish(), Err(ShmError::Stale)));
        assert!(matches!(TensorRef::new(slot), Err(ShmError::Stale)));
        assert!(matches!(TensorMut::new(slot), Err(ShmError::Stale)));
    }
}
