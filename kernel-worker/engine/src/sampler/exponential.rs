//! Sums of exponentials over a vocabulary, written so that the compiler vectorises them.

/// Partial sums: element `i` is added to lane `i % LANES`, so the order of additions is fixed.
const LANES: usize = 8;

/// Returns `e^x` for `x <= 0` within 2 units in the last place; below the normal numbers it is 0.
#[inline]
pub(super) fn exp(x: f64) -> f64 {
    // Added to a number below 2^51, it leaves the nearest integer in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    // Taylor: the remainder is at most ln(2) / 2, where the 14th term is below half a unit in the last place.
    const TERMS: [f64; 14] = [
        1.0 / 6_227_020_800.0,
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let clamped = if x > -708.0 { x } else { -708.0 };
    let shifted = clamped * std::f64::consts::LOG2_E + ROUND;
    let exponent = shifted - ROUND;
    let rest = clamped - exponent * LN_2_HIGH - exponent * LN_2_LOW;
    let mut power = TERMS[0];
    for term in &TERMS[1..] {
        power = power * rest + term;
    }
    // The low bits of `shifted` are the exponent; 1023 is the bias of f64.
    let scale = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    if x > -708.0 { power * scale } else { 0.0 }
}

/// Returns the sum of `e^((value - maximum) / temperature)`; no value is above the maximum.
pub(super) fn sum_of_exponentials<T: Copy + Into<f64>>(
    values: &[T],
    maximum: f64,
    temperature: f64,
) -> f64 {
    let weight = |value: T| exp((value.into() - maximum) / temperature);
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += weight(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += weight(*value);
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{exp, sum_of_exponentials};

    #[test]
    fn ends_of_the_range_are_exact() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e300), 0.0);
        assert_eq!(exp(-708.5), 0.0);
        assert!(exp(-707.9) > 0.0);
    }

    proptest! {
        #[test]
        fn exp_is_that_of_the_standard_library(x in prop_oneof![-1.0_f64..0.0, -50.0_f64..0.0, -707.0_f64..0.0]) {
            let expected = f64::exp(x);
            prop_assert!((exp(x) - expected).abs() <= 4.0 * f64::EPSILON * expected, "{x}");
        }

        #[test]
        fn sums_take_every_value_once(
            values in prop::collection::vec(-30.0_f32..0.0, 0..50),
            temperature in 0.1_f64..3.0,
        ) {
            let expected: f64 = values.iter().map(|&x| (f64::from(x) / temperature).exp()).sum();
            let found = sum_of_exponentials(&values, 0.0, temperature);
            prop_assert!((found - expected).abs() <= 1e-14 * expected);
        }
    }
}
