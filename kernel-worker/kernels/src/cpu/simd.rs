//! The vector operations that kernels are written in, once for every instruction set.
//!
//! A kernel is a [`Kernel`] whose `run` and everything below it is `#[inline(always)]`, so that it is compiled anew
//! inside the one function per instruction set that carries `#[target_feature]` ([`Simd::enter`]). Vectors lie in
//! memory as slices of their own type: kernels need no pointers and no bounds checks.

use std::fmt::Debug;

/// Work that is compiled for an instruction set.
pub(super) trait Kernel {
    /// What it returns.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set. A value of the type proves that the machine has it.
pub(super) trait Simd: Copy + Debug + Send + Sync + 'static {
    /// Name as results show it.
    const NAME: &'static str;
    /// Lanes of a vector; also the weight rows that a tile of quantised weights holds.
    const LANES: usize;
    /// Whether [`Simd::dot4`] takes weights as unsigned bytes. Signed weights are then stored with 128 added.
    const UNSIGNED_WEIGHTS: bool;
    /// `LANES` of f32.
    type F: Copy + Debug + Send + Sync;
    /// `LANES` of 32 bits.
    type I: Copy + Debug + Send + Sync;

    /// Runs a kernel compiled for this set.
    fn enter<K: Kernel>(self, kernel: K) -> K::Output;

    /// Sets every lane.
    fn splat(self, value: f32) -> Self::F;
    /// Reads `LANES` little-endian f32 from exactly `4 * LANES` bytes.
    fn load_f32(self, bytes: &[u8]) -> Self::F;
    /// Reads `LANES` little-endian f16 from exactly `2 * LANES` bytes.
    fn load_f16(self, bytes: &[u8]) -> Self::F;
    /// Reads `LANES` little-endian bf16 from exactly `2 * LANES` bytes.
    fn load_bf16(self, bytes: &[u8]) -> Self::F;
    /// Writes `LANES` f32 to exactly as many places.
    fn store(self, value: Self::F, to: &mut [f32]);
    /// `left + right`.
    fn add(self, left: Self::F, right: Self::F) -> Self::F;
    /// `left - right`.
    fn sub(self, left: Self::F, right: Self::F) -> Self::F;
    /// `left * right`.
    fn mul(self, left: Self::F, right: Self::F) -> Self::F;
    /// `left / right`.
    fn div(self, left: Self::F, right: Self::F) -> Self::F;
    /// `left * right + addend`, rounded once where the set can.
    fn fma(self, left: Self::F, right: Self::F, addend: Self::F) -> Self::F;
    /// The larger, `right` if one is not a number.
    fn max(self, left: Self::F, right: Self::F) -> Self::F;
    /// The smaller, `right` if one is not a number.
    fn min(self, left: Self::F, right: Self::F) -> Self::F;
    /// 0 where `left < right`, else `value`, also if one is not a number.
    fn zero_if_less(self, value: Self::F, left: Self::F, right: Self::F) -> Self::F;
    /// Shifts the bits of each lane left by 23 and adds the bits of 1.0.
    fn bits_to_power(self, value: Self::F) -> Self::F;
    /// Sums the lanes in a fixed order.
    fn sum(self, value: Self::F) -> f32;

    /// Sets every lane.
    fn splat_bits(self, value: i32) -> Self::I;
    /// Bitwise and.
    fn and(self, left: Self::I, right: Self::I) -> Self::I;
    /// Bitwise or.
    fn or(self, left: Self::I, right: Self::I) -> Self::I;
    /// Bitwise exclusive or.
    fn xor(self, left: Self::I, right: Self::I) -> Self::I;
    /// Shifts each lane right, filling with 0.
    fn shift_right<const BITS: u32>(self, value: Self::I) -> Self::I;
    /// Shifts each lane left.
    fn shift_left<const BITS: u32>(self, value: Self::I) -> Self::I;
    /// Replaces each byte, which is below 16, by its entry.
    fn look_up(self, indices: Self::I, table: &[i8; 16]) -> Self::I;
    /// Converts integers to f32.
    fn to_f32(self, value: Self::I) -> Self::F;
    /// Takes integers for the bits of f32.
    fn of_bits(self, value: Self::I) -> Self::F;
    /// Converts the low and the high half of each lane from f16.
    fn f16_halves(self, value: Self::I) -> (Self::F, Self::F);
    /// Adds to each lane the dot product of its four weight bytes with four signed activation bytes. `SIGNED` says
    /// that weights may be outside 0..=127 (in which case, unless [`Simd::UNSIGNED_WEIGHTS`], they are signed).
    fn dot4<const SIGNED: bool>(
        self,
        sum: Self::I,
        weights: Self::I,
        activations: Self::I,
    ) -> Self::I;
    /// Asks for the cache line of a byte; does nothing where there is no such instruction.
    fn prefetch(self, byte: &u8);
    /// Reads 4 bytes of each of `LANES` rows that lie `stride` apart; lane = row.
    fn load_column(self, rows: &[u8], stride: usize) -> Self::I;
    /// Reads 16 bytes of each of `LANES` rows that lie `stride` apart; lane = row, four columns of 4 bytes.
    fn load_columns(self, rows: &[u8], stride: usize) -> [Self::I; 4];
}

/// Panics unless `LANES` rows of `width` bytes, `stride` apart, lie in `rows`: what column loads rely on.
#[inline(always)]
pub(super) fn check_rows(rows: &[u8], stride: usize, lanes: usize, width: usize) {
    assert!(
        rows.len() >= width && rows.len() - width >= stride.saturating_mul(lanes - 1),
        "rows of a tile end outside their matrix"
    );
}
