//! Matrices of a model on the device.

use velox_kernels::affine::{AffineMatrix, StoredMatrix};
use velox_kernels::block::BlockType;
use velox_kernels::matrix::Matrix;

use crate::ffi::{Affine, Dtype, MlxError, Tensor, evaluate};
use crate::transcode;

/// A matrix `[out, in]` as MLX multiplies it.
#[derive(Debug)]
pub enum Weight {
    /// Numbers.
    Dense(Tensor),
    /// Groups of integers.
    Affine(Affine),
}

impl Weight {
    /// Copies a matrix to the device. Scales and numbers become `dtype`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn new(matrix: &StoredMatrix, dtype: Dtype) -> Result<Self, MlxError> {
        match matrix {
            StoredMatrix::Blocks(matrix) => Self::of_blocks(matrix, dtype),
            StoredMatrix::Affine(matrix) => Self::of_affine(matrix, dtype),
        }
    }

    /// MLX's own form: the words stay as they are.
    fn of_affine(matrix: &AffineMatrix, dtype: Dtype) -> Result<Self, MlxError> {
        let layout = matrix.layout();
        let shape = [matrix.rows(), matrix.columns() * layout.bits() / 32];
        let affine = Affine {
            packed: Tensor::of_bytes(Dtype::U32, matrix.packed(), &shape)?,
            scales: floats(matrix.scales())?.cast(dtype)?,
            biases: floats(matrix.biases())?.cast(dtype)?,
            group: layout.group(),
            bits: layout.bits(),
        };
        evaluate([&affine.packed, &affine.scales, &affine.biases])?;
        Ok(Self::Affine(affine))
    }

    fn of_blocks(matrix: &Matrix, dtype: Dtype) -> Result<Self, MlxError> {
        let affine =
            transcode::affine(matrix).map_err(|error| MlxError::Operation(error.to_string()))?;
        if let Some(affine) = affine {
            return Self::of_affine(&affine, dtype);
        }
        let numbers = floats(matrix)?.cast(dtype)?;
        evaluate([&numbers])?;
        Ok(Self::Dense(numbers))
    }

    /// Returns the size of the output.
    #[must_use]
    pub fn rows(&self) -> usize {
        match self {
            Self::Dense(numbers) => numbers.axis(0),
            Self::Affine(affine) => affine.packed.axis(0),
        }
    }

    /// Whether rows of the other could be rows of this.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Dense(numbers), Self::Dense(others)) => {
                numbers.axis(1) == others.axis(1) && numbers.dtype() == others.dtype()
            }
            (Self::Affine(affine), Self::Affine(other)) => {
                let layout = |affine: &Affine| {
                    let sizes = (affine.packed.axis(1), affine.group, affine.bits);
                    (sizes, affine.scales.dtype())
                };
                layout(affine) == layout(other)
            }
            _ => false,
        }
    }

    /// Puts the rows of a matrix that is like this one below its own.
    ///
    /// # Errors
    /// As MLX says.
    pub fn above(&self, other: &Self) -> Result<Self, MlxError> {
        let joined = |upper: &Tensor, lower: &Tensor| {
            Tensor::concatenate(&[upper.clone(), lower.clone()], 0)
        };
        match (self, other) {
            (Self::Dense(numbers), Self::Dense(others)) => {
                let numbers = joined(numbers, others)?;
                evaluate([&numbers])?;
                Ok(Self::Dense(numbers))
            }
            (Self::Affine(affine), Self::Affine(other)) => {
                let affine = Affine {
                    packed: joined(&affine.packed, &other.packed)?,
                    scales: joined(&affine.scales, &other.scales)?,
                    biases: joined(&affine.biases, &other.biases)?,
                    group: affine.group,
                    bits: affine.bits,
                };
                evaluate([&affine.packed, &affine.scales, &affine.biases])?;
                Ok(Self::Affine(affine))
            }
            _ => Err(MlxError::Operation(
                "matrices of two layouts cannot be joined".to_owned(),
            )),
        }
    }

    /// `[T, in]` to `[T, out]`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn multiply(&self, input: &Tensor) -> Result<Tensor, MlxError> {
        match self {
            Self::Dense(numbers) => input.times_transposed(numbers),
            Self::Affine(affine) => input.times_affine(affine),
        }
    }

    /// Rows by their u32 indices, `[T, in]`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn take(&self, rows: &Tensor) -> Result<Tensor, MlxError> {
        match self {
            Self::Dense(numbers) => numbers.take(rows),
            Self::Affine(affine) => affine.take(rows),
        }
    }
}

/// Copies a float matrix as it is.
fn floats(matrix: &Matrix) -> Result<Tensor, MlxError> {
    let stored = match matrix.block_type() {
        BlockType::F16 => Dtype::F16,
        BlockType::Bf16 => Dtype::Bf16,
        _ => Dtype::F32,
    };
    Tensor::of_bytes(stored, matrix.bytes(), &[matrix.rows(), matrix.columns()])
}
