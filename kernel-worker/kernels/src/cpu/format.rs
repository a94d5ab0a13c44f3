//! Quantised weights, a tile of rows at a time, in the form that the integer kernels read.
//!
//! Every block type reduces to bytes `q` with `weight = a q + b`, where `a` and `b` hold for 16 or 32 elements in a
//! row. A [`Packed`] is 32 columns of `LANES` rows, lane = row, four columns to a lane:
//!
//! ```text
//! q[c]   row 0: columns 4c..4c+4 | row 1: columns 4c..4c+4 | ...       c = 0..8
//! a[h]   row 0                   | row 1                   | ...       h = 0, or 0..2 where 16 elements share a scale
//! ```
//!
//! so that a dot product with four broadcast activations sums over columns within a lane, and no sum across lanes
//! is ever needed.

use super::simd::Simd;

mod nibble;
mod super_block;

pub(super) use nibble::{Iq4Nl, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8Affine};
pub(super) use super_block::{Q2K, Q3K, Q4K, Q5K, Q6K};

/// 32 columns of a tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packed<S: Simd> {
    /// Quants, four columns to a lane.
    pub(super) q: [S::I; 8],
    /// Scales; the second is used by formats of group 16 only.
    pub(super) a: [S::F; 2],
    /// Offsets, as the scales.
    pub(super) b: [S::F; 2],
}

/// What takes the packed columns of a tile, in order.
pub(super) trait Sink<S: Simd> {
    /// Takes the next 32 columns. Implementations are `#[inline(always)]`.
    fn push(&mut self, simd: S, packed: Packed<S>);
}

/// A quantised block type.
pub(super) trait Format: Copy {
    /// Elements of a block.
    const ELEMENTS: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Elements that share a scale: 16 or 32.
    const GROUP: usize;
    /// Whether quants are signed bytes; otherwise they are within 0..=63.
    const SIGNED: bool;

    /// Unpacks one block of each of `LANES` rows: `rows` starts at the block of the first row, rows lie `stride` apart.
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>);
}

/// Decodes blocks of one row, in order: every lane sees the same row.
#[derive(Debug)]
pub(super) struct Decoder<'a> {
    /// What is not decoded yet.
    pub(super) out: &'a mut [f32],
    /// Elements that share a scale.
    pub(super) group: usize,
    /// Whether quants are signed bytes.
    pub(super) signed: bool,
}

impl<S: Simd> Sink<S> for Decoder<'_> {
    #[inline(always)]
    fn push(&mut self, simd: S, packed: Packed<S>) {
        let mut lanes = [0.0; 16];
        let lanes = &mut lanes[..S::LANES];
        let (flip, zero) = if self.signed && !S::UNSIGNED_WEIGHTS {
            (i32::from_ne_bytes([0x80; 4]), 128.0)
        } else {
            (0, 0.0)
        };
        let (now, later) = std::mem::take(&mut self.out).split_at_mut(32);
        self.out = later;
        for (column, values) in packed.q.into_iter().zip(now.chunks_exact_mut(4)) {
            let mut bytes = simd.xor(column, simd.splat_bits(flip));
            for value in values {
                let quant = simd.to_f32(simd.and(bytes, simd.splat_bits(0xff)));
                simd.store(quant, lanes);
                *value = lanes[0] - zero;
                bytes = simd.shift_right::<8>(bytes);
            }
        }
        for (half, values) in now.chunks_exact_mut(self.group).enumerate() {
            simd.store(packed.a[half], lanes);
            let scale = lanes[0];
            simd.store(packed.b[half], lanes);
            let offset = lanes[0];
            for value in values {
                *value = scale * *value + offset;
            }
        }
    }
}
