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
