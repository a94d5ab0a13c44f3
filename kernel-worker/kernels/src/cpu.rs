//! SIMD kernels, chosen by probing.
//!
//! Kernels are written once over the private trait `Simd` and compiled for every instruction set; [`CpuKernelSet`]
//! names the sets that this machine has. A [`Cpu`] is a set with a pool of threads; ops take it first and are otherwise
//! called like those of [`crate::reference`].
//!
//! **Determinism.** On one kernel set the bits of a result are a function of the operands of its row alone: integer
//! sums are exact, and every f32 sum has one order of additions, which depends neither on the other tokens of the
//! call nor on threads.
#![expect(
    unsafe_code,
    reason = "vector instructions, and threads that write disjoint parts of one slice"
)]

mod activation;
mod attend;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod band;
mod embed;
mod floats;
mod format;
mod mat_mul;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod output;
mod pool;
mod portable;
mod rope;
mod rows;
mod simd;

use std::io;
use std::num::NonZeroUsize;

pub use attend::{AttendSpan, attend, attend_all};
pub use embed::{dequantise_row, embed};
pub use mat_mul::{Activations, Product, mat_mul, multiply};
pub use pool::Pool;
pub use rope::{RopeTable, rope};
pub use rows::{add, rms_norm, silu_mul, softmax};

use crate::label::BackendLabel;
use crate::ran::Device;
use simd::{Kernel, Simd};

/// Witness that these kernels evaluated; only ops of this module make it.
#[derive(Debug)]
pub struct CpuDevice(());

impl Device for CpuDevice {
    const LABEL: BackendLabel = BackendLabel::Cpu;
}

/// An instruction set that this machine has; there is no other way to get one than to ask the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuKernelSet(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon),
    Portable(portable::Portable),
}

impl CpuKernelSet {
    /// Names of all sets, strong to weak, whatever this machine has.
    pub const NAMES: [&'static str; 4] = ["avx512vnni", "avx2", "neon", "portable"];

    /// Returns the sets that this machine has, strong to weak; the last, plain Rust, is always there.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(avx512::Avx512::detect().map(Set::Avx512));
            sets.extend(avx2::Avx2::detect().map(Set::Avx2));
        }
        #[cfg(target_arch = "aarch64")]
        sets.extend(neon::Neon::detect().map(Set::Neon));
        sets.push(Set::Portable(portable::Portable));
        sets.into_iter().map(Self).collect()
    }

    /// Returns the strongest set.
    #[must_use]
    pub fn detect() -> Self {
        let strongest = Self::available().into_iter().next();
        strongest.unwrap_or(Self(Set::Portable(portable::Portable)))
    }

    /// Returns the set of a name, `None` if this machine does not have it.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::available().into_iter().find(|set| set.name() == name)
    }

    /// Returns the name that results show as their kernel.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) => avx512::Avx512::NAME,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => avx2::Avx2::NAME,
            #[cfg(target_arch = "aarch64")]
            Set::Neon(_) => neon::Neon::NAME,
            Set::Portable(_) => portable::Portable::NAME,
        }
    }

    /// Runs a kernel compiled for this set.
    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(simd) => simd.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(simd) => simd.enter(kernel),
            #[cfg(target_arch = "aarch64")]
            Set::Neon(simd) => simd.enter(kernel),
            Set::Portable(simd) => simd.enter(kernel),
        }
    }
}

/// A kernel set and the threads that run it.
#[derive(Debug)]
pub struct Cpu {
    kernels: CpuKernelSet,
    pool: Pool,
}

impl Cpu {
    /// Starts `threads - 1` threads beside the caller's.
    ///
    /// # Errors
    /// What the system says when it cannot start a thread.
    pub fn new(kernels: CpuKernelSet, threads: NonZeroUsize) -> io::Result<Self> {
        Ok(Self {
            kernels,
            pool: Pool::new(threads)?,
        })
    }

    /// Returns the kernel set.
    #[must_use]
    pub fn kernels(&self) -> CpuKernelSet {
        self.kernels
    }

    /// Returns the threads.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}
