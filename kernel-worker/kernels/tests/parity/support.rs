//! Operands of the parity cases.

use std::num::NonZeroUsize;

use half::f16;
use velox_kernels::block::BlockType;
use velox_kernels::buffer::ByteSource;
use velox_kernels::cpu::{Cpu, CpuKernelSet};
use velox_kernels::matrix::Matrix;

/// Calls `check` with every kernel set of this machine, on one and on three threads.
pub(crate) fn on_every_set(check: impl Fn(&Cpu)) {
    for kernels in CpuKernelSet::available() {
        for threads in [1, 3] {
            check(&Cpu::new(kernels, NonZeroUsize::new(threads).unwrap()).unwrap());
        }
    }
}

/// A small generator: what it makes is a function of its seed.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: usize) -> Self {
        Self(0x9e37_79b9_7f4a_7c15 ^ u64::try_from(seed).unwrap())
    }

    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        u32::try_from((mixed ^ mixed >> 27) >> 32).unwrap()
    }

    /// Within -1..1.
    pub(crate) fn value(&mut self) -> f32 {
        let [.., low, high] = self.bits().to_le_bytes();
        f32::from(i16::from_le_bytes([low, high])) / 32768.0
    }

    pub(crate) fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value()).collect()
    }

    fn byte(&mut self) -> u8 {
        self.bits().to_le_bytes()[3]
    }
}

/// Where a block's f16 factors lie; f32 ones of Q8_AFFINE.
fn factors(block_type: BlockType) -> &'static [usize] {
    match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::Bf16 => &[],
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 | BlockType::Iq4Nl => &[0],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
        BlockType::Q8Affine => &[0, 4],
        BlockType::Q2K => &[80, 82],
        BlockType::Q3K => &[108],
        BlockType::Q6K => &[208],
    }
}

/// Any quants and scales; factors of either sign and moderate size.
pub(crate) fn matrix(block_type: BlockType, rows: usize, columns: usize, seed: usize) -> Matrix {
    let mut numbers = Numbers::new(seed);
    let mut bytes = Vec::new();
    for _ in 0..rows * columns / block_type.elements() {
        match block_type {
            BlockType::F32 => bytes.extend(numbers.value().to_le_bytes()),
            BlockType::F16 => bytes.extend(f16::from_f32(numbers.value()).to_le_bytes()),
            BlockType::Bf16 => bytes.extend(half::bf16::from_f32(numbers.value()).to_le_bytes()),
            _ => {
                let mut block: Vec<u8> = (0..block_type.bytes()).map(|_| numbers.byte()).collect();
                for &at in factors(block_type) {
                    let factor = 0.05 * numbers.value();
                    if block_type == BlockType::Q8Affine {
                        block[at..at + 4].copy_from_slice(&factor.to_le_bytes());
                    } else {
                        let factor = f16::from_f32(factor);
                        block[at..at + 2].copy_from_slice(&factor.to_le_bytes());
                    }
                }
                bytes.extend(block);
            }
        }
    }
    Matrix::new(block_type, rows, columns, ByteSource::copy_of(&bytes)).unwrap()
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
