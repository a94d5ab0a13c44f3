//! AVX-512 with VNNI: 16 lanes, dot products of unsigned by signed bytes.

use std::arch::x86_64::_CMP_NLT_UQ;
use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch,
    _mm256_loadu_si256, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_broadcast_i32x4,
    _mm512_castps_si512, _mm512_castsi128_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
    _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps,
    _mm512_div_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_i32gather_epi32,
    _mm512_inserti32x4, _mm512_loadu_ps, _mm512_maskz_mov_ps, _mm512_max_ps, _mm512_min_ps,
    _mm512_mul_ps, _mm512_mullo_epi32, _mm512_or_si512, _mm512_reduce_add_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setr_epi32, _mm512_shuffle_epi8, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64,
    _mm512_unpacklo_epi32, _mm512_unpacklo_epi64, _mm512_xor_si512,
};

use super::simd::{Kernel, Simd, check_rows};

/// Proof that the machine has AVX-512 F, BW, VL and VNNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Avx512(());

impl Avx512 {
    /// Asks the machine.
    pub(super) fn detect() -> Option<Self> {
        let present = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        present.then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn enter<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
    kernel.run(simd)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_f32(bytes: &[u8; 64]) -> __m512 {
    // SAFETY: the array has the 64 bytes that are read; the load needs no alignment.
    unsafe { _mm512_loadu_ps(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx")]
fn load_half(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: the array has the 32 bytes that are read; the load needs no alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_f16(bytes: &[u8; 32]) -> __m512 {
    _mm512_cvtph_ps(load_half(bytes))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_bf16(bytes: &[u8; 32]) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(load_half(
        bytes,
    ))))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(value: __m512, to: &mut [f32; 16]) {
    // SAFETY: the array has the 64 bytes that are written; the store needs no alignment.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn zero_if_less(value: __m512, left: __m512, right: __m512) -> __m512 {
    _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(left, right), value)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn bits_to_power(value: __m512) -> __m512 {
    let shifted = _mm512_slli_epi32::<23>(_mm512_castps_si512(value));
    _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3f80_0000)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn look_up(indices: __m512i, table: &[i8; 16]) -> __m512i {
    // SAFETY: the array has the 16 bytes that are read; the load needs no alignment.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), indices)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn f16_halves(value: __m512i) -> (__m512, __m512) {
    let low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(value));
    let high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(value)));
    (low, high)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_column(rows: &[u8], stride: usize) -> __m512i {
    check_rows(rows, stride, 16, 4);
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let stride = i32::try_from(stride).expect("rows of a tile lie within 2 GiB");
    assert!(stride <= i32::MAX / 16, "rows of a tile lie within 2 GiB");
    let offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(stride));
    // SAFETY: lane r reads 4 bytes at r * stride; `check_rows` proved that the last of them lie in `rows`, and the
    // second assertion that no offset wraps.
    unsafe { _mm512_i32gather_epi32::<1>(offsets, rows.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_columns(rows: &[u8], stride: usize) -> [__m512i; 4] {
    check_rows(rows, stride, 16, 16);
    let row = |index: usize| -> __m128i {
        // SAFETY: `check_rows` proved that 16 bytes at `index * stride` lie in `rows` for index < 16.
        let at = unsafe { rows.as_ptr().add(index * stride) };
        // SAFETY: as above; the load needs no alignment.
        unsafe { _mm_loadu_si128(at.cast()) }
    };
    // Part p holds rows p, p + 4, p + 8 and p + 12, one a quarter: quarter q of the transposed parts then holds a
    // column of rows 4q to 4q + 3, which is lane order.
    let part = |first: usize| -> __m512i {
        let part = _mm512_castsi128_si512(row(first));
        let part = _mm512_inserti32x4::<1>(part, row(first + 4));
        let part = _mm512_inserti32x4::<2>(part, row(first + 8));
        _mm512_inserti32x4::<3>(part, row(first + 12))
    };
    let (a, b, c, d) = (part(0), part(1), part(2), part(3));
    let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab_low, cd_low),
        _mm512_unpackhi_epi64(ab_low, cd_low),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ]
}

impl Simd for Avx512 {
    const NAME: &'static str = "avx512vnni";
    const LANES: usize = 16;
    const UNSIGNED_WEIGHTS: bool = true;
    type F = __m512;
    type I = __m512i;

    #[inline]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` proves the features.
        unsafe { enter(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load_f32(self, bytes: &[u8]) -> __m512 {
        let bytes = bytes.try_into().expect("64 bytes");
        // SAFETY: `self` proves the features.
        unsafe { load_f32(bytes) }
    }

    #[inline(always)]
    fn load_f16(self, bytes: &[u8]) -> __m512 {
        let bytes = bytes.try_into().expect("32 bytes");
        // SAFETY: `self` proves the features.
        unsafe { load_f16(bytes) }
    }

    #[inline(always)]
    fn load_bf16(self, bytes: &[u8]) -> __m512 {
        let bytes = bytes.try_into().expect("32 bytes");
        // SAFETY: `self` proves the features.
        unsafe { load_bf16(bytes) }
    }

    #[inline(always)]
    fn store(self, value: __m512, to: &mut [f32]) {
        let to = to.try_into().expect("16 places");
        // SAFETY: `self` proves the features.
        unsafe { store(value, to) }
    }

    #[inline(always)]
    fn add(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_add_ps(left, right) }
    }

    #[inline(always)]
    fn sub(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_sub_ps(left, right) }
    }

    #[inline(always)]
    fn mul(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_mul_ps(left, right) }
    }

    #[inline(always)]
    fn div(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_div_ps(left, right) }
    }

    #[inline(always)]
    fn fma(self, left: __m512, right: __m512, addend: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_fmadd_ps(left, right, addend) }
    }

    #[inline(always)]
    fn max(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_max_ps(left, right) }
    }

    #[inline(always)]
    fn min(self, left: __m512, right: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_min_ps(left, right) }
    }

    #[inline(always)]
    fn zero_if_less(self, value: __m512, left: __m512, right: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { zero_if_less(value, left, right) }
    }

    #[inline(always)]
    fn bits_to_power(self, value: __m512) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { bits_to_power(value) }
    }

    #[inline(always)]
    fn sum(self, value: __m512) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_reduce_add_ps(value) }
    }

    #[inline(always)]
    fn splat_bits(self, value: i32) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    fn and(self, left: __m512i, right: __m512i) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_and_si512(left, right) }
    }

    #[inline(always)]
    fn or(self, left: __m512i, right: __m512i) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_or_si512(left, right) }
    }

    #[inline(always)]
    fn xor(self, left: __m512i, right: __m512i) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_xor_si512(left, right) }
    }

    #[inline(always)]
    fn shift_right<const BITS: u32>(self, value: __m512i) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_srli_epi32::<BITS>(value) }
    }

    #[inline(always)]
    fn shift_left<const BITS: u32>(self, value: __m512i) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_slli_epi32::<BITS>(value) }
    }

    #[inline(always)]
    fn look_up(self, indices: __m512i, table: &[i8; 16]) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { look_up(indices, table) }
    }

    #[inline(always)]
    fn to_f32(self, value: __m512i) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_cvtepi32_ps(value) }
    }

    #[inline(always)]
    fn of_bits(self, value: __m512i) -> __m512 {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_castsi512_ps(value) }
    }

    #[inline(always)]
    fn f16_halves(self, value: __m512i) -> (__m512, __m512) {
        // SAFETY: `self` proves the features.
        unsafe { f16_halves(value) }
    }

    #[inline(always)]
    fn dot4<const SIGNED: bool>(
        self,
        sum: __m512i,
        weights: __m512i,
        activations: __m512i,
    ) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { _mm512_dpbusd_epi32(sum, weights, activations) }
    }

    #[inline(always)]
    fn prefetch(self, byte: &u8) {
        // SAFETY: SSE is part of every x86-64, and the hint accesses nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(byte).cast()) }
    }

    #[inline(always)]
    fn load_column(self, rows: &[u8], stride: usize) -> __m512i {
        // SAFETY: `self` proves the features.
        unsafe { load_column(rows, stride) }
    }

    #[inline(always)]
    fn load_columns(self, rows: &[u8], stride: usize) -> [__m512i; 4] {
        // SAFETY: `self` proves the features.
        unsafe { load_columns(rows, stride) }
    }
}
