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
