//! Softmax.

use super::ReferenceDevice;
use crate::error::{OpError, row_count};
use crate::ran::Ran;

/// Turns every row of `[rows, columns]` into `exp(x - max) / sum(exp(x - max))` in place.
///
/// A row with no largest finite value (all `-inf`, or any NaN or `+inf`) becomes NaN: nothing is made up for it.
///
/// # Errors
/// [`OpError`] if `values` is no whole number of rows.
pub fn softmax(values: &mut [f32], columns: usize) -> Result<Ran<ReferenceDevice, ()>, OpError> {
    row_count("softmax input", values.len(), columns)?;
    if columns > 0 {
        values.chunks_exact_mut(columns).for_each(softmax_row);
    }
    Ok(Ran::new(ReferenceDevice(()), ()))
}

/// Softmax of one row, summed in order of the elements.
pub(super) fn softmax_row(row: &mut [f32]) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0_f32;
    for value in row.iter_mut() {
        *value = (*value - largest).exp();
        sum += *value;
    }
    for value in row {
        *value /= sum;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equals_the_formula(
            columns in 1_usize..40,
            rows in 0_usize..4,
            seed in prop::collection::vec(-90.0_f32..90.0, 120),
        ) {
            let input = &seed[..rows * columns];
            let mut actual = input.to_vec();
            let _ = softmax(&mut actual, columns).unwrap();
            // A difference of up to 180 is rounded to f32 before the exponential: half of 2^-16.
            let tolerance = 1e-5;
            for (row, actual) in input.chunks_exact(columns).zip(actual.chunks_exact(columns)) {
                let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
                for (&x, &y) in row.iter().zip(actual) {
                    let expected = f64::from(x).exp() / sum;
                    prop_assert!((f64::from(y) - expected).abs() <= tolerance * expected + 1e-37);
                }
            }
        }
    }

    #[test]
    fn large_numbers_do_not_overflow_and_masked_ones_are_zero() {
        let mut row = [3e38, 3e38, f32::NEG_INFINITY, -3e38];
        let _ = softmax(&mut row, 4).unwrap();
        assert_eq!(row, [0.5, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn nothing_is_made_up_for_a_row_without_a_largest_number() {
        for bad in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN] {
            let mut row = [bad; 3];
            let _ = softmax(&mut row, 3).unwrap();
            assert!(row.iter().all(|x| x.is_nan()), "{bad}");
        }
        let mut row = [1.0, f32::NAN, 2.0];
        let _ = softmax(&mut row, 3).unwrap();
        assert!(row.iter().all(|x| x.is_nan()));
    }

    #[test]
    fn shapes_are_checked() {
        assert!(softmax(&mut [0.0; 5], 2).is_err());
        assert!(softmax(&mut [0.0; 5], 0).is_err());
        assert!(softmax(&mut [], 0).is_ok());
    }
}
