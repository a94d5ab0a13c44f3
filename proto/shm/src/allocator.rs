//! First fit over units, with coalescing; integers only.

use std::collections::BTreeMap;

/// Which units of a segment are free.
#[derive(Debug)]
pub(crate) struct Allocator {
    /// First unit of each free run -> its length; runs never touch each other.
    free: BTreeMap<u64, u64>,
    units: u64,
    leased: u64,
}

impl Allocator {
    /// Makes an allocator of so many free units.
    pub(crate) fn new(units: u64) -> Self {
        let free = if units == 0 {
            BTreeMap::new()
        } else {
            BTreeMap::from([(0, units)])
        };
        Self {
            free,
            units,
            leased: 0,
        }
    }

    /// Takes the first run of `count` units; `None` if there is none or `count` is 0.
    pub(crate) fn take(&mut self, count: u64) -> Option<u64> {
        if count == 0 {
            return None;
        }
        let (&start, &length) = self.free.iter().find(|&(_, &length)| length >= count)?;
        self.free.remove(&start);
        if length > count {
            self.free.insert(start + count, length - count);
        }
        self.leased += count;
        Some(start)
    }

    /// Gives back a run that [`Self::take`] returned, whole and once.
    pub(crate) fn give_back(&mut self, start: u64, count: u64) {
        let (mut first, mut length) = (start, count);
        if let Some((&before, &before_length)) = self.free.range(..start).next_back() {
            debug_assert!(before + before_length <= start, "run was already free");
            if before + before_length == start {
                self.free.remove(&before);
                first = before;
                length += before_length;
            }
        }
        if let Some(after_length) = self.free.remove(&(start + count)) {
            length += after_length;
        }
        self.free.insert(first, length);
        self.leased -= count;
    }

    /// Number of units that are taken.
    pub(crate) fn leased(&self) -> u64 {
        self.leased
    }

    /// Number of units that are free, perhaps in pieces.
    pub(crate) fn free(&self) -> u64 {
        self.units - self.leased
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_grow_together_again_in_any_order() {
        let mut allocator = Allocator::new(6);
        let runs = [2, 2, 2].map(|count| allocator.take(count).unwrap());
        assert_eq!(allocator.take(1), None);
        for index in [0, 2, 1] {
            allocator.give_back(runs[index], 2);
        }
        assert_eq!(allocator.take(6), Some(0));
    }

    #[test]
    fn nothing_and_too_much_are_refused() {
        let mut allocator = Allocator::new(4);
        assert_eq!(allocator.take(0), None);
        assert_eq!(allocator.take(5), None);
        assert_eq!(allocator.take(u64::MAX), None);
        assert_eq!(Allocator::new(0).take(1), None);
        assert_eq!(allocator.free(), 4);
    }

    proptest! {
        #![proptest_config(crate::property(512))]

        #[test]
        fn runs_never_overlap_and_all_capacity_comes_back(
            units in 1_u64..64,
            steps in prop::collection::vec((1_u64..20, any::<prop::sample::Index>(), any::<bool>()), 0..80),
        ) {
            let mut allocator = Allocator::new(units);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (count, index, take) in steps {
                if take {
                    if let Some(start) = allocator.take(count) {
                        prop_assert!(start + count <= units);
                        for &(other, length) in &taken {
                            prop_assert!(start + count <= other || other + length <= start);
                        }
                        taken.push((start, count));
                    }
                } else if !taken.is_empty() {
                    let (start, count) = taken.swap_remove(index.index(taken.len()));
                    allocator.give_back(start, count);
                }
                prop_assert_eq!(allocator.leased(), taken.iter().map(|run| run.1).sum::<u64>());
            }
            for (start, count) in taken {
                allocator.give_back(start, count);
            }
            prop_assert_eq!(allocator.take(units), Some(0));
        }
    }
}
