//! Loaded models and which rows are open on them.

use std::collections::HashMap;

use velox_engine::error::EngineError;
use velox_engine::step::{Progress, RowId, RowOutcome, Runner, StepOutcome, StepPlan, Ticket};
use velox_proto::tensor::TensorHandle;
use velox_shm::PeerSegments;

use crate::convert::ValidPlan;
use crate::error::WorkerError;
use crate::facts::TokenizerBlob;

/// A loaded model.
pub(crate) struct Resident {
    pub(crate) runner: Box<dyn Runner>,
    pub(crate) tokenizer: TokenizerBlob,
}

impl std::fmt::Debug for Resident {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Resident")
            .field("open_rows", &self.runner.open_rows())
            .finish_non_exhaustive()
    }
}

/// A plan that a model's runner works on.
#[derive(Debug)]
pub(crate) struct Begun {
    model: String,
    ticket: Ticket,
    logits: HashMap<RowId, TensorHandle>,
}

/// The models of this worker.
#[derive(Debug, Default)]
pub(crate) struct Residents {
    models: HashMap<String, Resident>,
    rows: HashMap<RowId, String>,
}

impl Residents {
    /// Returns a model.
    pub(crate) fn get(&self, name: &str) -> Result<&Resident, WorkerError> {
        self.models
            .get(name)
            .ok_or_else(|| WorkerError::ModelNotFound(name.to_owned()))
    }

    /// Refuses a name that is taken.
    pub(crate) fn expect_free(&self, name: &str) -> Result<(), WorkerError> {
        if self.models.contains_key(name) {
            return Err(WorkerError::ModelExists(name.to_owned()));
        }
        Ok(())
    }

    /// Takes over a loaded model.
    pub(crate) fn insert(&mut self, name: String, resident: Resident) {
        self.models.insert(name, resident);
    }

    /// Drops a model that has no open rows.
    pub(crate) fn remove(&mut self, name: &str) -> Result<(), WorkerError> {
        let rows = self.get(name)?.runner.open_rows();
        if rows > 0 {
            return Err(WorkerError::ModelBusy {
                name: name.to_owned(),
                rows,
            });
        }
        self.models.remove(name);
        Ok(())
    }

    /// Counts open rows over all models.
    pub(crate) fn open_rows(&self) -> usize {
        self.rows.len()
    }

    /// Closes rows; one that is not open, because it failed, is closed already.
    pub(crate) fn close(&mut self, rows: &[RowId], progress: &dyn Progress) {
        let mut of_model: HashMap<String, Vec<RowId>> = HashMap::new();
        for row in rows {
            if let Some(name) = self.rows.remove(row) {
                of_model.entry(name).or_default().push(*row);
            }
        }
        for (name, close_rows) in of_model {
            let Some(resident) = self.models.get_mut(&name) else {
                continue;
            };
            let plan = StepPlan {
                close_rows,
                ..StepPlan::default()
            };
            let closed = resident.runner.submit(plan, progress);
            if let Err(error) = closed.and_then(|ticket| resident.runner.collect(ticket, progress))
            {
                tracing::error!(%error, model = name, "rows could not be closed");
            }
        }
    }

    /// Starts a plan that closes nothing.
    pub(crate) fn submit(
        &mut self,
        valid: ValidPlan,
        progress: &dyn Progress,
    ) -> Result<Begun, WorkerError> {
        let model = self.model_of(&valid)?;
        let opened: Vec<RowId> = valid.plan.open_rows.iter().map(|row| row.row).collect();
        let resident = self
            .models
            .get_mut(&model)
            .ok_or_else(|| WorkerError::ModelNotFound(model.clone()))?;
        let ticket = resident.runner.submit(valid.plan, progress)?;
        // From here on the rows may be open, whatever comes of the plan.
        self.rows
            .extend(opened.into_iter().map(|row| (row, model.clone())));
        Ok(Begun {
            model,
            ticket,
            logits: valid.logits,
        })
    }

    /// Whether [`Self::collect`] would not have to wait.
    pub(crate) fn is_ready(&self, begun: &Begun) -> bool {
        self.models
            .get(&begun.model)
            .is_none_or(|resident| resident.runner.is_ready(&begun.ticket))
    }

    /// Waits for a plan, and moves logits to their destinations.
    pub(crate) fn collect(
        &mut self,
        begun: Begun,
        memory: &PeerSegments,
        progress: &dyn Progress,
    ) -> Result<StepOutcome, WorkerError> {
        let resident = self
            .models
            .get_mut(&begun.model)
            .ok_or(WorkerError::ModelNotFound(begun.model))?;
        let mut outcome = resident.runner.collect(begun.ticket, progress)?;
        let mut failed = Vec::new();
        for row in &mut outcome.rows {
            store_logits(row, &begun.logits, memory);
            if row.result.is_err() {
                failed.push(row.row);
            }
        }
        self.close(&failed, progress);
        Ok(outcome)
    }

    /// Finds the one model that a plan's rows belong to.
    fn model_of(&self, valid: &ValidPlan) -> Result<String, WorkerError> {
        let prefill = valid.plan.prefill.iter().map(|chunk| chunk.row);
        let working = prefill.chain(valid.plan.decode.iter().map(|row| row.row));
        let mut model = valid.model.as_ref();
        for name in working.filter_map(|row| self.rows.get(&row)) {
            match model {
                None => model = Some(name),
                Some(other) if other == name => {}
                Some(other) => {
                    return Err(WorkerError::Invalid {
                        field: "plan",
                        problem: format!("mixes rows of models {other:?} and {name:?}"),
                    });
                }
            }
        }
        model.cloned().ok_or_else(|| WorkerError::Invalid {
            field: "plan",
            problem: "has no open rows".to_owned(),
        })
    }
}

/// Moves a scored row's logits to their destination; a destination that does not fit fails the row only.
fn store_logits(
    row: &mut RowOutcome,
    destinations: &HashMap<RowId, TensorHandle>,
    memory: &PeerSegments,
) {
    let (Ok(output), Some(handle)) = (&mut row.result, destinations.get(&row.row)) else {
        return;
    };
    let logits = std::mem::take(&mut output.logits);
    if let Err(error) = memory.write(handle, bytemuck::cast_slice(&logits)) {
        row.result = Err(EngineError::InvalidPlan(format!(
            "logits cannot be stored: {error}"
        )));
    }
}
