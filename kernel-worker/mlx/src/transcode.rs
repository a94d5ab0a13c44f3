//! Blocks of GGUF files as MLX's affine groups: integers stay integers, nothing is blown up to half precision.
//!
//! MLX stores a group of 32 elements as `scale * q + bias` with the `q` of a row packed as one stream of bits, lowest
//! first. Most block types are such groups already and change their arrangement only. Q2_K, Q3_K and Q6_K have groups
//! of 16, for which MLX has no layout: their values are rounded to 8 bits per group of 32, which costs at most 1/510 of
//! the group's range.

mod groups;

use half::f16;
use velox_kernels::affine::{AffineLayout, AffineMatrix};
use velox_kernels::block::BlockType;
use velox_kernels::buffer::ByteSource;
use velox_kernels::error::OpError;
use velox_kernels::matrix::Matrix;
use velox_kernels::reference;

/// Elements of a group.
const GROUP: usize = 32;

/// Groups of a matrix as they are packed one by one.
struct Packing {
    bits: usize,
    /// `[rows, columns * bits / 32]`.
    packed: Vec<u32>,
    /// `[rows, columns / 32]`.
    scales: Vec<f32>,
    /// `[rows, columns / 32]`.
    biases: Vec<f32>,
}

/// One group before it is packed.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Group {
    scale: f32,
    bias: f32,
    q: [u8; GROUP],
}

/// Returns the bits that a type's elements get, or `None` if it is not quantised.
fn bits_of(block_type: BlockType) -> Option<usize> {
    match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::Bf16 => None,
        BlockType::Q4_0 | BlockType::Q4_1 | BlockType::Q4K => Some(4),
        BlockType::Q5_0 | BlockType::Q5_1 | BlockType::Q5K => Some(5),
        BlockType::Q8_0
        | BlockType::Iq4Nl
        | BlockType::Q2K
        | BlockType::Q3K
        | BlockType::Q6K
        | BlockType::Q8Affine => Some(8),
    }
}

/// Rearranges a quantised matrix in groups of 32, with f32 scales; `None` if it is not quantised.
///
/// # Errors
/// [`OpError`] if a row cannot be decoded, which a [`Matrix`] rules out.
pub fn affine(matrix: &Matrix) -> Result<Option<AffineMatrix>, OpError> {
    let Some(bits) = bits_of(matrix.block_type()) else {
        return Ok(None);
    };
    let groups = matrix.rows() * matrix.columns() / GROUP;
    let mut out = Packing {
        bits,
        packed: Vec::with_capacity(groups * bits),
        scales: Vec::with_capacity(groups),
        biases: Vec::with_capacity(groups),
    };
    let bytes = matrix.bytes();
    match matrix.block_type() {
        BlockType::F32 | BlockType::F16 | BlockType::Bf16 => {}
        BlockType::Q4_0 => out.extend(bytes, |block: &[u8; 18]| [groups::q4_0(block)]),
        BlockType::Q4_1 => out.extend(bytes, |block: &[u8; 20]| [groups::q4_1(block)]),
        BlockType::Q5_0 => out.extend(bytes, |block: &[u8; 22]| [groups::q5_0(block)]),
        BlockType::Q5_1 => out.extend(bytes, |block: &[u8; 24]| [groups::q5_1(block)]),
        BlockType::Q8_0 => out.extend(bytes, |block: &[u8; 34]| [groups::q8_0(block)]),
        BlockType::Iq4Nl => out.extend(bytes, |block: &[u8; 18]| [groups::iq4_nl(block)]),
        BlockType::Q8Affine => out.extend(bytes, |block: &[u8; 40]| [groups::q8_affine(block)]),
        BlockType::Q4K => out.extend(bytes, groups::q4_k),
        BlockType::Q5K => out.extend(bytes, groups::q5_k),
        BlockType::Q2K | BlockType::Q3K | BlockType::Q6K => {
            let mut values = vec![0.0; matrix.columns()];
            for row in 0..matrix.rows() {
                let _ =
                    reference::dequantise_row(matrix.block_type(), matrix.row(row), &mut values)?;
                let (chunks, _) = values.as_chunks::<GROUP>();
                for chunk in chunks {
                    out.push(&groups::rounded(chunk));
                }
            }
        }
    }
    Ok(Some(out.finish(matrix.rows(), matrix.columns())))
}

impl Packing {
    fn finish(self, rows: usize, columns: usize) -> AffineMatrix {
        let layout = AffineLayout::new(self.bits, GROUP).expect("MLX has 4, 5 and 8 bits");
        let floats = |values: &[f32]| {
            Matrix::from_f32(rows, columns / GROUP, values).expect("one of each per group")
        };
        let packed = ByteSource::copy_of(bytemuck::cast_slice(&self.packed));
        AffineMatrix::new(layout, packed, floats(&self.scales), floats(&self.biases))
            .expect("every group was packed")
    }

    fn extend<const BYTES: usize, const GROUPS: usize>(
        &mut self,
        bytes: &[u8],
        decode: impl Fn(&[u8; BYTES]) -> [Group; GROUPS],
    ) {
        let (blocks, _) = bytes.as_chunks::<BYTES>();
        for group in blocks.iter().flat_map(decode) {
            self.push(&group);
        }
    }

    /// Appends a group; 32 elements fill a whole number of words.
    fn push(&mut self, group: &Group) {
        self.scales.push(group.scale);
        self.biases.push(group.bias);
        let (mut word, mut filled) = (0_u64, 0);
        for &q in &group.q {
            word |= u64::from(q) << filled;
            filled += self.bits;
            if filled >= 32 {
                let [a, b, c, d, ..] = word.to_le_bytes();
                self.packed.push(u32::from_le_bytes([a, b, c, d]));
                word >>= 32;
                filled -= 32;
            }
        }
    }
}

/// Reads an f16 of a block.
fn half_at(block: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

#[cfg(test)]
mod tests;
