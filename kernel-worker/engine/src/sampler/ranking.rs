//! The best candidates without sorting the vocabulary.

use std::cmp::Ordering;

/// A token and the value it is ranked by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Ranked {
    pub(super) value: f64,
    pub(super) token_id: u32,
}

/// Best value first, ties by lowest id. Total, because values are no NaN and ids differ.
fn order(left: &Ranked, right: &Ranked) -> Ordering {
    right
        .value
        .partial_cmp(&left.value)
        .unwrap_or(Ordering::Equal)
        .then(left.token_id.cmp(&right.token_id))
}

/// Returns the `count` best of the values, which are indexed by token, best first. Minus infinity is no candidate.
///
/// Keeps a buffer of twice the wanted number and drops its worse half when it is full: linear in the vocabulary,
/// and almost every value fails one comparison.
pub(super) fn best(values: impl Iterator<Item = f64>, count: usize) -> Vec<Ranked> {
    let mut buffer: Vec<Ranked> = Vec::new();
    if count == 0 {
        return buffer;
    }
    let full = count.saturating_mul(2).max(64);
    let mut threshold = f64::NEG_INFINITY;
    for (token_id, value) in (0_u32..).zip(values) {
        // Ids ascend, so a value equal to the threshold loses its tie.
        if value > threshold {
            buffer.push(Ranked { value, token_id });
            if buffer.len() == full {
                let (_, worst_kept, _) = buffer.select_nth_unstable_by(count - 1, order);
                threshold = worst_kept.value;
                buffer.truncate(count);
            }
        }
    }
    if buffer.len() > count {
        buffer.select_nth_unstable_by(count - 1, order);
        buffer.truncate(count);
    }
    buffer.sort_unstable_by(order);
    buffer
}

/// Returns the greatest value; minus infinity for none.
pub(super) fn maximum(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let greater = |left: f32, right: f32| if right > left { right } else { left };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = greater(*lane, *value);
        }
    }
    lanes
        .iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |left, right| greater(left, *right))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{best, maximum};

    proptest! {
        #[test]
        fn best_equals_a_stable_sort(
            values in prop::collection::vec((-20_i8..20).prop_map(f64::from), 0..400),
            count in 0_usize..450,
        ) {
            let mut expected: Vec<(usize, f64)> = values.iter().copied().enumerate().collect();
            expected.sort_by(|left, right| right.1.total_cmp(&left.1));
            expected.truncate(count);
            let found: Vec<(usize, f64)> = best(values.iter().copied(), count)
                .into_iter()
                .map(|ranked| (ranked.token_id as usize, ranked.value))
                .collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn maximum_equals_a_fold(values in prop::collection::vec(-1e30_f32..1e30, 0..70)) {
            let expected = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(maximum(&values), expected);
        }
    }
}
