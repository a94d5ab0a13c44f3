//! Products with F32, F16 and BF16 matrices: lanes along the columns.
//!
//! Element `i` of a row goes to lane `i % LANES`; the lanes are summed at the end. Four rows meet four tokens at a
//! time, so that each load serves four products and sums do not wait for each other.

use half::{bf16, f16};

use super::band::Target;
use super::simd::{Kernel, Simd};

/// How an element is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FloatFormat {
    /// binary32.
    F32,
    /// binary16.
    F16,
    /// Upper half of binary32.
    Bf16,
}

impl FloatFormat {
    #[inline(always)]
    const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Decodes a row.
    pub(super) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => {
                for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
            Self::F16 => {
                for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f16::from_le_bytes(*bytes).to_f32();
                }
            }
            Self::Bf16 => {
                for (value, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *value = bf16::from_le_bytes(*bytes).to_f32();
                }
            }
        }
    }

    #[inline(always)]
    fn load<S: Simd>(self, simd: S, bytes: &[u8]) -> S::F {
        match self {
            Self::F32 => simd.load_f32(bytes),
            Self::F16 => simd.load_f16(bytes),
            Self::Bf16 => simd.load_bf16(bytes),
        }
    }
}

/// One band of rows.
#[derive(Debug)]
pub(super) struct FloatBand<'a> {
    format: FloatFormat,
    bytes: &'a [u8],
    input: &'a [f32],
    target: Target<'a>,
}

impl<'a> FloatBand<'a> {
    /// Names the operands: the band's bytes and `[T, in]`.
    pub(super) fn new(
        format: FloatFormat,
        bytes: &'a [u8],
        input: &'a [f32],
        target: Target<'a>,
    ) -> Self {
        Self {
            format,
            bytes,
            input,
            target,
        }
    }

    #[inline(always)]
    fn rows<S: Simd, const R: usize>(&self, simd: S, row: usize) {
        let row_bytes = self.bytes.len() / self.target.rows;
        let columns = row_bytes / self.format.bytes();
        let tokens = self.input.len().checked_div(columns).unwrap_or(0);
        let rows: [&[u8]; R] = std::array::from_fn(|index| {
            &self.bytes[(row + index) * row_bytes..(row + index + 1) * row_bytes]
        });
        let mut token = 0;
        while tokens - token >= 4 {
            self.tile::<S, R, 4>(simd, rows, row, token);
            token += 4;
        }
        while token < tokens {
            self.tile::<S, R, 1>(simd, rows, row, token);
            token += 1;
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const T: usize>(
        &self,
        simd: S,
        rows: [&[u8]; R],
        row: usize,
        token: usize,
    ) {
        let size = self.format.bytes();
        let columns = rows[0].len() / size;
        let inputs: [&[u8]; T] = std::array::from_fn(|index| {
            let from = (token + index) * columns;
            bytemuck::cast_slice(&self.input[from..from + columns])
        });
        let mut sums = [[simd.splat(0.0); T]; R];
        let whole = columns / S::LANES * S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            let inputs = inputs.map(|input| simd.load_f32(&input[4 * at..4 * (at + S::LANES)]));
            for (row, sums) in rows.iter().zip(&mut sums) {
                let weights = &row[size * at..size * (at + S::LANES)];
                let weights = self.format.load(simd, weights);
                for (sum, input) in sums.iter_mut().zip(inputs) {
                    *sum = simd.fma(weights, input, *sum);
                }
            }
        }
        if whole < columns {
            let inputs = inputs.map(|input| {
                let mut lanes = [0_u8; 64];
                lanes[..input.len() - 4 * whole].copy_from_slice(&input[4 * whole..]);
                simd.load_f32(&lanes[..4 * S::LANES])
            });
            for (row, sums) in rows.iter().zip(&mut sums) {
                let mut lanes = [0_u8; 64];
                lanes[..row.len() - size * whole].copy_from_slice(&row[size * whole..]);
                let weights = self.format.load(simd, &lanes[..size * S::LANES]);
                for (sum, input) in sums.iter_mut().zip(inputs) {
                    *sum = simd.fma(weights, input, *sum);
                }
            }
        }
        for index in 0..T {
            let places = self.target.places(token + index, row, R);
            for (place, sums) in places.iter_mut().zip(&sums) {
                *place = simd.sum(sums[index]);
            }
        }
    }
}

impl Kernel for FloatBand<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let rows = self.target.rows;
        let mut row = 0;
        while rows - row >= 4 {
            self.rows::<S, 4>(simd, row);
            row += 4;
        }
        while row < rows {
            self.rows::<S, 1>(simd, row);
            row += 1;
        }
    }
}
