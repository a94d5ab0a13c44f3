//! A worker as the scheduler sees it: what it hosts, which rows it has, which plans it has not answered.

use std::collections::VecDeque;
use std::sync::Arc;

use velox_shm::Lease;

use crate::planner::{ModelIndex, RowId, WorkerState};
use crate::policy::{Policy, label};
use crate::pool::{ModelFacts, WorkerFacts};
use crate::request::ModelIdentity;

/// A row in a plan that was sent.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) row: RowId,
    pub(super) wire_row: u64,
    /// Known tokens that it fed; 0 = it decoded.
    pub(super) prefilled: u32,
    /// Guesses that it checks.
    pub(super) draft: Vec<u32>,
    /// Where the worker writes logits and how many bytes; lives until the plan retires or the worker is reaped.
    pub(super) logits: Option<(Lease, u64)>,
}

/// A plan without an answer.
#[derive(Debug)]
pub(super) struct SentPlan {
    pub(super) sequence: u64,
    pub(super) entries: Vec<Entry>,
}

/// A process that said it is ready and is not lost yet.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) facts: Arc<WorkerFacts>,
    pub(super) models: Vec<Arc<ModelFacts>>,
    pub(super) takes_plans: bool,
    /// In the order of placement.
    pub(super) rows: Vec<RowId>,
    /// Open rows that the next plan closes.
    pub(super) closing: Vec<u64>,
    pub(super) sent: VecDeque<SentPlan>,
    pub(super) last_model: ModelIndex,
    sequence: u64,
}

impl Worker {
    pub(super) fn new(facts: Arc<WorkerFacts>, models: Vec<Arc<ModelFacts>>) -> Self {
        Self {
            facts,
            models,
            takes_plans: true,
            rows: Vec::new(),
            closing: Vec::new(),
            sent: VecDeque::new(),
            last_model: ModelIndex::default(),
            sequence: 0,
        }
    }

    pub(super) fn state(&self) -> WorkerState {
        WorkerState {
            uncollected: self.sent.len(),
            last_model: self.last_model,
        }
    }

    /// Returns the number of the next plan.
    pub(super) fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    pub(super) fn model(&self, wanted: ModelIdentity<'_>) -> Option<&Arc<ModelFacts>> {
        self.models.iter().find(|model| model.identity() == wanted)
    }

    pub(super) fn forget(&mut self, row: RowId) {
        self.rows.retain(|&own| own != row);
    }

    /// Returns why a request does not run on the backend that it prefers; empty if it does.
    pub(super) fn fallback_reason(&self, policy: &Policy, model: &ModelFacts) -> Arc<str> {
        let Some(missed) = policy.missed(model.backend()) else {
            return model.fallback_reason().into();
        };
        let why = self
            .facts
            .wire()
            .backends
            .iter()
            .find(|entry| entry.backend() == missed && !entry.available)
            .map_or("the model is loaded on another backend", |entry| {
                entry.reason.as_str()
            });
        format!("{}: {why}", label(missed)).into()
    }
}
