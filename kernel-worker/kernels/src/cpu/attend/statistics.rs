//! Attention weights for eviction scorers, by a second pass over the keys.

use std::ops::Range;

use super::Job;
use crate::cpu::math::{exp, largest};
use crate::cpu::simd::{Kernel, Simd};

/// Sums the weights of the tokens' queries, in order, for the query heads of one key/value head.
pub(super) struct Statistics<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) kv_head: usize,
    pub(super) tokens: Range<usize>,
    /// `[group, positions]`.
    pub(super) statistics: &'a mut [f32],
}

impl Kernel for Statistics<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self {
            job,
            kv_head,
            tokens,
            statistics,
        } = self;
        let layout = job.view.layout();
        let tiles = layout.page_tokens.div_ceil(S::LANES);
        let row_tiles = job.view.page_count() * tiles;
        let positions = statistics.len() / job.group;
        let (mut keys, mut scores, mut lanes) = (Vec::new(), Vec::new(), [0.0_f32; 16]);
        for token in tokens {
            let block = job.block(token..token + 1, kv_head);
            scores.clear();
            scores.resize(job.group * row_tiles, simd.splat(f32::NEG_INFINITY));
            for at in 0..row_tiles {
                let place = |row: usize| row * row_tiles + at;
                let tile = (at / tiles, at % tiles);
                block.score_tile(simd, tile, &mut keys, place, &mut scores);
            }
            for (row, scores) in scores.chunks_exact_mut(row_tiles).enumerate() {
                normalise(simd, scores);
                let statistics = &mut statistics[row * positions..(row + 1) * positions];
                for (at, weights) in scores.iter().enumerate() {
                    simd.store(*weights, &mut lanes[..S::LANES]);
                    let first = at % tiles * S::LANES;
                    let slots = S::LANES.min(layout.page_tokens - first);
                    let from = at / tiles * layout.page_tokens + first;
                    let to = positions.min(from + slots);
                    for (sum, weight) in statistics[from.min(to)..to].iter_mut().zip(lanes) {
                        *sum += weight;
                    }
                }
            }
        }
    }
}

/// Softmax over all scores of a row.
#[inline(always)]
fn normalise<S: Simd>(simd: S, scores: &mut [S::F]) {
    let mut most = simd.splat(f32::NEG_INFINITY);
    for score in scores.iter() {
        most = simd.max(*score, most);
    }
    let most = simd.splat(largest(simd, most));
    let mut sum = simd.splat(0.0);
    for score in scores.iter_mut() {
        *score = exp(simd, simd.sub(*score, most));
        sum = simd.add(sum, *score);
    }
    let sum = simd.splat(simd.sum(sum));
    for score in scores {
        *score = simd.div(*score, sum);
    }
}
