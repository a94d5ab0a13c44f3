//! Causal attention over a paged cache.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;

use super::softmax::softmax_row;
use super::{ReferenceDevice, dot, worthwhile_threads};
use crate::attention::{AttendCall, PagedView, StatsRequest};
use crate::error::OpError;
use crate::ran::Ran;

/// Multiplications per thread below which starting it costs more than it saves.
const MINIMUM_PER_THREAD: usize = 1 << 21;

/// `out` `[T, H*K]` = for every query and head, the values of the positions it sees, weighted by
/// `softmax(scale * query . keys)`; on up to `threads` threads. Returns the requested statistics `[H, positions]`,
/// positions from 0 to the last query's, or nothing.
///
/// Scores are summed in lanes, the softmax and the values in order of position from the first that the query sees:
/// the same bits for any chunking and any number of threads.
///
/// # Errors
/// [`OpError`] as [`AttendCall::check`].
pub fn attend(
    call: &AttendCall<'_>,
    view: &PagedView<'_>,
    threads: usize,
    out: &mut [f32],
) -> Result<Ran<ReferenceDevice, Vec<f32>>, OpError> {
    let tokens = call.check(view, out.len())?;
    let positions = call.statistics_positions(tokens);
    let mut statistics = vec![0.0; call.n_heads * positions];
    if tokens > 0 {
        let multiplications = out.len().saturating_mul(call.start + tokens);
        let threads = worthwhile_threads(threads, multiplications, MINIMUM_PER_THREAD);
        if tokens == 1 {
            split_heads(call, view, threads, out, &mut statistics);
        } else {
            let mut by_head = vec![0.0; out.len()];
            split_heads(call, view, threads, &mut by_head, &mut statistics);
            let head_dim = view.layout().head_dim;
            for (index, result) in out.chunks_exact_mut(head_dim).enumerate() {
                let (token, head) = (index / call.n_heads, index % call.n_heads);
                let from = (head * tokens + token) * head_dim;
                result.copy_from_slice(&by_head[from..from + head_dim]);
            }
        }
    }
    Ok(Ran::new(ReferenceDevice(()), statistics))
}

/// Computes `[H, T, K]` and the statistics, a contiguous run of heads per thread.
fn split_heads(
    call: &AttendCall<'_>,
    view: &PagedView<'_>,
    threads: usize,
    by_head: &mut [f32],
    statistics: &mut [f32],
) {
    let heads_per_thread = call.n_heads.div_ceil(threads);
    let head_elements = by_head.len() / call.n_heads;
    let head_statistics = statistics.len() / call.n_heads;
    let mut rest = statistics;
    std::thread::scope(|scope| {
        let parts = by_head.chunks_mut(heads_per_thread * head_elements);
        for (part, output) in parts.enumerate() {
            let first = part * heads_per_thread;
            let heads = first..first + output.len() / head_elements;
            let (own, others) =
                std::mem::take(&mut rest).split_at_mut(heads.len() * head_statistics);
            rest = others;
            if threads == 1 {
                attend_heads(call, view, heads, output, own);
            } else {
                scope.spawn(move || attend_heads(call, view, heads, output, own));
            }
        }
    });
}

/// Computes `[heads, T, K]` and `[heads, positions]`.
fn attend_heads(
    call: &AttendCall<'_>,
    view: &PagedView<'_>,
    heads: Range<usize>,
    output: &mut [f32],
    statistics: &mut [f32],
) {
    let group = call.n_heads / view.layout().n_kv_heads;
    let head_elements = output.len() / heads.len();
    let head_statistics = statistics.len() / heads.len();
    let mut cache = HeadCache::default();
    for (index, (head, result)) in heads
        .zip(output.chunks_exact_mut(head_elements))
        .enumerate()
    {
        cache.load(call, view, head / group);
        let from = index * head_statistics;
        let own = &mut statistics[from..from + head_statistics];
        attend_head(call, &cache, head, result, own);
    }
}

/// One key/value head's visible positions as f32.
#[derive(Default)]
struct HeadCache {
    /// Whose head this is, `None` before the first load.
    kv_head: Option<usize>,
    head_dim: usize,
    /// Position of the first row.
    first: usize,
    /// `[positions, K]`.
    keys: Vec<f32>,
    /// `[positions, K]`.
    values: Vec<f32>,
}

impl HeadCache {
    /// Reads a head unless it is the one already held.
    fn load(&mut self, call: &AttendCall<'_>, view: &PagedView<'_>, kv_head: usize) {
        if self.kv_head == Some(kv_head) {
            return;
        }
        self.kv_head = Some(kv_head);
        self.head_dim = view.layout().head_dim;
        let first_page = call.visible(call.start).start / view.layout().page_tokens;
        self.first = view.page_positions(first_page).start;
        let elements = (view.length_tokens() - self.first) * self.head_dim;
        self.keys.resize(elements, 0.0);
        self.values.resize(elements, 0.0);
        let mut from = 0;
        for page in first_page..view.page_count() {
            let used = view.page_positions(page).len() * self.head_dim;
            let to = from + used;
            view.keys(page, kv_head)[..used].convert_to_f32_slice(&mut self.keys[from..to]);
            view.values(page, kv_head)[..used].convert_to_f32_slice(&mut self.values[from..to]);
            from = to;
        }
    }

    /// Returns where a position's `K` elements lie.
    fn row(&self, position: usize) -> Range<usize> {
        let from = (position - self.first) * self.head_dim;
        from..from + self.head_dim
    }
}

/// Computes `[T, K]` and `[positions]` of one query head.
fn attend_head(
    call: &AttendCall<'_>,
    cache: &HeadCache,
    head: usize,
    output: &mut [f32],
    statistics: &mut [f32],
) {
    let width = call.n_heads * cache.head_dim;
    let tokens = output.len() / cache.head_dim;
    let mut weights = Vec::with_capacity(call.start + tokens);
    for (token, result) in output.chunks_exact_mut(cache.head_dim).enumerate() {
        let from = token * width + head * cache.head_dim;
        let query = &call.queries[from..from + cache.head_dim];
        let visible = call.visible(call.start + token);
        weights.clear();
        weights.extend(
            visible
                .clone()
                .map(|position| call.scale * dot(query, &cache.keys[cache.row(position)])),
        );
        softmax_row(&mut weights);
        result.fill(0.0);
        for (position, &weight) in visible.clone().zip(&weights) {
            for (sum, &value) in result.iter_mut().zip(&cache.values[cache.row(position)]) {
                *sum += weight * value;
            }
        }
        let wanted = match call.statistics {
            StatsRequest::None => false,
            StatsRequest::DecodeWeights => token + 1 == tokens,
            StatsRequest::ColumnSums => true,
        };
        if wanted {
            for (sum, &weight) in statistics[visible].iter_mut().zip(&weights) {
                *sum += weight;
            }
        }
    }
}

#[cfg(test)]
mod tests;
