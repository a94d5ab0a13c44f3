//! What a supervisor shows of its slot, and the only way to reach its process.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use velox_proto::error::{Reason, ServiceFault};
use velox_proto::worker::v1 as wire;

use super::attest::{AttestedResult, Violation};
use super::control::Control;
use super::error::PoolError;
use super::event::{LossCause, SlotState, WorkerKey, WorkerSnapshot};
use super::facts::{ModelFacts, WorkerFacts};
use super::memory::WorkerMemory;
use super::plan::{MAX_PLANS_IN_FLIGHT, PlanError, PlanExpectation, RowLedger};
use super::session::Command;

/// A plan on its way to the worker.
#[derive(Debug)]
pub(super) struct SentPlan {
    pub(super) plan: wire::StepPlan,
    pub(super) expectation: PlanExpectation,
}

/// A process that passed its handshake, for those who talk to it beside the supervisor.
#[derive(Debug)]
pub(super) struct LiveWorker {
    pub(super) key: WorkerKey,
    pub(super) facts: Arc<WorkerFacts>,
    pub(super) control: Control,
    pub(super) memory: Arc<WorkerMemory>,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) busy: Arc<BusyCount>,
}

impl LiveWorker {
    /// Runs a call that occupies the tensor thread. Meanwhile the call's own limit stands in for the stall
    /// limit; a call that passes it has found a stuck process, which the supervisor then replaces. The caller
    /// must not drop the future: the worker would work on, unknown to the supervisor.
    pub(super) async fn on_tensor_thread<T>(
        &self,
        call: &'static str,
        limit: Duration,
        answer: impl Future<Output = Result<T, PoolError>>,
    ) -> Result<T, PoolError> {
        let _busy = self.busy.enter();
        let Ok(answer) = tokio::time::timeout(limit, answer).await else {
            let key = self.key;
            self.report(Command::Unresponsive { key, call, limit });
            return Err(PoolError::Unanswered { call, limit });
        };
        answer
    }

    /// Tells the supervisor that evidence of the process did not hold.
    pub(super) fn quarantine(&self, violation: Violation) {
        let key = self.key;
        self.report(Command::Quarantine { key, violation });
    }

    fn report(&self, command: Command) {
        if self.commands.try_send(command).is_err() {
            tracing::warn!(worker = %self.key, "report to the supervisor was lost, its inbox is full");
        }
    }
}

/// How many calls occupy the tensor thread.
#[derive(Debug, Default)]
pub(super) struct BusyCount(AtomicUsize);

impl BusyCount {
    pub(super) fn is_busy(&self) -> bool {
        // Relaxed: only the number matters, it publishes nothing else.
        self.0.load(Ordering::Relaxed) > 0
    }

    fn enter(&self) -> BusyGuard<'_> {
        // Relaxed: see `is_busy`.
        self.0.fetch_add(1, Ordering::Relaxed);
        BusyGuard(self)
    }
}

#[derive(Debug)]
struct BusyGuard<'a>(&'a BusyCount);

impl Drop for BusyGuard<'_> {
    fn drop(&mut self) {
        // Relaxed: see `BusyCount::is_busy`.
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// State of a slot behind a short lock; the supervisor writes, everybody reads.
#[derive(Debug)]
pub(super) struct Board {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    key: WorkerKey,
    slot: SlotState,
    pid: Option<u32>,
    facts: Option<Arc<WorkerFacts>>,
    last_exit: Option<LossCause>,
    accepting: Option<Accepting>,
}

/// Present exactly while the process takes plans.
#[derive(Debug)]
struct Accepting {
    worker: Arc<LiveWorker>,
    models: HashMap<String, Arc<ModelFacts>>,
    ledger: RowLedger,
    in_flight: usize,
    plans: mpsc::Sender<SentPlan>,
}

impl Board {
    pub(super) fn new(slot: u32) -> Self {
        Self {
            state: Mutex::new(State {
                key: WorkerKey {
                    slot,
                    incarnation: 0,
                },
                slot: SlotState::Starting,
                pid: None,
                facts: None,
                last_exit: None,
                accepting: None,
            }),
        }
    }

    /// Begins the next process of the slot.
    pub(super) fn begin(&self) -> WorkerKey {
        let mut state = self.state();
        state.key.incarnation = state.key.incarnation.wrapping_add(1);
        state.slot = SlotState::Starting;
        state.facts = None;
        state.key
    }

    pub(super) fn spawned(&self, pid: u32) {
        self.state().pid = Some(pid);
    }

    pub(super) fn introduced(&self, facts: &Arc<WorkerFacts>) {
        let mut state = self.state();
        state.slot = SlotState::Loading;
        state.facts = Some(Arc::clone(facts));
    }

    /// Opens the way to the process; the receiver gets what is submitted.
    pub(super) fn ready(
        &self,
        worker: Arc<LiveWorker>,
        models: &[Arc<ModelFacts>],
    ) -> mpsc::Receiver<SentPlan> {
        let (plans, receiver) = mpsc::channel(MAX_PLANS_IN_FLIGHT);
        let mut state = self.state();
        state.slot = SlotState::Ready;
        state.accepting = Some(Accepting {
            worker,
            models: by_name(models),
            ledger: RowLedger::default(),
            in_flight: 0,
            plans,
        });
        receiver
    }

    /// Closes the way to the process, which goes on with what it has.
    pub(super) fn draining(&self) {
        let mut state = self.state();
        state.slot = SlotState::Draining;
        state.accepting = None;
    }

    /// Closes the way to the process, which ends.
    pub(super) fn closed(&self) {
        self.state().accepting = None;
    }

    /// Records that the process is gone and what the slot does next.
    pub(super) fn ended(&self, cause: LossCause, next: SlotState) {
        let mut state = self.state();
        state.pid = None;
        state.accepting = None;
        state.slot = next;
        state.last_exit = Some(cause);
    }

    /// Records what the slot does between processes.
    pub(super) fn rests(&self, next: SlotState) {
        self.state().slot = next;
    }

    pub(super) fn submit(&self, key: WorkerKey, plan: wire::StepPlan) -> Result<(), PoolError> {
        let mut state = self.state();
        let accepting = state.accepting_of(key)?;
        if accepting.in_flight >= MAX_PLANS_IN_FLIGHT {
            return Err(PlanError::TooManyPlans.into());
        }
        // Reserved first: an expectation may only be taken over if the plan really goes.
        let place = accepting
            .plans
            .try_reserve()
            .map_err(|_closed| PoolError::WorkerLost(key))?;
        let expectation = accepting.ledger.expect(&plan, &accepting.models)?;
        place.send(SentPlan { plan, expectation });
        accepting.in_flight += 1;
        Ok(())
    }

    /// Records that a plan retired, and forgets the rows that failed in it.
    pub(super) fn retired(&self, key: WorkerKey, result: &AttestedResult) {
        let mut state = self.state();
        if let Ok(accepting) = state.accepting_of(key) {
            accepting.in_flight = accepting.in_flight.saturating_sub(1);
            let failed = result.rows().iter().filter(|row| row.error.is_some());
            for row in failed {
                accepting.ledger.free(row.row);
            }
        }
    }

    /// Returns the way to a process, if it takes plans.
    pub(super) fn live(&self, key: WorkerKey) -> Result<Arc<LiveWorker>, PoolError> {
        let mut state = self.state();
        Ok(Arc::clone(&state.accepting_of(key)?.worker))
    }

    /// Returns the way to the slot's process, if it takes plans.
    pub(super) fn ready_worker(&self) -> Option<Arc<LiveWorker>> {
        let state = self.state();
        let accepting = state.accepting.as_ref()?;
        Some(Arc::clone(&accepting.worker))
    }

    /// Returns what is known of a model of the slot's process.
    pub(super) fn model(&self, key: WorkerKey, name: &str) -> Option<Arc<ModelFacts>> {
        let mut state = self.state();
        let accepting = state.accepting_of(key).ok()?;
        accepting.models.get(name).cloned()
    }

    /// Lets rows of a further model open.
    pub(super) fn add_model(
        &self,
        key: WorkerKey,
        facts: Arc<ModelFacts>,
    ) -> Result<(), PoolError> {
        let mut state = self.state();
        let models = &mut state.accepting_of(key)?.models;
        models.insert(facts.name().to_owned(), facts);
        Ok(())
    }

    /// Lets no further rows of a model open; `None` if the process does not have it.
    pub(super) fn remove_model(
        &self,
        key: WorkerKey,
        name: &str,
    ) -> Result<Option<Arc<ModelFacts>>, PoolError> {
        let mut state = self.state();
        let accepting = state.accepting_of(key)?;
        let rows = accepting.ledger.rows_of(name);
        if rows > 0 {
            let text = format!("model {name:?} has {rows} open rows");
            return Err(ServiceFault::new(Reason::ModelBusy, text).into());
        }
        Ok(accepting.models.remove(name))
    }

    pub(super) fn snapshot(&self) -> WorkerSnapshot {
        let state = self.state();
        let accepting = state.accepting.as_ref();
        let mut models: Vec<Arc<ModelFacts>> = accepting
            .map(|accepting| accepting.models.values().cloned().collect())
            .unwrap_or_default();
        models.sort_by(|left, right| left.name().cmp(right.name()));
        WorkerSnapshot {
            key: state.key,
            pid: state.pid,
            state: state.slot,
            restarts: state.key.incarnation.saturating_sub(1),
            facts: state.facts.clone(),
            models,
            last_exit: state.last_exit.clone(),
            in_flight: accepting.map_or(0, |accepting| accepting.in_flight),
            rows: accepting.map_or(0, |accepting| accepting.ledger.len()),
        }
    }

    /// Held for map operations only, none of which leaves the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn accepting_of(&mut self, key: WorkerKey) -> Result<&mut Accepting, PoolError> {
        self.accepting
            .as_mut()
            .filter(|accepting| accepting.worker.key == key)
            .ok_or(PoolError::WorkerLost(key))
    }
}

fn by_name(models: &[Arc<ModelFacts>]) -> HashMap<String, Arc<ModelFacts>> {
    models
        .iter()
        .map(|facts| (facts.name().to_owned(), Arc::clone(facts)))
        .collect()
}
