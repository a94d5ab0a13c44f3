//! The loop: take what happened, then take a turn.

mod dispatch;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use velox_proto::error::{Reason, ServiceFault};
use velox_proto::worker::v1 as wire;
use velox_shm::Lease;

use super::row::{Fate, Row, Suspicion};
use super::worker::{Entry, Worker};
use super::{Command, Load, READER_IDLE, SchedulerConfig, Usage, Workers};
use crate::admission::{self, KvLedger, Place, Waiting};
use crate::catalog::Catalog;
use crate::error::GatewayError;
use crate::planner::{ModelIndex, RowId};
use crate::pool::{AttestedResult, LossCause, PoolError, PoolEvent, WorkerKey};

/// State of the scheduler; only its own task touches it.
#[derive(Debug)]
pub(super) struct Actor<W: Workers> {
    config: SchedulerConfig,
    pool: W,
    catalog: Arc<Catalog>,
    load: watch::Sender<Load>,
    rows: HashMap<RowId, Row>,
    /// Rows without a worker, the next one first.
    queue: VecDeque<RowId>,
    workers: BTreeMap<WorkerKey, Worker>,
    /// Room for the logits of rows that want them, while no plan uses it.
    landings: HashMap<RowId, Lease>,
    /// Leases on their way, with the row's number in the worker.
    leasing: JoinSet<(RowId, u64, Result<Lease, PoolError>)>,
    ledger: KvLedger,
    /// Names behind [`ModelIndex`].
    models: Vec<String>,
    last_row: u64,
    last_wire_row: u64,
    last_loss: String,
}

impl<W: Workers> Actor<W> {
    pub(super) fn new(
        config: SchedulerConfig,
        pool: W,
        catalog: Arc<Catalog>,
        load: watch::Sender<Load>,
    ) -> Self {
        Self {
            ledger: KvLedger::new(config.kv_budget_bytes),
            config,
            pool,
            catalog,
            load,
            rows: HashMap::new(),
            queue: VecDeque::new(),
            workers: BTreeMap::new(),
            landings: HashMap::new(),
            leasing: JoinSet::new(),
            models: Vec::new(),
            last_row: 0,
            last_wire_row: 0,
            last_loss: "no worker is ready yet".to_owned(),
        }
    }

    pub(super) async fn run(
        mut self,
        mut inbox: mpsc::Receiver<Command>,
        mut events: mpsc::Receiver<PoolEvent>,
        wake: Arc<Notify>,
        shutdown: CancellationToken,
    ) {
        loop {
            let alarm = self.next_alarm();
            tokio::select! {
                () = shutdown.cancelled() => break,
                event = events.recv() => match event {
                    Some(event) => self.on_event(event),
                    None => break,
                },
                command = inbox.recv() => match command {
                    Some(command) => self.on_command(command),
                    None => break,
                },
                Some(leased) = self.leasing.join_next() => match leased {
                    Ok((row, wire_row, lease)) => self.on_lease(row, wire_row, lease),
                    Err(error) => tracing::error!(%error, "a lease failed"),
                },
                () = wake.notified() => {}
                () = sleep_until(alarm) => {}
            }
            // One turn for everything that happened meanwhile: rows that arrive together share their first plan.
            while let Ok(event) = events.try_recv() {
                self.on_event(event);
            }
            while let Ok(command) = inbox.try_recv() {
                self.on_command(command);
            }
            self.turn(Instant::now());
        }
        for row in self.rows.values() {
            row.fail(GatewayError::Draining);
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Submit {
                job,
                span,
                output,
                deadline,
            } => {
                self.last_row += 1;
                let id = RowId(self.last_row);
                self.enqueue(Row::new(id, *job, span, output, deadline));
            }
            Command::Usage(reply) => {
                // A caller that no longer waits needs no answer.
                let _gone = reply.send(self.usage());
            }
        }
    }

    fn enqueue(&mut self, row: Row) {
        let id = row.id;
        let kv_bytes = row.job.kv_bytes();
        if kv_bytes > self.ledger.budget() {
            row.fail(GatewayError::CacheTooSmall {
                bytes: kv_bytes,
                budget: self.ledger.budget(),
            });
            return;
        }
        self.rows.insert(id, row);
        self.queue.push_back(id);
        self.close_abandoned();
        self.place(Instant::now());
        let fresh = self.queue.iter().filter(|id| self.is_fresh(**id)).count();
        if fresh > self.config.max_queue && self.queue.back() == Some(&id) {
            self.queue.pop_back();
            self.fail(
                id,
                GatewayError::QueueFull {
                    depth: fresh - 1,
                    limit: self.config.max_queue,
                },
            );
        }
    }

    fn is_fresh(&self, id: RowId) -> bool {
        self.rows.get(&id).is_some_and(|row| row.recoveries == 0)
    }

    fn on_event(&mut self, event: PoolEvent) {
        self.catalog.observe(&event);
        match event {
            PoolEvent::Ready {
                worker,
                facts,
                models,
            } => {
                self.workers.insert(worker, Worker::new(facts, models));
            }
            PoolEvent::Result { worker, result } => self.on_result(worker, result),
            PoolEvent::Draining { worker } => {
                if let Some(worker) = self.workers.get_mut(&worker) {
                    worker.takes_plans = false;
                }
                self.evict_rows(worker, "worker is drained", Suspicion::None);
            }
            PoolEvent::Lost { worker, cause } => self.on_lost(worker, &cause),
            PoolEvent::ModelLoaded { worker, model } => {
                if let Some(worker) = self.workers.get_mut(&worker) {
                    worker.models.push(model);
                }
            }
            PoolEvent::ModelUnloaded { worker, model } => {
                if let Some(worker) = self.workers.get_mut(&worker) {
                    worker.models.retain(|own| own.name() != model);
                }
            }
            PoolEvent::ModelFailed { .. } => {}
        }
    }

    fn on_lost(&mut self, key: WorkerKey, cause: &LossCause) {
        self.last_loss = cause.to_string();
        let suspicion = match cause {
            LossCause::Exited(_)
            | LossCause::Killed(_)
            | LossCause::Wedged { .. }
            | LossCause::ChannelClosed
            | LossCause::ChannelFailed(_) => Suspicion::InLostPlan,
            LossCause::SpawnFailed(_)
            | LossCause::Unresponsive { .. }
            | LossCause::Quarantined(_)
            | LossCause::HandshakeFailed(_)
            | LossCause::Drained => Suspicion::None,
        };
        self.evict_rows(key, &self.last_loss.clone(), suspicion);
        // The process is reaped: only now may the leases of its plans go.
        self.workers.remove(&key);
    }

    /// Puts the rows of a worker at the front of the queue, the oldest first.
    fn evict_rows(&mut self, key: WorkerKey, cause: &str, suspicion: Suspicion) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let rows = std::mem::take(&mut worker.rows);
        for id in rows.into_iter().rev() {
            let Some(row) = self.rows.get_mut(&id) else {
                continue;
            };
            self.landings.remove(&id);
            self.ledger.release(row.job.kv_bytes());
            match row.evict(cause, suspicion, self.config.max_recoveries) {
                Ok(()) => self.queue.push_front(id),
                Err(error) => {
                    tracing::warn!(row = id.0, %error, "row ends");
                    row.fail(error);
                    self.rows.remove(&id);
                }
            }
        }
    }

    fn on_result(&mut self, key: WorkerKey, result: AttestedResult) {
        let now = Instant::now();
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let Some(plan) = worker.sent.pop_front() else {
            tracing::error!(worker = %key, "result without a plan");
            return;
        };
        debug_assert_eq!(plan.sequence, result.sequence());
        let provenance = result.provenance().cloned().map(Arc::new);
        let mut results: HashMap<u64, wire::RowResult> = result
            .into_rows()
            .into_iter()
            .map(|row| (row.row, row))
            .collect();
        for entry in plan.entries {
            let Some(row_result) = results.remove(&entry.wire_row) else {
                continue;
            };
            if self.is_current(entry.row, entry.wire_row) {
                self.take(entry, row_result, provenance.clone(), now);
            }
        }
    }

    fn on_lease(&mut self, id: RowId, wire_row: u64, lease: Result<Lease, PoolError>) {
        if !self.is_current(id, wire_row) {
            return;
        }
        match lease {
            Ok(lease) => {
                self.landings.insert(id, lease);
            }
            // The event that follows moves the row.
            Err(PoolError::WorkerLost(_)) => {}
            Err(error) => self.fail(id, error.into()),
        }
    }

    /// Returns whether the row is still placed as it was when it got that number.
    fn is_current(&self, id: RowId, wire_row: u64) -> bool {
        self.rows
            .get(&id)
            .and_then(|row| row.placed.as_ref())
            .is_some_and(|placed| placed.wire_row == wire_row)
    }

    fn take(
        &mut self,
        entry: Entry,
        mut result: wire::RowResult,
        provenance: Option<Arc<crate::pool::AttestedProvenance>>,
        now: Instant,
    ) {
        if let Some(error) = result.error.take() {
            // The worker freed the row itself.
            if let Some(placed) = self.placed_mut(entry.row) {
                placed.is_open = false;
            }
            let reason = error.reason.parse().unwrap_or(Reason::Internal);
            self.fail(entry.row, ServiceFault::new(reason, error.message).into());
            return;
        }
        let logits = match entry.logits {
            None => None,
            // The plan retired: nobody writes there any more.
            Some((lease, byte_len)) => match lease.copy_out(byte_len) {
                Ok(bytes) => {
                    self.landings.insert(entry.row, lease);
                    Some(Bytes::from(bytes))
                }
                Err(error) => {
                    self.fail(entry.row, error.into());
                    return;
                }
            },
        };
        let Some(row) = self.rows.get_mut(&entry.row) else {
            return;
        };
        if row.take(
            (entry.prefilled, &entry.draft),
            result,
            (provenance, logits),
            now,
        ) == Fate::Ends
        {
            self.remove(entry.row);
        }
    }

    fn placed_mut(&mut self, id: RowId) -> Option<&mut super::row::Placed> {
        self.rows.get_mut(&id)?.placed.as_mut()
    }

    /// Ends a row with an error and frees what it has.
    fn fail(&mut self, id: RowId, error: GatewayError) {
        if let Some(row) = self.rows.get(&id) {
            row.fail(error);
        }
        self.remove(id);
    }

    /// Frees what a row has, wherever it is.
    fn remove(&mut self, id: RowId) {
        let Some(row) = self.rows.remove(&id) else {
            return;
        };
        self.landings.remove(&id);
        let Some(placed) = row.placed else {
            self.queue.retain(|&waiting| waiting != id);
            return;
        };
        // A plan closes rows before it opens others, so the memory may be promised again at once.
        self.ledger.release(row.job.kv_bytes());
        if let Some(worker) = self.workers.get_mut(&placed.worker) {
            worker.forget(id);
            if placed.is_open {
                worker.closing.push(placed.wire_row);
            }
        }
    }

    fn turn(&mut self, now: Instant) {
        self.close_abandoned();
        self.end_late(now);
        self.place(now);
        self.expire(now);
        let keys: Vec<WorkerKey> = self.workers.keys().copied().collect();
        for key in keys {
            while self.plan(key) {}
        }
        self.publish();
    }

    fn close_abandoned(&mut self) {
        let abandoned: Vec<RowId> = self
            .rows
            .values()
            .filter(|row| row.is_abandoned())
            .map(|row| row.id)
            .collect();
        for id in abandoned {
            self.remove(id);
        }
    }

    fn place(&mut self, now: Instant) {
        if self.queue.is_empty() {
            return;
        }
        let mut places: Vec<Place<'_>> = Vec::new();
        for (&key, worker) in self.workers.iter().filter(|(_, worker)| worker.takes_plans) {
            let rows = u32::try_from(worker.rows.len()).unwrap_or(u32::MAX);
            places.extend(worker.models.iter().map(|model| Place {
                worker: key,
                model: model.identity(),
                backend: model.backend(),
                rows,
                max_rows: self.config.max_rows.min(model.max_rows()),
            }));
        }
        let waiting = self.queue.iter().filter_map(|id| {
            let row = self.rows.get(id)?;
            Some(Waiting {
                id: row.id,
                model: row.job.identity(),
                kv_bytes: row.job.kv_bytes(),
                policy: row.job.policy(),
                ran_on: row.ran_on(),
            })
        });
        let placements = admission::place(waiting, &mut places, &mut self.ledger);
        for placement in &placements {
            self.start(placement.row, placement.worker, now);
        }
        if !placements.is_empty() {
            self.queue
                .retain(|id| !placements.iter().any(|placement| placement.row == *id));
        }
    }

    fn start(&mut self, id: RowId, key: WorkerKey, now: Instant) {
        let Some(row) = self.rows.get_mut(&id) else {
            return;
        };
        let index = intern(&mut self.models, row.job.model());
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let fallback_reason = worker
            .model(row.job.identity())
            .map(|model| worker.fallback_reason(row.job.policy(), model))
            .unwrap_or_default();
        self.last_wire_row += 1;
        row.place((key, index), self.last_wire_row, fallback_reason, now);
        worker.rows.push(id);
        if let Some(byte_len) = row.job.logits_bytes(self.config.plan.sole_chunk_tokens) {
            let lease = self.pool.lease(key, byte_len);
            let wire_row = self.last_wire_row;
            self.leasing
                .spawn(async move { (id, wire_row, lease.await) });
        }
    }

    /// Ends rows whose deadline passed or whose reader stopped, wherever they are.
    fn end_late(&mut self, now: Instant) {
        let mut late = Vec::new();
        for row in self.rows.values_mut() {
            if !row.is_behind() {
                row.behind = None;
            }
            if let Some(deadline) = row.deadline.filter(|deadline| deadline.at <= now) {
                late.push((row.id, GatewayError::DeadlineExceeded(deadline.limit)));
            } else if row.is_behind() && now >= *row.behind.get_or_insert(now) + READER_IDLE {
                let message = format!("nothing was read for {} s", READER_IDLE.as_secs());
                let fault = ServiceFault::new(Reason::Cancelled, message);
                late.push((row.id, fault.into()));
            }
        }
        for (id, error) in late {
            self.fail(id, error);
        }
    }

    /// Ends rows that waited too long while no worker could run them.
    fn expire(&mut self, now: Instant) {
        let mut late = Vec::new();
        for id in &self.queue {
            let Some(row) = self.rows.get_mut(id) else {
                continue;
            };
            let has_worker = self.workers.values().any(|worker| {
                let model = worker.model(row.job.identity());
                worker.takes_plans
                    && model.is_some_and(|model| row.job.policy().rank(model.backend()).is_some())
            });
            if has_worker {
                row.stranded = None;
            } else if now >= *row.stranded.get_or_insert(now) + self.config.worker_wait {
                late.push(*id);
            }
        }
        for id in late {
            let error = self
                .rows
                .get(&id)
                .map(|row| GatewayError::WorkerUnavailable {
                    waited: self.config.worker_wait,
                    cause: row
                        .last_loss
                        .clone()
                        .unwrap_or_else(|| self.last_loss.clone()),
                    next_token_index: (row.recoveries > 0).then(|| row.next_token_index()),
                });
            if let Some(error) = error {
                self.fail(id, error);
            }
        }
    }

    fn next_alarm(&self) -> Option<Instant> {
        let stranded = self
            .queue
            .iter()
            .filter_map(|id| self.rows.get(id)?.stranded)
            .map(|since| since + self.config.worker_wait);
        let rows = self.rows.values();
        let own = rows.flat_map(|row| {
            let idle = row.behind.map(|since| since + READER_IDLE);
            row.deadline
                .map(|deadline| deadline.at)
                .into_iter()
                .chain(idle)
        });
        stranded.chain(own).min()
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for row in self.rows.values() {
            *usage
                .by_model
                .entry(row.job.model().to_owned())
                .or_default() += 1;
        }
        for (&key, worker) in &self.workers {
            usage.by_worker.insert(key, worker.rows.len());
        }
        usage
    }

    fn publish(&self) {
        let kv_bytes = self
            .rows
            .values()
            .map(|row| row.kv_bytes.0.saturating_add(row.kv_bytes.1))
            .sum();
        let load = Load {
            running: self.rows.len() - self.queue.len(),
            waiting: self.queue.len(),
            kv_bytes,
        };
        self.load.send_if_modified(|last| {
            let changed = *last != load;
            *last = load;
            changed
        });
    }
}

/// Returns the number of a model's name.
fn intern(models: &mut Vec<String>, name: &str) -> ModelIndex {
    let place = models.iter().position(|known| known == name);
    let place = place.unwrap_or_else(|| {
        models.push(name.to_owned());
        models.len() - 1
    });
    ModelIndex(u32::try_from(place).unwrap_or(u32::MAX))
}

async fn sleep_until(alarm: Option<Instant>) {
    match alarm {
        Some(alarm) => tokio::time::sleep_until(alarm).await,
        None => std::future::pending().await,
    }
}
