//! The kernels that RunOp and the probes call, one implementation per backend.

use std::io;
use std::num::NonZeroUsize;

use velox_kernels::cpu::{self, Cpu, CpuDevice, CpuKernelSet};
use velox_kernels::error::OpError;
use velox_kernels::matrix::Matrix;
use velox_kernels::ran::{Device, Ran};
use velox_kernels::reference::{self, ReferenceDevice};

/// Kernels on plain f32 tensors and stored matrices.
pub trait KernelSet {
    /// Witness of where they run.
    type Device: Device;

    /// `out` `[T, rows]` = `input` `[T, columns]` times the transposed matrix.
    ///
    /// # Errors
    /// [`OpError`] if the shapes disagree.
    fn mat_mul(
        &self,
        input: &[f32],
        matrix: &Matrix,
        out: &mut [f32],
    ) -> Result<Ran<Self::Device, ()>, OpError>;

    /// RMS norm of rows as long as `weight`.
    ///
    /// # Errors
    /// [`OpError`] if the shapes disagree.
    fn rms_norm(
        &self,
        input: &[f32],
        weight: &[f32],
        epsilon: f32,
        out: &mut [f32],
    ) -> Result<Ran<Self::Device, ()>, OpError>;

    /// Softmax of rows of `columns` values, in place.
    ///
    /// # Errors
    /// [`OpError`] if the shapes disagree.
    fn softmax(&self, values: &mut [f32], columns: usize)
    -> Result<Ran<Self::Device, ()>, OpError>;

    /// All values of a matrix.
    ///
    /// # Errors
    /// [`OpError`] if the shapes disagree.
    fn dequantise(
        &self,
        matrix: &Matrix,
        out: &mut [f32],
    ) -> Result<Ran<Self::Device, ()>, OpError>;
}

/// The oracle.
#[derive(Debug, Clone, Copy)]
pub struct ReferenceKernels {
    /// Threads of a product.
    pub threads: usize,
}

impl KernelSet for ReferenceKernels {
    type Device = ReferenceDevice;

    fn mat_mul(
        &self,
        input: &[f32],
        matrix: &Matrix,
        out: &mut [f32],
    ) -> Result<Ran<ReferenceDevice, ()>, OpError> {
        reference::mat_mul(input, matrix, self.threads, out)
    }

    fn rms_norm(
        &self,
        input: &[f32],
        weight: &[f32],
        epsilon: f32,
        out: &mut [f32],
    ) -> Result<Ran<ReferenceDevice, ()>, OpError> {
        reference::rms_norm(input, weight, epsilon, out)
    }

    fn softmax(
        &self,
        values: &mut [f32],
        columns: usize,
    ) -> Result<Ran<ReferenceDevice, ()>, OpError> {
        reference::softmax(values, columns)
    }

    fn dequantise(
        &self,
        matrix: &Matrix,
        out: &mut [f32],
    ) -> Result<Ran<ReferenceDevice, ()>, OpError> {
        reference::dequantise_row(matrix.block_type(), matrix.bytes(), out)
    }
}

/// The SIMD kernels with their threads.
#[derive(Debug)]
pub struct CpuKernels(Cpu);

impl CpuKernels {
    /// Starts the threads.
    ///
    /// # Errors
    /// What the system says when it cannot start one.
    pub fn new(threads: NonZeroUsize) -> io::Result<Self> {
        Cpu::new(CpuKernelSet::detect(), threads).map(Self)
    }
}

impl KernelSet for CpuKernels {
    type Device = CpuDevice;

    fn mat_mul(
        &self,
        input: &[f32],
        matrix: &Matrix,
        out: &mut [f32],
    ) -> Result<Ran<CpuDevice, ()>, OpError> {
        cpu::mat_mul(&self.0, input, matrix, out)
    }

    fn rms_norm(
        &self,
        input: &[f32],
        weight: &[f32],
        epsilon: f32,
        out: &mut [f32],
    ) -> Result<Ran<CpuDevice, ()>, OpError> {
        cpu::rms_norm(&self.0, input, weight, epsilon, out)
    }

    fn softmax(&self, values: &mut [f32], columns: usize) -> Result<Ran<CpuDevice, ()>, OpError> {
        cpu::softmax(&self.0, values, columns)
    }

    fn dequantise(&self, matrix: &Matrix, out: &mut [f32]) -> Result<Ran<CpuDevice, ()>, OpError> {
        cpu::dequantise_row(&self.0, matrix.block_type(), matrix.bytes(), out)
    }
}
