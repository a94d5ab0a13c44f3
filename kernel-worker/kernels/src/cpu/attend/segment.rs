//! Attention of a block of queries over one segment.

use std::ops::Range;

use crate::attention::{AttendCall, PagedView};
use crate::cpu::math::{exp, exp_one, largest, load, store};
use crate::cpu::simd::Simd;

/// Consecutive queries of one row and the query heads of one key/value head. Its rows are `[tokens, group]`.
#[derive(Debug)]
pub(super) struct Block<'a> {
    pub(super) call: &'a AttendCall<'a>,
    pub(super) view: &'a PagedView<'a>,
    pub(super) tokens: Range<usize>,
    pub(super) kv_head: usize,
    pub(super) group: usize,
}

/// Memory that segments share.
#[derive(Debug)]
pub(super) struct Scratch<S: Simd> {
    /// `[K]`: keys of `LANES` positions, lane = position.
    keys: Vec<S::F>,
    /// `[page slots, K / LANES]`.
    values: Vec<S::F>,
    /// `[rows, pages, page slots / LANES]`: scores, then weights.
    scores: Vec<S::F>,
    /// The weights of one row.
    weights: Vec<f32>,
}

impl<S: Simd> Default for Scratch<S> {
    fn default() -> Self {
        Self {
            keys: Vec::new(),
            values: Vec::new(),
            scores: Vec::new(),
            weights: Vec::new(),
        }
    }
}

/// Softmax under way, a row each: largest score, sum of weights and weighted values.
#[derive(Debug)]
pub(super) struct States<S: Simd> {
    largest: Vec<f32>,
    /// 0 = nothing was seen.
    sums: Vec<f32>,
    /// `[rows, K / LANES]`.
    values: Vec<S::F>,
    width: usize,
}

impl<S: Simd> States<S> {
    /// Makes states that saw nothing.
    #[inline(always)]
    pub(super) fn new(simd: S, rows: usize, head_dim: usize) -> Self {
        let width = head_dim.div_ceil(S::LANES);
        Self {
            largest: vec![f32::NEG_INFINITY; rows],
            sums: vec![0.0; rows],
            values: vec![simd.splat(0.0); rows * width],
            width,
        }
    }

    /// Adds what a later segment saw, and empties it.
    #[inline(always)]
    pub(super) fn join(&mut self, simd: S, later: &mut Self) {
        let width = self.width;
        for row in 0..self.sums.len() {
            let range = row * width..(row + 1) * width;
            let (sums, values) = (&mut self.sums[row], &mut self.values[range.clone()]);
            let later_values = &mut later.values[range];
            if later.sums[row] == 0.0 {
                continue;
            }
            if *sums == 0.0 {
                (self.largest[row], *sums) = (later.largest[row], later.sums[row]);
                values.copy_from_slice(later_values);
            } else {
                let most = self.largest[row].max(later.largest[row]);
                let own_factor = exp_one(simd, self.largest[row] - most);
                let later_factor = exp_one(simd, later.largest[row] - most);
                *sums = *sums * own_factor + later.sums[row] * later_factor;
                let (own_factor, later_factor) = (simd.splat(own_factor), simd.splat(later_factor));
                for (value, later) in values.iter_mut().zip(later_values.iter()) {
                    *value = simd.fma(*later, later_factor, simd.mul(*value, own_factor));
                }
                self.largest[row] = most;
            }
            later.sums[row] = 0.0;
            later.largest[row] = f32::NEG_INFINITY;
            later_values.fill(simd.splat(0.0));
        }
    }

    /// Returns the elements that [`Self::save`] writes for a row.
    pub(super) fn stored(head_dim: usize) -> usize {
        // Widest vectors of any set: a row is padded to them.
        head_dim.next_multiple_of(16) + 2
    }

    /// Writes the states.
    #[inline(always)]
    pub(super) fn save(&self, simd: S, to: &mut [f32]) {
        let rows = self.sums.len();
        for (row, to) in to.chunks_exact_mut(to.len() / rows).enumerate() {
            (to[0], to[1]) = (self.largest[row], self.sums[row]);
            let values = &self.values[row * self.width..(row + 1) * self.width];
            for (value, to) in values.iter().zip(to[2..].chunks_exact_mut(S::LANES)) {
                simd.store(*value, to);
            }
        }
    }

    /// Reads what [`Self::save`] wrote.
    #[inline(always)]
    pub(super) fn restore(&mut self, simd: S, from: &[f32]) {
        let rows = self.sums.len();
        for (row, from) in from.chunks_exact(from.len() / rows).enumerate() {
            (self.largest[row], self.sums[row]) = (from[0], from[1]);
            let values = &mut self.values[row * self.width..(row + 1) * self.width];
            for (value, from) in values.iter_mut().zip(from[2..].chunks_exact(S::LANES)) {
                *value = load(simd, from, 0.0);
            }
        }
    }

    /// Writes the weighted mean of the values of a row.
    #[inline(always)]
    pub(super) fn write(&self, simd: S, row: usize, out: &mut [f32]) {
        let sum = simd.splat(self.sums[row]);
        let values = &self.values[row * self.width..(row + 1) * self.width];
        for (value, out) in values.iter().zip(out.chunks_mut(S::LANES)) {
            store(simd, simd.div(*value, sum), out);
        }
    }
}

impl Block<'_> {
    #[inline(always)]
    fn query(&self, row: usize) -> &[f32] {
        let head_dim = self.view.layout().head_dim;
        let token = self.tokens.start + row / self.group;
        let head = self.kv_head * self.group + row % self.group;
        let from = (token * self.call.n_heads + head) * head_dim;
        &self.call.queries[from..from + head_dim]
    }

    /// Returns what the row's token sees of a page, as slots.
    #[inline(always)]
    fn visible_slots(&self, row: usize, page: usize) -> Range<usize> {
        let token = self.tokens.start + row / self.group;
        let visible = self.call.visible(self.call.start + token);
        let positions = self.view.page_positions(page);
        let from = visible.start.max(positions.start);
        let to = visible.end.min(positions.end);
        from.min(to).max(positions.start) - positions.start
            ..to.max(positions.start) - positions.start
    }

    /// Attends over the pages, into empty states.
    #[inline(always)]
    pub(super) fn attend<S: Simd>(
        &self,
        simd: S,
        pages: Range<usize>,
        scratch: &mut Scratch<S>,
        states: &mut States<S>,
    ) {
        let rows = self.tokens.len() * self.group;
        let pages = pages.start..pages.end.min(self.view.page_count());
        let tiles = self.view.layout().page_tokens.div_ceil(S::LANES);
        let row_tiles = pages.len() * tiles;
        let Scratch {
            keys,
            values,
            scores,
            weights,
        } = scratch;
        scores.clear();
        scores.resize(rows * row_tiles, simd.splat(f32::NEG_INFINITY));
        for (index, page) in pages.clone().enumerate() {
            for tile in 0..tiles {
                let at = index * tiles + tile;
                self.score_tile(simd, (page, tile), keys, |row| row * row_tiles + at, scores);
            }
        }
        for row in 0..rows {
            let scores = &mut scores[row * row_tiles..(row + 1) * row_tiles];
            (states.largest[row], states.sums[row]) = softmax(simd, scores);
        }
        for (index, page) in pages.enumerate() {
            let first = self.visible_slots(0, page);
            let last = self.visible_slots(rows - 1, page);
            let seen = first.start..last.end.max(first.end);
            if seen.is_empty() {
                continue;
            }
            self.load_values(simd, page, seen, values);
            for token in 0..self.tokens.len() {
                let row = token * self.group;
                let slots = self.visible_slots(row, page);
                if slots.is_empty() {
                    continue;
                }
                let width = states.width;
                let values = &values[slots.start * width..slots.end * width];
                weights.clear();
                weights.resize(self.group * tiles * S::LANES, 0.0);
                for member in 0..self.group {
                    let at = (row + member) * row_tiles + index * tiles;
                    let to = &mut weights[member * tiles * S::LANES..];
                    for (weight, to) in scores[at..at + tiles]
                        .iter()
                        .zip(to.chunks_exact_mut(S::LANES))
                    {
                        simd.store(*weight, to);
                    }
                }
                let stride = tiles * S::LANES;
                let mut member = 0;
                while member < self.group {
                    let from = (row + member) * width;
                    let weights = &weights[member * stride..];
                    let sums = &mut states.values[from..];
                    member += match self.group - member {
                        1 => add_values::<S, 1>(
                            simd,
                            weights,
                            (stride, &slots),
                            values,
                            (sums, width),
                        ),
                        2 => add_values::<S, 2>(
                            simd,
                            weights,
                            (stride, &slots),
                            values,
                            (sums, width),
                        ),
                        3 => add_values::<S, 3>(
                            simd,
                            weights,
                            (stride, &slots),
                            values,
                            (sums, width),
                        ),
                        _ => add_values::<S, 4>(
                            simd,
                            weights,
                            (stride, &slots),
                            values,
                            (sums, width),
                        ),
                    };
                }
            }
        }
    }

    /// Scores `LANES` slots of a page for every row that sees one of them; `place(row)` says where they go.
    /// Slots that a row does not see are scored `-inf`.
    #[inline(always)]
    pub(super) fn score_tile<S: Simd>(
        &self,
        simd: S,
        (page, tile): (usize, usize),
        keys: &mut Vec<S::F>,
        place: impl Fn(usize) -> usize,
        scores: &mut [S::F],
    ) {
        let first = tile * S::LANES;
        let sees = |row: usize| {
            let slots = self.visible_slots(row, page);
            slots.start < first + S::LANES && slots.end > first.max(slots.start)
        };
        let rows = self.tokens.len() * self.group;
        let mut row = 0;
        // Later tokens see later slots; a window hides earlier ones. Rows that see the tile are one run.
        while row < rows && !sees(row) {
            row += self.group;
        }
        let mut end = row;
        while end < rows && sees(end) {
            end += self.group;
        }
        if row == end {
            return;
        }
        self.load_keys(simd, page, first, keys);
        while row < end {
            row += match end - row {
                1 => self.score_rows::<S, 1>(simd, (page, first), keys, (row, &place), scores),
                2 => self.score_rows::<S, 2>(simd, (page, first), keys, (row, &place), scores),
                3 => self.score_rows::<S, 3>(simd, (page, first), keys, (row, &place), scores),
                4..=7 => self.score_rows::<S, 4>(simd, (page, first), keys, (row, &place), scores),
                _ => self.score_rows::<S, 8>(simd, (page, first), keys, (row, &place), scores),
            };
        }
    }

    #[inline(always)]
    fn score_rows<S: Simd, const R: usize>(
        &self,
        simd: S,
        (page, first): (usize, usize),
        keys: &[S::F],
        (row, place): (usize, &impl Fn(usize) -> usize),
        scores: &mut [S::F],
    ) -> usize {
        let queries: [&[f32]; R] =
            std::array::from_fn(|index| &self.query(row + index)[..keys.len()]);
        let mut sums = [simd.splat(0.0); R];
        // Four elements at a time, so that one check of bounds serves four.
        let (fours, rest) = keys.as_chunks::<4>();
        for (index, keys) in fours.iter().enumerate() {
            let queries = queries.map(|query| query.as_chunks::<4>().0[index]);
            for element in 0..4 {
                for (sum, query) in sums.iter_mut().zip(&queries) {
                    *sum = simd.fma(keys[element], simd.splat(query[element]), *sum);
                }
            }
        }
        for (element, keys) in (4 * fours.len()..).zip(rest) {
            for (sum, query) in sums.iter_mut().zip(&queries) {
                *sum = simd.fma(*keys, simd.splat(query[element]), *sum);
            }
        }
        let scale = simd.splat(self.call.scale);
        for (index, sum) in sums.into_iter().enumerate() {
            let slots = self.visible_slots(row + index, page);
            let score = simd.mul(sum, scale);
            scores[place(row + index)] = if slots.start <= first && slots.end >= first + S::LANES {
                score
            } else {
                hide(simd, score, first, &slots)
            };
        }
        R
    }

    /// Loads `LANES` keys of a page from slot `first` on, lane = slot; slots after the page's end repeat nothing.
    #[inline(always)]
    fn load_keys<S: Simd>(&self, simd: S, page: usize, first: usize, keys: &mut Vec<S::F>) {
        let head_dim = self.view.layout().head_dim;
        let stride = 2 * head_dim;
        let bytes: &[u8] = bytemuck::cast_slice(self.view.keys(page, self.kv_head));
        let rows = &bytes[first * stride..];
        keys.clear();
        let mut padded = [0_u8; 16 * 16];
        for at in (0..stride).step_by(16) {
            let columns = if at + 16 <= stride && rows.len() >= S::LANES * stride {
                simd.load_columns(&rows[at..], stride)
            } else {
                padded.fill(0);
                let used = 16.min(stride - at);
                for (row, padded) in rows.chunks_exact(stride).zip(padded.chunks_exact_mut(16)) {
                    padded[..used].copy_from_slice(&row[at..at + used]);
                }
                simd.load_columns(&padded[..16 * S::LANES], 16)
            };
            for column in columns {
                let (even, odd) = simd.f16_halves(column);
                keys.push(even);
                keys.push(odd);
            }
        }
        keys.truncate(head_dim);
    }

    /// Loads the values of a page's slots to their places in `[slots, K / LANES]`.
    #[inline(always)]
    fn load_values<S: Simd>(
        &self,
        simd: S,
        page: usize,
        slots: Range<usize>,
        values: &mut Vec<S::F>,
    ) {
        let head_dim = self.view.layout().head_dim;
        let width = head_dim.div_ceil(S::LANES);
        let bytes: &[u8] = bytemuck::cast_slice(self.view.values(page, self.kv_head));
        values.resize(self.view.layout().page_tokens * width, simd.splat(0.0));
        let rows = bytes.chunks_exact(2 * head_dim).skip(slots.start);
        let places = values[slots.start * width..slots.end * width].chunks_exact_mut(width);
        for (row, places) in rows.zip(places) {
            for (part, place) in row.chunks(2 * S::LANES).zip(places) {
                *place = if part.len() == 2 * S::LANES {
                    simd.load_f16(part)
                } else {
                    let mut lanes = [0_u8; 32];
                    lanes[..part.len()].copy_from_slice(part);
                    simd.load_f16(&lanes[..2 * S::LANES])
                };
            }
        }
    }
}

/// Replaces scores of slots outside `slots` by `-inf`.
#[inline(always)]
fn hide<S: Simd>(simd: S, score: S::F, first: usize, slots: &Range<usize>) -> S::F {
    let mut lanes = [0.0_f32; 16];
    simd.store(score, &mut lanes[..S::LANES]);
    for (lane, score) in lanes.iter_mut().enumerate() {
        if !slots.contains(&(first + lane)) {
            *score = f32::NEG_INFINITY;
        }
    }
    load(simd, &lanes[..S::LANES], 0.0)
}

/// Turns scores into weights that are not normalised yet; returns the largest score and the sum of the weights.
#[inline(always)]
fn softmax<S: Simd>(simd: S, scores: &mut [S::F]) -> (f32, f32) {
    let mut most = simd.splat(f32::NEG_INFINITY);
    for score in scores.iter() {
        most = simd.max(*score, most);
    }
    let most = largest(simd, most);
    if most == f32::NEG_INFINITY && scores.iter().all(|score| simd.sum(*score) == most) {
        // The segment lies outside the row's window, or after it.
        scores.fill(simd.splat(0.0));
        return (most, 0.0);
    }
    let shift = simd.splat(most);
    let mut sum = simd.splat(0.0);
    for score in scores {
        *score = exp(simd, simd.sub(*score, shift));
        sum = simd.add(sum, *score);
    }
    (most, simd.sum(sum))
}

/// Adds the weighted values of `slots` to the sums of `R` rows; `values` begins at the first of them.
#[inline(always)]
fn add_values<S: Simd, const R: usize>(
    simd: S,
    weights: &[f32],
    (stride, slots): (usize, &Range<usize>),
    values: &[S::F],
    (sums, width): (&mut [S::F], usize),
) -> usize {
    let weights: [&[f32]; R] =
        std::array::from_fn(|row| &weights[row * stride + slots.start..row * stride + slots.end]);
    let mut part = 0;
    while part < width {
        part += match width - part {
            1 => add_parts::<S, R, 1>(simd, &weights, values, (sums, width), part),
            2 | 3 => add_parts::<S, R, 2>(simd, &weights, values, (sums, width), part),
            _ => add_parts::<S, R, 4>(simd, &weights, values, (sums, width), part),
        };
    }
    R
}

#[inline(always)]
fn add_parts<S: Simd, const R: usize, const P: usize>(
    simd: S,
    weights: &[&[f32]; R],
    values: &[S::F],
    (sums, width): (&mut [S::F], usize),
    part: usize,
) -> usize {
    let mut kept: [[S::F; P]; R] =
        std::array::from_fn(|row| std::array::from_fn(|index| sums[row * width + part + index]));
    for (slot, values) in values.chunks_exact(width).enumerate() {
        let values = &values[part..part + P];
        for (kept, weights) in kept.iter_mut().zip(weights) {
            let weight = simd.splat(weights[slot]);
            for (sum, value) in kept.iter_mut().zip(values) {
                *sum = simd.fma(weight, *value, *sum);
            }
        }
    }
    for (row, kept) in kept.into_iter().enumerate() {
        sums[row * width + part..row * width + part + P].copy_from_slice(&kept);
    }
    P
}
