//! The stages by the oracle's ops: readable f32, any block type, any machine.

use std::convert::Infallible;

use velox_kernels::affine::StoredMatrix;
use velox_kernels::attention::AttendCall;
use velox_kernels::matrix::Matrix;
use velox_kernels::ran::Ran;
use velox_kernels::reference::{self, ReferenceDevice};
use velox_kernels::rotary::Rotation;
use velox_kvcache::{PageBudget, PagedCache};

use super::host::{self, LogitRows, rows_of, score_scale};
use super::{
    Attended, AttentionShape, Backend, CacheBytes, FedToken, Linear, MlpOf, Norm, QkNorm, Qkv,
    RowSamples, RowSpan, ScoreRequest, ScoreResult, StatsRequest,
};
use crate::error::EngineError;
use crate::sampler::SampleRequest;
use crate::spec::RopeSpec;

/// Runs every stage by `velox_kernels::reference`.
#[derive(Debug)]
pub struct ReferenceBackend {
    threads: usize,
    budget: PageBudget,
    rope: Option<RopeSpec>,
}

type Evaluated<T> = Result<Ran<ReferenceDevice, T>, EngineError>;

impl ReferenceBackend {
    /// Makes a backend that uses up to `threads` threads and whose caches share `budget`.
    #[must_use]
    pub fn new(threads: usize, budget: PageBudget) -> Self {
        Self {
            threads: threads.max(1),
            budget,
            rope: None,
        }
    }

    /// `[T, in]` to `[T, out]`, with bias.
    fn project(&self, input: &[f32], linear: &Linear<Matrix, Vec<f32>>) -> Evaluated<Vec<f32>> {
        let tokens = rows_of(input, linear.weight.columns());
        let mut out = vec![0.0; tokens * linear.weight.rows()];
        let ran = reference::mat_mul(input, &linear.weight, self.threads, &mut out)?;
        let ran = match &linear.bias {
            Some(bias) => join(ran, reference::add(&mut out, bias)?),
            None => ran,
        };
        Ok(ran.map(|()| out))
    }

    fn rotate(
        &self,
        activations: &mut [f32],
        positions: &[usize],
        head_dim: usize,
    ) -> Evaluated<()> {
        let rope = self.rope.as_ref().ok_or_else(|| {
            EngineError::InvalidPlan("the rotary embedding was not prepared".to_owned())
        })?;
        let rotation = Rotation {
            pairing: host::pairing_of(rope.pairing),
            inverse_frequencies: &rope.inverse_frequencies,
            attention_factor: rope.attention_factor,
            head_dim,
        };
        Ok(reference::rope(activations, positions, &rotation)?)
    }
}

fn join(
    left: Ran<ReferenceDevice, ()>,
    right: Ran<ReferenceDevice, ()>,
) -> Ran<ReferenceDevice, ()> {
    left.zip(right).map(|_| ())
}

fn normed(input: &[f32], norm: &Norm<Vec<f32>>) -> Evaluated<Vec<f32>> {
    let mut out = vec![0.0; input.len()];
    let ran = reference::rms_norm(input, &norm.weight, norm.epsilon, &mut out)?;
    Ok(ran.map(|()| out))
}

/// Appends and attends for one row; `output` is `[its tokens, H*K]`.
fn attend_row(
    cache: &mut PagedCache,
    layer: usize,
    appended: (&[f32], &[f32]),
    call: &AttendCall<'_>,
    (threads, output): (usize, &mut [f32]),
) -> Evaluated<Vec<f32>> {
    let (keys, values) = appended;
    cache.append(layer, keys, values)?;
    Ok(reference::attend(
        call,
        &cache.view(layer)?,
        threads,
        output,
    )?)
}

impl Backend for ReferenceBackend {
    type Device = ReferenceDevice;
    type Sampler = ReferenceDevice;
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Group<const N: usize> = [Linear<Matrix, Vec<f32>>; N];
    type Awaited = Infallible;
    type Flight = ();
    type Activation = Vec<f32>;
    type Cache = PagedCache;
    type Logits = LogitRows;

    fn prepare_matrix(&mut self, matrix: StoredMatrix) -> Result<Matrix, EngineError> {
        host::matrix_of(matrix, self.threads)
    }

    fn prepare_vector(&mut self, values: &[f32]) -> Result<Vec<f32>, EngineError> {
        Ok(values.to_vec())
    }

    fn prepare_group<const N: usize>(
        &mut self,
        projections: [Linear<Matrix, Vec<f32>>; N],
    ) -> Result<[Linear<Matrix, Vec<f32>>; N], EngineError> {
        Ok(projections)
    }

    fn prepare_rope(&mut self, rope: &RopeSpec, _context_length: usize) -> Result<(), EngineError> {
        self.rope = Some(rope.clone());
        Ok(())
    }

    fn new_cache(
        &mut self,
        n_layers: usize,
        shape: AttentionShape,
        capacity_tokens: usize,
    ) -> Result<PagedCache, EngineError> {
        host::new_cache(n_layers, shape, capacity_tokens, &self.budget)
    }

    fn reserve(&mut self, cache: &mut PagedCache, tokens: usize) -> Result<(), EngineError> {
        Ok(cache.reserve(tokens)?)
    }

    fn truncate_cache(&mut self, cache: &mut PagedCache, tokens: usize) {
        let kept = cache.truncate(tokens);
        debug_assert_eq!(kept, tokens, "a cache is cut to what it holds");
    }

    fn cache_bytes(&self, cache: &PagedCache) -> CacheBytes {
        host::cache_bytes(cache)
    }

    fn embed(&mut self, table: &Matrix, tokens: &[FedToken<Infallible>]) -> Evaluated<Vec<f32>> {
        let token_ids: Vec<u32> = tokens.iter().map(FedToken::id).collect();
        let mut out = vec![0.0; token_ids.len() * table.columns()];
        let ran = reference::embed(table, &token_ids, &mut out)?;
        Ok(ran.map(|()| out))
    }

    fn norm_project(
        &mut self,
        hidden: &Vec<f32>,
        norm: &Norm<Vec<f32>>,
        projections: &[Linear<Matrix, Vec<f32>>; 3],
    ) -> Evaluated<Qkv<Vec<f32>>> {
        let input = normed(hidden, norm)?;
        let [queries, keys, values] = projections;
        let queries = self.project(input.value(), queries)?;
        let keys = self.project(input.value(), keys)?;
        let values = self.project(input.value(), values)?;
        Ok(queries
            .zip(keys)
            .zip(values)
            .map(|((queries, keys), values)| Qkv {
                queries,
                keys,
                values,
            }))
    }

    fn rope(
        &mut self,
        qkv: Qkv<Vec<f32>>,
        norms: Option<&QkNorm<Vec<f32>>>,
        positions: &[usize],
        shape: AttentionShape,
    ) -> Evaluated<Qkv<Vec<f32>>> {
        let (mut queries, mut keys) = (qkv.queries, qkv.keys);
        if let Some(norms) = norms {
            queries = normed(&queries, &norms.q_norm)?.into_value();
            keys = normed(&keys, &norms.k_norm)?.into_value();
        }
        let rotated = join(
            self.rotate(&mut queries, positions, shape.head_dim)?,
            self.rotate(&mut keys, positions, shape.head_dim)?,
        );
        Ok(rotated.map(|()| Qkv {
            queries,
            keys,
            values: qkv.values,
        }))
    }

    fn append_attend(
        &mut self,
        qkv: &Qkv<Vec<f32>>,
        spans: &mut [RowSpan<'_, PagedCache>],
        layer: usize,
        shape: AttentionShape,
        statistics: StatsRequest,
    ) -> Evaluated<Attended<Vec<f32>>> {
        let query_width = shape.n_heads * shape.head_dim;
        let key_width = shape.n_kv_heads * shape.head_dim;
        let scaled =
            |range: &std::ops::Range<usize>, width: usize| range.start * width..range.end * width;
        let mut output = vec![0.0; qkv.queries.len()];
        // Where every row has failed, adding nothing is all that the oracle does.
        let mut ran = reference::add(&mut [], &[])?;
        let mut collected = Vec::with_capacity(spans.len());
        for span in spans {
            let mut row_statistics = Vec::new();
            if span.failure.is_none() {
                let queries = scaled(&span.tokens, query_width);
                let keys = scaled(&span.tokens, key_width);
                let call = AttendCall {
                    queries: &qkv.queries[queries.clone()],
                    start: span.start,
                    n_heads: shape.n_heads,
                    sliding_window: shape.sliding_window,
                    scale: score_scale(shape.head_dim),
                    statistics,
                };
                let appended = (&qkv.keys[keys.clone()], &qkv.values[keys]);
                let target = (self.threads, &mut output[queries]);
                match attend_row(span.cache, layer, appended, &call, target) {
                    Ok(attended) => {
                        ran = ran.zip(attended).map(|((), found)| row_statistics = found);
                    }
                    Err(error) => span.failure = Some(error),
                }
            }
            collected.push(row_statistics);
        }
        Ok(ran.map(|()| Attended {
            output,
            statistics: collected,
        }))
    }

    fn output_project(
        &mut self,
        mut residual: Vec<f32>,
        attended: &Vec<f32>,
        o_proj: &Linear<Matrix, Vec<f32>>,
    ) -> Evaluated<Vec<f32>> {
        let projected = self.project(attended, o_proj)?;
        let added = reference::add(&mut residual, projected.value())?;
        Ok(projected.zip(added).map(|_| residual))
    }

    fn gated_mlp(&mut self, mut residual: Vec<f32>, mlp: &MlpOf<Self>) -> Evaluated<Vec<f32>> {
        let input = normed(&residual, &mlp.norm)?;
        let [gate, up] = &mlp.gate_up;
        let gate = self.project(input.value(), gate)?;
        let up = self.project(input.value(), up)?;
        let mut gated = vec![0.0; gate.value().len()];
        let product = reference::silu_mul(gate.value(), up.value(), &mut gated)?;
        let down = self.project(&gated, &mlp.down_proj)?;
        let added = reference::add(&mut residual, down.value())?;
        Ok(join(product, added).zip(down).map(|_| residual))
    }

    fn head(
        &mut self,
        hidden: &Vec<f32>,
        rows: &[usize],
        norm: &Norm<Vec<f32>>,
        head: &Matrix,
    ) -> Evaluated<LogitRows> {
        let width = norm.weight.len();
        let gathered = host::gather(hidden, width, rows)?;
        let input = normed(&gathered, norm)?;
        let mut out = vec![0.0; rows.len() * head.rows()];
        let ran = reference::mat_mul(input.value(), head, self.threads, &mut out)?;
        Ok(ran.map(|()| LogitRows {
            vocab_size: head.rows(),
            values: out,
        }))
    }

    fn sample(
        &mut self,
        logits: &Ran<ReferenceDevice, LogitRows>,
        requests: &mut [SampleRequest<'_>],
    ) -> Evaluated<RowSamples> {
        Ok(logits.as_ref().map(|logits| logits.sample(requests)))
    }

    fn score(
        &mut self,
        logits: &LogitRows,
        requests: &[ScoreRequest],
    ) -> Result<Vec<ScoreResult>, EngineError> {
        logits.score(requests)
    }

    fn read_activation(&mut self, activation: &Vec<f32>) -> Result<Vec<f32>, EngineError> {
        Ok(activation.clone())
    }

    fn read_logits(&mut self, logits: &LogitRows) -> Result<Vec<f32>, EngineError> {
        Ok(logits.values.clone())
    }
}
