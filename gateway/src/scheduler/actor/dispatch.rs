//! From a decision to a plan on its way.

use velox_proto::tensor::DType;
use velox_proto::worker::v1 as wire;
use velox_shm::Lease;

use super::super::Workers;
use super::super::worker::{Entry, SentPlan};
use super::Actor;
use crate::error::GatewayError;
use crate::planner::{self, Decision, Reader};
use crate::pool::{PoolError, WorkerKey};

impl<W: Workers> Actor<W> {
    /// Sends the next plan of a worker; returns whether there was one.
    pub(super) fn plan(&mut self, key: WorkerKey) -> bool {
        let Some(worker) = self.workers.get_mut(&key) else {
            return false;
        };
        if !worker.takes_plans || worker.sent.len() >= self.config.plan.uncollected_plans {
            return false;
        }
        let views: Vec<_> = worker
            .rows
            .iter()
            .filter_map(|id| {
                let row = self.rows.get(id)?;
                let mut view = row.view()?;
                // Logits have one place to land: the row pauses until it is there and free.
                if row.job.wants_logits() && !self.landings.contains_key(id) {
                    view.reader = Reader::Behind;
                }
                Some(view)
            })
            .collect();
        let decision = planner::decide(&views, worker.state(), &self.config.plan);
        if decision.is_empty() && worker.closing.is_empty() {
            return false;
        }
        let mut plan = wire::StepPlan {
            sequence: worker.next_sequence(),
            close_rows: std::mem::take(&mut worker.closing),
            ..wire::StepPlan::default()
        };
        let entries = self.fill(&decision, &mut plan);
        self.send(key, plan, entries)
    }

    /// Writes a decision down as a message and counts it in the rows.
    fn fill(&mut self, decision: &Decision, plan: &mut wire::StepPlan) -> Vec<Entry> {
        let mut entries = Vec::with_capacity(decision.decode.len() + 1);
        if let Some(chunk) = decision.prefill
            && let Some(row) = self.rows.get_mut(&chunk.row)
        {
            plan.open_rows.extend(row.open());
            plan.prefill = row.feed(chunk.tokens);
            let logits = match row.job.logits_shape(chunk.start, chunk.tokens) {
                Some(shape) => self
                    .landings
                    .remove(&chunk.row)
                    .and_then(|lease| land(lease, shape, plan)),
                None => None,
            };
            entries.push(Entry {
                row: chunk.row,
                wire_row: plan.prefill.as_ref().map_or(0, |prefill| prefill.row),
                prefilled: chunk.tokens,
                draft: Vec::new(),
                logits,
            });
        }
        for &decode in &decision.decode {
            if let Some(entry) = self
                .rows
                .get_mut(&decode.row)
                .and_then(|row| row.decode(decode))
            {
                entries.push(Entry {
                    row: decode.row,
                    wire_row: entry.row,
                    prefilled: 0,
                    draft: entry.draft_token_ids.clone(),
                    logits: None,
                });
                plan.decode.push(entry);
            }
        }
        entries
    }

    fn send(&mut self, key: WorkerKey, plan: wire::StepPlan, entries: Vec<Entry>) -> bool {
        let sequence = plan.sequence;
        let closed = plan.close_rows.clone();
        let opened: Vec<u64> = plan.open_rows.iter().map(|open| open.row).collect();
        let sent = self.pool.submit(key, plan);
        let Some(worker) = self.workers.get_mut(&key) else {
            return false;
        };
        let first = entries
            .first()
            .and_then(|entry| self.rows.get(&entry.row)?.placed.as_ref());
        if let Some(placed) = first {
            worker.last_model = placed.model;
        }
        match sent {
            Ok(()) => {
                worker.sent.push_back(SentPlan { sequence, entries });
                true
            }
            Err(PoolError::WorkerLost(_) | PoolError::ShuttingDown) => {
                // Its rows stay where they are until the event says that the process is reaped. They cannot have
                // killed it with a plan that it never got.
                worker.takes_plans = false;
                for entry in entries {
                    if let Some(placed) = self.placed_mut(entry.row) {
                        placed.in_flight = placed.in_flight.saturating_sub(1);
                    }
                }
                false
            }
            Err(error) => {
                tracing::error!(worker = %key, %error, "plan was refused");
                // The worker still has these rows: a later plan closes them.
                worker.closing.extend(closed);
                let has_rows = !entries.is_empty();
                for entry in entries {
                    if opened.contains(&entry.wire_row)
                        && let Some(placed) = self.placed_mut(entry.row)
                    {
                        placed.is_open = false;
                    }
                    self.fail(entry.row, GatewayError::Internal("a plan was refused"));
                }
                // Without rows the next plan would be the same: it waits for the next turn.
                has_rows
            }
        }
    }
}

/// Writes into a plan where the logits of its chunk land; returns the lease and how much of it they take.
fn land(lease: Lease, shape: [u64; 2], plan: &mut wire::StepPlan) -> Option<(Lease, u64)> {
    let score = plan.prefill.as_mut()?.score.as_mut()?;
    match lease.handle(DType::F32, &shape) {
        Ok(handle) => {
            let byte_len = handle.byte_len;
            score.logits = Some(handle);
            Some((lease, byte_len))
        }
        Err(error) => {
            tracing::error!(%error, "lease does not hold the logits it was made for");
            None
        }
    }
}
