//! Matrices in MLX's affine form: groups of integers with a scale and a bias each.
//!
//! The elements of a row are one stream of bits, lowest first, so that 32 of them fill as many 32-bit words as an
//! element has bits. Scales and biases lie in matrices of their own, `[rows, columns / group]`. A weight is
//! `scale * q + bias`.

mod convert;

use crate::block::BlockType;
use crate::buffer::ByteSource;
use crate::matrix::{Matrix, MatrixError};

/// Elements whose bits fill whole words; every group is a multiple of it.
const RUN: usize = 32;

const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];
const GROUPS: [usize; 3] = [32, 64, 128];
/// By [`BITS`], then by [`GROUPS`].
const NAMES: [[&str; 3]; 6] = [
    ["MLX_AFFINE_2_G32", "MLX_AFFINE_2_G64", "MLX_AFFINE_2_G128"],
    ["MLX_AFFINE_3_G32", "MLX_AFFINE_3_G64", "MLX_AFFINE_3_G128"],
    ["MLX_AFFINE_4_G32", "MLX_AFFINE_4_G64", "MLX_AFFINE_4_G128"],
    ["MLX_AFFINE_5_G32", "MLX_AFFINE_5_G64", "MLX_AFFINE_5_G128"],
    ["MLX_AFFINE_6_G32", "MLX_AFFINE_6_G64", "MLX_AFFINE_6_G128"],
    ["MLX_AFFINE_8_G32", "MLX_AFFINE_8_G64", "MLX_AFFINE_8_G128"],
];

/// Bits of an element and elements of a group, in a combination that MLX has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AffineLayout {
    /// Index into [`BITS`].
    bits: usize,
    /// Index into [`GROUPS`].
    group: usize,
}

impl AffineLayout {
    /// Returns the layout; `None` if MLX has none with these numbers.
    #[must_use]
    pub fn new(bits: usize, group: usize) -> Option<Self> {
        Some(Self {
            bits: BITS.iter().position(|known| *known == bits)?,
            group: GROUPS.iter().position(|known| *known == group)?,
        })
    }

    /// Returns every layout.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..BITS.len()).flat_map(|bits| (0..GROUPS.len()).map(move |group| Self { bits, group }))
    }

    /// Returns the bits of an element.
    #[must_use]
    pub const fn bits(self) -> usize {
        BITS[self.bits]
    }

    /// Returns the elements that share a scale.
    #[must_use]
    pub const fn group(self) -> usize {
        GROUPS[self.group]
    }

    /// Returns the name as the facts of a model give it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        NAMES[self.bits][self.group]
    }

    /// Returns the 32-bit words of a row; `None` if `columns` is no whole number of groups.
    #[must_use]
    pub const fn row_words(self, columns: usize) -> Option<usize> {
        if !columns.is_multiple_of(self.group()) {
            return None;
        }
        (columns / RUN).checked_mul(self.bits())
    }
}

/// `[rows, columns]`, row major. Cloning shares the bytes.
#[derive(Debug, Clone)]
pub struct AffineMatrix {
    layout: AffineLayout,
    packed: ByteSource,
    scales: Matrix,
    biases: Matrix,
}

impl AffineMatrix {
    /// Makes a matrix of little-endian words and of float scales and biases `[rows, columns / group]`.
    ///
    /// # Errors
    /// [`MatrixError`] if the parts are not of one shape, or scales or biases are no floats.
    pub fn new(
        layout: AffineLayout,
        packed: ByteSource,
        scales: Matrix,
        biases: Matrix,
    ) -> Result<Self, MatrixError> {
        for part in [&scales, &biases] {
            if part.block_type().elements() != 1 {
                return Err(MatrixError::NoFloats {
                    block: part.block_type().name(),
                });
            }
        }
        if (biases.rows(), biases.columns()) != (scales.rows(), scales.columns()) {
            return Err(MatrixError::BiasShape {
                scales: [scales.rows(), scales.columns()],
                biases: [biases.rows(), biases.columns()],
            });
        }
        let expected = scales
            .columns()
            .checked_mul(layout.group())
            .and_then(|columns| layout.row_words(columns)?.checked_mul(4))
            .and_then(|row_bytes| row_bytes.checked_mul(scales.rows()))
            .ok_or(MatrixError::Overflow)?;
        let actual = packed.as_slice().len();
        if actual != expected {
            return Err(MatrixError::ByteLength { expected, actual });
        }
        Ok(Self {
            layout,
            packed,
            scales,
            biases,
        })
    }

    /// Returns bits and group.
    #[must_use]
    pub fn layout(&self) -> AffineLayout {
        self.layout
    }

    /// Returns the number of rows (outputs).
    #[must_use]
    pub fn rows(&self) -> usize {
        self.scales.rows()
    }

    /// Returns the number of columns (inputs).
    #[must_use]
    pub fn columns(&self) -> usize {
        self.scales.columns() * self.layout.group()
    }

    /// Returns the packed elements of all rows: little-endian words.
    #[must_use]
    pub fn packed(&self) -> &[u8] {
        self.packed.as_slice()
    }

    /// Returns the scales `[rows, columns / group]`, floats.
    #[must_use]
    pub fn scales(&self) -> &Matrix {
        &self.scales
    }

    /// Returns the biases, as the scales.
    #[must_use]
    pub fn biases(&self) -> &Matrix {
        &self.biases
    }

    /// Returns the bytes of elements, scales and biases.
    #[must_use]
    pub fn byte_length(&self) -> usize {
        self.packed().len() + self.scales.bytes().len() + self.biases.bytes().len()
    }
}

/// How a matrix lies in a model file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StoredType {
    /// Rows of blocks.
    Blocks(BlockType),
    /// Groups with scales and biases beside them.
    Affine(AffineLayout),
}

impl StoredType {
    /// Returns the name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blocks(block_type) => block_type.name(),
            Self::Affine(layout) => layout.name(),
        }
    }
}

/// A matrix as a model file has it. Kernels of the host read [`Matrix`]; see [`AffineMatrix::to_blocks`].
#[derive(Debug, Clone)]
pub enum StoredMatrix {
    /// Rows of blocks.
    Blocks(Matrix),
    /// Groups with scales and biases beside them.
    Affine(AffineMatrix),
}

impl From<Matrix> for StoredMatrix {
    fn from(matrix: Matrix) -> Self {
        Self::Blocks(matrix)
    }
}

impl StoredMatrix {
    /// Returns how it is stored.
    #[must_use]
    pub fn stored_type(&self) -> StoredType {
        match self {
            Self::Blocks(matrix) => StoredType::Blocks(matrix.block_type()),
            Self::Affine(matrix) => StoredType::Affine(matrix.layout()),
        }
    }

    /// Returns the bytes of all its parts.
    #[must_use]
    pub fn byte_length(&self) -> usize {
        match self {
            Self::Blocks(matrix) => matrix.bytes().len(),
            Self::Affine(matrix) => matrix.byte_length(),
        }
    }
}

#[cfg(test)]
mod tests;
