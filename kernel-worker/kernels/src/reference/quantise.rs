//! f32 to stored blocks: the rounding of the published reference quantisers of GGUF.
//!
//! `Q4_1` and `Q5_1` spread their codes evenly from the smallest to the largest value of a block; `Q8_0` from minus
//! the largest magnitude to plus. Codes are rounded, halves away from zero, with the scale before it is rounded to f16.

use half::f16;

use super::ReferenceDevice;
use crate::block::BlockType;
use crate::error::{OpError, check_length};
use crate::ran::Ran;

const ELEMENTS: usize = 32;

/// Encodes a row of whole blocks as `Q4_1`, `Q5_1` or `Q8_0`. The bytes need no alignment.
///
/// # Errors
/// [`OpError`] if the row is no whole number of blocks, `out` has another length than those blocks, the type has no
/// quantiser, or a value is no number or too large for the f16 scale of its block.
pub fn quantise_row(
    block_type: BlockType,
    values: &[f32],
    out: &mut [u8],
) -> Result<Ran<ReferenceDevice, ()>, OpError> {
    let expected = block_type
        .row_bytes(values.len())
        .ok_or(OpError::PartialRow {
            what: "row to quantise",
            row: block_type.elements(),
            actual: values.len(),
        })?;
    check_length("bytes of the row", expected, out.len())?;
    match block_type {
        BlockType::Q4_1 => blocks(values, out, q4_1),
        BlockType::Q5_1 => blocks(values, out, q5_1),
        BlockType::Q8_0 => blocks(values, out, q8_0),
        other => Err(OpError::NoQuantiser {
            block: other.name(),
        }),
    }?;
    Ok(Ran::new(ReferenceDevice(()), ()))
}

/// Encodes block after block.
fn blocks<const BYTES: usize>(
    values: &[f32],
    out: &mut [u8],
    encode: impl Fn(&[f32; ELEMENTS], &mut [u8; BYTES]) -> Result<(), OpError>,
) -> Result<(), OpError> {
    let (sources, _) = values.as_chunks::<ELEMENTS>();
    let (targets, _) = out.as_chunks_mut::<BYTES>();
    sources
        .iter()
        .zip(targets)
        .try_for_each(|(source, target)| encode(source, target))
}

fn q4_1(values: &[f32; ELEMENTS], block: &mut [u8; 20]) -> Result<(), OpError> {
    let affine = affine(values, 15)?;
    block[0..2].copy_from_slice(&affine.scale);
    block[2..4].copy_from_slice(&affine.minimum);
    nibbles(&affine.codes, &mut block[4..]);
    Ok(())
}

fn q5_1(values: &[f32; ELEMENTS], block: &mut [u8; 24]) -> Result<(), OpError> {
    let affine = affine(values, 31)?;
    let fifth_bits = affine
        .codes
        .iter()
        .enumerate()
        .fold(0_u32, |bits, (element, &code)| {
            bits | u32::from(code >> 4) << element
        });
    block[0..2].copy_from_slice(&affine.scale);
    block[2..4].copy_from_slice(&affine.minimum);
    block[4..8].copy_from_slice(&fifth_bits.to_le_bytes());
    nibbles(&affine.codes, &mut block[8..]);
    Ok(())
}

fn q8_0(values: &[f32; ELEMENTS], block: &mut [u8; 34]) -> Result<(), OpError> {
    let largest = values
        .iter()
        .fold(0.0_f32, |most, value| most.max(value.abs()));
    let scale = largest / 127.0;
    block[0..2].copy_from_slice(&half(scale, values)?);
    let inverse = inverse(scale);
    for (byte, value) in block[2..].iter_mut().zip(values) {
        // `f32::round` rounds halves away from zero.
        *byte = code((value * inverse).round().abs(), 127);
        if *value < 0.0 {
            *byte = byte.wrapping_neg();
        }
    }
    Ok(())
}

/// A block of which code `q` means `scale q + minimum`; both are f16.
struct Affine {
    codes: [u8; ELEMENTS],
    scale: [u8; 2],
    minimum: [u8; 2],
}

/// Spreads codes from the smallest (0) to the largest value (`most`).
fn affine(values: &[f32; ELEMENTS], most: u8) -> Result<Affine, OpError> {
    let minimum = values.iter().copied().fold(f32::INFINITY, f32::min);
    let maximum = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (maximum - minimum) / f32::from(most);
    let inverse = inverse(scale);
    Ok(Affine {
        codes: values.map(|value| code(((value - minimum) * inverse + 0.5).trunc(), most)),
        scale: half(scale, values)?,
        minimum: half(minimum, values)?,
    })
}

/// A block whose values are equal, or differ by less than f32 can divide by, has no scale; its codes are 0.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// A rounded value as a code, at most `most`.
fn code(rounded: f32, most: u8) -> u8 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value is whole and not negative; what lies above ends at `most`"
    )]
    let code = rounded.min(f32::from(most)) as u8;
    code
}

/// Rounds a field of a block to f16.
fn half(field: f32, values: &[f32; ELEMENTS]) -> Result<[u8; 2], OpError> {
    let half = f16::from_f32(field);
    if half.is_finite() && values.iter().all(|value| value.is_finite()) {
        Ok(half.to_le_bytes())
    } else {
        Err(OpError::BeyondBlock)
    }
}

/// Elements 0 to 15 go to the low halves of the bytes, 16 to 31 to the high ones.
fn nibbles(codes: &[u8; ELEMENTS], bytes: &mut [u8]) {
    let (low, high) = codes.split_at(ELEMENTS / 2);
    for ((byte, low), high) in bytes.iter_mut().zip(low).zip(high) {
        *byte = low & 15 | (high & 15) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::super::dequantise_row;
    use super::*;

    const TYPES: [BlockType; 3] = [BlockType::Q4_1, BlockType::Q5_1, BlockType::Q8_0];

    fn quantised(block_type: BlockType, values: &[f32]) -> Result<Vec<u8>, OpError> {
        let mut bytes = vec![0xA5; block_type.row_bytes(values.len()).unwrap()];
        quantise_row(block_type, values, &mut bytes).map(|_ran| bytes)
    }

    #[test]
    fn what_the_blocks_can_hold_comes_back_unchanged() {
        // Whole numbers from -127 to 127 with a scale of 1, and 0 to 15 or 31 beside a minimum.
        for (block_type, low, step) in [
            (BlockType::Q4_1, -7.0_f32, 15_u8),
            (BlockType::Q5_1, -7.0, 31),
            (BlockType::Q8_0, -127.0, 254),
        ] {
            let values: Vec<f32> = (0..=31_u8)
                .map(|element| low + f32::from(u16::from(element) * u16::from(step) / 31))
                .collect();
            let bytes = quantised(block_type, &values).unwrap();
            let mut back = vec![f32::NAN; values.len()];
            let _ = dequantise_row(block_type, &bytes, &mut back).unwrap();
            assert_eq!(
                back.iter().map(|v| (v * 1e3).round()).collect::<Vec<_>>(),
                values.iter().map(|v| (v * 1e3).round()).collect::<Vec<_>>(),
                "{}",
                block_type.name()
            );
        }
    }

    #[test]
    fn an_error_is_at_most_half_a_step() {
        let values: Vec<f32> = (0..96_u8).map(|i| (f32::from(i) * 0.7).sin()).collect();
        for (block_type, steps) in TYPES.into_iter().zip([15.0_f32, 31.0, 254.0]) {
            let bytes = quantised(block_type, &values).unwrap();
            let mut back = vec![f32::NAN; values.len()];
            let _ = dequantise_row(block_type, &bytes, &mut back).unwrap();
            for (value, back) in values.iter().zip(&back) {
                let error = (value - back).abs();
                // Half a step, and what f16 rounds off scale and minimum.
                assert!(
                    error <= 1.0 / steps + 2e-3,
                    "{}: {value} became {back}",
                    block_type.name()
                );
            }
        }
    }

    #[test]
    fn what_no_block_can_hold_is_refused() {
        for block_type in TYPES {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30] {
                let mut values = [0.25_f32; 64];
                values[40] = bad;
                assert_eq!(
                    quantised(block_type, &values),
                    Err(OpError::BeyondBlock),
                    "{} of {bad}",
                    block_type.name()
                );
            }
        }
    }

    #[test]
    fn other_types_and_lengths_are_refused() {
        let quantise = |block_type, count, bytes| {
            quantise_row(block_type, &vec![0.0; count], &mut vec![0; bytes]).err()
        };
        assert!(matches!(
            quantise(BlockType::Q4K, 256, 144),
            Some(OpError::NoQuantiser { block: "Q4_K" })
        ));
        assert!(matches!(
            quantise(BlockType::Q8_0, 33, 34),
            Some(OpError::PartialRow { .. })
        ));
        assert!(matches!(
            quantise(BlockType::Q8_0, 32, 33),
            Some(OpError::Length { .. })
        ));
    }
}
