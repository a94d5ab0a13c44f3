//! Plans and results checked as the pool checks them, for tests of what lives on a pool.

use std::collections::HashMap;
use std::sync::Arc;

use velox_proto::v1;
use velox_proto::worker::v1 as wire;

use super::attest::AttestedResult;
use super::event::WorkerKey;
use super::facts::{ModelFacts, WorkerFacts};
use super::plan::{PlanExpectation, RowLedger};

/// Layers of every scripted model.
const LAYERS: u32 = 2;

/// The gateway's view of one process that a test plays.
#[derive(Debug)]
pub(crate) struct ScriptedWorker {
    pub(crate) key: WorkerKey,
    pub(crate) facts: Arc<WorkerFacts>,
    pub(crate) models: HashMap<String, Arc<ModelFacts>>,
    ledger: RowLedger,
}

impl ScriptedWorker {
    /// Makes a process that runs the given models on a backend.
    pub(crate) fn new(key: WorkerKey, backend: v1::Backend, models: &[v1::Model]) -> Self {
        let wire = wire::WorkerFacts {
            protocol_min: 1,
            protocol_max: 1,
            pid: 1,
            device: "scripted".to_owned(),
            kernel: "none".to_owned(),
            backends: vec![v1::BackendCapability {
                backend: backend.into(),
                available: true,
                reason: String::new(),
                ..v1::BackendCapability::default()
            }],
            ..wire::WorkerFacts::default()
        };
        let facts = WorkerFacts::try_from_wire(wire, 1).unwrap();
        let models = models.iter().map(|model| {
            let wire = wire::ModelFacts {
                model: Some(model.clone()),
                backend: backend.into(),
                n_layers: LAYERS,
                max_rows: 128,
                tokenizer_sha256: "digest".to_owned(),
                ..wire::ModelFacts::default()
            };
            let checked = ModelFacts::try_from_wire(wire, &model.name, &facts).unwrap();
            (model.name.clone(), Arc::new(checked))
        });
        Self {
            key,
            models: models.collect(),
            facts: Arc::new(facts),
            ledger: RowLedger::default(),
        }
    }

    /// Takes a plan as the pool does.
    ///
    /// # Panics
    /// If the plan breaks the contract.
    pub(crate) fn expect(&mut self, plan: &wire::StepPlan) -> PlanExpectation {
        self.ledger.expect(plan, &self.models).unwrap()
    }

    /// Returns the number of rows that the plans so far leave open.
    pub(crate) fn open_rows(&self) -> usize {
        self.ledger.len()
    }

    /// Makes the honest result of a plan whose rows yielded `rows`, in the plan's order.
    pub(crate) fn result(
        &mut self,
        plan: &wire::StepPlan,
        expectation: &PlanExpectation,
        rows: Vec<wire::RowResult>,
    ) -> AttestedResult {
        for row in rows.iter().filter(|row| row.error.is_some()) {
            self.ledger.free(row.row);
        }
        let backend = self.models.values().next().unwrap().backend();
        let result = wire::StepResult {
            sequence: plan.sequence,
            op_counts: op_counts(plan, &rows),
            rows,
            backend: backend.into(),
            sampler: backend.into(),
            compute_us: 1,
        };
        AttestedResult::attest(self.key, &self.facts, expectation, result).unwrap()
    }
}

/// Counts the stages of a plan whose rows all did what they were asked to.
fn op_counts(plan: &wire::StepPlan, rows: &[wire::RowResult]) -> Vec<v1::OpCount> {
    let yielded = |decode: &wire::DecodeRow| {
        let result = rows.iter().find(|result| result.row == decode.row);
        let tokens = result.map_or(0, |result| result.tokens.len());
        // A draft is checked in one pass.
        if decode.draft_token_ids.is_empty() {
            tokens
        } else {
            tokens.min(1)
        }
    };
    let steps = plan.decode.iter().map(yielded).max();
    let steps = u64::try_from(steps.unwrap_or(0)).unwrap();
    let passes = steps.max(u64::from(plan.prefill.is_some()));
    let ends = plan
        .prefill
        .as_ref()
        .is_some_and(|chunk| chunk.sample || chunk.score.is_some());
    let samples = plan.prefill.as_ref().is_some_and(|chunk| chunk.sample);
    let layers = passes * u64::from(LAYERS);
    [
        ("embed", passes),
        ("norm_project", layers),
        ("rope", layers),
        ("append_attend", layers),
        ("output_project", layers),
        ("gated_mlp", layers),
        ("head", steps.max(u64::from(ends))),
        ("sample", steps.max(u64::from(samples))),
    ]
    .into_iter()
    .filter(|&(_op, count)| count > 0)
    .map(|(op, count)| v1::OpCount {
        op: op.to_owned(),
        count,
    })
    .collect()
}
