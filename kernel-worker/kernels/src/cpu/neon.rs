//! NEON: 4 lanes. Products of bytes go through 16 bits; the dot product instructions have no stable intrinsics yet.

use std::arch::aarch64::{
    float32x4_t, int32x4_t, uint32x4_t, vaddq_f32, vaddq_u32, vaddvq_f32, vandq_s32, vandq_u32,
    vbslq_f32, vcgeq_u32, vcgtq_f32, vcltq_f32, vcvtq_f32_s32, vdivq_f32, vdupq_n_f32, vdupq_n_s32,
    vdupq_n_u32, veorq_s32, vfmaq_f32, vget_low_s8, vld1_u8, vld1q_s8, vld1q_s32, vld1q_u8,
    vmovl_u16, vmull_high_s8, vmull_s8, vmulq_f32, vorrq_s32, vorrq_u32, vpadalq_s16, vpaddq_s16,
    vqtbl1q_s8, vreinterpret_u16_u8, vreinterpretq_f32_s32, vreinterpretq_f32_u8,
    vreinterpretq_f32_u32, vreinterpretq_s8_s32, vreinterpretq_s32_s8, vreinterpretq_s32_s64,
    vreinterpretq_s32_u8, vreinterpretq_s32_u32, vreinterpretq_s64_s32, vreinterpretq_u8_s32,
    vreinterpretq_u32_f32, vreinterpretq_u32_s32, vshlq_n_u32, vshlq_u32, vshrq_n_u32, vst1q_f32,
    vsubq_f32, vtrn1q_s32, vtrn1q_s64, vtrn2q_s32, vtrn2q_s64,
};

use super::simd::{Kernel, Simd, check_rows};

/// Proof that the machine has NEON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Neon(());

impl Neon {
    /// Asks the machine.
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

#[target_feature(enable = "neon")]
fn enter<K: Kernel>(simd: Neon, kernel: K) -> K::Output {
    kernel.run(simd)
}

#[inline]
#[target_feature(enable = "neon")]
fn load_f32(bytes: &[u8; 16]) -> float32x4_t {
    // SAFETY: the array has the 16 bytes that are read; the load needs no alignment.
    vreinterpretq_f32_u8(unsafe { vld1q_u8(bytes.as_ptr()) })
}

/// Reads four 16-bit lanes, widened.
#[inline]
#[target_feature(enable = "neon")]
fn load_half(bytes: &[u8; 8]) -> uint32x4_t {
    // SAFETY: the array has the 8 bytes that are read; the load needs no alignment.
    vmovl_u16(vreinterpret_u16_u8(unsafe { vld1_u8(bytes.as_ptr()) }))
}

/// Converts f16 bits in the low half of each lane. Shifted into place, they are 2^112 times too small, which the
/// product undoes exactly for normal and subnormal numbers; infinities and non-numbers get their exponent.
#[inline]
#[target_feature(enable = "neon")]
fn widen_f16(bits: uint32x4_t) -> float32x4_t {
    let magnitude = vandq_u32(bits, vdupq_n_u32(0x7fff));
    let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
    let placed = vreinterpretq_f32_u32(vshlq_n_u32::<13>(magnitude));
    let scaled = vreinterpretq_u32_f32(vmulq_f32(
        placed,
        vdupq_n_f32(f32::from_bits((127 + 112) << 23)),
    ));
    let special = vandq_u32(
        vcgeq_u32(magnitude, vdupq_n_u32(0x7c00)),
        vdupq_n_u32(0x7f80_0000),
    );
    vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(scaled, special), sign))
}

#[inline]
#[target_feature(enable = "neon")]
fn load_f16(bytes: &[u8; 8]) -> float32x4_t {
    widen_f16(load_half(bytes))
}

#[inline]
#[target_feature(enable = "neon")]
fn load_bf16(bytes: &[u8; 8]) -> float32x4_t {
    vreinterpretq_f32_u32(vshlq_n_u32::<16>(load_half(bytes)))
}

#[inline]
#[target_feature(enable = "neon")]
fn store(value: float32x4_t, to: &mut [f32; 4]) {
    // SAFETY: the array has the 16 bytes that are written; the store needs no alignment.
    unsafe { vst1q_f32(to.as_mut_ptr(), value) }
}

#[inline]
#[target_feature(enable = "neon")]
fn max(left: float32x4_t, right: float32x4_t) -> float32x4_t {
    vbslq_f32(vcgtq_f32(left, right), left, right)
}

#[inline]
#[target_feature(enable = "neon")]
fn min(left: float32x4_t, right: float32x4_t) -> float32x4_t {
    vbslq_f32(vcltq_f32(left, right), left, right)
}

#[inline]
#[target_feature(enable = "neon")]
fn zero_if_less(value: float32x4_t, left: float32x4_t, right: float32x4_t) -> float32x4_t {
    vbslq_f32(vcltq_f32(left, right), vdupq_n_f32(0.0), value)
}

#[inline]
#[target_feature(enable = "neon")]
fn bits_to_power(value: float32x4_t) -> float32x4_t {
    let shifted = vshlq_n_u32::<23>(vreinterpretq_u32_f32(value));
    vreinterpretq_f32_u32(vaddq_u32(shifted, vdupq_n_u32(0x3f80_0000)))
}

#[inline]
#[target_feature(enable = "neon")]
fn shift_right<const BITS: u32>(value: int32x4_t) -> int32x4_t {
    let by = vdupq_n_s32(-BITS.cast_signed());
    vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(value), by))
}

#[inline]
#[target_feature(enable = "neon")]
fn shift_left<const BITS: u32>(value: int32x4_t) -> int32x4_t {
    let by = vdupq_n_s32(BITS.cast_signed());
    vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(value), by))
}

#[inline]
#[target_feature(enable = "neon")]
fn look_up(indices: int32x4_t, table: &[i8; 16]) -> int32x4_t {
    // SAFETY: the array has the 16 bytes that are read.
    let table = unsafe { vld1q_s8(table.as_ptr()) };
    vreinterpretq_s32_s8(vqtbl1q_s8(table, vreinterpretq_u8_s32(indices)))
}

#[inline]
#[target_feature(enable = "neon")]
fn f16_halves(value: int32x4_t) -> (float32x4_t, float32x4_t) {
    let bits = vreinterpretq_u32_s32(value);
    let low = widen_f16(vandq_u32(bits, vdupq_n_u32(0xffff)));
    (low, widen_f16(vshrq_n_u32::<16>(bits)))
}

/// Pair sums fit 16 bits: activations are within -127..=127 and weights within -128..=127.
#[inline]
#[target_feature(enable = "neon")]
fn dot4(sum: int32x4_t, weights: int32x4_t, activations: int32x4_t) -> int32x4_t {
    let (w, x) = (
        vreinterpretq_s8_s32(weights),
        vreinterpretq_s8_s32(activations),
    );
    let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(w, x)))
}

#[inline]
#[target_feature(enable = "neon")]
fn load_column(rows: &[u8], stride: usize) -> int32x4_t {
    check_rows(rows, stride, 4, 4);
    let words: [i32; 4] = std::array::from_fn(|row| {
        let at = row * stride;
        i32::from_le_bytes([rows[at], rows[at + 1], rows[at + 2], rows[at + 3]])
    });
    // SAFETY: the array has the 16 bytes that are read.
    unsafe { vld1q_s32(words.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn load_columns(rows: &[u8], stride: usize) -> [int32x4_t; 4] {
    check_rows(rows, stride, 4, 16);
    let row = |index: usize| -> int32x4_t {
        // SAFETY: `check_rows` proved that 16 bytes at `index * stride` lie in `rows` for index < 4.
        let at = unsafe { rows.as_ptr().add(index * stride) };
        // SAFETY: as above; the load needs no alignment.
        vreinterpretq_s32_u8(unsafe { vld1q_u8(at) })
    };
    let (a, b, c, d) = (row(0), row(1), row(2), row(3));
    let pair = |value: int32x4_t| vreinterpretq_s64_s32(value);
    let (ab_even, ab_odd) = (pair(vtrn1q_s32(a, b)), pair(vtrn2q_s32(a, b)));
    let (cd_even, cd_odd) = (pair(vtrn1q_s32(c, d)), pair(vtrn2q_s32(c, d)));
    [
        vreinterpretq_s32_s64(vtrn1q_s64(ab_even, cd_even)),
        vreinterpretq_s32_s64(vtrn1q_s64(ab_odd, cd_odd)),
        vreinterpretq_s32_s64(vtrn2q_s64(ab_even, cd_even)),
        vreinterpretq_s32_s64(vtrn2q_s64(ab_odd, cd_odd)),
    ]
}

impl Simd for Neon {
    const NAME: &'static str = "neon";
    const LANES: usize = 4;
    const UNSIGNED_WEIGHTS: bool = false;
    type F = float32x4_t;
    type I = int32x4_t;

    #[inline]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves the features.
        unsafe { enter(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    fn load_f32(self, bytes: &[u8]) -> float32x4_t {
        let bytes = bytes.try_into().expect("16 bytes");
        // SAFETY: `self` proves the features.
        unsafe { load_f32(bytes) }
    }

    #[inline(always)]
    fn load_f16(self, bytes: &[u8]) -> float32x4_t {
        let bytes = bytes.try_into().expect("8 bytes");
        // SAFETY: `self` proves the features.
        unsafe { load_f16(bytes) }
    }

    #[inline(always)]
    fn load_bf16(self, bytes: &[u8]) -> float32x4_t {
        let bytes = bytes.try_into().expect("8 bytes");
        // SAFETY: `self` proves the features.
        unsafe { load_bf16(bytes) }
    }

    #[inline(always)]
    fn store(self, value: float32x4_t, to: &mut [f32]) {
        let to = to.try_into().expect("4 places");
        // SAFETY: `self` proves the features.
        unsafe { store(value, to) }
    }

    #[inline(always)]
    fn add(self, left: float32x4_t, right: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vaddq_f32(left, right) }
    }

    #[inline(always)]
    fn sub(self, left: float32x4_t, right: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vsubq_f32(left, right) }
    }

    #[inline(always)]
    fn mul(self, left: float32x4_t, right: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vmulq_f32(left, right) }
    }

    #[inline(always)]
    fn div(self, left: float32x4_t, right: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vdivq_f32(left, right) }
    }

    #[inline(always)]
    fn fma(self, left: float32x4_t, right: float32x4_t, addend: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vfmaq_f32(addend, left, right) }
    }

    #[inline(always)]
    fn max(self, left: float32x4_t, right: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { max(left, right) }
    }

    #[inline(always)]
    fn min(self, left: float32x4_t, right: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { min(left, right) }
    }

    #[inline(always)]
    fn zero_if_less(
        self,
        value: float32x4_t,
        left: float32x4_t,
        right: float32x4_t,
    ) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { zero_if_less(value, left, right) }
    }

    #[inline(always)]
    fn bits_to_power(self, value: float32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { bits_to_power(value) }
    }

    #[inline(always)]
    fn sum(self, value: float32x4_t) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { vaddvq_f32(value) }
    }

    #[inline(always)]
    fn splat_bits(self, value: i32) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vdupq_n_s32(value) }
    }

    #[inline(always)]
    fn and(self, left: int32x4_t, right: int32x4_t) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vandq_s32(left, right) }
    }

    #[inline(always)]
    fn or(self, left: int32x4_t, right: int32x4_t) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vorrq_s32(left, right) }
    }

    #[inline(always)]
    fn xor(self, left: int32x4_t, right: int32x4_t) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { veorq_s32(left, right) }
    }

    #[inline(always)]
    fn shift_right<const BITS: u32>(self, value: int32x4_t) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { shift_right::<BITS>(value) }
    }

    #[inline(always)]
    fn shift_left<const BITS: u32>(self, value: int32x4_t) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { shift_left::<BITS>(value) }
    }

    #[inline(always)]
    fn look_up(self, indices: int32x4_t, table: &[i8; 16]) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { look_up(indices, table) }
    }

    #[inline(always)]
    fn to_f32(self, value: int32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vcvtq_f32_s32(value) }
    }

    #[inline(always)]
    fn of_bits(self, value: int32x4_t) -> float32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { vreinterpretq_f32_s32(value) }
    }

    #[inline(always)]
    fn f16_halves(self, value: int32x4_t) -> (float32x4_t, float32x4_t) {
        // SAFETY: `self` proves the features.
        unsafe { f16_halves(value) }
    }

    #[inline(always)]
    fn dot4<const SIGNED: bool>(
        self,
        sum: int32x4_t,
        weights: int32x4_t,
        activations: int32x4_t,
    ) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { dot4(sum, weights, activations) }
    }

    #[inline(always)]
    fn prefetch(self, _byte: &u8) {}

    #[inline(always)]
    fn load_column(self, rows: &[u8], stride: usize) -> int32x4_t {
        // SAFETY: `self` proves the features.
        unsafe { load_column(rows, stride) }
    }

    #[inline(always)]
    fn load_columns(self, rows: &[u8], stride: usize) -> [int32x4_t; 4] {
        // SAFETY: `self` proves the features.
        unsafe { load_columns(rows, stride) }
    }
}
