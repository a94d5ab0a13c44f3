//! Plans that were taken from the gateway and not answered yet, oldest first.

use std::collections::VecDeque;
use std::time::Instant;

use velox_engine::step::{Progress, RowId};
use velox_proto::worker::v1 as wire;
use velox_shm::PeerSegments;

use crate::convert;
use crate::residents::{Begun, Residents};

/// Plans that may be unanswered: one that the device works on and one that is prepared beside it.
const MAX_UNANSWERED: usize = 2;

/// The plans.
#[derive(Debug, Default)]
pub(super) struct Plans {
    waiting: VecDeque<Plan>,
    /// When the last answer was made: the device worked on the next plan since then at the latest.
    answered: Option<Instant>,
}

/// A plan without an answer.
#[derive(Debug)]
pub(super) enum Plan {
    /// There is nothing to wait for.
    Answered(wire::StepResult),
    /// A runner works on it.
    Running {
        sequence: u64,
        rows: Vec<u64>,
        begun: Begun,
        taken: Instant,
    },
}

impl Plans {
    /// Takes the youngest plan.
    pub(super) fn push(&mut self, plan: Plan) {
        self.waiting.push_back(plan);
    }

    /// Whether the oldest plan must be answered before another is taken: it is done, or as many wait as may.
    pub(super) fn is_due(&self, residents: &Residents) -> bool {
        let done = |plan: &Plan| match plan {
            Plan::Answered(_) => true,
            Plan::Running { begun, .. } => residents.is_ready(begun),
        };
        self.waiting.len() >= MAX_UNANSWERED || self.waiting.front().is_some_and(done)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Waits for the oldest plan and returns its answer; `None` if there is no plan.
    pub(super) fn answer(
        &mut self,
        residents: &mut Residents,
        memory: &PeerSegments,
        progress: &dyn Progress,
    ) -> Option<wire::StepResult> {
        let answer = match self.waiting.pop_front()? {
            Plan::Answered(result) => result,
            Plan::Running {
                sequence,
                rows,
                begun,
                taken,
            } => match residents.collect(begun, memory, progress) {
                Ok(outcome) => {
                    let since = self.answered.map_or(taken, |answered| answered.max(taken));
                    let compute_us = u64::try_from(since.elapsed().as_micros());
                    convert::result(sequence, outcome, compute_us.unwrap_or(u64::MAX))
                }
                Err(error) => {
                    tracing::warn!(sequence, %error, "plan failed");
                    let ids: Vec<RowId> = rows.iter().copied().map(RowId).collect();
                    residents.close(&ids, progress);
                    convert::refused(sequence, &rows, &error)
                }
            },
        };
        self.answered = Some(Instant::now());
        Some(answer)
    }
}
