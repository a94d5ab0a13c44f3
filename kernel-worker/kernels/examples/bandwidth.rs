//! How close products with one token come to the speed at which this machine reads memory, and what more tokens give.
//!
//! `bandwidth [THREADS] [KERNEL]`: for every block type, the best of several products with a matrix larger than the
//! caches, beside the best plain read of as many bytes in the same run. One line a type on standard output.

use std::error::Error;
use std::io::Write;
use std::num::NonZeroUsize;
use std::time::Instant;

use velox_kernels::block::BlockType;
use velox_kernels::buffer::ByteSource;
use velox_kernels::cpu::{self, Cpu, CpuKernelSet};
use velox_kernels::matrix::Matrix;

const COLUMNS: usize = 2048;
const BATCH: usize = 32;
const RUNS: usize = 7;
/// Weights of a matrix: 16 MiB of the smallest type and more of the others.
const WEIGHTS: usize = 48 << 20;

fn best(mut run: impl FnMut()) -> f64 {
    let times = (0..RUNS).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

/// Sums all words, each thread a part.
fn read(words: &[u64], threads: usize) -> u64 {
    let part = words.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let sums: Vec<_> = words
            .chunks(part)
            .map(|part| {
                scope.spawn(|| part.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)))
            })
            .collect();
        sums.into_iter()
            .filter_map(|sum| sum.join().ok())
            .fold(0, u64::wrapping_add)
    })
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of a benchmark are far below 2^52"
)]
fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads = match arguments.next() {
        Some(threads) => threads.parse()?,
        None => NonZeroUsize::MIN,
    };
    let kernels = match arguments.next() {
        Some(name) => {
            CpuKernelSet::named(&name).ok_or_else(|| format!("this machine has no {name}"))?
        }
        None => CpuKernelSet::detect(),
    };
    let cpu = Cpu::new(kernels, threads)?;
    let mut stdout = std::io::stdout().lock();
    writeln!(
        stdout,
        "kernel {}  threads {threads}\ntype      read GB/s  1 token GB/s   ratio  {BATCH} tokens, products/s",
        kernels.name()
    )?;
    for block_type in BlockType::ALL {
        let rows = WEIGHTS / COLUMNS;
        let row_bytes = block_type
            .row_bytes(COLUMNS)
            .ok_or("columns are whole blocks")?;
        // 0x2e2e is a small f16 and a small bf16; any byte is a valid quant.
        let words = vec![0x2e2e_2e2e_2e2e_2e2e_u64; (rows * row_bytes).div_ceil(8)];
        let bytes = bytemuck::cast_slice(&words);
        let matrix = Matrix::new(
            block_type,
            rows,
            COLUMNS,
            ByteSource::copy_of(&bytes[..rows * row_bytes]),
        )?;
        let input = vec![0.5_f32; BATCH * COLUMNS];
        let mut out = vec![0.0_f32; BATCH * rows];
        let mut sum = 0;
        let read = best(|| sum ^= read(&words, threads.get()));
        std::hint::black_box(sum);
        let mut failure = None;
        let one = best(|| {
            let result = cpu::mat_mul(&cpu, &input[..COLUMNS], &matrix, &mut out[..rows]);
            failure = result.err().or(failure);
        });
        let start = Instant::now();
        let many = cpu::mat_mul(&cpu, &input, &matrix, &mut out);
        let many_seconds = start.elapsed().as_secs_f64();
        if let Some(error) = failure.or(many.err()) {
            return Err(error.into());
        }
        let bytes = matrix.bytes().len() as f64;
        writeln!(
            stdout,
            "{:8} {:10.2} {:13.2} {:7.2} {:22.3e}",
            block_type.name(),
            bytes / read * 1e-9,
            bytes / one * 1e-9,
            read / one,
            (BATCH * WEIGHTS) as f64 / many_seconds
        )?;
    }
    Ok(())
}
