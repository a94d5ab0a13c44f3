//! The counter generator: one uniform number per (seed, output index), whoever asks and whenever.

/// Returns a number in `[0, 1)` with 53 random bits.
///
/// SplitMix64 from a state that is the mixed seed: neighbouring seeds and neighbouring indices give unrelated
/// numbers, and no state has to survive a worker's death.
pub(super) fn uniform(seed: u64, output_index: u64) -> f64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let state = mix(seed.wrapping_add(GOLDEN));
    let step = output_index.wrapping_add(1).wrapping_mul(GOLDEN);
    let bits = mix(state.wrapping_add(step));
    (bits >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
}

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::uniform;

    #[test]
    fn numbers_are_pinned_because_replays_depend_on_them() {
        let pinned = [
            uniform(0, 0),
            uniform(0, 1),
            uniform(1, 0),
            uniform(u64::MAX, u64::MAX),
        ];
        assert_eq!(pinned, PINNED);
    }

    #[test]
    fn numbers_fill_the_unit_interval_evenly() {
        for by_index in [false, true] {
            let mut buckets = [0_u32; 16];
            for counter in 0..16_000 {
                let number = if by_index {
                    uniform(7, counter)
                } else {
                    uniform(counter, 7)
                };
                assert!((0.0..1.0).contains(&number));
                let edges = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
                let bucket = edges.partition_point(|edge| f64::from(*edge) / 16.0 <= number);
                buckets[bucket] += 1;
            }
            // Expectation 1000, standard deviation 31.
            assert!(
                buckets.iter().all(|count| (850..1150).contains(count)),
                "{buckets:?}"
            );
        }
    }

    /// Computed by another implementation of SplitMix64.
    const PINNED: [f64; 4] = [
        0.6524484863740322,
        0.7012121095215252,
        0.36818951565166946,
        0.2668471864940366,
    ];
}
