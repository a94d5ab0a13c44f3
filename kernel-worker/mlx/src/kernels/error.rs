//! Why a kernel was not run.

use thiserror::Error;

use crate::ffi::MlxError;
use crate::metal::{Element, MetalError};

/// Why a kernel was not run.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum KernelError {
    /// An argument has another number of elements than its shape.
    #[error("{argument} has {actual} elements, shape {shape:?} has {expected}")]
    Length {
        /// Argument.
        argument: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Elements of the shape.
        expected: usize,
        /// Elements that were given.
        actual: usize,
    },
    /// An argument's shape does not go with another's.
    #[error("{argument} has shape {actual:?}, expected {expected:?}")]
    Shape {
        /// Argument.
        argument: &'static str,
        /// What would fit.
        expected: Vec<usize>,
        /// What was given.
        actual: Vec<usize>,
    },
    /// A shape has more elements than a kernel can count.
    #[error("{argument} has shape {shape:?}, limit is {} elements", i32::MAX)]
    TooLarge {
        /// Argument.
        argument: &'static str,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A number is above its limit.
    #[error("{argument} is {value}, limit is {limit}")]
    AboveLimit {
        /// Argument.
        argument: &'static str,
        /// Number.
        value: usize,
        /// Largest that is possible.
        limit: usize,
    },
    /// A code has bits that its storage has no room for.
    #[error("codes[{index}] is {value}, limit with {bits} bits is {}", (1_u32 << bits) - 1)]
    Code {
        /// Where.
        index: usize,
        /// Code.
        value: u8,
        /// Bits of a code, 1 to 8.
        bits: usize,
    },
    /// A number that must be finite is not.
    #[error("{argument} is {value}, which is no finite number")]
    NotFinite {
        /// Argument.
        argument: &'static str,
        /// Number.
        value: f64,
    },
    /// Heads cannot be shared evenly.
    #[error("{heads} query heads cannot share {kv_heads} heads of the cache evenly")]
    Heads {
        /// Query heads.
        heads: usize,
        /// Heads of the cache.
        kv_heads: usize,
    },
    /// An argument has elements of another type.
    #[error("{argument} holds {actual:?}, expected {expected:?}")]
    Type {
        /// Argument.
        argument: &'static str,
        /// What would fit.
        expected: Element,
        /// What was given.
        actual: Element,
    },
    /// Elements are no floats.
    #[error("{0:?} is no type of values, only F16, Bf16 and F32 are")]
    NoFloat(Element),
    /// The kernel was not written for bits, a group, a length or a type.
    #[error(transparent)]
    Variant(#[from] MetalError),
    /// What MLX says.
    #[error(transparent)]
    Mlx(#[from] MlxError),
}
