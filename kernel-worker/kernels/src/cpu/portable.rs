//! Plain Rust: 8 lanes that the compiler may vectorise as it can.

use half::{bf16, f16};

use super::simd::{Kernel, Simd, check_rows};

const LANES: usize = 8;

/// The instruction set that every machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Portable;

/// Applies a function lane by lane.
#[inline(always)]
fn zip<A: Copy, B: Copy, C>(
    left: [A; LANES],
    right: [B; LANES],
    apply: impl Fn(A, B) -> C,
) -> [C; LANES] {
    std::array::from_fn(|lane| apply(left[lane], right[lane]))
}

#[inline(always)]
fn halves(bytes: &[u8]) -> [u16; LANES] {
    assert_eq!(bytes.len(), 2 * LANES, "bytes of half-wide lanes");
    std::array::from_fn(|lane| u16::from_le_bytes([bytes[2 * lane], bytes[2 * lane + 1]]))
}

#[inline(always)]
fn word(bytes: &[u8], at: usize) -> i32 {
    i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl Simd for Portable {
    const NAME: &'static str = "portable";
    const LANES: usize = LANES;
    const UNSIGNED_WEIGHTS: bool = false;
    type F = [f32; LANES];
    type I = [i32; LANES];

    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        [value; LANES]
    }

    #[inline(always)]
    fn load_f32(self, bytes: &[u8]) -> Self::F {
        assert_eq!(bytes.len(), 4 * LANES, "bytes of f32 lanes");
        std::array::from_fn(|lane| f32::from_bits(word(bytes, 4 * lane).cast_unsigned()))
    }

    #[inline(always)]
    fn load_f16(self, bytes: &[u8]) -> Self::F {
        halves(bytes).map(|bits| f16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    fn load_bf16(self, bytes: &[u8]) -> Self::F {
        halves(bytes).map(|bits| bf16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32]) {
        to.copy_from_slice(&value);
    }

    #[inline(always)]
    fn add(self, left: Self::F, right: Self::F) -> Self::F {
        zip(left, right, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, left: Self::F, right: Self::F) -> Self::F {
        zip(left, right, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, left: Self::F, right: Self::F) -> Self::F {
        zip(left, right, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, left: Self::F, right: Self::F) -> Self::F {
        zip(left, right, |a, b| a / b)
    }

    /// Rounds twice: a fused product is a library call where the instruction is missing.
    #[inline(always)]
    fn fma(self, left: Self::F, right: Self::F, addend: Self::F) -> Self::F {
        self.add(self.mul(left, right), addend)
    }

    #[inline(always)]
    fn max(self, left: Self::F, right: Self::F) -> Self::F {
        zip(left, right, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, left: Self::F, right: Self::F) -> Self::F {
        zip(left, right, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn zero_if_less(self, value: Self::F, left: Self::F, right: Self::F) -> Self::F {
        let less = zip(left, right, |a, b| a < b);
        zip(value, less, |v, less| if less { 0.0 } else { v })
    }

    #[inline(always)]
    fn bits_to_power(self, value: Self::F) -> Self::F {
        value.map(|v| f32::from_bits((v.to_bits() << 23).wrapping_add(1.0_f32.to_bits())))
    }

    #[inline(always)]
    fn sum(self, v: Self::F) -> f32 {
        let four = [v[0] + v[4], v[1] + v[5], v[2] + v[6], v[3] + v[7]];
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    fn splat_bits(self, value: i32) -> Self::I {
        [value; LANES]
    }

    #[inline(always)]
    fn and(self, left: Self::I, right: Self::I) -> Self::I {
        zip(left, right, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, left: Self::I, right: Self::I) -> Self::I {
        zip(left, right, |a, b| a | b)
    }

    #[inline(always)]
    fn xor(self, left: Self::I, right: Self::I) -> Self::I {
        zip(left, right, |a, b| a ^ b)
    }

    #[inline(always)]
    fn shift_right<const BITS: u32>(self, value: Self::I) -> Self::I {
        value.map(|v| (v.cast_unsigned() >> BITS).cast_signed())
    }

    #[inline(always)]
    fn shift_left<const BITS: u32>(self, value: Self::I) -> Self::I {
        value.map(|v| v << BITS)
    }

    #[inline(always)]
    fn look_up(self, indices: Self::I, table: &[i8; 16]) -> Self::I {
        let entry = |index: u8| table[usize::from(index)].to_le_bytes()[0];
        indices.map(|four| i32::from_le_bytes(four.to_le_bytes().map(entry)))
    }

    #[inline(always)]
    #[expect(
        clippy::cast_precision_loss,
        reason = "rounds to the nearest, as the vector sets do"
    )]
    fn to_f32(self, value: Self::I) -> Self::F {
        value.map(|v| v as f32)
    }

    #[inline(always)]
    fn of_bits(self, value: Self::I) -> Self::F {
        value.map(|bits| f32::from_bits(bits.cast_unsigned()))
    }

    #[inline(always)]
    fn f16_halves(self, value: Self::I) -> (Self::F, Self::F) {
        let half = |low: u8, high: u8| f16::from_le_bytes([low, high]).to_f32();
        let bytes = value.map(i32::to_le_bytes);
        (
            bytes.map(|b| half(b[0], b[1])),
            bytes.map(|b| half(b[2], b[3])),
        )
    }

    #[inline(always)]
    fn dot4<const SIGNED: bool>(self, sum: Self::I, weights: Self::I, x: Self::I) -> Self::I {
        std::array::from_fn(|lane| {
            let weights = weights[lane].to_le_bytes();
            let x = x[lane].to_le_bytes();
            (0..4).fold(sum[lane], |sum, at| {
                sum + i32::from(weights[at].cast_signed()) * i32::from(x[at].cast_signed())
            })
        })
    }

    #[inline(always)]
    fn prefetch(self, _byte: &u8) {}

    #[inline(always)]
    fn load_column(self, rows: &[u8], stride: usize) -> Self::I {
        check_rows(rows, stride, LANES, 4);
        std::array::from_fn(|lane| word(rows, lane * stride))
    }

    #[inline(always)]
    fn load_columns(self, rows: &[u8], stride: usize) -> [Self::I; 4] {
        check_rows(rows, stride, LANES, 16);
        std::array::from_fn(|column| {
            std::array::from_fn(|lane| word(rows, lane * stride + 4 * column))
        })
    }
}
