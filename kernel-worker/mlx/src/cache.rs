//! Keys and values of one row, as MLX arrays that grow.
//!
//! An array has room for more tokens than it holds; appending writes in place as long as nobody else refers to it.

use velox_engine::backend::{AttentionShape, CacheBytes};
use velox_engine::error::EngineError;
use velox_kvcache::{PageBudget, Reservation};

use crate::ffi::{Dtype, MlxError, Tensor};

/// Tokens by which an array grows.
pub const GROWTH_TOKENS: usize = 256;

/// The cache of a row over all layers.
#[derive(Debug)]
pub struct MlxCache {
    layers: Vec<LayerCache>,
    shape: AttentionShape,
    dtype: Dtype,
    capacity_tokens: usize,
    /// Tokens that every layer has room for, once it was grown.
    room_tokens: usize,
    reservation: Reservation,
}

#[derive(Debug, Default)]
struct LayerCache {
    /// `[1, G, room, K]`; `None` before the first token.
    stored: Option<(Tensor, Tensor)>,
    length: usize,
}

impl MlxCache {
    /// Makes an empty cache.
    #[must_use]
    pub fn new(
        n_layers: usize,
        shape: AttentionShape,
        dtype: Dtype,
        capacity_tokens: usize,
        budget: &PageBudget,
    ) -> Self {
        Self {
            layers: (0..n_layers).map(|_| LayerCache::default()).collect(),
            shape,
            dtype,
            capacity_tokens,
            room_tokens: 0,
            reservation: budget.reservation(),
        }
    }

    /// Takes the bytes of `tokens` more tokens in every layer out of the budget.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`], or [`EngineError::InvalidPlan`] above the row's capacity.
    pub fn reserve(&mut self, tokens: usize) -> Result<(), EngineError> {
        let held = self.layers.first().map_or(0, |layer| layer.length);
        let needed = held + tokens;
        if needed > self.capacity_tokens {
            return Err(EngineError::InvalidPlan(format!(
                "row needs {needed} tokens of cache, its capacity is {}",
                self.capacity_tokens
            )));
        }
        if needed > self.room_tokens {
            let room = needed
                .next_multiple_of(GROWTH_TOKENS)
                .min(self.capacity_tokens);
            let more = (room - self.room_tokens) * self.layers.len() * 2 * self.row_bytes();
            self.reservation.grow(more as u64)?;
            self.room_tokens = room;
        }
        Ok(())
    }

    /// Bytes of one token's keys in one layer; its values take as many.
    fn row_bytes(&self) -> usize {
        self.shape.n_kv_heads * self.shape.head_dim * self.dtype.bytes()
    }

    /// Returns what the arrays hold allocated, or will when they are next written.
    #[must_use]
    pub fn bytes(&self) -> CacheBytes {
        let each = (self.room_tokens * self.layers.len() * self.row_bytes()) as u64;
        CacheBytes {
            keys: each,
            values: each,
        }
    }

    /// Appends keys and values `[1, G, L, K]` to a layer and returns all that it holds, `[1, G, S, K]`. Room was
    /// reserved.
    ///
    /// # Errors
    /// As MLX says; the layer is empty then.
    pub fn append(
        &mut self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Tensor, Tensor), MlxError> {
        let (shape, dtype, room) = (self.shape, self.dtype, self.room_tokens);
        let no_layer = || MlxError::Operation(format!("the cache has no layer {layer}"));
        let layer = self.layers.get_mut(layer).ok_or_else(no_layer)?;
        let start = layer.length;
        let end = start + keys.axis(2);
        let grown = |stored: Option<Tensor>| -> Result<Tensor, MlxError> {
            let held = stored.as_ref().map_or(0, |stored| stored.axis(2));
            if held >= room {
                return stored.map_or_else(
                    || Tensor::zeros(dtype, &[1, shape.n_kv_heads, 0, shape.head_dim]),
                    Ok,
                );
            }
            let more = Tensor::zeros(dtype, &[1, shape.n_kv_heads, room - held, shape.head_dim])?;
            match stored {
                Some(stored) => Tensor::concatenate(&[stored, more], 2),
                None => Ok(more),
            }
        };
        // Empty until everything is recorded.
        layer.length = 0;
        let (old_keys, old_values) = layer.stored.take().unzip();
        let all_keys = grown(old_keys)?.with_slice(2, start, &keys.cast(dtype)?)?;
        let all_values = grown(old_values)?.with_slice(2, start, &values.cast(dtype)?)?;
        let seen = (all_keys.slice(2, 0..end)?, all_values.slice(2, 0..end)?);
        layer.stored = Some((all_keys, all_values));
        layer.length = end;
        Ok(seen)
    }

    /// Cuts every layer to `tokens` tokens. The room stays, and stays counted: the next tokens are written over what was
    /// cut off, which nothing reads.
    pub fn truncate(&mut self, tokens: usize) {
        for layer in &mut self.layers {
            layer.length = layer.length.min(tokens);
        }
    }
}
