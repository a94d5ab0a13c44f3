//! Shared memory of one process: a heartbeat, and arenas that it has mapped.

use std::sync::{Mutex, MutexGuard, PoisonError};

use velox_proto::worker::v1 as wire;
use velox_shm::{Heartbeat, Lease, MAX_PEER_SEGMENTS, PooledArena, SegmentPool, ShmError};

/// Segments of one process. Dropped after the process was reaped: then nobody writes to them any more, and the
/// next process may get the same pages.
#[derive(Debug)]
pub(super) struct WorkerMemory {
    heartbeat: Heartbeat,
    arenas: Mutex<Vec<PooledArena>>,
    /// Held while an arena is created and offered, so that two callers do not both do it for one lease each.
    pub(super) growth: tokio::sync::Mutex<()>,
}

impl WorkerMemory {
    pub(super) fn new(segments: &SegmentPool) -> Result<Self, ShmError> {
        Ok(Self {
            heartbeat: Heartbeat::create(segments.next_id())?,
            arenas: Mutex::default(),
            growth: tokio::sync::Mutex::default(),
        })
    }

    pub(super) fn heartbeat(&self) -> &Heartbeat {
        &self.heartbeat
    }

    pub(super) fn heartbeat_offer(&self) -> wire::SegmentOffer {
        wire::SegmentOffer {
            segment: self.heartbeat.id(),
            byte_len: self.heartbeat.byte_len(),
            role: wire::SegmentRole::Heartbeat.into(),
        }
    }

    /// Leases from an arena that has room; `None` if none has.
    pub(super) fn try_lease(&self, byte_len: u64) -> Result<Option<Lease>, ShmError> {
        for arena in self.arenas().iter() {
            match arena.lease(byte_len) {
                Ok(lease) => return Ok(Some(lease)),
                Err(ShmError::Exhausted { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Checks that the process may hold a further segment.
    pub(super) fn check_count(&self) -> Result<(), ShmError> {
        let heartbeat_and_next = 2;
        if self.arenas().len() + heartbeat_and_next > MAX_PEER_SEGMENTS {
            return Err(ShmError::TooManySegments);
        }
        Ok(())
    }

    /// Takes over an arena that the process has mapped.
    pub(super) fn mapped(&self, arena: PooledArena) {
        self.arenas().push(arena);
    }

    fn arenas(&self) -> MutexGuard<'_, Vec<PooledArena>> {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Describes an arena to the process that shall map it.
pub(super) fn arena_offer(arena: &PooledArena) -> wire::SegmentOffer {
    wire::SegmentOffer {
        segment: arena.segment_id(),
        byte_len: arena.segment_bytes(),
        role: wire::SegmentRole::Tensors.into(),
    }
}
