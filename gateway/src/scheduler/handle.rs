//! The two ends of a row's output: the scheduler never waits, dropping the reader's end cancels.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use velox_proto::worker::v1 as wire;

use crate::error::GatewayError;
use crate::pool::AttestedProvenance;

/// Events that a row may be ahead of its reader.
const EVENTS: usize = 32;

/// Places that stay free for what is not the result of a plan: the start and the end.
const RESERVED: usize = 2;

/// Most plans without an answer that contain the row, plus the one that is about to be made.
const PLANS: usize = 3;

/// Why a row ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowEnd {
    /// It sampled a token that ends the answer.
    EndToken(u32),
    /// It sampled as many tokens as it may.
    Length,
    /// Every position was scored.
    Scored,
}

/// What one plan did for a row.
#[derive(Debug)]
pub struct Step {
    /// When its result arrived.
    pub at: Instant,
    /// Sampled tokens, none of them past an end.
    pub tokens: Vec<wire::SampledToken>,
    /// Draft tokens that were checked.
    pub drafted: u32,
    /// How many of `tokens`, from the first on, are draft tokens.
    pub accepted_drafts: usize,
    /// Scored positions.
    pub scores: Vec<wire::ScoredToken>,
    /// Logits of the scored positions, f32 little-endian.
    pub logits: Option<Bytes>,
    /// Which code ran.
    pub provenance: Option<Arc<AttestedProvenance>>,
    /// Why not the backend that the caller prefers; empty if it is.
    pub fallback_reason: Arc<str>,
    /// Bytes of keys and of values that the row's cache has allocated.
    pub kv_bytes: (u64, u64),
    /// How often the row went on with another worker, and how it was replayed.
    pub recoveries: (u32, &'static str),
    /// Set if this was the last step.
    pub end: Option<RowEnd>,
}

/// What happens to a row, in order; a step with an end, or `Failed`, is the last.
#[derive(Debug)]
pub enum RowEvent {
    /// It left the queue for the first time.
    Started(Instant),
    /// A plan retired.
    Step(Box<Step>),
    /// It cannot go on.
    Failed(GatewayError),
}

/// The reader's end. Dropping it cancels the row wherever it is.
#[derive(Debug)]
pub struct RowHandle {
    events: mpsc::Receiver<RowEvent>,
    wake: Arc<Notify>,
}

/// Makes both ends.
pub(crate) fn channel(wake: Arc<Notify>) -> (mpsc::Sender<RowEvent>, RowHandle) {
    let (output, events) = mpsc::channel(EVENTS);
    (output, RowHandle { events, wake })
}

/// Returns whether the row may be part of a further plan without overrunning its reader.
pub(super) fn has_room(output: &mpsc::Sender<RowEvent>, in_flight: usize) -> bool {
    output.capacity() > in_flight + RESERVED
}

impl RowHandle {
    /// Polls for the next event; `None` after the last one.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<RowEvent>> {
        let event = std::task::ready!(self.events.poll_recv(context));
        // A row pauses at most this close to its limit. Looking at the length after the event was taken cannot
        // miss a pause: what the scheduler saw when it paused the row was at least as long.
        if self.events.len() + 1 + PLANS + RESERVED >= EVENTS {
            self.wake.notify_one();
        }
        Poll::Ready(event)
    }

    /// Waits for the next event; `None` after the last one.
    ///
    /// # Cancel safety
    /// No event is lost.
    pub async fn next(&mut self) -> Option<RowEvent> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }
}

impl Drop for RowHandle {
    fn drop(&mut self) {
        self.events.close();
        self.wake.notify_one();
    }
}
