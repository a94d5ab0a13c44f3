//! Ops on single elements, and reductions: what the kernels are made of where there is no Metal.

use mlx_rs::{Array, Stream, ops};
use mlx_sys::{mlx_array, mlx_stream};

use super::error::MlxError;
use super::tensor::{Dtype, Tensor, int, recorded, sizes};

/// An op on two arrays of one type, with broadcasting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binary {
    /// Difference; whole numbers wrap around.
    Subtract,
    /// Quotient of floats.
    Divide,
    /// The larger one; NaN if one is.
    Maximum,
    /// The smaller one; NaN if one is.
    Minimum,
    /// Bits that both have.
    And,
    /// The first, shifted by the second towards the high bits.
    ShiftLeft,
    /// The first, shifted by the second towards the low bits.
    ShiftRight,
    /// Whether the first is larger, as bool; false for NaN.
    Greater,
}

/// An op on one array of floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unary {
    /// Magnitude.
    Absolute,
    /// To the nearest whole number, halves to even.
    Round,
    /// Power of e.
    Exponential,
    /// Of radians.
    Cosine,
    /// Of radians.
    Sine,
}

/// What becomes of the elements of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Sum, in the order that the device likes.
    Sum,
    /// Largest; NaN if one is.
    Maximum,
    /// Smallest; NaN if one is.
    Minimum,
}

type RawBinary = unsafe extern "C" fn(*mut mlx_array, mlx_array, mlx_array, mlx_stream) -> i32;

impl Tensor {
    /// Applies an op to this and another array.
    ///
    /// # Errors
    /// As MLX says.
    pub fn binary(&self, op: Binary, other: &Self) -> Result<Self, MlxError> {
        let (one, other) = (&self.0, &other.0);
        Ok(Self(match op {
            Binary::Subtract => ops::subtract(one, other)?,
            Binary::Divide => ops::divide(one, other)?,
            Binary::Maximum => ops::maximum(one, other)?,
            Binary::Minimum => ops::minimum(one, other)?,
            Binary::Greater => ops::gt(one, other)?,
            Binary::And => return raw(mlx_sys::mlx_bitwise_and, one, other),
            Binary::ShiftLeft => return raw(mlx_sys::mlx_left_shift, one, other),
            Binary::ShiftRight => return raw(mlx_sys::mlx_right_shift, one, other),
        }))
    }

    /// Applies an op to this array.
    ///
    /// # Errors
    /// As MLX says.
    pub fn unary(&self, op: Unary) -> Result<Self, MlxError> {
        Ok(Self(match op {
            Unary::Absolute => ops::abs(&self.0)?,
            Unary::Round => ops::round(&self.0, 0)?,
            Unary::Exponential => ops::exp(&self.0)?,
            Unary::Cosine => ops::cos(&self.0)?,
            Unary::Sine => ops::sin(&self.0)?,
        }))
    }

    /// Reduces an axis to one element. Whole numbers keep their type.
    ///
    /// # Errors
    /// As MLX says, also if the axis is empty and has no sum.
    pub fn reduced(&self, op: Reduction, axis: usize) -> Result<Self, MlxError> {
        let axis = int(axis)?;
        Ok(Self(match op {
            Reduction::Sum => self.0.sum_axis(axis, true)?,
            Reduction::Maximum => self.0.max_axis(axis, true)?,
            Reduction::Minimum => self.0.min_axis(axis, true)?,
        }))
    }

    /// Elements of one array where this one, of bool, is true, and of the other elsewhere.
    ///
    /// # Errors
    /// As MLX says.
    pub fn select(&self, when_true: &Self, when_false: &Self) -> Result<Self, MlxError> {
        Ok(Self(ops::select(&self.0, &when_true.0, &when_false.0)?))
    }

    /// Repeats axes of one element up to a shape.
    ///
    /// # Errors
    /// As MLX says.
    pub fn broadcast(&self, shape: &[usize]) -> Result<Self, MlxError> {
        Ok(Self(ops::broadcast_to(&self.0, &sizes(shape)?)?))
    }

    /// Makes an array of equal numbers.
    ///
    /// # Errors
    /// As MLX says.
    pub fn filled(dtype: Dtype, value: f32, shape: &[usize]) -> Result<Self, MlxError> {
        let value = Self(Array::from_f32(value)).cast(dtype)?;
        value.broadcast(shape)
    }
}

/// Calls an op that mlx-rs does not have.
fn raw(op: RawBinary, one: &Array, other: &Array) -> Result<Tensor, MlxError> {
    let stream = Stream::thread_local_or_default();
    recorded(|result| {
        // SAFETY: both arrays and the stream are live for the call, and `result` is a handle that it may fill.
        unsafe { op(result, one.as_ptr(), other.as_ptr(), stream.as_ptr()) }
    })
}
