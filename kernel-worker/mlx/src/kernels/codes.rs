//! Packing and quantising as ops of MLX. One IEEE operation after the other, as in the bodies, so results are equal.

use super::arguments::{AffineCodes, Format, ScalarCodes};
use super::error::KernelError;
use crate::ffi::metal_calls::words;
use crate::ffi::{Binary, Dtype, MlxError, Reduction, Tensor, Unary};

const WORD_BITS: usize = 32;

/// `[rows, words]` of codes `[rows, columns]`, whole numbers below 2^bits.
pub(super) fn pack(codes: &Tensor, bits: usize) -> Result<Tensor, MlxError> {
    let (rows, columns) = (codes.axis(0), codes.axis(1));
    let row_words = words(columns, bits);
    if rows == 0 || columns == 0 {
        return Tensor::zeros(Dtype::U32, &[rows, row_words]);
    }
    // As many codes as a word has bits are whole words.
    let padded = columns.next_multiple_of(WORD_BITS);
    let zeros = Tensor::zeros(Dtype::U32, &[rows, padded - columns])?;
    let codes = Tensor::concatenate(&[codes.cast(Dtype::U32)?, zeros], 1)?;
    let stream = bits_of(&codes.reshape(&[rows, padded, 1])?, bits)?;
    let all_words = padded / WORD_BITS * bits;
    number(&stream.reshape(&[rows, all_words, WORD_BITS])?, WORD_BITS)?
        .reshape(&[rows, all_words])?
        .slice(1, 0..row_words)
}

/// Codes `[rows, columns]`, u32, of words `[rows, words]`.
pub(super) fn unpack(packed: &Tensor, columns: usize, bits: usize) -> Result<Tensor, MlxError> {
    let (rows, row_words) = (packed.axis(0), packed.axis(1));
    if rows == 0 || columns == 0 {
        return Tensor::zeros(Dtype::U32, &[rows, columns]);
    }
    let stream = bits_of(&packed.reshape(&[rows, row_words, 1])?, WORD_BITS)?;
    let stream = stream.reshape(&[rows, row_words * WORD_BITS])?;
    let stream = stream.slice(1, 0..columns * bits)?;
    number(&stream.reshape(&[rows, columns, bits])?, bits)?.reshape(&[rows, columns])
}

/// The lowest bits of numbers `[.., 1]`, least significant first: `[.., bits]`.
fn bits_of(numbers: &Tensor, bits: usize) -> Result<Tensor, MlxError> {
    let one = Tensor::of_u32(&[1], &[1])?;
    numbers
        .binary(Binary::ShiftRight, &places(bits)?)?
        .binary(Binary::And, &one)
}

/// The numbers of bits `[.., .., bits]`: `[.., .., 1]`.
fn number(stream: &Tensor, bits: usize) -> Result<Tensor, MlxError> {
    stream
        .binary(Binary::ShiftLeft, &places(bits)?)?
        .reduced(Reduction::Sum, 2)?
        .cast(Dtype::U32)
}

fn places(bits: usize) -> Result<Tensor, MlxError> {
    let places: Vec<u32> = (0..u32::try_from(bits).unwrap_or(0)).collect();
    Tensor::of_u32(&places, &[places.len()])
}

/// Groups `[rows, groups, group]`, f32, of values `[rows, columns]`; a last group that has fewer columns is filled up
/// with its last value, which changes neither the smallest nor the largest.
fn grouped(values: &Tensor, group: usize) -> Result<Tensor, MlxError> {
    let (rows, columns) = (values.axis(0), values.axis(1));
    let padded = columns.next_multiple_of(group);
    let values = values.cast(Dtype::F32)?;
    let last = values.slice(1, columns - 1..columns)?;
    let filling = last.broadcast(&[rows, padded - columns])?;
    Tensor::concatenate(&[values, filling], 1)?.reshape(&[rows, padded / group, group])
}

/// Per group: 0, or NaN if one of its values is no finite number.
fn poison(groups: &Tensor) -> Result<Tensor, MlxError> {
    let zero = Tensor::of_f32(&[0.0], &[1])?;
    groups.mul(&zero)?.reduced(Reduction::Sum, 2)
}

/// The f16 of `[rows, groups, 1]`, and what it is in f32.
fn stored(exact: &Tensor) -> Result<(Tensor, Tensor), MlxError> {
    let half = exact.cast(Dtype::F16)?;
    let shape = [exact.axis(0), exact.axis(1)];
    Ok((half.reshape(&shape)?, half.cast(Dtype::F32)?))
}

/// How many scales the distances are, halves to even; 0 where the scale is none.
fn steps(distances: &Tensor, scale: &Tensor) -> Result<Tensor, MlxError> {
    let zero = Tensor::of_f32(&[0.0], &[1])?;
    let steps = distances
        .binary(Binary::Divide, scale)?
        .unary(Unary::Round)?;
    scale.binary(Binary::Greater, &zero)?.select(&steps, &zero)
}

/// Words of codes `[rows, groups, group]`, of which the first columns count.
fn packed(codes: &Tensor, columns: usize, bits: usize) -> Result<Tensor, MlxError> {
    let (rows, padded) = (codes.axis(0), codes.axis(1) * codes.axis(2));
    pack(&codes.reshape(&[rows, padded])?.slice(1, 0..columns)?, bits)
}

/// `most = 2^bits - 1`, an exact f32.
fn largest(bits: usize) -> f32 {
    // The catalogue allows no more than 8.
    f32::from(
        u8::MAX
            .checked_shr(u32::try_from(8_usize.saturating_sub(bits)).unwrap_or(8))
            .unwrap_or(0),
    )
}

/// Words and scales.
pub(super) fn scalar_quantise(values: &Tensor, format: Format) -> Result<[Tensor; 2], KernelError> {
    let Format { bits, group } = format;
    let (rows, columns) = (values.axis(0), values.axis(1));
    if rows == 0 || columns == 0 {
        let empty = |dtype, width| Tensor::zeros(dtype, &[rows, width]);
        return Ok([
            empty(Dtype::U32, words(columns, bits))?,
            empty(Dtype::F16, columns.div_ceil(group))?,
        ]);
    }
    let most = Tensor::of_f32(&[largest(bits - 1)], &[1])?;
    let least = Tensor::of_f32(&[-largest(bits - 1)], &[1])?;
    let groups = grouped(values, group)?;
    let magnitude = groups
        .unary(Unary::Absolute)?
        .reduced(Reduction::Maximum, 2)?;
    let exact = magnitude
        .binary(Binary::Divide, &most)?
        .add(&poison(&groups)?)?;
    let (scales, scale) = stored(&exact)?;
    let codes = steps(&groups, &scale)?
        .binary(Binary::Maximum, &least)?
        .binary(Binary::Minimum, &most)?
        .cast(Dtype::I32)?
        .cast(Dtype::U32)?;
    Ok([packed(&codes, columns, bits)?, scales])
}

/// Words, scales and minimums.
pub(super) fn affine_quantise(values: &Tensor, format: Format) -> Result<[Tensor; 3], KernelError> {
    let Format { bits, group } = format;
    let (rows, columns) = (values.axis(0), values.axis(1));
    if rows == 0 || columns == 0 {
        let empty = |dtype, width| Tensor::zeros(dtype, &[rows, width]);
        return Ok([
            empty(Dtype::U32, words(columns, bits))?,
            empty(Dtype::F16, columns.div_ceil(group))?,
            empty(Dtype::F16, columns.div_ceil(group))?,
        ]);
    }
    let most = Tensor::of_f32(&[largest(bits)], &[1])?;
    let zero = Tensor::of_f32(&[0.0], &[1])?;
    let groups = grouped(values, group)?;
    let poison = poison(&groups)?;
    let smallest = groups.reduced(Reduction::Minimum, 2)?;
    let (minimums, minimum) = stored(&smallest.add(&poison)?)?;
    let range = groups
        .reduced(Reduction::Maximum, 2)?
        .binary(Binary::Subtract, &minimum)?
        // Rounding may put the minimum of equal values above them.
        .binary(Binary::Maximum, &zero)?;
    let exact = range.binary(Binary::Divide, &most)?.add(&poison)?;
    let (scales, scale) = stored(&exact)?;
    let steps = steps(&groups.binary(Binary::Subtract, &minimum)?, &scale)?;
    // An infinite scale makes NaN of some distances; the code is 0 then.
    let codes = steps
        .binary(Binary::Greater, &zero)?
        .select(&steps.binary(Binary::Minimum, &most)?, &zero)?
        .cast(Dtype::U32)?;
    Ok([packed(&codes, columns, bits)?, scales, minimums])
}

/// Scale or minimum of every column, f32: `[rows, columns]` of `[rows, groups]`.
fn spread(per_group: &Tensor, columns: usize, group: usize) -> Result<Tensor, MlxError> {
    let (rows, groups) = (per_group.axis(0), per_group.axis(1));
    per_group
        .cast(Dtype::F32)?
        .reshape(&[rows, groups, 1])?
        .broadcast(&[rows, groups, group])?
        .reshape(&[rows, groups * group])?
        .slice(1, 0..columns)
}

/// Values `[rows, columns]`, f32.
pub(super) fn scalar_dequantise(stored: &ScalarCodes) -> Result<Tensor, KernelError> {
    let Format { bits, group } = stored.format();
    let [rows, columns] = stored.packed().shape();
    if rows == 0 || columns == 0 {
        return Ok(Tensor::zeros(Dtype::F32, &[rows, columns])?);
    }
    // Moved up to the sign of an i32 and back, the shift brings the sign along.
    let unused = Tensor::of_u32(&[u32::try_from(WORD_BITS - bits).unwrap_or(0)], &[1])?;
    let codes = unpack(stored.packed().words(), columns, bits)?
        .binary(Binary::ShiftLeft, &unused)?
        .cast(Dtype::I32)?
        .binary(Binary::ShiftRight, &unused.cast(Dtype::I32)?)?
        .cast(Dtype::F32)?;
    Ok(codes.mul(&spread(stored.scales(), columns, group)?)?)
}

/// Values `[rows, columns]`, f32.
pub(super) fn affine_dequantise(stored: &AffineCodes) -> Result<Tensor, KernelError> {
    let Format { bits, group } = stored.format();
    let [rows, columns] = stored.packed().shape();
    if rows == 0 || columns == 0 {
        return Ok(Tensor::zeros(Dtype::F32, &[rows, columns])?);
    }
    let codes = unpack(stored.packed().words(), columns, bits)?.cast(Dtype::F32)?;
    let product = codes.mul(&spread(stored.scales(), columns, group)?)?;
    Ok(product.add(&spread(stored.minimums(), columns, group)?)?)
}
