//! Stored blocks to f32.
//!
//! `d` and `m` are f16, those of Q8_AFFINE f32. In 32-element blocks the low nibbles are elements 0 to 15, the high ones 16 to 31. Each value
//! is computed in f32 as the rule of its type in [`BlockType`] reads: products first, then one subtraction or addition.

mod super_block;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::ReferenceDevice;
use crate::block::BlockType;
use crate::error::{OpError, check_length};
use crate::ran::Ran;

/// Values of an IQ4_NL nibble.
const IQ4_NL: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Decodes a row of whole blocks. The bytes need no alignment.
///
/// # Errors
/// [`OpError`] if `out` is no whole number of blocks or `bytes` has another length than those blocks.
pub fn dequantise_row(
    block_type: BlockType,
    bytes: &[u8],
    out: &mut [f32],
) -> Result<Ran<ReferenceDevice, ()>, OpError> {
    let expected = block_type.row_bytes(out.len()).ok_or(OpError::PartialRow {
        what: "dequantised row",
        row: block_type.elements(),
        actual: out.len(),
    })?;
    check_length("bytes of the row", expected, bytes.len())?;
    dequantise(block_type, bytes, out);
    Ok(Ran::new(ReferenceDevice(()), ()))
}

/// As [`dequantise_row`], for a row whose lengths were checked.
pub(crate) fn dequantise(block_type: BlockType, bytes: &[u8], out: &mut [f32]) {
    match block_type {
        BlockType::F32 => blocks(bytes, out, |block: &[u8; 4], value: &mut [f32; 1]| {
            value[0] = f32::from_le_bytes(*block);
        }),
        BlockType::F16 => halves(bytes, out),
        BlockType::Bf16 => blocks(bytes, out, |block: &[u8; 2], value: &mut [f32; 1]| {
            value[0] = bf16::from_le_bytes(*block).to_f32();
        }),
        BlockType::Q4_0 => blocks(bytes, out, q4_0),
        BlockType::Q4_1 => blocks(bytes, out, q4_1),
        BlockType::Q5_0 => blocks(bytes, out, q5_0),
        BlockType::Q5_1 => blocks(bytes, out, q5_1),
        BlockType::Q8_0 => blocks(bytes, out, q8_0),
        BlockType::Iq4Nl => blocks(bytes, out, iq4_nl),
        BlockType::Q8Affine => blocks(bytes, out, q8_affine),
        BlockType::Q2K => blocks(bytes, out, super_block::q2_k),
        BlockType::Q3K => blocks(bytes, out, super_block::q3_k),
        BlockType::Q4K => blocks(bytes, out, super_block::q4_k),
        BlockType::Q5K => blocks(bytes, out, super_block::q5_k),
        BlockType::Q6K => blocks(bytes, out, super_block::q6_k),
    }
}

/// Decodes block after block.
fn blocks<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    let (sources, _) = bytes.as_chunks::<BYTES>();
    let (targets, _) = out.as_chunks_mut::<ELEMENTS>();
    for (source, target) in sources.iter().zip(targets) {
        decode(source, target);
    }
}

/// Decodes f16 in runs, because a conversion of a run may use the CPU's instruction for it.
fn halves(bytes: &[u8], out: &mut [f32]) {
    const RUN: usize = 64;
    let mut run = [f16::ZERO; RUN];
    for (source, target) in bytes.chunks(2 * RUN).zip(out.chunks_mut(RUN)) {
        let (pairs, _) = source.as_chunks::<2>();
        for (value, pair) in run.iter_mut().zip(pairs) {
            *value = f16::from_le_bytes(*pair);
        }
        run[..target.len()].convert_to_f32_slice(target);
    }
}

/// Reads an f16 of a block.
fn half_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

/// Calls `value(element, nibble)` for the 32 elements of 16 nibble bytes.
fn nibbles(bytes: &[u8], out: &mut [f32; 32], value: impl Fn(usize, u8) -> f32) {
    for (element, &byte) in bytes.iter().enumerate() {
        out[element] = value(element, byte & 15);
        out[element + 16] = value(element + 16, byte >> 4);
    }
}

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    nibbles(&block[2..], out, |_, q| d * (f32::from(q) - 8.0));
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    nibbles(&block[4..], out, |_, q| d * f32::from(q) + m);
}

/// Adds the fifth bit of an element to its nibble.
fn fifth_bit(bits: u32, element: usize, nibble: u8) -> f32 {
    let high = if bits >> element & 1 == 1 { 16 } else { 0 };
    f32::from(nibble | high)
}

fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let bits = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    nibbles(&block[6..], out, |element, q| {
        d * (fifth_bit(bits, element, q) - 16.0)
    });
}

fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let bits = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    nibbles(&block[8..], out, |element, q| {
        d * fifth_bit(bits, element, q) + m
    });
}

fn q8_affine(block: &[u8; 40], out: &mut [f32; 32]) {
    let [d, m] = [0, 4]
        .map(|at| f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]));
    for (value, &q) in out.iter_mut().zip(&block[8..]) {
        *value = d * f32::from(q) + m;
    }
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, &q) in out.iter_mut().zip(&block[2..]) {
        *value = d * f32::from(q.cast_signed());
    }
}

fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    nibbles(&block[2..], out, |_, q| {
        d * f32::from(IQ4_NL[usize::from(q)])
    });
}
