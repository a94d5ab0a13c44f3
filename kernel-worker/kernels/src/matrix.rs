//! A stored matrix of any block type.

use crate::block::BlockType;
use crate::buffer::{AlignedBytes, ByteSource};

/// Rows that are worth a thread of their own.
const MIN_ROWS_PER_THREAD: usize = 64;

/// Why bytes are no matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    /// A row is no whole number of blocks.
    #[error("{columns} columns are no whole number of {block} blocks")]
    PartialBlock {
        /// Columns asked for.
        columns: usize,
        /// Block type.
        block: &'static str,
    },
    /// The size overflows.
    #[error("size of the matrix overflows")]
    Overflow,
    /// Another number of bytes than the shape needs.
    #[error("matrix has {actual} bytes, its shape needs {expected}")]
    ByteLength {
        /// Bytes that the shape needs.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// Scales or biases of another type.
    #[error("scales and biases must be F32, F16 or BF16, not {block}")]
    NoFloats {
        /// Block type.
        block: &'static str,
    },
    /// Biases belong to scales one by one.
    #[error("biases have shape {biases:?}, scales {scales:?}")]
    BiasShape {
        /// Rows and columns of the scales.
        scales: [usize; 2],
        /// Rows and columns of the biases.
        biases: [usize; 2],
    },
}

/// A matrix that is to be made finds no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no memory for a matrix of {bytes} bytes")]
pub struct NoRoom {
    /// Bytes that it needs.
    pub bytes: usize,
}

/// Why [`Matrix::written`] gave none.
#[derive(Debug, PartialEq, Eq)]
pub enum NotWritten<E> {
    /// The allocator refused, or the size overflows.
    NoRoom(NoRoom),
    /// What the writer says.
    Rows(E),
}

/// `[rows, columns]`, row major, each row a whole number of blocks. Cloning shares the bytes.
#[derive(Debug, Clone)]
pub struct Matrix {
    block_type: BlockType,
    rows: usize,
    columns: usize,
    row_bytes: usize,
    bytes: ByteSource,
}

impl Matrix {
    /// Makes a matrix of bytes that a file map or a buffer holds.
    ///
    /// # Errors
    /// [`MatrixError`] if shape and length disagree.
    pub fn new(
        block_type: BlockType,
        rows: usize,
        columns: usize,
        bytes: ByteSource,
    ) -> Result<Self, MatrixError> {
        let row_bytes = block_type
            .row_bytes(columns)
            .ok_or(MatrixError::PartialBlock {
                columns,
                block: block_type.name(),
            })?;
        let expected = row_bytes.checked_mul(rows).ok_or(MatrixError::Overflow)?;
        if bytes.as_slice().len() != expected {
            return Err(MatrixError::ByteLength {
                expected,
                actual: bytes.as_slice().len(),
            });
        }
        Ok(Self {
            block_type,
            rows,
            columns,
            row_bytes,
            bytes,
        })
    }

    /// Makes an f32 matrix of owned values; for tests and small tables.
    ///
    /// # Errors
    /// [`MatrixError`] if shape and length disagree.
    pub fn from_f32(rows: usize, columns: usize, values: &[f32]) -> Result<Self, MatrixError> {
        Self::new(
            BlockType::F32,
            rows,
            columns,
            ByteSource::copy_of(bytemuck::cast_slice(values)),
        )
    }

    /// Makes a matrix on up to `threads` threads. `write` is given the number of a row and the bytes of it and some rows
    /// behind it. `columns` are a whole number of blocks.
    ///
    /// # Errors
    /// [`NotWritten`] by what failed.
    ///
    /// # Panics
    /// If `columns` are no whole number of blocks, or `write` panics.
    pub fn written<E: Send>(
        block_type: BlockType,
        (rows, columns): (usize, usize),
        threads: usize,
        write: impl Fn(usize, &mut [u8]) -> Result<(), E> + Sync,
    ) -> Result<Self, NotWritten<E>> {
        let row_bytes = block_type.row_bytes(columns).unwrap_or(usize::MAX);
        let length = row_bytes.saturating_mul(rows);
        let mut bytes = AlignedBytes::zeroed(length)
            .map_err(|_refused| NotWritten::NoRoom(NoRoom { bytes: length }))?;
        let rows_per_thread = rows.div_ceil(threads.max(1)).max(MIN_ROWS_PER_THREAD);
        let write = &write;
        std::thread::scope(|scope| {
            let parts: Vec<_> = bytes
                .as_elements_mut::<u8>()
                .chunks_mut((rows_per_thread * row_bytes).max(1))
                .enumerate()
                .map(|(part, out)| scope.spawn(move || write(part * rows_per_thread, out)))
                .collect();
            parts.into_iter().try_for_each(|part| {
                part.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
        .map_err(NotWritten::Rows)?;
        Ok(
            Self::new(block_type, rows, columns, ByteSource::from(bytes))
                .expect("the bytes were counted by the same shape"),
        )
    }

    /// Returns how it is stored.
    #[must_use]
    pub fn block_type(&self) -> BlockType {
        self.block_type
    }

    /// Returns the number of rows (outputs).
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns (inputs).
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the bytes of all rows.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    /// Returns the bytes of one row.
    ///
    /// # Panics
    /// If `row` is not below [`Matrix::rows`].
    #[must_use]
    pub fn row(&self, row: usize) -> &[u8] {
        assert!(
            row < self.rows,
            "row {row} of a matrix of {} rows",
            self.rows
        );
        &self.bytes.as_slice()[row * self.row_bytes..(row + 1) * self.row_bytes]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_whole_blocks() {
        let bytes: Vec<u8> = (0..72).collect();
        let matrix = Matrix::new(BlockType::Q4_0, 2, 64, ByteSource::copy_of(&bytes)).unwrap();
        assert_eq!(matrix.row(0), &bytes[..36]);
        assert_eq!(matrix.row(1), &bytes[36..]);
        assert_eq!(matrix.bytes(), &bytes[..]);
        assert_eq!((matrix.rows(), matrix.columns()), (2, 64));
    }

    #[test]
    fn a_shape_that_does_not_fit_is_refused() {
        let bytes = ByteSource::copy_of(&[0; 36]);
        let make = |rows, columns| Matrix::new(BlockType::Q4_0, rows, columns, bytes.clone()).err();
        assert_eq!(
            make(1, 33),
            Some(MatrixError::PartialBlock {
                columns: 33,
                block: "Q4_0"
            })
        );
        assert_eq!(make(usize::MAX, 64), Some(MatrixError::Overflow));
        assert_eq!(
            make(1, 32),
            Some(MatrixError::ByteLength {
                expected: 18,
                actual: 36
            })
        );
    }

    #[test]
    fn a_matrix_may_be_empty() {
        let no_rows = Matrix::from_f32(0, 5, &[]).unwrap();
        assert!(no_rows.bytes().is_empty());
        let no_columns = Matrix::from_f32(3, 0, &[]).unwrap();
        assert!(no_columns.row(2).is_empty());
    }

    #[test]
    #[should_panic(expected = "row 0 of a matrix of 0 rows")]
    fn a_missing_row_is_named() {
        let _ = Matrix::from_f32(0, 5, &[]).unwrap().row(0);
    }
}
