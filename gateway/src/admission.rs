//! Which waiting row starts where: a pure function of the queue, the workers and the memory that is left.

use std::collections::VecDeque;

use velox_proto::v1::{Backend, KvGeometry};

use crate::planner::RowId;
use crate::policy::Policy;
use crate::pool::WorkerKey;
use crate::request::ModelIdentity;

/// Returns the bytes that the cache of a row of `capacity_tokens` can grow to.
#[must_use]
pub fn worst_case_kv_bytes(kv: &KvGeometry, capacity_tokens: u32) -> u64 {
    let pages = u64::from(capacity_tokens).div_ceil(u64::from(kv.page_tokens.max(1)));
    let tokens = pages * u64::from(kv.page_tokens.max(1));
    kv.key_bytes_per_token
        .saturating_add(kv.value_bytes_per_token)
        .saturating_mul(tokens)
}

/// Memory of the machine that caches may take, counted by worst case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLedger {
    budget: u64,
    reserved: u64,
}

impl KvLedger {
    /// Makes a ledger with nothing reserved.
    #[must_use]
    pub fn new(budget: u64) -> Self {
        Self {
            budget,
            reserved: 0,
        }
    }

    /// Returns the whole budget.
    #[must_use]
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Returns what running rows may grow to.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Reserves bytes if they fit.
    #[must_use]
    pub fn try_reserve(&mut self, bytes: u64) -> bool {
        match self.reserved.checked_add(bytes) {
            Some(total) if total <= self.budget => {
                self.reserved = total;
                true
            }
            _ => false,
        }
    }

    /// Gives back what was reserved for a row.
    pub fn release(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.reserved, "released more than was reserved");
        self.reserved = self.reserved.saturating_sub(bytes);
    }
}

/// A row that waits, in the order of the queue.
#[derive(Debug, Clone, Copy)]
pub struct Waiting<'a> {
    /// Its number.
    pub id: RowId,
    /// Model that it needs.
    pub model: ModelIdentity<'a>,
    /// Worst case of its cache.
    pub kv_bytes: u64,
    /// Backends that it may run on.
    pub policy: &'a Policy,
    /// Backend that produced its tokens so far: going on there changes nothing.
    pub ran_on: Option<Backend>,
}

/// A model on a ready worker.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The worker.
    pub worker: WorkerKey,
    /// Which model.
    pub model: ModelIdentity<'a>,
    /// Backend that runs it.
    pub backend: Backend,
    /// Rows that the worker has, of any model.
    pub rows: u32,
    /// Rows that it may have.
    pub max_rows: u32,
}

/// A row starts on a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// The row.
    pub row: RowId,
    /// Its worker.
    pub worker: WorkerKey,
}

/// Starts as many waiting rows as fit, first come first served, and reserves their memory.
///
/// A row that fits nowhere for lack of room stops the walk, so that small rows cannot starve a large one. A row
/// that no ready worker can run at all (its model is elsewhere or restarting) is passed over.
#[must_use]
pub fn place<'a>(
    queue: impl IntoIterator<Item = Waiting<'a>>,
    places: &mut [Place<'_>],
    ledger: &mut KvLedger,
) -> VecDeque<Placement> {
    let mut placements = VecDeque::new();
    for row in queue {
        // A row that already has tokens goes where they came from; else the caller's preference counts. A full
        // worker is not a missing one: the row waits for it rather than run on a weaker backend.
        let preference = |place: &Place<'_>| {
            let rank = row.policy.rank(place.backend)?;
            let changes = row.ran_on.is_some_and(|backend| backend != place.backend);
            (place.model == row.model).then_some((changes, rank))
        };
        let Some(best) = places.iter().filter_map(preference).min() else {
            continue;
        };
        let free = places
            .iter()
            .filter(|place| preference(place) == Some(best) && place.rows < place.max_rows)
            .min_by_key(|place| (place.rows, place.worker));
        let Some(worker) = free.map(|place| place.worker) else {
            break;
        };
        if !ledger.try_reserve(row.kv_bytes) {
            break;
        }
        for place in places.iter_mut().filter(|place| place.worker == worker) {
            place.rows += 1;
        }
        placements.push_back(Placement {
            row: row.id,
            worker,
        });
    }
    placements
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(slot: u32) -> WorkerKey {
        WorkerKey {
            slot,
            incarnation: 1,
        }
    }

    fn model(name: &'static str, fingerprint: &'static str) -> ModelIdentity<'static> {
        ModelIdentity { name, fingerprint }
    }

    fn spot(slot: u32, backend: Backend, rows: u32) -> Place<'static> {
        Place {
            worker: key(slot),
            model: model("m", "1"),
            backend,
            rows,
            max_rows: 4,
        }
    }

    fn waiting(id: u64, kv_bytes: u64, policy: &Policy) -> Waiting<'_> {
        Waiting {
            id: RowId(id),
            model: model("m", "1"),
            kv_bytes,
            policy,
            ran_on: None,
        }
    }

    fn placed(placements: VecDeque<Placement>) -> Vec<(u64, u32)> {
        placements
            .into_iter()
            .map(|placement| (placement.row.0, placement.worker.slot))
            .collect()
    }

    #[test]
    fn the_least_loaded_worker_is_taken() {
        let policy = Policy::any();
        let mut places = [spot(0, Backend::Cpu, 2), spot(1, Backend::Cpu, 0)];
        let queue = (1..=4).map(|id| waiting(id, 1, &policy));
        let placements = place(queue, &mut places, &mut KvLedger::new(99));
        assert_eq!(placed(placements), [(1, 1), (2, 1), (3, 0), (4, 1)]);
    }

    #[test]
    fn a_full_worker_is_waited_for_rather_than_replaced_by_a_weaker_backend() {
        let policy = Policy::any();
        let mut places = [spot(0, Backend::Reference, 0), spot(1, Backend::Cpu, 3)];
        let queue = (1..=2).map(|id| waiting(id, 1, &policy));
        let placements = place(queue, &mut places, &mut KvLedger::new(99));
        assert_eq!(placed(placements), [(1, 1)]);
    }

    #[test]
    fn a_row_with_tokens_goes_on_with_their_backend() {
        let policy = Policy::any();
        let mut places = [spot(0, Backend::Cpu, 0), spot(1, Backend::Reference, 3)];
        let row = Waiting {
            ran_on: Some(Backend::Reference),
            ..waiting(1, 1, &policy)
        };
        let placements = place([row], &mut places, &mut KvLedger::new(99));
        assert_eq!(placed(placements), [(1, 1)]);
    }

    #[test]
    fn a_large_row_is_not_starved_by_small_ones() {
        let policy = Policy::any();
        let mut ledger = KvLedger::new(10);
        let queue = [
            waiting(1, 8, &policy),
            waiting(2, 9, &policy),
            waiting(3, 1, &policy),
        ];
        let placements = place(queue, &mut [spot(0, Backend::Cpu, 0)], &mut ledger);
        assert_eq!(placed(placements), [(1, 0)]);
        assert_eq!(ledger.reserved(), 8);
    }

    #[test]
    fn a_row_does_not_go_on_with_another_model_of_the_same_name() {
        let policy = Policy::any();
        let of_before = Waiting {
            model: model("m", "0"),
            ..waiting(1, 1, &policy)
        };
        let mut places = [spot(0, Backend::Cpu, 0)];
        let placements = place([of_before], &mut places, &mut KvLedger::new(99));
        assert!(placements.is_empty());
    }

    #[test]
    fn a_row_whose_model_is_nowhere_does_not_hold_up_others() {
        let policy = Policy::any();
        let elsewhere = Waiting {
            model: model("other", "1"),
            ..waiting(1, 1, &policy)
        };
        let placements = place(
            [elsewhere, waiting(2, 1, &policy)],
            &mut [spot(0, Backend::Cpu, 0)],
            &mut KvLedger::new(99),
        );
        assert_eq!(placed(placements), [(2, 0)]);
    }

    #[test]
    fn the_worst_case_is_counted_in_whole_pages() {
        let kv = KvGeometry {
            page_tokens: 16,
            key_bytes_per_token: 3,
            value_bytes_per_token: 4,
            ..KvGeometry::default()
        };
        assert_eq!(worst_case_kv_bytes(&kv, 0), 0);
        assert_eq!(worst_case_kv_bytes(&kv, 1), 112);
        assert_eq!(worst_case_kv_bytes(&kv, 17), 224);
        let hostile = KvGeometry {
            page_tokens: u32::MAX,
            key_bytes_per_token: u64::MAX,
            ..kv
        };
        assert_eq!(worst_case_kv_bytes(&hostile, u32::MAX), u64::MAX);
    }

    proptest! {
        #[test]
        fn neither_memory_nor_rows_are_overcommitted(
            sizes in prop::collection::vec(0_u64..40, 0..20),
            loads in prop::collection::vec(0_u32..5, 1..4), budget in 0_u64..100,
        ) {
            let policy = Policy::any();
            let mut places: Vec<_> = (0..).zip(&loads)
                .map(|(slot, &rows)| spot(slot, Backend::Cpu, rows)).collect();
            let mut ledger = KvLedger::new(budget);
            let queue = (0..).zip(&sizes).map(|(id, &bytes)| waiting(id, bytes, &policy));
            let placements = place(queue, &mut places, &mut ledger);
            prop_assert!(ledger.reserved() <= budget);
            for (place, before) in places.iter().zip(&loads) {
                prop_assert!(place.rows <= place.max_rows.max(*before));
            }
            // First come, first served: what started is a prefix of the queue.
            let order: Vec<u64> = placements.iter().map(|placement| placement.row.0).collect();
            prop_assert!(order.iter().copied().eq(0..u64::try_from(order.len()).unwrap()));
        }
    }
}
