//! The only code that calls MLX, and the only `unsafe` of this crate.
//!
//! MLX is lazy: an op records a node on the stream that is current and is evaluated later, on that stream or not at
//! all. So the device of a value is known when it is recorded, and [`DeviceStream::record`] is where its label is made.
//! Streams belong to a thread: whoever opens one must record, evaluate and read on the same thread.

#![expect(unsafe_code, reason = "calls of a C interface")]

mod device;
mod draw;
mod elementwise;
mod error;
mod fused;
mod kernel;
mod library;
pub(crate) mod metal_calls;
mod tensor;

pub use device::{
    DeviceStream, HalfPrecision, KernelPath, MetalDevice, MlxCpuDevice, MlxCudaDevice, MlxDevice,
};
pub use draw::{DrawRule, Drawn};
pub use elementwise::{Binary, Reduction, Unary};
pub use error::MlxError;
pub use fused::Fused;
pub use library::{Library, MLX_VERSION};
pub use tensor::{
    Affine, AttentionMask, Dtype, Pairing, Rotary, Tensor, evaluate, start, window_mask,
};
