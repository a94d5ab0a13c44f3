//! What a rotary embedding is asked to do.

use crate::error::{OpError, product, row_count};

/// Which elements of a head form a rotated pair, among the first `R = 2 * inverse_frequencies.len()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// Element `i` with `i + R/2`: Hugging Face, and GGUF of Qwen.
    HalfSplit,
    /// Element `2i` with `2i + 1`: GGUF of the Llama family.
    Interleaved,
}

/// Rotates pair `i` of every head at position `p` by `p * inverse_frequencies[i]`; elements from `R` on stay.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// How a head's elements pair up.
    pub pairing: Pairing,
    /// One per rotated pair, scaling already applied.
    pub inverse_frequencies: &'a [f64],
    /// Factor on cosine and sine (YaRN, LongRoPE); 1 otherwise.
    pub attention_factor: f32,
    /// `K`.
    pub head_dim: usize,
}

impl Rotation<'_> {
    /// Checks the rotation against `[T, heads*K]` and the `T` positions; returns the heads of a token.
    ///
    /// # Errors
    /// [`OpError`] if more elements than a head has are rotated, or the lengths disagree.
    pub fn check(&self, elements: usize, positions: usize) -> Result<usize, OpError> {
        let rotated = product("rotated elements", &[2, self.inverse_frequencies.len()])?;
        if rotated > self.head_dim {
            return Err(OpError::AboveLimit {
                what: "rotated elements",
                limit: self.head_dim,
                value: rotated,
            });
        }
        let rows = row_count("rotated activations", elements, self.head_dim)?;
        row_count("rotated heads", rows, positions)
    }
}
