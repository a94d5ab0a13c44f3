//! Arrays of MLX and the ops that the engine records.

use mlx_rs::fast::ScaledDotProductAttentionMask;
use mlx_rs::transforms::async_eval;
use mlx_rs::{Array, Stream, fast, ops};
use mlx_sys::mlx_array;

use super::error::{MlxError, last_failure};

/// Element types that the engine uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// Upper half of binary32.
    Bf16,
    /// Packed weights, token ids.
    U32,
    /// Positions.
    I32,
    /// Distances between positions.
    I64,
    /// Codes.
    U8,
    /// Fractions of a turn.
    U64,
    /// Masks, a byte each.
    Bool,
}

impl Dtype {
    /// Returns the bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::I64 | Self::U64 => 8,
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 | Self::Bool => 1,
        }
    }

    pub(super) fn of_mlx(self) -> mlx_rs::Dtype {
        match self {
            Self::F32 => mlx_rs::Dtype::Float32,
            Self::F16 => mlx_rs::Dtype::Float16,
            Self::Bf16 => mlx_rs::Dtype::Bfloat16,
            Self::U32 => mlx_rs::Dtype::Uint32,
            Self::I32 => mlx_rs::Dtype::Int32,
            Self::I64 => mlx_rs::Dtype::Int64,
            Self::U8 => mlx_rs::Dtype::Uint8,
            Self::U64 => mlx_rs::Dtype::Uint64,
            Self::Bool => mlx_rs::Dtype::Bool,
        }
    }
}

/// An array that may not be computed yet. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Tensor(pub(super) Array);

/// A quantised matrix `[out, in]`: `scale * q + bias` per group of a row.
#[derive(Debug, Clone)]
pub struct Affine {
    /// `[out, in * bits / 32]`, u32.
    pub packed: Tensor,
    /// `[out, in / group]`.
    pub scales: Tensor,
    /// `[out, in / group]`.
    pub biases: Tensor,
    /// Elements that share a scale.
    pub group: usize,
    /// Bits of an element.
    pub bits: usize,
}

/// Which elements of a head form a rotated pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// Element `i` with `i + K/2`.
    HalfSplit,
    /// Element `2i` with `2i + 1`.
    Interleaved,
}

/// A rotary embedding.
#[derive(Debug)]
pub struct Rotary {
    /// How elements pair up.
    pub pairing: Pairing,
    /// Rotated elements of a head, even.
    pub dimensions: usize,
    /// f32, one per pair: the angle is position / period.
    pub periods: Tensor,
}

/// Which keys a query sees.
#[derive(Debug)]
pub enum AttentionMask {
    /// All.
    Everything,
    /// Those up to its own position, counted from the end of the keys.
    Causal,
    /// Those where `[L, S]` is true.
    Allowed(Tensor),
}

/// A box within an array: where it starts and ends in every axis.
struct Corners {
    start: Vec<i32>,
    stop: Vec<i32>,
    strides: Vec<i32>,
}

/// Checks sizes for MLX, which counts in i32.
pub(super) fn sizes(shape: &[usize]) -> Result<Vec<i32>, MlxError> {
    shape.iter().map(|&size| int(size)).collect()
}

pub(super) fn int(value: usize) -> Result<i32, MlxError> {
    i32::try_from(value).map_err(|_too_large| MlxError::TooLarge {
        what: "an axis",
        value,
    })
}

/// Runs a call of the C interface that writes an array.
pub(super) fn recorded(call: impl FnOnce(*mut mlx_array) -> i32) -> Result<Tensor, MlxError> {
    // SAFETY: makes an empty handle, which the call fills and the array below owns.
    let mut handle = unsafe { mlx_sys::mlx_array_new() };
    let status = call(&raw mut handle);
    // SAFETY: the handle was made above and has no other owner; an empty one may be owned, too.
    let array = unsafe { Array::from_ptr(handle) };
    if status == 0 {
        Ok(Tensor(array))
    } else {
        Err(last_failure("an op was refused"))
    }
}

impl Tensor {
    /// Copies values; the shape must have as many.
    ///
    /// # Errors
    /// [`MlxError::TooLarge`].
    pub fn of_f32(values: &[f32], shape: &[usize]) -> Result<Self, MlxError> {
        Self::of_bytes(Dtype::F32, bytemuck::cast_slice(values), shape)
    }

    /// Copies values; the shape must have as many.
    ///
    /// # Errors
    /// [`MlxError::TooLarge`].
    pub fn of_u32(values: &[u32], shape: &[usize]) -> Result<Self, MlxError> {
        Self::of_bytes(Dtype::U32, bytemuck::cast_slice(values), shape)
    }

    /// Copies positions or indices, as i32.
    ///
    /// # Errors
    /// [`MlxError::TooLarge`].
    pub fn of_positions(positions: &[usize]) -> Result<Self, MlxError> {
        let positions = sizes(positions)?;
        Ok(Self(Array::from_slice(
            &positions,
            &[int(positions.len())?],
        )))
    }

    /// Copies little-endian elements.
    ///
    /// # Errors
    /// [`MlxError::TooLarge`], or [`MlxError::Operation`] if the shape needs another number of bytes.
    pub fn of_bytes(dtype: Dtype, bytes: &[u8], shape: &[usize]) -> Result<Self, MlxError> {
        let axes = sizes(shape)?;
        let element_bytes = dtype.bytes();
        let expected = shape
            .iter()
            .try_fold(element_bytes, |product, &size| product.checked_mul(size));
        if expected != Some(bytes.len()) {
            return Err(MlxError::Operation(format!(
                "{} bytes do not fill the shape {shape:?} of {dtype:?}",
                bytes.len()
            )));
        }
        // What lies in a mapped file need not be aligned, and MLX reads whole elements.
        let mut words = Vec::new();
        let bytes = if bytes.as_ptr().align_offset(element_bytes) == 0 {
            bytes
        } else {
            words.resize(bytes.len().div_ceil(size_of::<u64>()), 0_u64);
            let copy = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()];
            copy.copy_from_slice(bytes);
            copy
        };
        // SAFETY: the bytes are as many as the shape needs and aligned for their type, both checked above, and MLX
        // copies them during the call.
        let array = unsafe { Array::from_raw_data(bytes.as_ptr().cast(), &axes, dtype.of_mlx()) };
        if array.as_ptr().ctx.is_null() {
            return Err(last_failure("no memory for an array"));
        }
        Ok(Self(array))
    }

    /// Makes zeros.
    ///
    /// # Errors
    /// As MLX says.
    pub fn zeros(dtype: Dtype, shape: &[usize]) -> Result<Self, MlxError> {
        Ok(Self(ops::zeros_dtype(&sizes(shape)?, dtype.of_mlx())?))
    }

    /// Returns the size of an axis; 0 if there is none.
    #[must_use]
    pub fn axis(&self, axis: usize) -> usize {
        let size = self.0.shape().get(axis).copied().unwrap_or(0);
        usize::try_from(size).unwrap_or(0)
    }

    /// Returns the sizes of all axes.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        (0..self.0.shape().len())
            .map(|axis| self.axis(axis))
            .collect()
    }

    /// Returns the type of the elements; `None` if it is none of ours.
    #[must_use]
    pub fn dtype(&self) -> Option<Dtype> {
        const ALL: [Dtype; 9] = [
            Dtype::F32,
            Dtype::F16,
            Dtype::Bf16,
            Dtype::U32,
            Dtype::I32,
            Dtype::I64,
            Dtype::U8,
            Dtype::U64,
            Dtype::Bool,
        ];
        let found = self.0.dtype();
        ALL.into_iter().find(|dtype| dtype.of_mlx() == found)
    }

    /// Returns the bytes of all elements.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.0.nbytes()
    }

    /// Converts elements.
    ///
    /// # Errors
    /// As MLX says.
    pub fn cast(&self, dtype: Dtype) -> Result<Self, MlxError> {
        if self.0.dtype() == dtype.of_mlx() {
            return Ok(self.clone());
        }
        Ok(Self(self.0.as_dtype(dtype.of_mlx())?))
    }

    /// Converts elements to the type of another array.
    ///
    /// # Errors
    /// As MLX says.
    pub fn cast_like(&self, other: &Self) -> Result<Self, MlxError> {
        Ok(Self(self.0.as_dtype(other.0.dtype())?))
    }

    /// Evaluates and copies out; elements must be f32.
    ///
    /// # Errors
    /// As MLX says.
    pub fn to_f32(&self) -> Result<Vec<f32>, MlxError> {
        self.copied_out()
    }

    /// Evaluates and copies out; elements must be u32.
    ///
    /// # Errors
    /// As MLX says.
    pub fn to_u32(&self) -> Result<Vec<u32>, MlxError> {
        self.copied_out()
    }

    /// Evaluates and copies out; elements must be u8.
    ///
    /// # Errors
    /// As MLX says.
    pub fn to_u8(&self) -> Result<Vec<u8>, MlxError> {
        self.copied_out()
    }

    fn copied_out<T: mlx_rs::ArrayElement + Clone>(&self) -> Result<Vec<T>, MlxError> {
        if self.0.size() == 0 {
            return Ok(Vec::new());
        }
        let contiguous = self.0.contiguous()?;
        contiguous.eval()?;
        contiguous
            .try_as_slice::<T>()
            .map(<[T]>::to_vec)
            .map_err(|error| MlxError::Operation(error.to_string()))
    }

    /// Whether the array is computed, so that nobody would wait for it. What MLX cannot tell counts as computed.
    #[must_use]
    pub fn is_available(&self) -> bool {
        let mut available = false;
        // SAFETY: the array is live and the pointer valid for writing a bool during the call.
        let status =
            unsafe { mlx_sys::_mlx_array_is_available(&raw mut available, self.0.as_ptr()) };
        status != 0 || available
    }

    /// Elementwise sum with broadcasting.
    ///
    /// # Errors
    /// As MLX says.
    pub fn add(&self, other: &Self) -> Result<Self, MlxError> {
        Ok(Self(ops::add(&self.0, &other.0)?))
    }

    /// Elementwise product with broadcasting.
    ///
    /// # Errors
    /// As MLX says.
    pub fn mul(&self, other: &Self) -> Result<Self, MlxError> {
        Ok(Self(ops::multiply(&self.0, &other.0)?))
    }

    /// Another shape of as many elements.
    ///
    /// # Errors
    /// As MLX says.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self, MlxError> {
        Ok(Self(self.0.reshape(&sizes(shape)?)?))
    }

    /// Swaps two axes.
    ///
    /// # Errors
    /// As MLX says.
    pub fn swap_axes(&self, one: usize, other: usize) -> Result<Self, MlxError> {
        Ok(Self(self.0.swap_axes(int(one)?, int(other)?)?))
    }

    /// Joins along an axis.
    ///
    /// # Errors
    /// As MLX says.
    pub fn concatenate(parts: &[Self], axis: usize) -> Result<Self, MlxError> {
        let parts: Vec<&Array> = parts.iter().map(|part| &part.0).collect();
        Ok(Self(ops::concatenate(&parts, int(axis)?)?))
    }

    /// Takes entries of the first axis by u32 indices.
    ///
    /// # Errors
    /// As MLX says.
    pub fn take(&self, indices: &Self) -> Result<Self, MlxError> {
        Ok(Self(self.0.take_axis(&indices.0, 0)?))
    }

    /// A part of one axis.
    ///
    /// # Errors
    /// As MLX says.
    pub fn slice(&self, axis: usize, range: std::ops::Range<usize>) -> Result<Self, MlxError> {
        let Corners {
            start,
            stop,
            strides,
        } = self.corners(axis, &range)?;
        let stream = Stream::thread_local_or_default();
        recorded(|result| {
            // SAFETY: all handles are live for the call, and each list has as many entries as it says.
            unsafe {
                mlx_sys::mlx_slice(
                    result,
                    self.0.as_ptr(),
                    start.as_ptr(),
                    start.len(),
                    stop.as_ptr(),
                    stop.len(),
                    strides.as_ptr(),
                    strides.len(),
                    stream.as_ptr(),
                )
            }
        })
    }

    /// This array with a part of one axis replaced. Taking `self` lets MLX write in place.
    ///
    /// # Errors
    /// As MLX says.
    pub fn with_slice(self, axis: usize, start: usize, update: &Self) -> Result<Self, MlxError> {
        let range = start..start + update.axis(axis);
        let Corners {
            start,
            stop,
            strides,
        } = self.corners(axis, &range)?;
        let stream = Stream::thread_local_or_default();
        recorded(|result| {
            // SAFETY: all handles are live for the call, and each list has as many entries as it says.
            unsafe {
                mlx_sys::mlx_slice_update(
                    result,
                    self.0.as_ptr(),
                    update.0.as_ptr(),
                    start.as_ptr(),
                    start.len(),
                    stop.as_ptr(),
                    stop.len(),
                    strides.as_ptr(),
                    strides.len(),
                    stream.as_ptr(),
                )
            }
        })
    }

    /// First and last corner and the strides of a box that is whole in every axis but one.
    fn corners(&self, axis: usize, range: &std::ops::Range<usize>) -> Result<Corners, MlxError> {
        let shape = self.0.shape();
        let mut start = vec![0; shape.len()];
        let mut stop = shape.to_vec();
        match (start.get_mut(axis), stop.get_mut(axis)) {
            (Some(start), Some(stop)) if range.start <= range.end && int(range.end)? <= *stop => {
                (*start, *stop) = (int(range.start)?, int(range.end)?);
            }
            _ => {
                return Err(MlxError::Operation(format!(
                    "axis {axis} of {shape:?} has no part {range:?}"
                )));
            }
        }
        Ok(Corners {
            strides: vec![1; start.len()],
            start,
            stop,
        })
    }

    /// RMS norm over the last axis.
    ///
    /// # Errors
    /// As MLX says.
    pub fn rms_norm(&self, weight: &Self, epsilon: f32) -> Result<Self, MlxError> {
        Ok(Self(fast::rms_norm(&self.0, Some(&weight.0), epsilon)?))
    }

    /// Product with a transposed matrix `[out, in]`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn times_transposed(&self, matrix: &Self) -> Result<Self, MlxError> {
        Ok(Self(ops::matmul(&self.0, matrix.0.swap_axes(0, 1)?)?))
    }

    /// Product with a transposed quantised matrix.
    ///
    /// # Errors
    /// As MLX says.
    pub fn times_affine(&self, matrix: &Affine) -> Result<Self, MlxError> {
        Ok(Self(ops::quantized_matmul(
            &self.0,
            &matrix.packed.0,
            &matrix.scales.0,
            &matrix.biases.0,
            true,
            int(matrix.group)?,
            int(matrix.bits)?,
        )?))
    }

    /// Rotates pairs of the last axis of `[T, heads, 1, K]`, each token by its own position.
    ///
    /// # Errors
    /// As MLX says.
    pub fn rope(&self, rotary: &Rotary, positions: &Self) -> Result<Self, MlxError> {
        Ok(Self(fast::rope_dynamic(
            &self.0,
            int(rotary.dimensions)?,
            rotary.pairing == Pairing::Interleaved,
            None,
            1.0,
            &positions.0,
            &rotary.periods.0,
        )?))
    }

    /// Attention of queries `[1, H, L, K]` over keys and values `[1, G, S, K]`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn attend(
        &self,
        keys: &Self,
        values: &Self,
        scale: f32,
        mask: &AttentionMask,
    ) -> Result<Self, MlxError> {
        let mask = match mask {
            AttentionMask::Everything => None,
            AttentionMask::Causal => Some(ScaledDotProductAttentionMask::Causal),
            AttentionMask::Allowed(allowed) => {
                Some(ScaledDotProductAttentionMask::Array(&allowed.0))
            }
        };
        Ok(Self(fast::scaled_dot_product_attention(
            &self.0, &keys.0, &values.0, scale, mask, None,
        )?))
    }
}

/// Which of `keys` positions from `first_key` on each of `queries` positions from `first_query` on sees: those up to
/// its own and above its own less `window`. `[queries, keys]`, bool.
///
/// # Errors
/// As MLX says.
pub fn window_mask(
    queries: std::ops::Range<usize>,
    keys: std::ops::Range<usize>,
    window: usize,
) -> Result<Tensor, MlxError> {
    let positions = |range: std::ops::Range<usize>| -> Result<Tensor, MlxError> {
        Tensor::of_positions(&range.collect::<Vec<usize>>())
    };
    let (n_queries, n_keys) = (queries.len(), keys.len());
    let rows = positions(queries)?.reshape(&[n_queries, 1])?;
    let columns = positions(keys)?.reshape(&[1, n_keys])?;
    let window = Tensor::of_positions(&[window])?;
    let seen = ops::le(&columns.0, &rows.0)?;
    let near = ops::gt(&columns.0, ops::subtract(&rows.0, &window.0)?)?;
    Ok(Tensor(ops::logical_and(seen, near)?))
}

/// Computes what was recorded, and waits for it.
///
/// # Errors
/// The first op that failed.
pub fn evaluate<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<(), MlxError> {
    Ok(mlx_rs::transforms::eval(
        tensors.into_iter().map(|tensor| &tensor.0),
    )?)
}

impl Affine {
    /// Rows of the matrix as numbers, taken by u32 indices.
    ///
    /// # Errors
    /// As MLX says.
    pub fn take(&self, indices: &Tensor) -> Result<Tensor, MlxError> {
        Ok(Tensor(ops::dequantize(
            &self.packed.take(indices)?.0,
            &self.scales.take(indices)?.0,
            &self.biases.take(indices)?.0,
            int(self.group)?,
            int(self.bits)?,
        )?))
    }
}

/// Starts to compute what was recorded, and does not wait.
///
/// # Errors
/// The first op that could not be started.
pub fn start<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<(), MlxError> {
    async_eval(tensors.into_iter().map(|tensor| &tensor.0))?;
    Ok(())
}
