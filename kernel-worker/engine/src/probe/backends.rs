//! What the probes of a process found, kept so that loading a model need not run them again.

use velox_kernels::label::BackendLabel;
use velox_kvcache::PageBudget;

use super::{ProbeCase, ProbeOutcome};
use crate::error::EngineError;
use crate::offer::{Offers, Opening};

/// What the caches of the tiny cases may allocate.
const PROBE_CACHE_BYTES: u64 = 16 * 1024 * 1024;

/// The backends of an executable and which cases came out wrong on them.
#[derive(Debug, Clone)]
pub struct ProbedBackends {
    offers: Offers,
    found: Vec<(BackendLabel, Found)>,
    /// Backends on which a token's logits did not depend on the batch.
    batch_invariant: Vec<BackendLabel>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    /// It cannot be started, and why.
    Missing(String),
    /// It ran; the cases that it got wrong, and how.
    Tried(Vec<(ProbeCase, String)>),
}

/// Told of a case as soon as it is done.
pub type EachProbe<'a> =
    dyn FnMut(BackendLabel, ProbeCase, &Result<ProbeOutcome, EngineError>) + 'a;

impl ProbedBackends {
    /// Probes every offered backend with `threads` compute threads.
    pub fn of(offers: Offers, threads: usize, each: &mut EachProbe<'_>) -> Self {
        let mut probed = Self {
            offers: offers.clone(),
            found: Vec::new(),
            batch_invariant: Vec::new(),
        };
        for offer in offers.iter() {
            let label = offer.label();
            let opening = Opening {
                stored_types: &["F32"],
                threads,
                budget: PageBudget::new(PROBE_CACHE_BYTES),
            };
            let invariant = offer.probe(&opening, &mut |case, outcome| {
                probed.record(label, case, outcome);
                each(label, case, outcome);
            });
            match invariant {
                Ok(true) => probed.batch_invariant.push(label),
                Ok(false) => {}
                Err(EngineError::BackendUnavailable { reason, .. }) => {
                    probed.record_missing(label, reason);
                }
                Err(error) => probed.record_missing(label, error.to_string()),
            }
        }
        probed
    }

    /// Probes `CPU` and `REFERENCE`.
    #[must_use]
    pub fn of_the_host(threads: usize) -> Self {
        let offers = Offers::of_the_host("it is not part of this build");
        Self::of(offers, threads, &mut |_, _, _| {})
    }

    /// Returns what was probed.
    #[must_use]
    pub fn offers(&self) -> &Offers {
        &self.offers
    }

    /// Keeps what came of one case.
    pub fn record(
        &mut self,
        label: BackendLabel,
        case: ProbeCase,
        outcome: &Result<ProbeOutcome, EngineError>,
    ) {
        let fault = match outcome {
            Ok(outcome) => outcome.fault(),
            Err(error) => Some(error.to_string()),
        };
        let found = self.found.iter_mut().find(|(known, _)| *known == label);
        match (found, fault) {
            (None, fault) => {
                let wrong = fault.map(|fault| (case, fault));
                self.found
                    .push((label, Found::Tried(wrong.into_iter().collect())));
            }
            (Some((_, Found::Tried(wrong))), Some(fault)) => wrong.push((case, fault)),
            (Some(_), _) => {}
        }
    }

    /// Keeps why a backend of this build cannot be started here.
    pub fn record_missing(&mut self, label: BackendLabel, reason: String) {
        self.found.retain(|(known, _)| *known != label);
        self.found.push((label, Found::Missing(reason)));
    }

    /// Returns whether the logits of a token had the same bits alone, in other chunks and beside another row, on every
    /// backend that could be started.
    #[must_use]
    pub fn is_batch_invariant(&self) -> bool {
        let mut started = self
            .found
            .iter()
            .filter(|(_, found)| matches!(found, Found::Tried(_)));
        !self.batch_invariant.is_empty()
            && started.all(|(label, _)| self.batch_invariant.contains(label))
    }

    /// Returns whether that held on one backend.
    #[must_use]
    pub fn is_invariant_on(&self, label: BackendLabel) -> bool {
        self.batch_invariant.contains(&label)
    }

    /// Returns why a backend may not run a model whose tensors are of the named types; `None` if every stage that such a model
    /// needs came out right.
    #[must_use]
    pub fn why_not(&self, label: BackendLabel, types: &[&str]) -> Option<String> {
        let needed = |case: &ProbeCase| {
            case.matrices
                .is_none_or(|stored| types.contains(&stored.name()))
        };
        match self.found.iter().find(|(known, _)| *known == label) {
            None => self.offers.find(label).err(),
            Some((_, Found::Missing(reason))) => Some(reason.clone()),
            Some((_, Found::Tried(wrong))) => wrong
                .iter()
                .find(|(case, _)| needed(case))
                .map(|(case, fault)| format!("{:?} of {}: {fault}", case.stage, case.dtype())),
        }
    }
}

#[cfg(test)]
mod tests {
    use velox_kernels::affine::StoredType;
    use velox_kernels::block::BlockType;

    use super::*;
    use crate::backend::Stage;

    const OFF: Result<ProbeOutcome, EngineError> = Ok(ProbeOutcome {
        max_error: 1.0,
        tolerance: 0.5,
    });
    const RIGHT: Result<ProbeOutcome, EngineError> = Ok(ProbeOutcome {
        max_error: 0.25,
        tolerance: 0.5,
    });

    fn nothing_probed() -> ProbedBackends {
        ProbedBackends {
            offers: Offers::of_the_host("no MLX here"),
            found: Vec::new(),
            batch_invariant: Vec::new(),
        }
    }

    fn case(stage: Stage, block_type: Option<BlockType>) -> ProbeCase {
        let matrices = block_type.map(StoredType::Blocks);
        ProbeCase { stage, matrices }
    }

    #[test]
    fn only_what_a_model_needs_counts_against_a_backend() {
        let mut probed = nothing_probed();
        let head = case(Stage::Head, Some(BlockType::Q4_1));
        probed.record(BackendLabel::Cpu, head, &OFF);
        probed.record(BackendLabel::Cpu, case(Stage::Rope, None), &RIGHT);
        assert_eq!(probed.why_not(BackendLabel::Cpu, &["F32", "Q8_0"]), None);
        let why = probed.why_not(BackendLabel::Cpu, &["F32", "Q4_1"]);
        assert_eq!(
            why.as_deref(),
            Some("Head of Q4_1: its probe is off by 1.000e0, tolerance is 5.000e-1")
        );
        // Every model attends.
        probed.record(BackendLabel::Cpu, case(Stage::AppendAttend, None), &OFF);
        assert!(probed.why_not(BackendLabel::Cpu, &[]).is_some());
    }

    #[test]
    fn a_case_that_breaks_off_is_wrong() {
        let mut probed = nothing_probed();
        let broken = Err(EngineError::Numeric("it gave no number".to_owned()));
        probed.record(BackendLabel::Cpu, case(Stage::Sample, None), &broken);
        let why = probed.why_not(BackendLabel::Cpu, &[]).unwrap();
        assert_eq!(why, "Sample of F32: it gave no number");
    }

    #[test]
    fn what_was_never_tried_or_cannot_start_is_not_available() {
        let mut probed = nothing_probed();
        let why = probed.why_not(BackendLabel::Metal, &[]).unwrap();
        assert_eq!(why, "no MLX here");
        probed.record_missing(BackendLabel::Cpu, "no threads".to_owned());
        let why = probed.why_not(BackendLabel::Cpu, &[]).unwrap();
        assert_eq!(why, "no threads");
    }
}
