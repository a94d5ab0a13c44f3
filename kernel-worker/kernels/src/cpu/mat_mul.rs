//! Product of activations and a stored matrix.
//!
//! A job is cut into bands of weight rows whose borders depend on the matrix only; see the module `band`.

use super::activation::{BLOCK, Block, Quantise};
use super::band::{Band, Target};
use super::floats::{FloatBand, FloatFormat};
use super::format::{Iq4Nl, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Q8Affine};
use super::output::Output;
use super::{Cpu, CpuDevice, CpuKernelSet};
use crate::block::BlockType;
use crate::error::{OpError, check_length, product, row_count};
use crate::matrix::Matrix;
use crate::ran::Ran;

/// Weight rows of a band: a multiple of every tile height.
const BAND_ROWS: usize = 48;
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
            BlockType::Q8Affine => kernels.run(Band::new(Q8Affine, bytes, blocks, target)),
            BlockType::Iq4Nl => kernels.run(Band::new(Iq4Nl, bytes, blocks, target)),
            BlockType::Q2K => kernels.run(Band::new(Q2K, bytes, blocks, target)),
            BlockType::Q3K => kernels.run(Band::new(Q3K, bytes, blocks, target)),
            BlockType::Q4K => kernels.run(Band::new(Q4K, bytes, blocks, target)),
            BlockType::Q5K => kernels.run(Band::new(Q5K, bytes, blocks, target)),
            BlockType::Q6K => kernels.run(Band::new(Q6K, bytes, blocks, target)),
        }
    }
}
