//! The crate's errors, by what the caller can do.

use velox_kernels::error::OpError;

/// Why a cache refuses. It is unchanged then.
#[derive(Debug, thiserror::Error)]
pub enum KvError {
    /// No such method is built in.
    #[error("kv method {name:?} is not known; known are {known}")]
    UnknownMethod {
        /// The name given, cut to a printable length.
        name: String,
        /// The names that are known.
        known: &'static str,
    },
    /// The budget of all caches is used up; closing rows helps.
    #[error("cache pages need {needed_bytes} bytes, {available_bytes} are left")]
    BudgetExceeded {
        /// Bytes asked for.
        needed_bytes: u64,
        /// Bytes left of the limit.
        available_bytes: u64,
    },
    /// The system has no memory.
    #[error("the allocator refused a cache page of {bytes} bytes")]
    AllocatorRefused {
        /// Bytes asked for.
        bytes: usize,
    },
    /// A row would grow beyond what it was opened for.
    #[error("cache would hold {tokens} tokens, its capacity is {capacity_tokens}")]
    CapacityExceeded {
        /// Tokens that it would hold.
        tokens: usize,
        /// Limit given at opening.
        capacity_tokens: usize,
    },
    /// A layer was appended out of turn, or with another number of tokens than the layers before it.
    #[error("layer {layer} would hold {tokens} tokens, {expected_tokens} are due")]
    LayerOutOfStep {
        /// Layer at fault.
        layer: usize,
        /// Tokens that it would hold.
        tokens: usize,
        /// Tokens that it must hold in this pass.
        expected_tokens: usize,
    },
    /// There is no such layer.
    #[error("layer {layer} of a cache of {n_layers} layers")]
    NoSuchLayer {
        /// Layer asked for.
        layer: usize,
        /// Layers there are.
        n_layers: usize,
    },
    /// A key or value is not a number or beyond the range of f16; storing it would poison the row unseen.
    #[error("{what} of layer {layer} is {value}, f16 holds up to 65504")]
    OutOfRange {
        /// Key or value.
        what: &'static str,
        /// Layer at fault.
        layer: usize,
        /// The number.
        value: f32,
    },
    /// Sizes that do not fit each other.
    #[error(transparent)]
    Shape(#[from] OpError),
}
