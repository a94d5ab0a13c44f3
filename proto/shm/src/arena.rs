//! The owner's side: slots of a segment, leased and given back.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use velox_proto::limits::SLOT_ALIGNMENT_BYTES;
use velox_proto::tensor::{DType, HandleError, contiguous_bytes};
use velox_proto::v1;

use crate::allocator::Allocator;
use crate::error::ShmError;
use crate::layout::units_of;
use crate::segment::Segment;
use crate::slot::Slot;

/// A segment and the only allocator of its slots; clones share it.
#[derive(Debug, Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    segment: Segment,
    state: Mutex<State>,
}

/// What the peer cannot touch: its copy of the generations is for its own checks.
#[derive(Debug)]
struct State {
    allocator: Allocator,
    /// Generation of the next lease. Odd; no two leases of a segment ever have the same.
    generation: u64,
}

impl Arena {
    /// Makes the owner of a segment that was just created.
    #[must_use]
    pub fn new(segment: Segment) -> Self {
        let allocator = Allocator::new(segment.layout().units());
        let state = Mutex::new(State {
            allocator,
            generation: 1,
        });
        Self {
            shared: Arc::new(Shared { segment, state }),
        }
    }

    /// Leases a slot of at least `byte_len` bytes; its content is arbitrary.
    ///
    /// # Errors
    /// [`ShmError::Exhausted`] if no free range is long enough, [`HandleError::Empty`] for 0 bytes.
    pub fn lease(&self, byte_len: u64) -> Result<Lease, ShmError> {
        if byte_len == 0 {
            return Err(HandleError::Empty.into());
        }
        let units = units_of(byte_len);
        let (unit, generation) = {
            let mut state = self.state();
            let Some(unit) = state.allocator.take(units) else {
                let free = state.allocator.free() * SLOT_ALIGNMENT_BYTES;
                let limit = self.shared.segment.layout().data_bytes();
                return Err(ShmError::Exhausted {
                    asked: byte_len,
                    free,
                    limit,
                });
            };
            let generation = state.generation;
            state.generation = generation.wrapping_add(2);
            (unit, generation)
        };
        let offset = unit * SLOT_ALIGNMENT_BYTES;
        // From here on the drop of the lease gives the units back, also if the next line fails.
        let lease = Lease {
            arena: self.clone(),
            generation,
            offset,
            byte_len,
        };
        lease.slot(units * SLOT_ALIGNMENT_BYTES)?.begin();
        Ok(lease)
    }

    /// Returns the bytes of all slots that are leased, rounded up to whole 16 KiB.
    #[must_use]
    pub fn leased_bytes(&self) -> u64 {
        self.state().allocator.leased() * SLOT_ALIGNMENT_BYTES
    }

    /// Returns the bytes that can be leased in all.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.shared.segment.layout().data_bytes()
    }

    /// Returns the length of the segment, header and data: what an offer announces.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.shared.segment.byte_len()
    }

    /// Returns the number of the segment.
    #[must_use]
    pub fn segment_id(&self) -> u64 {
        self.shared.segment.id()
    }

    /// Returns the descriptor, to be sent with the offer.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.segment.descriptor()
    }

    /// The lock is held for a few map operations only, none of which leaves the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A slot, until drop; dropping makes its handles stale and frees it.
///
/// Keep it until no peer can touch the slot any more: its answer arrived, or its process was reaped.
#[derive(Debug)]
#[must_use = "dropping a lease frees its slot"]
pub struct Lease {
    arena: Arena,
    generation: u64,
    offset: u64,
    byte_len: u64,
}

impl Lease {
    /// Copies bytes to the beginning of the slot; to be called before a handle is sent.
    ///
    /// # Errors
    /// [`ShmError::Length`] if they do not fit, [`ShmError::Stale`] if the peer overwrote the segment's header.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ShmError> {
        let byte_len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.part(byte_len)?.write(bytes)
    }

    /// Makes a handle of a contiguous tensor at the beginning of the slot.
    ///
    /// # Errors
    /// [`ShmError::Handle`] for an impossible shape, [`ShmError::Length`] if the tensor does not fit.
    pub fn handle(&self, dtype: DType, shape: &[u64]) -> Result<v1::TensorHandle, ShmError> {
        let byte_len = contiguous_bytes(shape, dtype)?;
        self.check_length(byte_len)?;
        Ok(v1::TensorHandle {
            segment: self.arena.segment_id(),
            generation: self.generation,
            offset: self.offset,
            byte_len,
            dtype: v1::DType::from(dtype).into(),
            shape: shape.to_vec(),
            strides: Vec::new(),
        })
    }

    /// Copies the first `byte_len` bytes of the slot out: what the peer put there, or what was there before.
    ///
    /// # Errors
    /// [`ShmError::Length`] if the slot is shorter, [`ShmError::Stale`] if the peer overwrote the segment's header.
    pub fn copy_out(&self, byte_len: u64) -> Result<Vec<u8>, ShmError> {
        self.part(byte_len)?.read()
    }

    /// Returns the bytes that were asked for.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    fn check_length(&self, actual: u64) -> Result<(), ShmError> {
        let limit = self.byte_len;
        if actual > limit {
            return Err(ShmError::Length { limit, actual });
        }
        Ok(())
    }

    fn part(&self, byte_len: u64) -> Result<Slot<'_>, ShmError> {
        self.check_length(byte_len)?;
        self.slot(byte_len)
    }

    fn slot(&self, byte_len: u64) -> Result<Slot<'_>, ShmError> {
        Slot::new(
            &self.arena.shared.segment,
            self.generation,
            self.offset,
            byte_len,
        )
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let units = units_of(self.byte_len);
        if let Ok(slot) = self.slot(units * SLOT_ALIGNMENT_BYTES) {
            slot.end();
        }
        self.arena
            .state()
            .allocator
            .give_back(self.offset / SLOT_ALIGNMENT_BYTES, units);
    }
}

#[cfg(test)]
mod tests;
