//! Numeric ops on packed layouts: a readable oracle and SIMD kernels.
//!
//! Shape alphabet: `T` tokens, `D` features of the residual stream, `H` query heads, `G` key/value heads,
//! `K` head dimension, `F` features of the MLP, `V` vocabulary. Activations are f32, row major.
//!
//! * [`label`] and [`ran`]: which backend ran, and the proof of it.
//! * [`block`]: quantised block types and their byte layouts.
//! * [`buffer`]: aligned memory and read-only file maps.
//! * [`matrix`]: a stored matrix of any block type; [`affine`]: MLX's other form, and how it becomes one.
//! * [`attention`]: the paged f16 cache as attention reads it; [`rotary`]: a rotation. Both backends take them.
//! * [`error`]: why an op refuses its operands.
//! * [`mod@reference`]: the oracle. Never optimised beyond fixed-order lane sums.
//! * [`cpu`]: SIMD kernels, chosen by probing.
//!
//! Adding an op: write it in `reference/`, then in `cpu/` under the same file name, then add a parity case with
//! sizes 0, 1, odd and not a multiple of the vector width, and state the tolerance there.

pub mod affine;
pub mod attention;
pub mod block;
pub mod buffer;
pub mod cpu;
pub mod error;
pub mod label;
pub mod matrix;
pub mod ran;
pub mod reference;
pub mod rotary;
