//! Vector functions and rows of any length.

use super::simd::Simd;

/// Below this, `exp` is 0: the smallest power that is a normal number.
const EXP_ZERO: f32 = -87.336_54;
/// Above this, `exp` is what it is here, just short of the largest number.
const EXP_LARGEST: f32 = 88.376_26;

/// `e^x`: 2^n times a polynomial in `x - n ln 2`. The relative error is below 3e-7 between the limits; results below
/// the smallest normal number are 0, above the largest limit they stay there, and what is not a number stays so.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::F) -> S::F {
    // 1.5 * 2^23: added, it leaves the nearest integer in the low bits.
    let round = simd.splat(12_582_912.0);
    let low = simd.splat(EXP_ZERO);
    // A limit on the left keeps what is not a number.
    let clamped = simd.min(simd.splat(EXP_LARGEST), simd.max(low, x));
    let shifted = simd.fma(clamped, simd.splat(std::f32::consts::LOG2_E), round);
    let n = simd.sub(shifted, round);
    // ln 2 in two parts; products with the first are exact.
    let rest = simd.fma(n, simd.splat(-0.693_359_4), clamped);
    let rest = simd.fma(n, simd.splat(2.121_944_4e-4), rest);
    let mut sum = simd.splat(1.987_569_1e-4);
    for coefficient in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        sum = simd.fma(sum, rest, simd.splat(coefficient));
    }
    let square = simd.mul(rest, rest);
    let sum = simd.add(simd.fma(sum, square, rest), simd.splat(1.0));
    simd.zero_if_less(simd.mul(sum, simd.bits_to_power(shifted)), x, low)
}

/// `e^x` of one number by the same steps.
#[inline(always)]
pub(super) fn exp_one<S: Simd>(simd: S, x: f32) -> f32 {
    first(simd, exp(simd, simd.splat(x)))
}

/// Returns the first lane.
#[inline(always)]
fn first<S: Simd>(simd: S, value: S::F) -> f32 {
    let mut lanes = [0.0; 16];
    simd.store(value, &mut lanes[..S::LANES]);
    lanes[0]
}

/// Returns the largest lane, ignoring what is not a number.
#[inline(always)]
pub(super) fn largest<S: Simd>(simd: S, value: S::F) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    simd.store(value, &mut lanes[..S::LANES]);
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// Reads up to `LANES` values; the other lanes are `rest`.
#[inline(always)]
pub(super) fn load<S: Simd>(simd: S, values: &[f32], rest: f32) -> S::F {
    if values.len() == S::LANES {
        return simd.load_f32(bytemuck::cast_slice(values));
    }
    let mut lanes = [rest; 16];
    lanes[..values.len()].copy_from_slice(values);
    simd.load_f32(bytemuck::cast_slice(&lanes[..S::LANES]))
}

/// Writes up to `LANES` values.
#[inline(always)]
pub(super) fn store<S: Simd>(simd: S, value: S::F, to: &mut [f32]) {
    if to.len() == S::LANES {
        simd.store(value, to);
        return;
    }
    let mut lanes = [0.0; 16];
    simd.store(value, &mut lanes[..S::LANES]);
    to.copy_from_slice(&lanes[..to.len()]);
}

#[cfg(test)]
mod tests {
    use super::super::CpuKernelSet;
    use super::super::simd::{Kernel, Simd};
    use super::*;

    struct Exp<'a>(&'a mut [f32]);

    impl Kernel for Exp<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            for values in self.0.chunks_mut(S::LANES) {
                let x = load(simd, values, 0.0);
                store(simd, exp(simd, x), values);
            }
        }
    }

    #[test]
    fn exp_is_within_its_bound() {
        for kernels in CpuKernelSet::available() {
            let inputs: Vec<f32> = (-17_400_i16..=17_600)
                .map(|n| f32::from(n) * 5e-3)
                .collect();
            let mut outputs = inputs.clone();
            kernels.run(Exp(&mut outputs));
            for (&x, &y) in inputs.iter().zip(&outputs) {
                let expected = f64::from(x).exp();
                let error = (f64::from(y) - expected).abs() / expected;
                assert!(
                    error < 3e-7,
                    "{}: exp({x}) = {y}, off by {error:e}",
                    kernels.name()
                );
            }
        }
    }

    #[test]
    fn exp_keeps_its_limits() {
        for kernels in CpuKernelSet::available() {
            let mut values = [
                0.0,
                -0.0,
                -1e9,
                f32::NEG_INFINITY,
                1e9,
                f32::INFINITY,
                f32::NAN,
            ];
            kernels.run(Exp(&mut values));
            assert_eq!(values[..4], [1.0, 1.0, 0.0, 0.0], "{}", kernels.name());
            assert!(values[4] > 2e38 && values[4].is_finite(), "{}", values[4]);
            assert_eq!(values[4], values[5]);
            assert!(values[6].is_nan());
        }
    }
}
