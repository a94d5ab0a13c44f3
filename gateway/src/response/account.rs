//! Usage, timings and provenance of one request, gathered step by step.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use velox_proto::op::OpId;
use velox_proto::v1::{self, Backend};

use crate::policy::AUTO_ORDER;
use crate::pool::{AttestedProvenance, WorkerKey};
use crate::scheduler::Step;

/// A run of results of one worker.
#[derive(Debug)]
struct Span {
    worker: WorkerKey,
    wire: v1::ProvenanceSpan,
}

/// What is reported at the end.
#[derive(Debug)]
pub struct Account {
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_event: Instant,
    tokens: u32,
    drafted_tokens: u32,
    accepted_draft_tokens: u32,
    /// Results that the reader gets: sampled tokens, or scored positions.
    published: u64,
    recoveries: u32,
    replay: &'static str,
    fallback_reason: String,
    kv_bytes: (u64, u64),
    op_counts: BTreeMap<OpId, u64>,
    sampler: Option<Backend>,
    spans: Vec<Span>,
}

impl Account {
    /// Begins now.
    #[must_use]
    pub fn begin() -> Self {
        let now = Instant::now();
        Self {
            submitted: now,
            started: None,
            first_token: None,
            last_event: now,
            tokens: 0,
            drafted_tokens: 0,
            accepted_draft_tokens: 0,
            published: 0,
            recoveries: 0,
            replay: "",
            fallback_reason: String::new(),
            kv_bytes: (0, 0),
            op_counts: BTreeMap::new(),
            sampler: None,
            spans: Vec::new(),
        }
    }

    /// The row left the queue.
    pub(super) fn started(&mut self, at: Instant) {
        self.started = Some(at);
        self.last_event = at;
    }

    /// A plan retired.
    pub(super) fn step(&mut self, step: &Step) {
        self.last_event = step.at;
        (self.recoveries, self.replay) = step.recoveries;
        self.kv_bytes = step.kv_bytes;
        self.drafted_tokens += step.drafted;
        if let Some(provenance) = &step.provenance {
            self.fallback_reason = step.fallback_reason.to_string();
            self.produced(provenance);
        }
    }

    /// A token was sampled.
    pub(super) fn token(&mut self, at: Instant) {
        self.tokens += 1;
        self.published += 1;
        self.first_token.get_or_insert(at);
    }

    /// The token that was just counted is one of a draft.
    pub(super) fn accepted_draft(&mut self) {
        self.accepted_draft_tokens += 1;
    }

    /// A position was scored.
    pub(super) fn scored(&mut self) {
        self.published += 1;
    }

    fn produced(&mut self, provenance: &AttestedProvenance) {
        for &(op, count) in provenance.op_counts() {
            *self.op_counts.entry(op).or_default() += count;
        }
        self.sampler = weakest(self.sampler, provenance.sampler());
        if self
            .spans
            .last()
            .is_some_and(|span| span.worker == provenance.worker())
        {
            return;
        }
        let first_token_index = self.published;
        // A worker that was lost before its first result produced nothing that anybody sees.
        self.spans
            .retain(|span| span.wire.first_token_index < first_token_index);
        self.spans.push(Span {
            worker: provenance.worker(),
            wire: v1::ProvenanceSpan {
                first_token_index,
                backend: provenance.backend().into(),
                device: provenance.device().to_owned(),
                kernel: provenance.kernel().to_owned(),
                worker_id: provenance.worker().to_string(),
            },
        });
    }

    /// Returns tokens read and written.
    #[must_use]
    pub fn usage(&self, prompt_tokens: u32) -> v1::Usage {
        v1::Usage {
            prompt_tokens,
            cached_tokens: 0,
            completion_tokens: self.tokens,
            recoveries: self.recoveries,
            truncated_tokens: 0,
            replay: self.replay.to_owned(),
            drafted_tokens: self.drafted_tokens,
            accepted_draft_tokens: self.accepted_draft_tokens,
        }
    }

    /// Returns where the time went.
    #[must_use]
    pub fn timings(&self) -> v1::Timings {
        let started = self.started.unwrap_or(self.last_event);
        let first_token = self.first_token.unwrap_or(self.last_event);
        let decode = self.last_event - first_token;
        let further = self.tokens.saturating_sub(1);
        v1::Timings {
            queue_ms: millis(started - self.submitted),
            prefill_ms: millis(first_token - started),
            decode_ms: millis(decode),
            decode_tokens_per_s: (further > 0 && !decode.is_zero())
                .then(|| f64::from(further) / decode.as_secs_f64()),
        }
    }

    /// Returns which code ran: the weakest label of all spans, and the device that goes with it.
    #[must_use]
    pub fn provenance(&self) -> v1::Provenance {
        let spans = || self.spans.iter().map(|span| &span.wire);
        let weakest = spans().max_by_key(|span| strength(span.backend()));
        v1::Provenance {
            backend: weakest.map_or(0, |span| span.backend),
            device: weakest.map(|span| span.device.clone()).unwrap_or_default(),
            kernel: weakest.map(|span| span.kernel.clone()).unwrap_or_default(),
            fallback_reason: self.fallback_reason.clone(),
            op_counts: self
                .op_counts
                .iter()
                .map(|(op, &count)| v1::OpCount {
                    op: op.name().to_owned(),
                    count,
                })
                .collect(),
            sampler: self.sampler.unwrap_or(Backend::Unspecified).into(),
            spans: spans().cloned().collect(),
        }
    }

    /// Returns the bytes of keys and of values.
    pub(super) fn kv_bytes(&self) -> (u64, u64) {
        self.kv_bytes
    }
}

/// Place in the order from strong to weak.
fn strength(backend: Backend) -> usize {
    AUTO_ORDER
        .iter()
        .position(|&known| known == backend)
        .unwrap_or(AUTO_ORDER.len())
}

fn weakest(before: Option<Backend>, now: Option<Backend>) -> Option<Backend> {
    before
        .into_iter()
        .chain(now)
        .max_by_key(|&backend| strength(backend))
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
