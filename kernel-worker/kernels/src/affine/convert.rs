//! Affine groups as blocks, for kernels that know no others.

use std::convert::Infallible;

use half::f16;

use super::{AffineLayout, AffineMatrix, RUN};
use crate::block::BlockType;
use crate::matrix::{Matrix, NoRoom, NotWritten};
use crate::reference::dequantise;

impl AffineMatrix {
    /// Returns the same weights as blocks, made on up to `threads` threads.
    ///
    /// Up to 4 bits become Q4_1 and 5 bits Q5_1, whose rule is the same, if each scale and bias is an f16 number too;
    /// others become Q8_AFFINE.
    ///
    /// # Errors
    /// [`NoRoom`] if the allocator refuses.
    pub fn to_blocks(&self, threads: usize) -> Result<Matrix, NoRoom> {
        let target = self.block_type();
        let row_bytes = target.row_bytes(self.columns()).unwrap_or(0).max(1);
        let write = |first: usize, out: &mut [u8]| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
                self.convert_row(row, target, out);
            }
            Ok::<(), Infallible>(())
        };
        Matrix::written(target, (self.rows(), self.columns()), threads, write).map_err(|refused| {
            match refused {
                NotWritten::NoRoom(no_room) => no_room,
                NotWritten::Rows(never) => match never {},
            }
        })
    }

    /// Chooses the smallest type that holds the weights.
    fn block_type(&self) -> BlockType {
        let halves = |matrix: &Matrix| {
            matrix.block_type() == BlockType::F16
                || (0..matrix.rows()).all(|row| {
                    let exact = |value: &f32| f16::from_f32(*value).to_f32() == *value;
                    floats(matrix, row).iter().all(exact)
                })
        };
        let small = match self.layout.bits() {
            2..=4 => Some(BlockType::Q4_1),
            5 => Some(BlockType::Q5_1),
            _ => None,
        };
        small
            .filter(|_| halves(&self.scales) && halves(&self.biases))
            .unwrap_or(BlockType::Q8Affine)
    }

    /// Writes one row as `target`.
    fn convert_row(&self, row: usize, target: BlockType, out: &mut [u8]) {
        let scales = floats(&self.scales, row);
        let biases = floats(&self.biases, row);
        let run_bytes = 4 * self.layout.bits();
        let runs_per_row = self.columns() / RUN;
        let first = row * runs_per_row * run_bytes;
        let packed = &self.packed()[first..first + runs_per_row * run_bytes];
        let out_bytes = target.bytes();
        let runs = packed
            .chunks_exact(run_bytes)
            .zip(out.chunks_exact_mut(out_bytes));
        for (run, (packed, out)) in runs.enumerate() {
            let codes = unpack(self.layout, packed);
            let group = run * RUN / self.layout.group();
            let (scale, bias) = (scales[group], biases[group]);
            match target {
                BlockType::Q4_1 => {
                    let (halves, nibbles) = out.split_at_mut(4);
                    write_halves(scale, bias, halves);
                    write_nibbles(&codes, nibbles);
                }
                BlockType::Q5_1 => {
                    let (halves, rest) = out.split_at_mut(4);
                    let (fifth_bits, nibbles) = rest.split_at_mut(4);
                    write_halves(scale, bias, halves);
                    fifth_bits.copy_from_slice(&bits_of(&codes, 4).to_le_bytes());
                    write_nibbles(&codes, nibbles);
                }
                _ => {
                    let (numbers, quants) = out.split_at_mut(8);
                    numbers[..4].copy_from_slice(&scale.to_le_bytes());
                    numbers[4..].copy_from_slice(&bias.to_le_bytes());
                    quants.copy_from_slice(&codes);
                }
            }
        }
    }
}

/// One row of a float matrix.
fn floats(matrix: &Matrix, row: usize) -> Vec<f32> {
    let mut values = vec![0.0; matrix.columns()];
    dequantise(matrix.block_type(), matrix.row(row), &mut values);
    values
}

/// The highest code of an element.
fn largest_code(layout: AffineLayout) -> u8 {
    u8::MAX >> (8 - layout.bits())
}

/// Unpacks a run of elements.
fn unpack(layout: AffineLayout, packed: &[u8]) -> [u8; RUN] {
    let mask = largest_code(layout);
    let mut codes = [0; RUN];
    let mut bytes = packed.iter();
    let (mut pending, mut held) = (0_u16, 0);
    for code in &mut codes {
        while held < layout.bits() {
            pending |= u16::from(bytes.next().copied().unwrap_or(0)) << held;
            held += 8;
        }
        *code = pending.to_le_bytes()[0] & mask;
        pending >>= layout.bits();
        held -= layout.bits();
    }
    codes
}

fn write_halves(scale: f32, bias: f32, out: &mut [u8]) {
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    out[2..].copy_from_slice(&f16::from_f32(bias).to_le_bytes());
}

/// Writes the low four bits: elements 0 to 15 are low nibbles, 16 to 31 high ones.
fn write_nibbles(codes: &[u8; RUN], out: &mut [u8]) {
    let (low, high) = codes.split_at(RUN / 2);
    for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
        *out = (low & 0xf) | (high << 4);
    }
}

/// Collects one bit of every element, that of element `e` as bit `e`.
fn bits_of(codes: &[u8; RUN], bit: usize) -> u32 {
    codes.iter().enumerate().fold(0, |bits, (element, code)| {
        bits | u32::from(code >> bit & 1) << element
    })
}
