//! Our Metal kernels: one description that both MLX's custom-kernel call and the emulation on other systems use.
//!
//! A kernel's source is a function body, as `mx.fast.metal_kernel` takes it. MLX generates the signature from the
//! names here; so does the emulation (`emulation/` and `tests/emulation`), which compiles the same text as C++ and
//! compares it with oracles. The emulation is a test tool and never a backend.
//!
//! * [`PRELUDE`] goes in front of every kernel (`header` of the call).
//! * [`KERNELS`] lists the kernels.
//! * [`turns`] prepares an input of [`ROPE_REENCODE`].
//!
//! Sizes arrive in a small buffer named `sizes`, so one compiled variant serves all lengths. What a body expects of its
//! buffers stands at its top. Every buffer is row major without gaps (`ensure_row_contiguous` of the call) and has fewer
//! than 2^32 elements; nothing in a body checks that sizes and buffers agree, the caller does.

mod catalogue;

use thiserror::Error;

pub use catalogue::{
    AFFINE_DEQUANTISE, AFFINE_QUANTISE, BIT_PACK, BIT_UNPACK, DECODE_ATTENTION,
    DECODE_ATTENTION_AFFINE, HADAMARD, KERNELS, ROPE_REENCODE, SCALAR_DEQUANTISE, SCALAR_QUANTISE,
};

/// Text in front of every kernel.
pub const PRELUDE: &str = include_str!("../metal/prelude.metal");

/// Threads of a SIMD-group on every Apple GPU.
pub const SIMDGROUP_THREADS: u32 = 32;

/// Threads of a threadgroup where the threads of a kernel do not work together.
const INDEPENDENT_THREADS: u32 = 256;

/// A kernel: a body and what its signature is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// Name, also of the function.
    pub name: &'static str,
    /// The body.
    pub source: &'static str,
    /// Template parameters in order.
    pub constants: &'static [Constant],
    /// Inputs in order.
    pub inputs: &'static [Buffer],
    /// Outputs in order.
    pub outputs: &'static [Buffer],
    /// How many threads work on an item.
    pub threads: Threads,
}

/// A template parameter and the values that the body was written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Constant {
    /// Name.
    pub name: &'static str,
    /// Values it may have.
    pub allowed: Allowed,
}

/// Values of a template parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowed {
    /// One of these element types.
    Elements(&'static [Element]),
    /// One of these integers.
    Integers(&'static [u32]),
    /// True or false.
    Boolean,
}

/// A value of a template parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// An element type.
    Element(Element),
    /// An integer.
    Integer(u32),
    /// True or false.
    Boolean(bool),
}

/// Type of a buffer's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// One byte, 0 or 1.
    Bool,
    /// u8.
    U8,
    /// u32.
    U32,
    /// u64.
    U64,
    /// f16.
    F16,
    /// bfloat16.
    Bf16,
    /// f32.
    F32,
}

impl Element {
    /// Returns the type as MLX writes it in Metal.
    #[must_use]
    pub const fn metal_name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::U8 => "uint8_t",
            Self::U32 => "uint32_t",
            Self::U64 => "uint64_t",
            Self::F16 => "float16_t",
            Self::Bf16 => "bfloat16_t",
            Self::F32 => "float",
        }
    }
}

/// An input or output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Name that the body knows it by.
    pub name: &'static str,
    /// What it holds.
    pub holds: Holds,
}

/// What a buffer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Always this type.
    Fixed(Element),
    /// The type that the template parameter of this name has.
    Constant(&'static str),
}

/// How many threads work on an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// One; it knows its item by `thread_position_in_grid`.
    One,
    /// One SIMD-group, which is a threadgroup; it knows its item by `threadgroup_position_in_grid`.
    Simdgroup,
    /// As many as the integer template parameter of this name says, one threadgroup, as above.
    Constant(&'static str),
}

/// Extents of a dispatch in threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// All threads.
    pub grid: [u32; 3],
    /// Threads of a threadgroup.
    pub threadgroup: [u32; 3],
}

/// A kernel with a value for each template parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    kernel: &'static Kernel,
    values: Vec<Value>,
}

/// Why there is no such variant or dispatch.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MetalError {
    /// A value for each template parameter is needed.
    #[error("kernel {kernel} takes {expected} template values, got {actual}")]
    Count {
        /// Kernel.
        kernel: &'static str,
        /// Template parameters.
        expected: usize,
        /// Values.
        actual: usize,
    },
    /// The body was not written for the value.
    #[error("kernel {kernel}: {constant} cannot be {value:?}, only {allowed:?}")]
    Value {
        /// Kernel.
        kernel: &'static str,
        /// Template parameter.
        constant: &'static str,
        /// Value.
        value: Value,
        /// What it may be.
        allowed: Allowed,
    },
    /// There are more threads than a dispatch can count.
    #[error(
        "kernel {kernel}: {items} items of {threads} threads, limit is {} threads",
        u32::MAX
    )]
    Items {
        /// Kernel.
        kernel: &'static str,
        /// Items in the first direction.
        items: u32,
        /// Threads of each.
        threads: u32,
    },
}

impl Allowed {
    fn contains(self, value: Value) -> bool {
        match (self, value) {
            (Self::Elements(elements), Value::Element(element)) => elements.contains(&element),
            (Self::Integers(integers), Value::Integer(integer)) => integers.contains(&integer),
            (Self::Boolean, Value::Boolean(_)) => true,
            _ => false,
        }
    }
}

impl Kernel {
    /// Chooses a value for each template parameter.
    ///
    /// # Errors
    /// [`MetalError`] if there are too few or too many, or the body was not written for one.
    pub fn variant(&'static self, values: &[Value]) -> Result<Variant, MetalError> {
        if values.len() != self.constants.len() {
            return Err(MetalError::Count {
                kernel: self.name,
                expected: self.constants.len(),
                actual: values.len(),
            });
        }
        for (constant, &value) in self.constants.iter().zip(values) {
            if !constant.allowed.contains(value) {
                return Err(MetalError::Value {
                    kernel: self.name,
                    constant: constant.name,
                    value,
                    allowed: constant.allowed,
                });
            }
        }
        Ok(Variant {
            kernel: self,
            values: values.to_vec(),
        })
    }
}

impl Variant {
    /// Returns the kernel.
    #[must_use]
    pub const fn kernel(&self) -> &'static Kernel {
        self.kernel
    }

    /// Returns the template parameters with their values, in order.
    pub fn constants(&self) -> impl Iterator<Item = (&'static str, Value)> {
        let names = self.kernel.constants.iter().map(|constant| constant.name);
        names.zip(self.values.iter().copied())
    }

    /// Returns what a buffer of the kernel holds in this variant, `None` if that depends on a parameter it lacks.
    #[must_use]
    pub fn element(&self, buffer: &Buffer) -> Option<Element> {
        match buffer.holds {
            Holds::Fixed(element) => Some(element),
            Holds::Constant(name) => match self.value(name)? {
                Value::Element(element) => Some(element),
                Value::Integer(_) | Value::Boolean(_) => None,
            },
        }
    }

    /// Returns the extents for `items`, or `None` if there is nothing to do.
    ///
    /// # Errors
    /// [`MetalError::Items`] if there are more threads than a dispatch can count.
    pub fn launch(&self, items: [u32; 3]) -> Result<Option<Launch>, MetalError> {
        if items.contains(&0) {
            return Ok(None);
        }
        let (each, threadgroup) = match self.kernel.threads {
            Threads::One => (1, INDEPENDENT_THREADS.min(items[0])),
            Threads::Simdgroup => (SIMDGROUP_THREADS, SIMDGROUP_THREADS),
            Threads::Constant(name) => match self.value(name) {
                Some(Value::Integer(threads)) => (threads, threads),
                // No kernel of the catalogue: its test holds them to integers.
                _ => (1, 1),
            },
        };
        let along = items[0].checked_mul(each).ok_or(MetalError::Items {
            kernel: self.kernel.name,
            items: items[0],
            threads: each,
        })?;
        Ok(Some(Launch {
            grid: [along, items[1], items[2]],
            threadgroup: [threadgroup, 1, 1],
        }))
    }

    fn value(&self, name: &str) -> Option<Value> {
        let mut constants = self.constants();
        constants.find_map(|(constant, value)| (constant == name).then_some(value))
    }
}

/// Returns by how much of a turn a rotary frequency (radians per position) moves a pair, as a fraction of 2^64.
///
/// What is left over after whole turns counts, so the frequency may have either sign. One that is no finite number
/// turns by nothing.
#[must_use]
pub fn turns(inverse_frequency: f64) -> u64 {
    let fraction = (inverse_frequency / std::f64::consts::TAU).rem_euclid(1.0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the product is from 0 to 2^64; a cast saturates there, and makes 0 of NaN"
    )]
    let turns = (fraction * 2.0_f64.powi(64)) as u64;
    turns
}

#[cfg(test)]
mod tests;
