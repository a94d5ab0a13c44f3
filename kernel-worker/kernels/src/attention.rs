//! What attention reads and is asked for: the view of a paged f16 cache, and a call.
//!
//! ```text
//! page of one layer:  keys    [G, page_tokens, K]  f16, contiguous
//!                     values  [G, page_tokens, K]  f16, contiguous
//! position p lies in page p / page_tokens at slot p % page_tokens
//! ```
//!
//! Page `n` starts at position `n * page_tokens`, so tiles are absolute: what a query at `p` adds up, and in which
//! order, is a function of `p` and the window alone.

use std::ops::Range;

use half::f16;

use crate::error::{OpError, check_length, product, row_count};

/// Sizes of a page of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageLayout {
    /// Tokens of a page.
    pub page_tokens: usize,
    /// `G`.
    pub n_kv_heads: usize,
    /// `K`.
    pub head_dim: usize,
}

impl PageLayout {
    /// Returns the elements of a page's keys, equal to those of its values.
    ///
    /// # Errors
    /// [`OpError`] if a size is 0 or the product overflows.
    pub fn elements(self) -> Result<usize, OpError> {
        for (what, size) in [
            ("page tokens", self.page_tokens),
            ("kv heads", self.n_kv_heads),
            ("head dimension", self.head_dim),
        ] {
            if size == 0 {
                return Err(OpError::Zero { what });
            }
        }
        product("page", &[self.n_kv_heads, self.page_tokens, self.head_dim])
    }

    /// Returns where one head's `[page_tokens, K]` lies in a page; the layout was checked by [`Self::elements`].
    #[must_use]
    pub fn head_range(self, kv_head: usize) -> Range<usize> {
        let head = self.page_tokens * self.head_dim;
        kv_head * head..(kv_head + 1) * head
    }
}

/// One page of one layer.
#[derive(Debug, Clone, Copy)]
pub struct PageView<'a> {
    /// `[G, page_tokens, K]`.
    pub keys: &'a [f16],
    /// `[G, page_tokens, K]`.
    pub values: &'a [f16],
}

/// Keys and values of one row in one layer.
#[derive(Debug, Clone)]
pub struct PagedView<'a> {
    layout: PageLayout,
    length_tokens: usize,
    pages: Vec<PageView<'a>>,
}

impl<'a> PagedView<'a> {
    /// Makes a view of `length_tokens` positions; what the last page holds beyond them is never read.
    ///
    /// # Errors
    /// [`OpError`] if the pages do not have the layout's size or are not exactly those that the length needs.
    pub fn new(
        layout: PageLayout,
        length_tokens: usize,
        pages: Vec<PageView<'a>>,
    ) -> Result<Self, OpError> {
        let elements = layout.elements()?;
        check_length(
            "page list",
            length_tokens.div_ceil(layout.page_tokens),
            pages.len(),
        )?;
        for page in &pages {
            check_length("keys of a page", elements, page.keys.len())?;
            check_length("values of a page", elements, page.values.len())?;
        }
        Ok(Self {
            layout,
            length_tokens,
            pages,
        })
    }

    /// Returns the sizes of a page.
    #[must_use]
    pub fn layout(&self) -> PageLayout {
        self.layout
    }

    /// Returns the number of positions.
    #[must_use]
    pub fn length_tokens(&self) -> usize {
        self.length_tokens
    }

    /// Returns the number of pages, the last one possibly part full.
    #[must_use]
    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    /// Returns the positions of a page that hold tokens.
    #[must_use]
    pub fn page_positions(&self, page: usize) -> Range<usize> {
        let start = page * self.layout.page_tokens;
        start..(start + self.layout.page_tokens).min(self.length_tokens)
    }

    /// Returns `[page_tokens, K]` of one head's keys.
    ///
    /// # Panics
    /// If there is no such page or head.
    #[must_use]
    pub fn keys(&self, page: usize, kv_head: usize) -> &'a [f16] {
        &self.pages[page].keys[self.layout.head_range(kv_head)]
    }

    /// Returns `[page_tokens, K]` of one head's values.
    ///
    /// # Panics
    /// If there is no such page or head.
    #[must_use]
    pub fn values(&self, page: usize, kv_head: usize) -> &'a [f16] {
        &self.pages[page].values[self.layout.head_range(kv_head)]
    }
}

/// What attention reports beside its output (DESIGN section 6); eviction scorers read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StatsRequest {
    /// Nothing.
    #[default]
    None,
    /// Weights of the span's last query, `[H, positions]`.
    DecodeWeights,
    /// Sums of the weights over the span's queries, `[H, positions]`; costs a second QK pass.
    ColumnSums,
}

/// Attention of one row's span of tokens over its cache, which holds them already.
///
/// Token `i` of the span has position `p = start + i` and sees the positions from `p + 1 - sliding_window` (or 0) to
/// `p`. Query head `h` reads key/value head `h / (H / G)`.
#[derive(Debug, Clone, Copy)]
pub struct AttendCall<'a> {
    /// `[T, H*K]`, after RoPE.
    pub queries: &'a [f32],
    /// Position of the first query.
    pub start: usize,
    /// `H`.
    pub n_heads: usize,
    /// Positions that a query sees at most, itself included; `None` = all before it.
    pub sliding_window: Option<usize>,
    /// Factor on the scores, `1 / sqrt(K)` in the common case.
    pub scale: f32,
    /// What is reported beside the output.
    pub statistics: StatsRequest,
}

impl AttendCall<'_> {
    /// Checks the call against a cache and the output `[T, H*K]`; returns `T`.
    ///
    /// # Errors
    /// [`OpError`] if shapes disagree, heads do not group, the window is empty, or a query's position is not in the
    /// cache.
    pub fn check(&self, view: &PagedView<'_>, output_elements: usize) -> Result<usize, OpError> {
        let layout = view.layout();
        if self.n_heads == 0 {
            return Err(OpError::Zero { what: "heads" });
        }
        if self.sliding_window == Some(0) {
            return Err(OpError::Zero {
                what: "sliding window",
            });
        }
        if !self.n_heads.is_multiple_of(layout.n_kv_heads) {
            return Err(OpError::UngroupedHeads {
                n_heads: self.n_heads,
                n_kv_heads: layout.n_kv_heads,
            });
        }
        let width = product("queries", &[self.n_heads, layout.head_dim])?;
        let tokens = row_count("queries", self.queries.len(), width)?;
        check_length("attention output", self.queries.len(), output_elements)?;
        let end = self.start.checked_add(tokens).ok_or(OpError::Overflow {
            what: "query positions",
        })?;
        if end > view.length_tokens() {
            return Err(OpError::AboveLimit {
                what: "end of the query positions",
                limit: view.length_tokens(),
                value: end,
            });
        }
        Ok(tokens)
    }

    /// Returns the positions that the query at `position` sees.
    #[must_use]
    pub fn visible(&self, position: usize) -> Range<usize> {
        let first = match self.sliding_window {
            Some(window) => (position + 1).saturating_sub(window),
            None => 0,
        };
        first..position + 1
    }

    /// Returns the positions that statistics of `tokens` queries cover, from 0 to the last query's, or 0 if none were
    /// requested or nothing was asked.
    #[must_use]
    pub fn statistics_positions(&self, tokens: usize) -> usize {
        match self.statistics {
            StatsRequest::None => 0,
            StatsRequest::DecodeWeights | StatsRequest::ColumnSums if tokens == 0 => 0,
            StatsRequest::DecodeWeights | StatsRequest::ColumnSums => self.start + tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: PageLayout = PageLayout {
        page_tokens: 4,
        n_kv_heads: 2,
        head_dim: 3,
    };

    fn pages(storage: &[f16], count: usize) -> Vec<PageView<'_>> {
        let page = PageView {
            keys: storage,
            values: storage,
        };
        vec![page; count]
    }

    fn call(queries: &[f32], start: usize) -> AttendCall<'_> {
        AttendCall {
            queries,
            start,
            n_heads: 4,
            sliding_window: None,
            scale: 1.0,
            statistics: StatsRequest::None,
        }
    }

    #[test]
    fn a_view_has_exactly_the_pages_that_its_length_needs() {
        let storage = [f16::ZERO; 24];
        for (length, count) in [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)] {
            let view = PagedView::new(LAYOUT, length, pages(&storage, count)).unwrap();
            assert_eq!(view.page_count(), count);
            assert!(PagedView::new(LAYOUT, length, pages(&storage, count + 1)).is_err());
        }
        let view = PagedView::new(LAYOUT, 5, pages(&storage, 2)).unwrap();
        assert_eq!(view.page_positions(0), 0..4);
        assert_eq!(view.page_positions(1), 4..5);
        assert!(PagedView::new(LAYOUT, 4, pages(&storage[1..], 1)).is_err());
        let empty = PageLayout {
            page_tokens: 0,
            ..LAYOUT
        };
        assert_eq!(
            PagedView::new(empty, 0, Vec::new()).err(),
            Some(OpError::Zero {
                what: "page tokens"
            })
        );
    }

    #[test]
    fn heads_of_a_page_are_contiguous() {
        let storage: Vec<f16> = (0_u8..24).map(|n| f16::from_f32(f32::from(n))).collect();
        let view = PagedView::new(LAYOUT, 4, pages(&storage, 1)).unwrap();
        assert_eq!(view.keys(0, 0), &storage[..12]);
        assert_eq!(view.values(0, 1), &storage[12..]);
    }

    #[test]
    fn a_query_beyond_the_cache_is_refused() {
        let storage = [f16::ZERO; 24];
        let view = PagedView::new(LAYOUT, 5, pages(&storage, 2)).unwrap();
        let queries = [0.0; 24];
        assert_eq!(call(&queries, 3).check(&view, 24), Ok(2));
        assert_eq!(
            call(&queries, 4).check(&view, 24),
            Err(OpError::AboveLimit {
                what: "end of the query positions",
                limit: 5,
                value: 6
            })
        );
        assert!(call(&queries, usize::MAX).check(&view, 24).is_err());
        assert!(call(&queries, 3).check(&view, 23).is_err());
        assert!(call(&queries[..13], 3).check(&view, 13).is_err());
        let ungrouped = AttendCall {
            n_heads: 3,
            ..call(&queries, 0)
        };
        assert!(ungrouped.check(&view, 24).is_err());
        let blind = AttendCall {
            sliding_window: Some(0),
            ..call(&queries, 0)
        };
        assert!(blind.check(&view, 24).is_err());
    }

    #[test]
    fn a_window_counts_the_query_itself() {
        let windowed = AttendCall {
            sliding_window: Some(3),
            ..call(&[], 0)
        };
        assert_eq!(windowed.visible(0), 0..1);
        assert_eq!(windowed.visible(2), 0..3);
        assert_eq!(windowed.visible(9), 7..10);
        assert_eq!(call(&[], 0).visible(9), 0..10);
    }
}
