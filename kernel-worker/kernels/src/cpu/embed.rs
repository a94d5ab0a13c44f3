//! Rows of stored matrices as f32.

use super::floats::FloatFormat;
use super::format::{
    Decoder, Format, Iq4Nl, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Q8Affine,
};
use super::simd::{Kernel, Simd};
use super::{Cpu, CpuDevice};
use crate::block::BlockType;
use crate::error::{OpError, check_length, product};
use crate::matrix::Matrix;
use crate::ran::Ran;

/// Decodes a row of whole blocks.
///
/// # Errors
/// [`OpError`] if `out` is no whole number of blocks or `bytes` has another length than those blocks.
pub fn dequantise_row(
    cpu: &Cpu,
    block_type: BlockType,
    bytes: &[u8],
    out: &mut [f32],
) -> Result<Ran<CpuDevice, ()>, OpError> {
    let expected = block_type.row_bytes(out.len()).ok_or(OpError::PartialRow {
        what: "dequantised row",
        row: block_type.elements(),
        actual: out.len(),
    })?;
    check_length("bytes of the row", expected, bytes.len())?;
    cpu.kernels().run(DecodeRow {
        block_type,
        bytes,
        out,
    });
    Ok(Ran::new(CpuDevice(()), ()))
}

/// `out` `[T, D]` = rows `token_ids` of `table` `[V, D]`.
///
/// # Errors
/// [`OpError`] if a token is not in the table or `out` has another shape.
pub fn embed(
    cpu: &Cpu,
    table: &Matrix,
    token_ids: &[u32],
    out: &mut [f32],
) -> Result<Ran<CpuDevice, ()>, OpError> {
    let expected = product("embedded tokens", &[token_ids.len(), table.columns()])?;
    check_length("embedded tokens", expected, out.len())?;
    if table.columns() > 0 {
        for (&token, out) in token_ids.iter().zip(out.chunks_exact_mut(table.columns())) {
            let row = usize::try_from(token).unwrap_or(usize::MAX);
            if row >= table.rows() {
                return Err(OpError::AboveLimit {
                    what: "token",
                    limit: table.rows().saturating_sub(1),
                    value: row,
                });
            }
            let (block_type, bytes) = (table.block_type(), table.row(row));
            cpu.kernels().run(DecodeRow {
                block_type,
                bytes,
                out,
            });
        }
    }
    Ok(Ran::new(CpuDevice(()), ()))
}

struct DecodeRow<'a> {
    block_type: BlockType,
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl Kernel for DecodeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self {
            block_type,
            bytes,
            out,
        } = self;
        match block_type {
            BlockType::F32 => FloatFormat::F32.decode(bytes, out),
            BlockType::F16 => FloatFormat::F16.decode(bytes, out),
            BlockType::Bf16 => FloatFormat::Bf16.decode(bytes, out),
            BlockType::Q4_0 => decode::<S, Q4_0>(simd, bytes, out),
            BlockType::Q4_1 => decode::<S, Q4_1>(simd, bytes, out),
            BlockType::Q5_0 => decode::<S, Q5_0>(simd, bytes, out),
            BlockType::Q5_1 => decode::<S, Q5_1>(simd, bytes, out),
            BlockType::Q8_0 => decode::<S, Q8_0>(simd, bytes, out),
            BlockType::Q8Affine => decode::<S, Q8Affine>(simd, bytes, out),
            BlockType::Iq4Nl => decode::<S, Iq4Nl>(simd, bytes, out),
            BlockType::Q2K => decode::<S, Q2K>(simd, bytes, out),
            BlockType::Q3K => decode::<S, Q3K>(simd, bytes, out),
            BlockType::Q4K => decode::<S, Q4K>(simd, bytes, out),
            BlockType::Q5K => decode::<S, Q5K>(simd, bytes, out),
            BlockType::Q6K => decode::<S, Q6K>(simd, bytes, out),
        }
    }
}

#[inline(always)]
fn decode<S: Simd, F: Format>(simd: S, bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes
        .chunks_exact(F::BYTES)
        .zip(out.chunks_exact_mut(F::ELEMENTS))
    {
        let mut decoder = Decoder {
            out,
            group: F::GROUP,
            signed: F::SIGNED,
        };
        // A stride of 0: every lane reads the block.
        F::unpack(simd, block, 0, &mut decoder);
    }
}
