//! Product of activations and a stored matrix.
//!
//! A job is cut into bands of weight rows whose borders depend on the matrix only. For one token a band is read,
//! unpacked in registers and multiplied at once; for more it is unpacked once into a panel that stays in the
//! nearest cache and meets all tokens. Either way an output element adds the same products in the same order.

use std::marker::PhantomData;

use super::activation::{BLOCK, Block, Quantise};
use super::floats::{FloatBand, FloatFormat};
use super::format::{
    Decoder, Format, Iq4Nl, Packed, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Sink,
};
use super::output::Output;
use super::simd::{Kernel, Simd};
use super::{Cpu, CpuDevice, CpuKernelSet};
use crate::block::BlockType;
use crate::error::{OpError, check_length, product, row_count};
use crate::matrix::Matrix;
use crate::ran::Ran;

/// Weight rows of a band: a multiple of every tile height.
const BAND_ROWS: usize = 48;
/// Columns of a panel: 16 rows of them are 24 KiB of quants.
const PANEL_COLUMNS: usize = 1536;
/// Bytes that are fetched at a time.
const CACHE_LINE: usize = 64;
/// Tokens that are quantised as one chunk.
const QUANTISE_TOKENS: usize = 8;

/// Activations `[T, in]` in the forms that stored matrices need; made once and shared by several products.
#[derive(Debug)]
pub struct Activations<'a> {
    floats: &'a [f32],
    columns: usize,
    /// `[T, in / 32]`, empty where no matrix needs it.
    blocks: Vec<Block>,
}

impl<'a> Activations<'a> {
    /// Prepares `[T, columns]` for products with matrices of these types.
    ///
    /// # Errors
    /// [`OpError`] if `floats` is no whole number of rows.
    pub fn new(
        cpu: &Cpu,
        floats: &'a [f32],
        columns: usize,
        types: impl IntoIterator<Item = BlockType>,
    ) -> Result<Self, OpError> {
        row_count("input", floats.len(), columns)?;
        let quantised = types
            .into_iter()
            .any(|block_type| block_type.elements() > 1);
        let mut blocks = Vec::new();
        // A matrix of quantised blocks has whole blocks of columns; the product checks that they are these.
        if quantised && columns.is_multiple_of(BLOCK) {
            blocks.resize(floats.len() / BLOCK, Block::default());
            let chunk = QUANTISE_TOKENS * columns;
            let output = Output::new(&mut blocks);
            cpu.pool()
                .run(floats.len().div_ceil(chunk.max(1)), &|index| {
                    let from = index * chunk;
                    let input = &floats[from..floats.len().min(from + chunk)];
                    let range = from / BLOCK..from / BLOCK + input.len() / BLOCK;
                    // SAFETY: chunks are disjoint, and the pool hands out each index once.
                    let blocks = unsafe { output.slice(range) };
                    cpu.kernels().run(Quantise { input, blocks });
                });
        }
        Ok(Self {
            floats,
            columns,
            blocks,
        })
    }

    fn tokens(&self) -> usize {
        self.floats.len().checked_div(self.columns).unwrap_or(0)
    }
}

/// One product: `out` `[T, out]` = activations times the transposed `matrix` `[out, in]`.
#[derive(Debug)]
pub struct Product<'a> {
    /// `[out, in]`.
    pub matrix: &'a Matrix,
    /// `[T, out]`.
    pub out: &'a mut [f32],
}

/// Computes several products of the same activations as one parallel job.
///
/// # Errors
/// [`OpError`] if shapes disagree.
pub fn multiply<const N: usize>(
    cpu: &Cpu,
    input: &Activations<'_>,
    products: [Product<'_>; N],
) -> Result<Ran<CpuDevice, ()>, OpError> {
    let tokens = input.tokens();
    for part in &products {
        check_length(
            "columns of the matrix",
            part.matrix.columns(),
            input.columns,
        )?;
        let expected = product("output", &[tokens, part.matrix.rows()])?;
        check_length("output", expected, part.out.len())?;
        if part.matrix.block_type().elements() > 1 {
            let expected = input.floats.len() / BLOCK;
            check_length("quantised input", expected, input.blocks.len())?;
        }
    }
    let parts = products.map(|part| Part {
        matrix: part.matrix,
        bands: part.matrix.rows().div_ceil(BAND_ROWS),
        output: Output::new(part.out),
    });
    if tokens > 0 {
        let bands = parts.iter().map(|part| part.bands).sum();
        cpu.pool().run(bands, &|mut band| {
            for part in &parts {
                if band < part.bands {
                    part.run_band(cpu.kernels(), input, band);
                    return;
                }
                band -= part.bands;
            }
        });
    }
    Ok(Ran::new(CpuDevice(()), ()))
}

/// `out` `[T, out]` = `input` `[T, in]` times the transposed `matrix` `[out, in]`.
///
/// Quantised matrices meet activations that are rounded to 15 bits, 32 to a scale; F32, F16 and BF16 ones meet them as
/// they are.
///
/// # Errors
/// [`OpError`] if the shapes disagree.
pub fn mat_mul(
    cpu: &Cpu,
    input: &[f32],
    matrix: &Matrix,
    out: &mut [f32],
) -> Result<Ran<CpuDevice, ()>, OpError> {
    let input = Activations::new(cpu, input, matrix.columns(), [matrix.block_type()])?;
    multiply(cpu, &input, [Product { matrix, out }])
}

/// Decodes a row of whole blocks.
///
/// # Errors
/// [`OpError`] if `out` is no whole number of blocks or `bytes` has another length than those blocks.
pub fn dequantise_row(
    cpu: &Cpu,
    block_type: BlockType,
    bytes: &[u8],
    out: &mut [f32],
) -> Result<Ran<CpuDevice, ()>, OpError> {
    let expected = block_type.row_bytes(out.len()).ok_or(OpError::PartialRow {
        what: "dequantised row",
        row: block_type.elements(),
        actual: out.len(),
    })?;
    check_length("bytes of the row", expected, bytes.len())?;
    cpu.kernels().run(DecodeRow {
        block_type,
        bytes,
        out,
    });
    Ok(Ran::new(CpuDevice(()), ()))
}

/// `out` `[T, D]` = rows `token_ids` of `table` `[V, D]`.
///
/// # Errors
/// [`OpError`] if a token is not in the table or `out` has another shape.
pub fn embed(
    cpu: &Cpu,
    table: &Matrix,
    token_ids: &[u32],
    out: &mut [f32],
) -> Result<Ran<CpuDevice, ()>, OpError> {
    let expected = product("embedded tokens", &[token_ids.len(), table.columns()])?;
    check_length("embedded tokens", expected, out.len())?;
    if table.columns() > 0 {
        for (&token, out) in token_ids.iter().zip(out.chunks_exact_mut(table.columns())) {
            let row = usize::try_from(token).unwrap_or(usize::MAX);
            if row >= table.rows() {
                return Err(OpError::AboveLimit {
                    what: "token",
                    limit: table.rows().saturating_sub(1),
                    value: row,
                });
            }
            let (block_type, bytes) = (table.block_type(), table.row(row));
            cpu.kernels().run(DecodeRow {
                block_type,
                bytes,
                out,
            });
        }
    }
    Ok(Ran::new(CpuDevice(()), ()))
}

struct Part<'a> {
    matrix: &'a Matrix,
    bands: usize,
    output: Output<'a, f32>,
}

impl Part<'_> {
    fn run_band(&self, kernels: CpuKernelSet, input: &Activations<'_>, band: usize) {
        let first_row = band * BAND_ROWS;
        let rows = BAND_ROWS.min(self.matrix.rows() - first_row);
        let row_bytes = self.matrix.bytes().len() / self.matrix.rows();
        let bytes = &self.matrix.bytes()[first_row * row_bytes..(first_row + rows) * row_bytes];
        let target = Target {
            output: &self.output,
            width: self.matrix.rows(),
            first_row,
            rows,
        };
        let (floats, blocks) = (input.floats, input.blocks.as_slice());
        match self.matrix.block_type() {
            BlockType::F32 => kernels.run(FloatBand::new(FloatFormat::F32, bytes, floats, target)),
            BlockType::F16 => kernels.run(FloatBand::new(FloatFormat::F16, bytes, floats, target)),
            BlockType::Bf16 => {
                kernels.run(FloatBand::new(FloatFormat::Bf16, bytes, floats, target));
            }
            BlockType::Q4_0 => kernels.run(Band::new(Q4_0, bytes, blocks, target)),
            BlockType::Q4_1 => kernels.run(Band::new(Q4_1, bytes, blocks, target)),
            BlockType::Q5_0 => kernels.run(Band::new(Q5_0, bytes, blocks, target)),
            BlockType::Q5_1 => kernels.run(Band::new(Q5_1, bytes, blocks, target)),
            BlockType::Q8_0 => kernels.run(Band::new(Q8_0, bytes, blocks, target)),
            BlockType::Iq4Nl => kernels.run(Band::new(Iq4Nl, bytes, blocks, target)),
            BlockType::Q2K => kernels.run(Band::new(Q2K, bytes, blocks, target)),
            BlockType::Q3K => kernels.run(Band::new(Q3K, bytes, blocks, target)),
            BlockType::Q4K => kernels.run(Band::new(Q4K, bytes, blocks, target)),
            BlockType::Q5K => kernels.run(Band::new(Q5K, bytes, blocks, target)),
            BlockType::Q6K => kernels.run(Band::new(Q6K, bytes, blocks, target)),
        }
    }
}

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
struct Band<'a, F> {
    format: PhantomData<F>,
    /// Of the band's rows.
    bytes: &'a [u8],
    /// `[T, in / 32]`.
    blocks: &'a [Block],
    target: Target<'a>,
}

impl<'a, F: Format> Band<'a, F> {
    fn new(_format: F, bytes: &'a [u8], blocks: &'a [Block], target: Target<'a>) -> Self {
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

struct DecodeRow<'a> {
    block_type: BlockType,
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl Kernel for DecodeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self {
            block_type,
            bytes,
            out,
        } = self;
        match block_type {
            BlockType::F32 => FloatFormat::F32.decode(bytes, out),
            BlockType::F16 => FloatFormat::F16.decode(bytes, out),
            BlockType::Bf16 => FloatFormat::Bf16.decode(bytes, out),
            BlockType::Q4_0 => decode::<S, Q4_0>(simd, bytes, out),
            BlockType::Q4_1 => decode::<S, Q4_1>(simd, bytes, out),
            BlockType::Q5_0 => decode::<S, Q5_0>(simd, bytes, out),
            BlockType::Q5_1 => decode::<S, Q5_1>(simd, bytes, out),
            BlockType::Q8_0 => decode::<S, Q8_0>(simd, bytes, out),
            BlockType::Iq4Nl => decode::<S, Iq4Nl>(simd, bytes, out),
            BlockType::Q2K => decode::<S, Q2K>(simd, bytes, out),
            BlockType::Q3K => decode::<S, Q3K>(simd, bytes, out),
            BlockType::Q4K => decode::<S, Q4K>(simd, bytes, out),
            BlockType::Q5K => decode::<S, Q5K>(simd, bytes, out),
            BlockType::Q6K => decode::<S, Q6K>(simd, bytes, out),
        }
    }
}

#[inline(always)]
fn decode<S: Simd, F: Format>(simd: S, bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes
        .chunks_exact(F::BYTES)
        .zip(out.chunks_exact_mut(F::ELEMENTS))
    {
        let mut decoder = Decoder {
            out,
            group: F::GROUP,
            signed: F::SIGNED,
        };
        // A stride of 0: every lane reads the block.
        F::unpack(simd, block, 0, &mut decoder);
    }
}
