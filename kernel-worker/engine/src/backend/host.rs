//! What backends in host memory share: logits as plain rows, and the constants of plain attention.

use velox_kernels::affine::StoredMatrix;
use velox_kernels::error::OpError;
use velox_kernels::matrix::Matrix;
use velox_kernels::rotary::Pairing;
use velox_kvcache::{KvShape, PageBudget, PagedCache};

use super::{AttentionShape, CacheBytes, RowSamples, ScoreRequest, ScoreResult};
use crate::error::EngineError;
use crate::sampler::{self, SampleRequest};
use crate::spec::RopePairing;

/// Rows of logits `[rows, V]`.
#[derive(Debug)]
pub struct LogitRows {
    pub(super) vocab_size: usize,
    pub(super) values: Vec<f32>,
}

impl LogitRows {
    /// Takes over rows of `vocab_size` values each.
    #[must_use]
    pub fn new(vocab_size: usize, values: Vec<f32>) -> Self {
        Self { vocab_size, values }
    }

    /// Chooses a token per request; a row's error is its own.
    pub fn sample(&self, requests: &[SampleRequest<'_>]) -> RowSamples {
        requests
            .iter()
            .map(|request| {
                let row = row_at(&self.values, self.vocab_size, request.logits_row)?;
                sampler::sample(row, request)
            })
            .collect()
    }

    /// Log-probabilities per request.
    ///
    /// # Errors
    /// [`EngineError::Kernel`] if a request names a row that is not there, [`EngineError::Numeric`] if a row holds what
    /// is no number.
    pub fn score(&self, requests: &[ScoreRequest]) -> Result<Vec<ScoreResult>, EngineError> {
        requests
            .iter()
            .map(|request| {
                let row = row_at(&self.values, self.vocab_size, request.logits_row)?;
                sampler::score(row, request)
            })
            .collect()
    }
}

/// Makes the matrix that the kernels of the host read.
pub(super) fn matrix_of(matrix: StoredMatrix, threads: usize) -> Result<Matrix, EngineError> {
    match matrix {
        StoredMatrix::Blocks(matrix) => Ok(matrix),
        StoredMatrix::Affine(matrix) => {
            matrix
                .to_blocks(threads)
                .map_err(|refused| EngineError::OutOfMemory {
                    what: format!("{} matrix as blocks", matrix.layout().name()),
                    needed_bytes: u64::try_from(refused.bytes).unwrap_or(u64::MAX),
                    available_bytes: 0,
                })
        }
    }
}

/// Counts the rows of `[rows, width]`.
pub(super) fn rows_of(values: &[f32], width: usize) -> usize {
    values.len().checked_div(width).unwrap_or(0)
}

/// Takes one row out of `[rows, width]`.
fn row_at(values: &[f32], width: usize, row: usize) -> Result<&[f32], EngineError> {
    row.checked_mul(width)
        .and_then(|start| values.get(start..start.checked_add(width)?))
        .ok_or(EngineError::Kernel(OpError::AboveLimit {
            what: "row of a batch",
            limit: rows_of(values, width).saturating_sub(1),
            value: row,
        }))
}

/// Copies rows of `[rows, width]` together.
pub(super) fn gather(
    values: &[f32],
    width: usize,
    rows: &[usize],
) -> Result<Vec<f32>, EngineError> {
    let mut gathered = Vec::with_capacity(rows.len() * width);
    for row in rows {
        gathered.extend_from_slice(row_at(values, width, *row)?);
    }
    Ok(gathered)
}

/// Softmax scale of plain attention.
pub(super) fn score_scale(head_dim: usize) -> f32 {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "a head has far fewer than 2^52 elements; the factor is rounded to f32 on purpose"
    )]
    let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
    scale
}

/// The kernels' name of a pairing.
pub(super) fn pairing_of(pairing: RopePairing) -> Pairing {
    match pairing {
        RopePairing::HalfSplit => Pairing::HalfSplit,
        RopePairing::Interleaved => Pairing::Interleaved,
    }
}

/// Makes an empty cache whose pages come out of `budget`.
pub(super) fn new_cache(
    n_layers: usize,
    shape: AttentionShape,
    capacity_tokens: usize,
    budget: &PageBudget,
) -> Result<PagedCache, EngineError> {
    let shape = KvShape {
        n_layers,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
    };
    Ok(PagedCache::new(shape, capacity_tokens, budget)?)
}

/// What a cache holds allocated.
pub(super) fn cache_bytes(cache: &PagedCache) -> CacheBytes {
    let bytes = cache.allocated_bytes();
    CacheBytes {
        keys: bytes.keys,
        values: bytes.values,
    }
}
