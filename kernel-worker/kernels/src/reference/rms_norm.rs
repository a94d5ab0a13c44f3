//! Root-mean-square norm.

use super::ReferenceDevice;
use crate::error::{OpError, check_length, row_count};
use crate::ran::Ran;

/// `out = input / sqrt(mean(input^2) + epsilon) * weight` for every row of `[T, D]`, `weight` `[D]`.
///
/// The mean square is f64 in order of the elements. A norm per head is the same op with `D` = `K`.
///
/// # Errors
/// [`OpError`] if `input` is no whole number of rows or `out` differs in length.
pub fn rms_norm(
    input: &[f32],
    weight: &[f32],
    epsilon: f32,
    out: &mut [f32],
) -> Result<Ran<ReferenceDevice, ()>, OpError> {
    row_count("input of the norm", input.len(), weight.len())?;
    check_length("output of the norm", input.len(), out.len())?;
    if !weight.is_empty() {
        let rows = input.chunks_exact(weight.len());
        for (row, result) in rows.zip(out.chunks_exact_mut(weight.len())) {
            norm_row(row, weight, epsilon, result);
        }
    }
    Ok(Ran::new(ReferenceDevice(()), ()))
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a row has far fewer than 2^52 elements; the factor is rounded to f32 on purpose"
)]
fn norm_row(row: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let squares: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let mean_square = squares / row.len() as f64;
    let factor = (1.0 / (mean_square + f64::from(epsilon)).sqrt()) as f32;
    for ((result, &value), &weight) in out.iter_mut().zip(row).zip(weight) {
        *result = value * factor * weight;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equals_the_formula(
            rows in 0_usize..4,
            weight in prop::collection::vec(-2.0_f32..2.0, 1..70),
            seed in prop::collection::vec(-100.0_f32..100.0, 280),
        ) {
            let width = weight.len();
            let input = &seed[..rows * width];
            let epsilon = 1e-5_f32;
            let mut out = vec![f32::NAN; input.len()];
            let _ = rms_norm(input, &weight, epsilon, &mut out).unwrap();
            for (row, actual) in input.chunks_exact(width).zip(out.chunks_exact(width)) {
                let squares: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
                let count = f64::from(u32::try_from(width).unwrap());
                let root = (squares / count + f64::from(epsilon)).sqrt();
                for ((&x, &w), &y) in row.iter().zip(&weight).zip(actual) {
                    let expected = f64::from(x) / root * f64::from(w);
                    prop_assert!((f64::from(y) - expected).abs() <= 3e-7 * expected.abs() + 1e-30);
                }
            }
        }
    }

    #[test]
    fn epsilon_keeps_a_row_of_zeros_zero() {
        let mut out = [f32::NAN; 2];
        let _ = rms_norm(&[0.0; 2], &[3.0; 2], 1e-6, &mut out).unwrap();
        assert_eq!(out, [0.0; 2]);
    }

    #[test]
    fn shapes_are_checked() {
        let mut out = [0.0; 6];
        assert!(rms_norm(&[0.0; 6], &[1.0; 4], 0.0, &mut out).is_err());
        assert!(rms_norm(&[0.0; 6], &[], 0.0, &mut out).is_err());
        assert!(rms_norm(&[0.0; 6], &[1.0; 3], 0.0, &mut out[1..]).is_err());
        assert!(rms_norm(&[], &[], 0.0, &mut []).is_ok());
    }
}
