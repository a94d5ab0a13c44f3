//! AVX2 with FMA and F16C: 8 lanes.

use std::arch::x86_64::_CMP_NLT_UQ;
use std::arch::x86_64::{
    __m128i, __m256, __m256i, _MM_HINT_T0, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadu_si128,
    _mm_movehl_ps, _mm_prefetch, _mm_shuffle_ps, _mm256_abs_epi8, _mm256_add_epi32, _mm256_add_ps,
    _mm256_and_ps, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_castps_si256,
    _mm256_castps256_ps128, _mm256_castsi128_si256, _mm256_castsi256_ps, _mm256_castsi256_si128,
    _mm256_cmp_ps, _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_div_ps,
    _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_i32gather_epi32, _mm256_inserti128_si256,
    _mm256_loadu_ps, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_max_ps, _mm256_min_ps,
    _mm256_mul_ps, _mm256_mullo_epi32, _mm256_or_si256, _mm256_packus_epi32,
    _mm256_permute4x64_epi64, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setr_epi32, _mm256_shuffle_epi8, _mm256_sign_epi8, _mm256_slli_epi32, _mm256_sllv_epi32,
    _mm256_srli_epi32, _mm256_srlv_epi32, _mm256_storeu_ps, _mm256_sub_ps, _mm256_unpackhi_epi32,
    _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64, _mm256_xor_si256,
};

use super::simd::{Kernel, Simd, check_rows};

/// Proof that the machine has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx2(());

impl Avx2 {
    /// Asks the machine.
    pub(super) fn detect() -> Option<Self> {
        let present = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        present.then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn enter<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
    kernel.run(simd)
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_f32(bytes: &[u8; 32]) -> __m256 {
    // SAFETY: the array has the 32 bytes that are read; the load needs no alignment.
    unsafe { _mm256_loadu_ps(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_half(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: the array has the 16 bytes that are read; the load needs no alignment.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_f16(bytes: &[u8; 16]) -> __m256 {
    _mm256_cvtph_ps(load_half(bytes))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_bf16(bytes: &[u8; 16]) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(load_half(
        bytes,
    ))))
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(value: __m256, to: &mut [f32; 8]) {
    // SAFETY: the array has the 32 bytes that are written; the store needs no alignment.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn zero_if_less(value: __m256, left: __m256, right: __m256) -> __m256 {
    _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(left, right), value)
}

#[inline]
#[target_feature(enable = "avx2")]
fn bits_to_power(value: __m256) -> __m256 {
    let shifted = _mm256_slli_epi32::<23>(_mm256_castps_si256(value));
    _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(0x3f80_0000)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum(value: __m256) -> f32 {
    let four = _mm_add_ps(
        _mm256_castps256_ps128(value),
        _mm256_extractf128_ps::<1>(value),
    );
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// Narrows lanes that hold 16 bits each.
#[inline]
#[target_feature(enable = "avx2")]
fn narrow(value: __m256i) -> __m128i {
    let packed = _mm256_packus_epi32(value, value);
    _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b00_00_10_00>(packed))
}

#[inline]
#[target_feature(enable = "avx2")]
fn look_up(indices: __m256i, table: &[i8; 16]) -> __m256i {
    // SAFETY: the array has the 16 bytes that are read; the load needs no alignment.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), indices)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn f16_halves(value: __m256i) -> (__m256, __m256) {
    let low = narrow(_mm256_and_si256(value, _mm256_set1_epi32(0xffff)));
    let high = narrow(_mm256_srli_epi32::<16>(value));
    (_mm256_cvtph_ps(low), _mm256_cvtph_ps(high))
}

/// Pair sums fit 16 bits: activations are within -127..=127 and weights within -128..=127.
#[inline]
#[target_feature(enable = "avx2")]
fn dot4<const SIGNED: bool>(sum: __m256i, weights: __m256i, activations: __m256i) -> __m256i {
    let pairs = if SIGNED {
        _mm256_maddubs_epi16(
            _mm256_abs_epi8(weights),
            _mm256_sign_epi8(activations, weights),
        )
    } else {
        _mm256_maddubs_epi16(weights, activations)
    };
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_column(rows: &[u8], stride: usize) -> __m256i {
    check_rows(rows, stride, 8, 4);
    let stride = i32::try_from(stride).expect("rows of a tile lie within 2 GiB");
    assert!(stride <= i32::MAX / 8, "rows of a tile lie within 2 GiB");
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let offsets = _mm256_mullo_epi32(lanes, _mm256_set1_epi32(stride));
    // SAFETY: lane r reads 4 bytes at r * stride; `check_rows` proved that the last of them lie in `rows`, and the
    // assertion that no offset wraps.
    unsafe { _mm256_i32gather_epi32::<1>(rows.as_ptr().cast(), offsets) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_columns(rows: &[u8], stride: usize) -> [__m256i; 4] {
    check_rows(rows, stride, 8, 16);
    let row = |index: usize| -> __m128i {
        // SAFETY: `check_rows` proved that 16 bytes at `index * stride` lie in `rows` for index < 8.
        let at = unsafe { rows.as_ptr().add(index * stride) };
        // SAFETY: as above; the load needs no alignment.
        unsafe { _mm_loadu_si128(at.cast()) }
    };
    // Part p holds rows p and p + 4: half h of the transposed parts then holds a column of rows 4h to 4h + 3.
    let part = |first: usize| -> __m256i {
        _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(row(first)), row(first + 4))
    };
    let (a, b, c, d) = (part(0), part(1), part(2), part(3));
    let (ab_low, ab_high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (cd_low, cd_high) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    [
        _mm256_unpacklo_epi64(ab_low, cd_low),
        _mm256_unpackhi_epi64(ab_low, cd_low),
        _mm256_unpacklo_epi64(ab_high, cd_high),
        _mm256_unpackhi_epi64(ab_high, cd_high),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn shift_right<const BITS: u32>(value: __m256i) -> __m256i {
    _mm256_srlv_epi32(value, _mm256_set1_epi32(BITS.cast_signed()))
}

#[inline]
#[target_feature(enable = "avx2")]
fn shift_left<const BITS: u32>(value: __m256i) -> __m256i {
    _mm256_sllv_epi32(value, _mm256_set1_epi32(BITS.cast_signed()))
}

impl Simd for Avx2 {
    const NAME: &'static str = "avx2";
    const LANES: usize = 8;
    const UNSIGNED_WEIGHTS: bool = false;
    type F = __m256;
    type I = __m256i;

    #[inline]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves the features.
        unsafe { enter(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    fn load_f32(self, bytes: &[u8]) -> __m256 {
        let bytes = bytes.try_into().expect("32 bytes");
        // SAFETY: `self` proves the features.
        unsafe { load_f32(bytes) }
    }

    #[inline(always)]
    fn load_f16(self, bytes: &[u8]) -> __m256 {
        let bytes = bytes.try_into().expect("16 bytes");
        // SAFETY: `self` proves the features.
        unsafe { load_f16(bytes) }
    }

    #[inline(always)]
    fn load_bf16(self, bytes: &[u8]) -> __m256 {
        let bytes = bytes.try_into().expect("16 bytes");
        // SAFETY: `self` proves the features.
        unsafe { load_bf16(bytes) }
    }

    #[inline(always)]
    fn store(self, value: __m256, to: &mut [f32]) {
        let to = to.try_into().expect("8 places");
        // SAFETY: `self` proves the features.
        unsafe { store(value, to) }
    }

    #[inline(always)]
    fn add(self, left: __m256, right: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_add_ps(left, right) }
    }

    #[inline(always)]
    fn sub(self, left: __m256, right: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_sub_ps(left, right) }
    }

    #[inline(always)]
    fn mul(self, left: __m256, right: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_mul_ps(left, right) }
    }

    #[inline(always)]
    fn div(self, left: __m256, right: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_div_ps(left, right) }
    }

    #[inline(always)]
    fn fma(self, left: __m256, right: __m256, addend: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_fmadd_ps(left, right, addend) }
    }

    #[inline(always)]
    fn max(self, left: __m256, right: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_max_ps(left, right) }
    }

    #[inline(always)]
    fn min(self, left: __m256, right: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_min_ps(left, right) }
    }

    #[inline(always)]
    fn zero_if_less(self, value: __m256, left: __m256, right: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { zero_if_less(value, left, right) }
    }

    #[inline(always)]
    fn bits_to_power(self, value: __m256) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { bits_to_power(value) }
    }

    #[inline(always)]
    fn sum(self, value: __m256) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { sum(value) }
    }

    #[inline(always)]
    fn splat_bits(self, value: i32) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_set1_epi32(value) }
    }

    #[inline(always)]
    fn and(self, left: __m256i, right: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_and_si256(left, right) }
    }

    #[inline(always)]
    fn or(self, left: __m256i, right: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_or_si256(left, right) }
    }

    #[inline(always)]
    fn xor(self, left: __m256i, right: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_xor_si256(left, right) }
    }

    #[inline(always)]
    fn shift_right<const BITS: u32>(self, value: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { shift_right::<BITS>(value) }
    }

    #[inline(always)]
    fn shift_left<const BITS: u32>(self, value: __m256i) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { shift_left::<BITS>(value) }
    }

    #[inline(always)]
    fn look_up(self, indices: __m256i, table: &[i8; 16]) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { look_up(indices, table) }
    }

    #[inline(always)]
    fn to_f32(self, value: __m256i) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_cvtepi32_ps(value) }
    }

    #[inline(always)]
    fn of_bits(self, value: __m256i) -> __m256 {
        // SAFETY: `self` proves the features.
        unsafe { _mm256_castsi256_ps(value) }
    }

    #[inline(always)]
    fn f16_halves(self, value: __m256i) -> (__m256, __m256) {
        // SAFETY: `self` proves the features.
        unsafe { f16_halves(value) }
    }

    #[inline(always)]
    fn dot4<const SIGNED: bool>(
        self,
        sum: __m256i,
        weights: __m256i,
        activations: __m256i,
    ) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { dot4::<SIGNED>(sum, weights, activations) }
    }

    #[inline(always)]
    fn prefetch(self, byte: &u8) {
        // SAFETY: SSE is part of every x86-64, and the hint accesses nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast()) }
    }

    #[inline(always)]
    fn load_column(self, rows: &[u8], stride: usize) -> __m256i {
        // SAFETY: `self` proves the features.
        unsafe { load_column(rows, stride) }
    }

    #[inline(always)]
    fn load_columns(self, rows: &[u8], stride: usize) -> [__m256i; 4] {
        // SAFETY: `self` proves the features.
        unsafe { load_columns(rows, stride) }
    }
}
