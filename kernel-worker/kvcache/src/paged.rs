//! The store of 16-bit keys and values in pages: one row over all layers.
//!
//! Layers of a pass are appended in order, each with the pass's tokens; the row has as many tokens as its last layer.
//! A pass that is given up in between leaves the early layers ahead; [`PagedCache::truncate`] brings them back.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;
use velox_kernels::attention::{PageLayout, PageView, PagedView};
use velox_kernels::buffer::AlignedBytes;
use velox_kernels::error::OpError;

use crate::budget::{PageBudget, Reservation};
use crate::error::KvError;
use crate::method::{KvMethod, KvShape};

/// The first magnitude that rounds to infinity in f16: half a unit in the last place above 65504.
const F16_OVERFLOW: f32 = 65520.0;

/// Bytes of allocations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AllocatedBytes {
    /// For keys.
    pub keys: u64,
    /// For values.
    pub values: u64,
}

/// Keys and values of one row over all layers, f16.
#[derive(Debug)]
pub struct PagedCache {
    layout: PageLayout,
    capacity_tokens: usize,
    layers: Vec<Layer>,
    reservation: Reservation,
}

#[derive(Debug, Default)]
struct Layer {
    length_tokens: usize,
    /// At least those that the length needs.
    pages: Vec<Page>,
}

#[derive(Debug)]
struct Page {
    /// `[G, page_tokens, K]` f16.
    keys: AlignedBytes,
    /// `[G, page_tokens, K]` f16.
    values: AlignedBytes,
}

impl PagedCache {
    /// Makes an empty cache; pages are allocated as tokens arrive.
    ///
    /// # Errors
    /// [`KvError::Shape`] if a size is 0 or a product overflows.
    pub fn new(
        shape: KvShape,
        capacity_tokens: usize,
        budget: &PageBudget,
    ) -> Result<Self, KvError> {
        if shape.n_layers == 0 {
            return Err(OpError::Zero { what: "layers" }.into());
        }
        // Checks that no product below overflows.
        KvMethod::None.geometry(shape)?;
        let layout = PageLayout {
            page_tokens: KvMethod::None.page_tokens(),
            n_kv_heads: shape.n_kv_heads,
            head_dim: shape.head_dim,
        };
        layout
            .elements()?
            .checked_mul(2 * size_of::<f16>())
            .ok_or(OpError::Overflow { what: "page" })?;
        Ok(Self {
            layout,
            capacity_tokens,
            layers: std::iter::repeat_with(Layer::default)
                .take(shape.n_layers)
                .collect(),
            reservation: budget.reservation(),
        })
    }

    /// Returns the tokens that every layer holds.
    #[must_use]
    pub fn length_tokens(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.length_tokens)
    }

    /// Returns the limit given at opening.
    #[must_use]
    pub fn capacity_tokens(&self) -> usize {
        self.capacity_tokens
    }

    /// Allocates the pages that `tokens` more tokens need in every layer, so that no append of a pass can fail for
    /// want of memory.
    ///
    /// # Errors
    /// [`KvError::CapacityExceeded`], [`KvError::BudgetExceeded`] or [`KvError::AllocatorRefused`].
    pub fn reserve(&mut self, tokens: usize) -> Result<(), KvError> {
        let end = self.end_after(self.length_tokens(), tokens)?;
        self.allocate(0..self.layers.len(), end)
    }

    /// Appends keys and values `[T, G*K]` of the next `T` tokens to a layer, rounded to the nearest f16, ties to even.
    ///
    /// # Errors
    /// [`KvError::LayerOutOfStep`] if the layer is not the one that is due, [`KvError::OutOfRange`] for a value that
    /// f16 cannot hold, and what [`Self::reserve`] says for pages that were not reserved.
    pub fn append(&mut self, layer: usize, keys: &[f32], values: &[f32]) -> Result<(), KvError> {
        let start = self.layer(layer)?.length_tokens;
        let tokens = self.token_count(keys, values)?;
        let end = self.end_after(start, tokens)?;
        let expected_tokens = match layer.checked_sub(1) {
            None => self.end_after(self.length_tokens(), tokens)?,
            Some(previous) => self.layers[previous].length_tokens,
        };
        if end != expected_tokens {
            return Err(KvError::LayerOutOfStep {
                layer,
                tokens: end,
                expected_tokens,
            });
        }
        check_range("key", layer, keys)?;
        check_range("value", layer, values)?;
        self.allocate(layer..layer + 1, end)?;
        let layout = self.layout;
        let target = &mut self.layers[layer];
        let width = layout.n_kv_heads * layout.head_dim;
        let tokens = keys.chunks_exact(width).zip(values.chunks_exact(width));
        for (position, (key, value)) in (start..end).zip(tokens) {
            let page = &mut target.pages[position / layout.page_tokens];
            let slot = position % layout.page_tokens;
            write_token(page.keys.as_elements_mut(), layout, slot, key);
            write_token(page.values.as_elements_mut(), layout, slot, value);
        }
        target.length_tokens = end;
        Ok(())
    }

    /// Returns what attention reads of a layer: all tokens appended to it, also those of a pass still running.
    ///
    /// # Errors
    /// [`KvError::NoSuchLayer`].
    pub fn view(&self, layer: usize) -> Result<PagedView<'_>, KvError> {
        let layer = self.layer(layer)?;
        let pages = layer
            .pages
            .iter()
            .take(layer.length_tokens.div_ceil(self.layout.page_tokens))
            .map(|page| PageView {
                keys: page.keys.as_elements(),
                values: page.values.as_elements(),
            })
            .collect();
        Ok(PagedView::new(self.layout, layer.length_tokens, pages)?)
    }

    /// Cuts every layer to `tokens` tokens, frees the pages beyond, reserved ones too, and returns how many tokens
    /// are kept: fewer than asked for if there are fewer. Tokens stored one by one can be cut anywhere.
    pub fn truncate(&mut self, tokens: usize) -> usize {
        let kept = tokens.min(self.length_tokens());
        let before = self.allocated_bytes();
        for layer in &mut self.layers {
            layer.length_tokens = kept;
            layer.pages.truncate(kept.div_ceil(self.layout.page_tokens));
        }
        let after = self.allocated_bytes();
        self.reservation
            .shrink(before.keys + before.values - after.keys - after.values);
        kept
    }

    /// Returns the sum over the allocations.
    #[must_use]
    pub fn allocated_bytes(&self) -> AllocatedBytes {
        let mut total = AllocatedBytes::default();
        for page in self.layers.iter().flat_map(|layer| &layer.pages) {
            total.keys += page.keys.allocated() as u64;
            total.values += page.values.allocated() as u64;
        }
        total
    }

    fn layer(&self, layer: usize) -> Result<&Layer, KvError> {
        self.layers.get(layer).ok_or(KvError::NoSuchLayer {
            layer,
            n_layers: self.layers.len(),
        })
    }

    /// Returns `T` of `[T, G*K]`.
    fn token_count(&self, keys: &[f32], values: &[f32]) -> Result<usize, KvError> {
        let width = self.layout.n_kv_heads * self.layout.head_dim;
        if !keys.len().is_multiple_of(width) {
            return Err(KvError::Shape(OpError::PartialRow {
                what: "keys",
                row: width,
                actual: keys.len(),
            }));
        }
        if values.len() != keys.len() {
            return Err(KvError::Shape(OpError::Length {
                what: "values",
                expected: keys.len(),
                actual: values.len(),
            }));
        }
        Ok(keys.len() / width)
    }

    /// Adds tokens to a length, up to the capacity.
    fn end_after(&self, length_tokens: usize, tokens: usize) -> Result<usize, KvError> {
        let end = length_tokens.saturating_add(tokens);
        if end > self.capacity_tokens {
            return Err(KvError::CapacityExceeded {
                tokens: end,
                capacity_tokens: self.capacity_tokens,
            });
        }
        Ok(end)
    }

    /// Gives some layers the pages for `tokens` tokens: all of them or none.
    fn allocate(&mut self, layers: Range<usize>, tokens: usize) -> Result<(), KvError> {
        let needed = tokens.div_ceil(self.layout.page_tokens);
        let missing: usize = self.layers[layers.clone()]
            .iter()
            .map(|layer| needed.saturating_sub(layer.pages.len()))
            .sum();
        if missing == 0 {
            return Ok(());
        }
        let half_bytes = self.layout.elements()? * size_of::<f16>();
        let bytes = (2 * half_bytes as u64).saturating_mul(missing as u64);
        self.reservation.grow(bytes)?;
        let pages: Result<Vec<Page>, KvError> =
            (0..missing).map(|_| Page::zeroed(half_bytes)).collect();
        let mut pages = match pages {
            Ok(pages) => pages.into_iter(),
            Err(refusal) => {
                self.reservation.shrink(bytes);
                return Err(refusal);
            }
        };
        for layer in &mut self.layers[layers] {
            let wanted = needed.saturating_sub(layer.pages.len());
            layer.pages.extend(pages.by_ref().take(wanted));
        }
        Ok(())
    }
}

impl Page {
    fn zeroed(half_bytes: usize) -> Result<Self, KvError> {
        let allocate = || {
            AlignedBytes::zeroed(half_bytes)
                .map_err(|_| KvError::AllocatorRefused { bytes: half_bytes })
        };
        Ok(Self {
            keys: allocate()?,
            values: allocate()?,
        })
    }
}

/// Writes `[G, K]` of one token into `[G, page_tokens, K]`.
fn write_token(page: &mut [f16], layout: PageLayout, slot: usize, token: &[f32]) {
    for (kv_head, source) in token.chunks_exact(layout.head_dim).enumerate() {
        let from = (kv_head * layout.page_tokens + slot) * layout.head_dim;
        page[from..from + layout.head_dim].convert_from_f32_slice(source);
    }
}

/// Refuses what f16 cannot hold.
fn check_range(what: &'static str, layer: usize, values: &[f32]) -> Result<(), KvError> {
    let unfit = values
        .iter()
        .find(|value| value.is_nan() || value.abs() >= F16_OVERFLOW);
    match unfit {
        Some(&value) => Err(KvError::OutOfRange { what, layer, value }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
