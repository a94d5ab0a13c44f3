//! Row-wise ops: norm, softmax, gate, sums.

use super::math::{exp, largest, load, store};
use super::output::Output;
use super::simd::{Kernel, Simd};
use super::{Cpu, CpuDevice};
use crate::error::{OpError, check_length, row_count};
use crate::ran::Ran;

/// Elements that are worth a chunk of their own.
const CHUNK_ELEMENTS: usize = 16 * 1024;

/// `out = input / sqrt(mean(input^2) + epsilon) * weight` for every row of `[T, D]`, `weight` `[D]`.
///
/// # Errors
/// [`OpError`] if `input` is no whole number of rows or `out` differs in length.
pub fn rms_norm(
    cpu: &Cpu,
    input: &[f32],
    weight: &[f32],
    epsilon: f32,
    out: &mut [f32],
) -> Result<Ran<CpuDevice, ()>, OpError> {
    row_count("input of the norm", input.len(), weight.len())?;
    check_length("output of the norm", input.len(), out.len())?;
    in_chunks(cpu, weight.len(), out, |kernel_input, out| {
        cpu.kernels().run(RmsNorm {
            input: &input[kernel_input..kernel_input + out.len()],
            weight,
            epsilon,
            out,
        });
    });
    Ok(Ran::new(CpuDevice(()), ()))
}

/// Turns every row of `[rows, columns]` into `exp(x - max) / sum(exp(x - max))` in place.
///
/// A row with no largest finite value becomes NaN.
///
/// # Errors
/// [`OpError`] if `values` is no whole number of rows.
pub fn softmax(
    cpu: &Cpu,
    values: &mut [f32],
    columns: usize,
) -> Result<Ran<CpuDevice, ()>, OpError> {
    row_count("softmax input", values.len(), columns)?;
    in_chunks(cpu, columns, values, |_, values| {
        cpu.kernels().run(Softmax { values, columns });
    });
    Ok(Ran::new(CpuDevice(()), ()))
}

/// `gate = silu(gate) * up`, where `silu(x) = x / (1 + exp(-x))`; both of one shape.
///
/// # Errors
/// [`OpError`] if the lengths differ.
pub fn silu_mul(cpu: &Cpu, gate: &mut [f32], up: &[f32]) -> Result<Ran<CpuDevice, ()>, OpError> {
    check_length("up", gate.len(), up.len())?;
    in_chunks(cpu, 1, gate, |from, gate| {
        let up = &up[from..from + gate.len()];
        cpu.kernels().run(SiluMul { gate, up });
    });
    Ok(Ran::new(CpuDevice(()), ()))
}

/// Adds `addend` `[N]` to every row of `target` `[T, N]`: a bias, or with `T` = 1 a residual.
///
/// # Errors
/// [`OpError`] if `target` is no whole number of rows.
pub fn add(cpu: &Cpu, target: &mut [f32], addend: &[f32]) -> Result<Ran<CpuDevice, ()>, OpError> {
    row_count("target of an addition", target.len(), addend.len())?;
    if !addend.is_empty() {
        for row in target.chunks_exact_mut(addend.len()) {
            cpu.kernels().run(Add { row, addend });
        }
    }
    Ok(Ran::new(CpuDevice(()), ()))
}

/// Calls `work(offset, part)` for parts of whole rows, in parallel where there is enough to do.
fn in_chunks(cpu: &Cpu, row: usize, out: &mut [f32], work: impl Fn(usize, &mut [f32]) + Sync) {
    if out.is_empty() {
        return;
    }
    let chunk = CHUNK_ELEMENTS.div_ceil(row) * row;
    let length = out.len();
    let output = Output::new(out);
    cpu.pool().run(length.div_ceil(chunk), &|index| {
        let range = index * chunk..length.min((index + 1) * chunk);
        let from = range.start;
        // SAFETY: chunks are disjoint, and the pool hands out each index once.
        let part = unsafe { output.slice(range) };
        work(from, part);
    });
}

struct RmsNorm<'a> {
    input: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    #[expect(
        clippy::cast_precision_loss,
        reason = "a row has far fewer than 2^24 elements"
    )]
    fn run<S: Simd>(self, simd: S) {
        let width = self.weight.len();
        let rows = self.input.chunks_exact(width);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(width)) {
            let mut squares = [simd.splat(0.0); 4];
            for part in row.chunks(4 * S::LANES) {
                for (values, sum) in part.chunks(S::LANES).zip(&mut squares) {
                    let values = load(simd, values, 0.0);
                    *sum = simd.fma(values, values, *sum);
                }
            }
            let [a, b, c, d] = squares;
            let squares = simd.sum(simd.add(simd.add(a, b), simd.add(c, d)));
            let factor = simd.splat(1.0 / (squares / width as f32 + self.epsilon).sqrt());
            let weights = self.weight.chunks(S::LANES);
            let values = row.chunks(S::LANES).zip(weights);
            for ((values, weights), out) in values.zip(out.chunks_mut(S::LANES)) {
                let scaled = simd.mul(load(simd, values, 0.0), factor);
                store(simd, simd.mul(scaled, load(simd, weights, 0.0)), out);
            }
        }
    }
}

struct Softmax<'a> {
    values: &'a mut [f32],
    columns: usize,
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let smallest = f32::NEG_INFINITY;
        for row in self.values.chunks_exact_mut(self.columns) {
            let mut most = simd.splat(smallest);
            for values in row.chunks(S::LANES) {
                most = simd.max(load(simd, values, smallest), most);
            }
            let most = simd.splat(largest(simd, most));
            let mut sum = simd.splat(0.0);
            for values in row.chunks_mut(S::LANES) {
                let weights = exp(simd, simd.sub(load(simd, values, smallest), most));
                sum = simd.add(sum, weights);
                store(simd, weights, values);
            }
            let sum = simd.splat(simd.sum(sum));
            for values in row.chunks_mut(S::LANES) {
                store(simd, simd.div(load(simd, values, 0.0), sum), values);
            }
        }
    }
}

struct SiluMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let one = simd.splat(1.0);
        for (gate, up) in self.gate.chunks_mut(S::LANES).zip(self.up.chunks(S::LANES)) {
            let x = load(simd, gate, 0.0);
            let power = exp(simd, simd.sub(simd.splat(0.0), x));
            let silu = simd.div(x, simd.add(one, power));
            store(simd, simd.mul(silu, load(simd, up, 0.0)), gate);
        }
    }
}

struct Add<'a> {
    row: &'a mut [f32],
    addend: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let addends = self.addend.chunks(S::LANES);
        for (row, addend) in self.row.chunks_mut(S::LANES).zip(addends) {
            let sum = simd.add(load(simd, row, 0.0), load(simd, addend, 0.0));
            store(simd, sum, row);
        }
    }
}
