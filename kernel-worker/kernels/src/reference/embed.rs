//! Rows of an embedding table.

use super::ReferenceDevice;
use super::dequantise::dequantise;
use crate::error::{OpError, check_length, product};
use crate::matrix::Matrix;
use crate::ran::Ran;

/// `out` `[T, D]` = rows `token_ids` of `table` `[V, D]`.
///
/// # Errors
/// [`OpError`] if a token is not in the table or `out` has another shape.
pub fn embed(
    table: &Matrix,
    token_ids: &[u32],
    out: &mut [f32],
) -> Result<Ran<ReferenceDevice, ()>, OpError> {
    let elements = product("embeddings", &[token_ids.len(), table.columns()])?;
    check_length("embeddings", elements, out.len())?;
    for &token_id in token_ids {
        let row = usize::try_from(token_id).unwrap_or(usize::MAX);
        if row >= table.rows() {
            return Err(OpError::AboveLimit {
                what: "token id",
                limit: table.rows().saturating_sub(1),
                value: row,
            });
        }
    }
    if table.columns() > 0 {
        let rows = out.chunks_exact_mut(table.columns());
        for (&token_id, result) in token_ids.iter().zip(rows) {
            dequantise(table.block_type(), table.row(token_id as usize), result);
        }
    }
    Ok(Ran::new(ReferenceDevice(()), ()))
}
