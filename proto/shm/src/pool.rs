//! Segments kept for reuse: their pages were touched once, which costs more than a copy.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::arena::Arena;
use crate::error::ShmError;
use crate::layout::Layout;
use crate::segment::Segment;

/// Every segment of a gateway, in use or idle; clones share it.
#[derive(Debug, Clone)]
pub struct SegmentPool {
    shared: Arc<Mutex<State>>,
    limit_bytes: u64,
}

#[derive(Debug)]
struct State {
    entries: Vec<Entry>,
    /// Number of the next segment; none is used twice.
    next_id: u64,
}

#[derive(Debug)]
struct Entry {
    arena: Arena,
    acquired: bool,
}

impl Entry {
    /// An arena that was given back may still have leases that wait for their worker's end.
    fn is_idle(&self) -> bool {
        !self.acquired && self.arena.leased_bytes() == 0
    }
}

impl State {
    fn created_bytes(&self) -> u64 {
        self.entries
            .iter()
            .map(|entry| entry.arena.segment_bytes())
            .sum()
    }
}

impl SegmentPool {
    /// Makes an empty pool that never holds more than `limit_bytes`.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        let state = State {
            entries: Vec::new(),
            next_id: 1,
        };
        Self {
            shared: Arc::new(Mutex::new(state)),
            limit_bytes,
        }
    }

    /// Takes the smallest idle arena with room for `data_bytes`, else creates one, dropping idle ones if they are in
    /// the way.
    ///
    /// Touching new pages takes about a millisecond per MiB: call it where blocking is allowed.
    ///
    /// # Errors
    /// [`ShmError::Exhausted`] at the limit, else those of [`Segment::create`].
    pub fn acquire(&self, data_bytes: u64) -> Result<PooledArena, ShmError> {
        let layout = Layout::new(data_bytes)?;
        let mut state = self.state();
        let fitting = state
            .entries
            .iter_mut()
            .filter(|entry| entry.is_idle() && entry.arena.capacity_bytes() >= data_bytes)
            .min_by_key(|entry| entry.arena.capacity_bytes());
        if let Some(entry) = fitting {
            entry.acquired = true;
            return Ok(self.guard(entry.arena.clone()));
        }
        self.make_room(&mut state, layout.byte_len())?;
        let id = state.next_id;
        let arena = Arena::new(Segment::create(id, data_bytes)?);
        state.next_id = id.wrapping_add(1);
        state.entries.push(Entry {
            arena: arena.clone(),
            acquired: true,
        });
        Ok(self.guard(arena))
    }

    /// Returns a number for a segment that is not of the pool (a heartbeat), different from all others.
    #[must_use]
    pub fn next_id(&self) -> u64 {
        let mut state = self.state();
        let id = state.next_id;
        state.next_id = id.wrapping_add(1);
        id
    }

    /// Returns the bytes of all segments, in use or idle.
    #[must_use]
    pub fn created_bytes(&self) -> u64 {
        self.state().created_bytes()
    }

    /// Returns the bytes of all leased slots.
    #[must_use]
    pub fn leased_bytes(&self) -> u64 {
        self.state()
            .entries
            .iter()
            .map(|entry| entry.arena.leased_bytes())
            .sum()
    }

    fn make_room(&self, state: &mut State, asked: u64) -> Result<(), ShmError> {
        let mut free = self.limit_bytes.saturating_sub(state.created_bytes());
        let idle: u64 = state
            .entries
            .iter()
            .filter(|entry| entry.is_idle())
            .map(|entry| entry.arena.segment_bytes())
            .sum();
        if asked > free + idle {
            return Err(ShmError::Exhausted {
                asked,
                free: free + idle,
                limit: self.limit_bytes,
            });
        }
        state.entries.retain(|entry| {
            let keep = asked <= free || !entry.is_idle();
            if !keep {
                free += entry.arena.segment_bytes();
            }
            keep
        });
        Ok(())
    }

    fn guard(&self, arena: Arena) -> PooledArena {
        PooledArena {
            arena,
            pool: self.clone(),
        }
    }

    /// Held while a segment is created: two callers must not both find room for one.
    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An arena that goes back to its pool on drop.
///
/// Drop it only after the worker that mapped it was reaped: the next worker gets the same memory.
#[derive(Debug)]
#[must_use = "dropping an arena gives it back to the pool"]
pub struct PooledArena {
    arena: Arena,
    pool: SegmentPool,
}

impl Deref for PooledArena {
    type Target = Arena;

    fn deref(&self) -> &Arena {
        &self.arena
    }
}

impl Drop for PooledArena {
    fn drop(&mut self) {
        let id = self.arena.segment_id();
        let mut state = self.pool.state();
        if let Some(entry) = state
            .entries
            .iter_mut()
            .find(|entry| entry.arena.segment_id() == id)
        {
            entry.acquired = false;
        }
    }
}

#[cfg(test)]
mod tests;
