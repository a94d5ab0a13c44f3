//! Attention of one token as ops of MLX, in f32.
//!
//! Products are multiplied and summed elementwise: a matrix product may take a GPU's shorter formats, which round to 11
//! bits. A fused attention op would do the same, and turns a row that sees nothing into something that looks plausible.

use super::error::KernelError;
use crate::ffi::metal_calls::Attending;
use crate::ffi::{Binary, Dtype, MlxError, Reduction, Tensor, Unary};

/// `[H, K]`, f32, over keys and values `[kv_heads, capacity, K]` with at least one position.
pub(super) fn attend(
    attending: &Attending<'_>,
    keys: &Tensor,
    values: &Tensor,
) -> Result<Tensor, KernelError> {
    let (heads, head_dim) = (attending.queries.axis(0), attending.queries.axis(1));
    if heads == 0 {
        return Ok(Tensor::zeros(Dtype::F32, &[heads, head_dim])?);
    }
    let (kv_heads, length) = (attending.kv_heads, attending.length);
    let visible = match attending.mask {
        None => None,
        Some(mask) => Some(mask.reshape(&[1, 1, length, 1])?),
    };
    // Rows that nobody sees may hold anything, also what makes NaN of a product with 0.
    let zero = Tensor::of_f32(&[0.0], &[1])?;
    let seen = |cache: &Tensor| -> Result<Tensor, MlxError> {
        let rows = cache
            .slice(1, 0..length)?
            .cast(Dtype::F32)?
            .reshape(&[kv_heads, 1, length, head_dim])?;
        match &visible {
            None => Ok(rows),
            Some(visible) => visible.select(&rows, &zero),
        }
    };
    let scale = Tensor::of_f32(&[attending.scale], &[1])?;
    let queries = attending.queries.cast(Dtype::F32)?.mul(&scale)?;
    let queries = queries.reshape(&[kv_heads, heads / kv_heads, 1, head_dim])?;
    let mut scores = queries.mul(&seen(keys)?)?.reduced(Reduction::Sum, 3)?;
    if let Some(visible) = &visible {
        let hidden = Tensor::of_f32(&[f32::NEG_INFINITY], &[1])?;
        scores = visible.select(&scores, &hidden)?;
    }
    // Of a row that sees nothing, or has an infinite score, infinities make NaN.
    let largest = scores.reduced(Reduction::Maximum, 2)?;
    let weights = scores
        .binary(Binary::Subtract, &largest)?
        .unary(Unary::Exponential)?;
    let total = weights.reduced(Reduction::Sum, 2)?;
    let sums = weights.mul(&seen(values)?)?.reduced(Reduction::Sum, 2)?;
    let attended = sums.binary(Binary::Divide, &total)?;
    Ok(attended.reshape(&[heads, head_dim])?)
}
