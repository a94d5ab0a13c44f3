//! A band of rows of a quantised matrix.
//!
//! For one token a tile of rows is read, unpacked in registers and multiplied at once; for more it is unpacked once
//! into a panel that stays in the nearest cache and meets all tokens. Either way an output element adds the same
//! products in the same order.

use std::marker::PhantomData;

use super::activation::{BLOCK, Block};
use super::format::{Format, Packed, Sink};
use super::output::Output;
use super::simd::{Kernel, Simd};

/// Columns of a panel: 16 rows of them are 24 KiB of quants.
const PANEL_COLUMNS: usize = 1536;
/// Bytes that are fetched at a time.
const CACHE_LINE: usize = 64;

/// Where a band's results go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target<'a> {
    /// `[T, width]`.
    pub(super) output: &'a Output<'a, f32>,
    /// Rows of the matrix.
    pub(super) width: usize,
    /// First of the band.
    pub(super) first_row: usize,
    /// Of the band.
    pub(super) rows: usize,
}

impl<'a> Target<'a> {
    /// Returns the places of a token for `count` rows from `row` of the band.
    #[inline(always)]
    pub(super) fn places(self, token: usize, row: usize, count: usize) -> &'a mut [f32] {
        assert!(row + count <= self.rows, "a tile ends outside its band");
        let from = token * self.width + self.first_row + row;
        // SAFETY: the range lies in columns `first_row..first_row + rows` of `[T, width]`, which only this band writes:
        // bands are disjoint and the pool hands out each once. The band uses one range at a time.
        unsafe { self.output.slice(from..from + count) }
    }
}

/// One band of a quantised matrix.
pub(super) struct Band<'a, F> {
    format: PhantomData<F>,
    /// Of the band's rows.
    bytes: &'a [u8],
    /// `[T, in / 32]`.
    blocks: &'a [Block],
    target: Target<'a>,
}

impl<'a, F: Format> Band<'a, F> {
    /// Names the operands: the band's bytes and `[T, in / 32]`.
    pub(super) fn new(
        _format: F,
        bytes: &'a [u8],
        blocks: &'a [Block],
        target: Target<'a>,
    ) -> Self {
        Self {
            format: PhantomData,
            bytes,
            blocks,
            target,
        }
    }
}

impl<F: Format> Kernel for Band<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self {
            format: _,
            bytes,
            blocks,
            target,
        } = self;
        let row_bytes = bytes.len() / target.rows;
        let row_blocks = row_bytes / F::BYTES * (F::ELEMENTS / BLOCK);
        let mut panel = Panel::<S>::default();
        let mut padded = Vec::new();
        for first in (0..target.rows).step_by(S::LANES) {
            let count = S::LANES.min(target.rows - first);
            let mut rows = &bytes[first * row_bytes..(first + count) * row_bytes];
            if count < S::LANES {
                // The missing rows repeat the last one; their results are dropped.
                padded.clear();
                padded.extend_from_slice(rows);
                for _ in count..S::LANES {
                    padded.extend_from_slice(&rows[(count - 1) * row_bytes..]);
                }
                rows = &padded;
            }
            let tile = Tile {
                rows,
                next: &bytes[(first + count) * row_bytes..],
                row_bytes,
                first,
                count,
                target,
            };
            if row_blocks == 0 {
                tile.store(simd, 0, simd.splat(0.0));
            } else if blocks.len() == row_blocks {
                tile.one_token::<S, F>(simd, blocks);
            } else {
                tile.many_tokens::<S, F>(simd, &mut panel, blocks, row_blocks);
            }
        }
    }
}

/// `LANES` rows of a band.
struct Tile<'a> {
    rows: &'a [u8],
    /// What follows in the band, to be fetched ahead.
    next: &'a [u8],
    row_bytes: usize,
    first: usize,
    count: usize,
    target: Target<'a>,
}

impl Tile<'_> {
    #[inline(always)]
    fn one_token<S: Simd, F: Format>(&self, simd: S, blocks: &[Block]) {
        let mut sum = Multiplier::<S, F> {
            sum: [simd.splat(0.0)],
            blocks: blocks.iter(),
            format: PhantomData,
        };
        for (index, at) in (0..self.row_bytes).step_by(F::BYTES).enumerate() {
            let tile_block = S::LANES * F::BYTES;
            for line in (0..tile_block).step_by(CACHE_LINE) {
                if let Some(next) = self.next.get(index * tile_block + line) {
                    simd.prefetch(next);
                }
            }
            F::unpack(simd, &self.rows[at..], self.row_bytes, &mut sum);
        }
        let [sum] = sum.sum;
        self.store(simd, 0, sum);
    }

    #[inline(always)]
    fn many_tokens<S: Simd, F: Format>(
        &self,
        simd: S,
        panel: &mut Panel<S>,
        blocks: &[Block],
        row_blocks: usize,
    ) {
        let tokens = blocks.len() / row_blocks;
        let step = PANEL_COLUMNS / F::ELEMENTS * F::BYTES;
        for at in (0..self.row_bytes).step_by(step) {
            panel.0.clear();
            for at in (at..self.row_bytes.min(at + step)).step_by(F::BYTES) {
                F::unpack(simd, &self.rows[at..], self.row_bytes, panel);
            }
            let first_block = at / F::BYTES * (F::ELEMENTS / BLOCK);
            let input = PanelInput {
                panel: &panel.0,
                blocks,
                row_blocks,
                first_block,
            };
            let mut token = 0;
            while tokens - token >= 8 {
                self.tokens::<S, F, 8>(simd, &input, token);
                token += 8;
            }
            if tokens - token >= 4 {
                self.tokens::<S, F, 4>(simd, &input, token);
                token += 4;
            }
            while token < tokens {
                self.tokens::<S, F, 1>(simd, &input, token);
                token += 1;
            }
        }
    }

    /// Multiplies a panel with `T` tokens from `token` on.
    #[inline(always)]
    fn tokens<S: Simd, F: Format, const T: usize>(
        &self,
        simd: S,
        input: &PanelInput<'_, S>,
        token: usize,
    ) {
        let columns = input.panel.len();
        let blocks: [&[Block]; T] = std::array::from_fn(|index| {
            let from = (token + index) * input.row_blocks + input.first_block;
            &input.blocks[from..from + columns]
        });
        let mut sums: [S::F; T] = std::array::from_fn(|index| {
            if input.first_block == 0 {
                simd.splat(0.0)
            } else {
                self.load(simd, token + index)
            }
        });
        for (column, packed) in input.panel.iter().enumerate() {
            let blocks = std::array::from_fn(|index| &blocks[index][column]);
            multiply_blocks::<S, F, T>(simd, &mut sums, packed, blocks);
        }
        for (index, sum) in sums.into_iter().enumerate() {
            self.store(simd, token + index, sum);
        }
    }

    /// Reads back what [`Self::store`] wrote.
    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, token: usize) -> S::F {
        let places = self.target.places(token, self.first, self.count);
        if self.count == S::LANES {
            return simd.load_f32(bytemuck::cast_slice(places));
        }
        let mut lanes = [0.0_f32; 16];
        lanes[..self.count].copy_from_slice(places);
        simd.load_f32(bytemuck::cast_slice(&lanes[..S::LANES]))
    }

    #[inline(always)]
    fn store<S: Simd>(&self, simd: S, token: usize, sums: S::F) {
        let places = self.target.places(token, self.first, self.count);
        if self.count == S::LANES {
            simd.store(sums, places);
            return;
        }
        let mut lanes = [0.0_f32; 16];
        simd.store(sums, &mut lanes[..S::LANES]);
        places.copy_from_slice(&lanes[..self.count]);
    }
}

struct PanelInput<'a, S: Simd> {
    /// Unpacked columns of the tile.
    panel: &'a [Packed<S>],
    /// `[T, row_blocks]`.
    blocks: &'a [Block],
    row_blocks: usize,
    /// Where the panel begins in a row.
    first_block: usize,
}

/// Keeps what a tile unpacks to.
struct Panel<S: Simd>(Vec<Packed<S>>);

impl<S: Simd> Default for Panel<S> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<S: Simd> Sink<S> for Panel<S> {
    #[inline(always)]
    fn push(&mut self, _simd: S, packed: Packed<S>) {
        self.0.push(packed);
    }
}

/// Multiplies what a tile unpacks to with one token.
struct Multiplier<'a, S: Simd, F> {
    sum: [S::F; 1],
    blocks: std::slice::Iter<'a, Block>,
    format: PhantomData<F>,
}

impl<S: Simd, F: Format> Sink<S> for Multiplier<'_, S, F> {
    #[inline(always)]
    fn push(&mut self, simd: S, packed: Packed<S>) {
        if let Some(block) = self.blocks.next() {
            multiply_blocks::<S, F, 1>(simd, &mut self.sum, &packed, [block]);
        }
    }
}

/// Adds the products of 32 columns with `T` tokens: the one order of additions of every path.
#[inline(always)]
fn multiply_blocks<S: Simd, F: Format, const T: usize>(
    simd: S,
    sums: &mut [S::F; T],
    packed: &Packed<S>,
    blocks: [&Block; T],
) {
    if F::GROUP == BLOCK {
        let dots = dots::<S, F, T>(simd, &packed.q, 0, blocks);
        for index in 0..T {
            let block = blocks[index];
            let scale = simd.mul(packed.a[0], simd.splat(block.scale));
            let sum = simd.fma(simd.to_f32(dots[index]), scale, sums[index]);
            sums[index] = simd.fma(packed.b[0], simd.splat(block.sum), sum);
        }
        return;
    }
    for half in 0..2 {
        let weights = &packed.q[4 * half..4 * half + 4];
        let dots = dots::<S, F, T>(simd, weights, 4 * half, blocks);
        for index in 0..T {
            let block = blocks[index];
            let scale = simd.mul(packed.a[half], simd.splat(block.scale));
            let sum = simd.fma(simd.to_f32(dots[index]), scale, sums[index]);
            let offset = simd.splat(block.half_sums[half]);
            sums[index] = simd.fma(packed.b[half], offset, sum);
        }
    }
}

/// Sums integer products with the words of activations from `first` on; each column of weights is read once for all
/// tokens. Nothing overflows: 32 * 255 * 16319 is below 2^31.
#[inline(always)]
fn dots<S: Simd, F: Format, const T: usize>(
    simd: S,
    weights: &[S::I],
    first: usize,
    blocks: [&Block; T],
) -> [S::I; T] {
    let mut dots = [simd.splat_bits(0); T];
    for (column, weights) in weights.iter().enumerate() {
        for (dot, block) in dots.iter_mut().zip(blocks) {
            *dot = dot4::<S, F>(simd, *dot, *weights, block.high[first + column]);
        }
    }
    for dot in &mut dots {
        *dot = simd.shift_left::<7>(*dot);
    }
    for (column, weights) in weights.iter().enumerate() {
        for (dot, block) in dots.iter_mut().zip(blocks) {
            *dot = dot4::<S, F>(simd, *dot, *weights, block.low[first + column]);
        }
    }
    dots
}

#[inline(always)]
fn dot4<S: Simd, F: Format>(simd: S, dot: S::I, weights: S::I, activations: i32) -> S::I {
    let activations = simd.splat_bits(activations);
    if F::SIGNED {
        simd.dot4::<true>(dot, weights, activations)
    } else {
        simd.dot4::<false>(dot, weights, activations)
    }
}
