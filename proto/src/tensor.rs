//! The validated form of a tensor handle; `TryFrom` the wire form is its only constructor from outside.

use crate::limits::{MAX_SEGMENT_BYTES, MAX_TENSOR_RANK, SLOT_ALIGNMENT_BYTES};
use crate::v1;

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// Upper half of binary32.
    Bf16,
    /// Signed 8 bit.
    I8,
    /// Unsigned 8 bit; also raw bytes.
    U8,
    /// Signed 32 bit.
    I32,
    /// Unsigned 32 bit.
    U32,
    /// Signed 64 bit.
    I64,
    /// Unsigned 64 bit.
    U64,
}

impl DType {
    /// Returns the bytes of one element.
    #[must_use]
    pub const fn size_bytes(self) -> u64 {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::I64 | Self::U64 => 8,
        }
    }

    /// Returns the name used in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
        }
    }
}

impl TryFrom<v1::DType> for DType {
    type Error = HandleError;

    fn try_from(wire: v1::DType) -> Result<Self, HandleError> {
        match wire {
            v1::DType::Unspecified => Err(HandleError::UnknownDType(wire.into())),
            v1::DType::F32 => Ok(Self::F32),
            v1::DType::F16 => Ok(Self::F16),
            v1::DType::Bf16 => Ok(Self::Bf16),
            v1::DType::I8 => Ok(Self::I8),
            v1::DType::U8 => Ok(Self::U8),
            v1::DType::I32 => Ok(Self::I32),
            v1::DType::U32 => Ok(Self::U32),
            v1::DType::I64 => Ok(Self::I64),
            v1::DType::U64 => Ok(Self::U64),
        }
    }
}

impl From<DType> for v1::DType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::Bf16 => Self::Bf16,
            DType::I8 => Self::I8,
            DType::U8 => Self::U8,
            DType::I32 => Self::I32,
            DType::U32 => Self::U32,
            DType::I64 => Self::I64,
            DType::U64 => Self::U64,
        }
    }
}

/// Why a handle was refused. No variant names a segment: internal numbers stay inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HandleError {
    /// The element type is not in the table.
    #[error("tensor has unknown element type {0}")]
    UnknownDType(i32),
    /// Too many dimensions.
    #[error("tensor has {0} dimensions, limit is {MAX_TENSOR_RANK}")]
    Rank(usize),
    /// A tensor without elements has no place in memory.
    #[error("tensor has no elements")]
    Empty,
    /// The product of the dimensions does not fit.
    #[error("size of the tensor overflows")]
    Overflow,
    /// Byte length and shape disagree.
    #[error("tensor has {actual} bytes, its shape and type need {expected}")]
    ByteLength {
        /// Bytes that shape, strides and type need.
        expected: u64,
        /// Bytes that the handle says.
        actual: u64,
    },
    /// The offset is not a slot's beginning.
    #[error("tensor offset {0} is not a multiple of {SLOT_ALIGNMENT_BYTES}")]
    Misaligned(u64),
    /// Another number of strides than of dimensions.
    #[error("tensor has {strides} strides for {rank} dimensions")]
    Strides {
        /// Number of strides.
        strides: usize,
        /// Number of dimensions.
        rank: usize,
    },
    /// The range ends outside any possible segment.
    #[error("tensor ends at byte {0}, limit is {MAX_SEGMENT_BYTES}")]
    OutOfRange(u64),
    /// The tensor has another element type than its reader expects.
    #[error("tensor has element type {actual}, expected {expected}")]
    WrongDType {
        /// Type that the reader expects.
        expected: &'static str,
        /// Type that the handle says.
        actual: &'static str,
    },
}

/// Place of a tensor in a shared segment, checked for everything that can be checked without the segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorHandle {
    segment: u64,
    generation: u64,
    offset: u64,
    byte_len: u64,
    dtype: DType,
    shape: Vec<u64>,
    strides: Vec<u64>,
}

impl TensorHandle {
    /// Returns the number of the segment.
    #[must_use]
    pub fn segment(&self) -> u64 {
        self.segment
    }

    /// Returns the generation of the slot.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the byte offset in the segment's data.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the length in bytes, never 0.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.byte_len
    }

    /// Returns the element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the dimensions, slowest first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns whether the elements lie row major without gaps.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.strides.is_empty()
    }

    /// Returns the strides in elements; empty if contiguous.
    #[must_use]
    pub fn strides(&self) -> &[u64] {
        &self.strides
    }

    /// Checks the element type.
    ///
    /// # Errors
    /// [`HandleError::WrongDType`] if it is another one.
    pub fn expect_dtype(&self, expected: DType) -> Result<(), HandleError> {
        if self.dtype == expected {
            return Ok(());
        }
        Err(HandleError::WrongDType {
            expected: expected.name(),
            actual: self.dtype.name(),
        })
    }
}

/// Returns the bytes of a contiguous tensor.
///
/// # Errors
/// [`HandleError::Rank`], [`HandleError::Empty`] or [`HandleError::Overflow`].
pub fn contiguous_bytes(shape: &[u64], dtype: DType) -> Result<u64, HandleError> {
    if shape.len() > MAX_TENSOR_RANK {
        return Err(HandleError::Rank(shape.len()));
    }
    let elements = shape
        .iter()
        .try_fold(1_u64, |product, &extent| product.checked_mul(extent))
        .ok_or(HandleError::Overflow)?;
    if elements == 0 {
        return Err(HandleError::Empty);
    }
    elements
        .checked_mul(dtype.size_bytes())
        .ok_or(HandleError::Overflow)
}

/// Bytes from the first to the last element of a strided tensor.
fn strided_bytes(shape: &[u64], strides: &[u64], dtype: DType) -> Result<u64, HandleError> {
    let last = shape
        .iter()
        .zip(strides)
        .try_fold(0_u64, |sum, (&extent, &stride)| {
            sum.checked_add(extent.checked_sub(1)?.checked_mul(stride)?)
        })
        .ok_or(HandleError::Overflow)?;
    last.checked_add(1)
        .and_then(|elements| elements.checked_mul(dtype.size_bytes()))
        .ok_or(HandleError::Overflow)
}

impl TryFrom<v1::TensorHandle> for TensorHandle {
    type Error = HandleError;

    fn try_from(wire: v1::TensorHandle) -> Result<Self, HandleError> {
        let dtype = v1::DType::try_from(wire.dtype)
            .map_err(|_unknown| HandleError::UnknownDType(wire.dtype))?
            .try_into()?;
        let contiguous = contiguous_bytes(&wire.shape, dtype)?;
        let expected = if wire.strides.is_empty() {
            contiguous
        } else {
            if wire.strides.len() != wire.shape.len() {
                return Err(HandleError::Strides {
                    strides: wire.strides.len(),
                    rank: wire.shape.len(),
                });
            }
            strided_bytes(&wire.shape, &wire.strides, dtype)?
        };
        if expected != wire.byte_len {
            return Err(HandleError::ByteLength {
                expected,
                actual: wire.byte_len,
            });
        }
        if !wire.offset.is_multiple_of(SLOT_ALIGNMENT_BYTES) {
            return Err(HandleError::Misaligned(wire.offset));
        }
        let end = wire
            .offset
            .checked_add(wire.byte_len)
            .ok_or(HandleError::Overflow)?;
        if end > MAX_SEGMENT_BYTES {
            return Err(HandleError::OutOfRange(end));
        }
        Ok(Self {
            segment: wire.segment,
            generation: wire.generation,
            offset: wire.offset,
            byte_len: wire.byte_len,
            dtype,
            shape: wire.shape,
            strides: wire.strides,
        })
    }
}

impl From<TensorHandle> for v1::TensorHandle {
    fn from(handle: TensorHandle) -> Self {
        Self {
            segment: handle.segment,
            generation: handle.generation,
            offset: handle.offset,
            byte_len: handle.byte_len,
            dtype: v1::DType::from(handle.dtype).into(),
            shape: handle.shape,
            strides: handle.strides,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wire() -> v1::TensorHandle {
        v1::TensorHandle {
            segment: 3,
            generation: 7,
            offset: SLOT_ALIGNMENT_BYTES,
            byte_len: 24,
            dtype: v1::DType::F32.into(),
            shape: vec![2, 3],
            strides: vec![],
        }
    }

    #[test]
    fn a_good_handle_survives_the_round_trip() {
        let handle = TensorHandle::try_from(wire()).unwrap();
        assert_eq!(v1::TensorHandle::from(handle), wire());
    }

    #[test]
    fn hostile_handles_are_refused_each_for_its_reason() {
        let refused = |change: fn(&mut v1::TensorHandle)| {
            let mut hostile = wire();
            change(&mut hostile);
            TensorHandle::try_from(hostile).unwrap_err()
        };
        assert_eq!(refused(|h| h.dtype = 0), HandleError::UnknownDType(0));
        assert_eq!(refused(|h| h.dtype = 99), HandleError::UnknownDType(99));
        assert_eq!(refused(|h| h.shape = vec![1; 9]), HandleError::Rank(9));
        assert_eq!(refused(|h| h.shape = vec![2, 0]), HandleError::Empty);
        assert_eq!(
            refused(|h| h.shape = vec![u64::MAX, 2]),
            HandleError::Overflow
        );
        assert_eq!(
            refused(|h| h.byte_len = 25),
            HandleError::ByteLength {
                expected: 24,
                actual: 25
            }
        );
        assert_eq!(refused(|h| h.offset = 64), HandleError::Misaligned(64));
        assert_eq!(
            refused(|h| {
                (h.shape, h.byte_len) = (vec![8192], 32_768);
                h.offset = u64::MAX - SLOT_ALIGNMENT_BYTES + 1;
            }),
            HandleError::Overflow
        );
        assert!(matches!(
            refused(|h| h.offset = MAX_SEGMENT_BYTES),
            HandleError::OutOfRange(_)
        ));
        assert_eq!(
            refused(|h| h.strides = vec![3]),
            HandleError::Strides {
                strides: 1,
                rank: 2
            }
        );
        assert_eq!(
            refused(|h| h.strides = vec![u64::MAX, 1]),
            HandleError::Overflow
        );
    }

    proptest! {
        #[test]
        fn no_handle_panics_and_every_accepted_one_lies_in_range(
            segment: u64, generation: u64, offset: u64, byte_len: u64, dtype in -1_i32..12,
            shape in prop::collection::vec(0_u64..70_000, 0..10),
            strides in prop::collection::vec(any::<u64>(), 0..10),
        ) {
            let wire = v1::TensorHandle { segment, generation, offset, byte_len, dtype, shape, strides };
            if let Ok(handle) = TensorHandle::try_from(wire) {
                prop_assert!(handle.offset() + handle.byte_len() <= MAX_SEGMENT_BYTES);
            }
        }
    }
}
