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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockType;
    use crate::buffer::ByteSource;

    #[test]
    fn rows_are_looked_up_in_order() {
        let table = Matrix::from_f32(3, 2, &[0.0, 1.0, 10.0, 11.0, 20.0, 21.0]).unwrap();
        let mut out = [f32::NAN; 6];
        let _ = embed(&table, &[2, 0, 2], &mut out).unwrap();
        assert_eq!(out, [20.0, 21.0, 0.0, 1.0, 20.0, 21.0]);
        assert!(embed(&table, &[], &mut []).is_ok());
    }

    #[test]
    fn a_stored_row_is_dequantised() {
        let mut bytes = vec![0; 36];
        bytes[18..20].copy_from_slice(&half::f16::ONE.to_le_bytes());
        bytes[20] = 0x9f;
        let table = Matrix::new(BlockType::Q4_0, 2, 32, ByteSource::copy_of(&bytes)).unwrap();
        let mut out = [f32::NAN; 32];
        let _ = embed(&table, &[1], &mut out).unwrap();
        assert_eq!((out[0], out[1], out[16], out[17]), (7.0, -8.0, 1.0, -8.0));
    }

    #[test]
    fn a_token_outside_the_table_is_refused() {
        let table = Matrix::from_f32(3, 1, &[0.0, 1.0, 2.0]).unwrap();
        let mut out = [7.0; 2];
        let refusal = embed(&table, &[1, 3], &mut out).unwrap_err();
        assert_eq!(refusal.to_string(), "token id is 3, limit is 2");
        assert_eq!(out, [7.0; 2]);
        assert!(embed(&table, &[1], &mut out).is_err());
        let empty = Matrix::from_f32(0, 1, &[]).unwrap();
        assert!(embed(&empty, &[0], &mut out[..1]).is_err());
    }
}
