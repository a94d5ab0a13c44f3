//! Hadamard transform and rotary re-encoding as ops of MLX.

use super::arguments::{HeadRows, Reencoding, Rows, dtype};
use super::error::KernelError;
use crate::ffi::{Binary, Dtype, MlxError, Tensor, Unary};

/// `2 pi / 2^32`, as the body has it.
const RADIANS: f32 = 1.462_918_1e-9;

/// `[rows, D]`: the stages of the body one after the other, so its sums are added in the same order.
pub(super) fn hadamard(values: &Rows) -> Result<Tensor, KernelError> {
    let [rows, length] = values.shape();
    let dtype = dtype(values.element())?;
    if rows == 0 {
        return Ok(Tensor::zeros(dtype, &[rows, length])?);
    }
    let mut transformed = values.tensor().cast(Dtype::F32)?;
    let mut stride = 1;
    while stride < length {
        let pairs = transformed.reshape(&[rows, length / (2 * stride), 2, stride])?;
        let (first, second) = (pairs.slice(2, 0..1)?, pairs.slice(2, 1..2)?);
        let difference = first.binary(Binary::Subtract, &second)?;
        transformed = Tensor::concatenate(&[first.add(&second)?, difference], 2)?;
        stride *= 2;
    }
    // At most 1024, an exact f32.
    let root = f32::from(u16::try_from(length).unwrap_or(u16::MAX)).sqrt();
    let factor = Tensor::of_f32(&[1.0 / root], &[1])?;
    Ok(transformed
        .reshape(&[rows, length])?
        .mul(&factor)?
        .cast(dtype)?)
}

/// `[heads, tokens, head_dim]`, rotated by as much as each token moves.
pub(super) fn rope_reencode(
    keys: &HeadRows,
    reencoding: &Reencoding,
) -> Result<Tensor, KernelError> {
    let [heads, tokens, head_dim] = keys.shape();
    let pairs = reencoding.pairs();
    if pairs == 0 || heads == 0 || tokens == 0 {
        return Ok(keys.tensor().clone());
    }
    let angles = angles(reencoding, tokens)?;
    let (cosine, sine) = (angles.unary(Unary::Cosine)?, angles.unary(Unary::Sine)?);
    // First and second of a pair: an axis of two, before or after the axis of pairs.
    let (shape, axis) = if reencoding.is_half_split() {
        ([heads, tokens, 2, pairs], 2)
    } else {
        ([heads, tokens, pairs, 2], 3)
    };
    let per_pair = |of_token: &Tensor| -> Result<Tensor, MlxError> {
        let mut shape = [1, tokens, 1, 1];
        shape[5 - axis] = pairs;
        of_token.reshape(&shape)
    };
    let (cosine, sine) = (per_pair(&cosine)?, per_pair(&sine)?);
    let rotating = keys.tensor().slice(2, 0..2 * pairs)?;
    let rotating = rotating.cast(Dtype::F32)?.reshape(&shape)?;
    let (x, y) = (rotating.slice(axis, 0..1)?, rotating.slice(axis, 1..2)?);
    let first = x.mul(&cosine)?.binary(Binary::Subtract, &y.mul(&sine)?)?;
    let second = x.mul(&sine)?.add(&y.mul(&cosine)?)?;
    let rotated = Tensor::concatenate(&[first, second], axis)?
        .reshape(&[heads, tokens, 2 * pairs])?
        .cast(dtype(keys.element())?)?;
    let kept = keys.tensor().slice(2, 2 * pairs..head_dim)?;
    Ok(Tensor::concatenate(&[rotated, kept], 2)?)
}

/// `[tokens, pairs]` in radians, from -pi to pi: computed in whole numbers, which wrap around with the turn.
fn angles(reencoding: &Reencoding, tokens: usize) -> Result<Tensor, MlxError> {
    let (old, new) = reencoding.positions();
    let moved = new
        .binary(Binary::Subtract, old)?
        .cast(Dtype::I32)?
        .cast(Dtype::I64)?
        .cast(Dtype::U64)?
        .reshape(&[tokens, 1])?;
    let high = Tensor::of_bytes(Dtype::U64, &32_u64.to_le_bytes(), &[1])?;
    moved
        .mul(&reencoding.turns().reshape(&[1, reencoding.pairs()])?)?
        .binary(Binary::ShiftRight, &high)?
        .cast(Dtype::U32)?
        .cast(Dtype::I32)?
        .cast(Dtype::F32)?
        .mul(&Tensor::of_f32(&[RADIANS], &[1])?)
}
