//! MLX behind the engine's `trait Backend`, and the worker executable that is linked with it.
//!
//! * [`transcode`]: GGUF blocks in MLX's affine layout; needs no MLX.
//! * [`metal`]: our Metal kernels, as MLX's custom-kernel call takes them; needs no MLX.
#![cfg_attr(
    feature = "mlx",
    doc = "* [`ffi`]: the calls of MLX; [`backend`]: the stages over them, with [`weights`], [`group`] and [`cache`]; [`kernels`]: our own kernels on every device; [`offers`]: what a worker gets."
)]

pub mod metal;
pub mod transcode;

#[cfg(feature = "mlx")]
pub mod backend;
#[cfg(feature = "mlx")]
pub mod cache;
#[cfg(feature = "mlx")]
pub mod ffi;
#[cfg(feature = "mlx")]
pub mod group;
#[cfg(feature = "mlx")]
pub mod kernels;
#[cfg(feature = "mlx")]
pub mod offers;
#[cfg(feature = "mlx")]
pub mod weights;
