//! The stages by SIMD kernels: integer products on quantised weights, several threads, eager.

use std::convert::Infallible;
use std::num::NonZeroUsize;

use velox_kernels::affine::StoredMatrix;
use velox_kernels::attention::{AttendCall, PagedView};
use velox_kernels::cpu::{
    self, Activations, AttendSpan, Cpu, CpuDevice, CpuKernelSet, Product, RopeTable,
};
use velox_kernels::label::BackendLabel;
use velox_kernels::matrix::Matrix;
use velox_kernels::ran::Ran;
use velox_kernels::rotary::Pairing;
use velox_kvcache::{PageBudget, PagedCache};

use super::host::{self, LogitRows, rows_of, score_scale};
use super::{
    Attended, AttentionShape, Backend, CacheBytes, FedToken, Linear, MlpOf, Norm, QkNorm, Qkv,
    RowSamples, RowSpan, ScoreRequest, ScoreResult, StatsRequest,
};
use crate::error::EngineError;
use crate::sampler::SampleRequest;
use crate::spec::RopeSpec;

/// Runs every stage by `velox_kernels::cpu`. Weights stay where they are mapped, but for MLX's affine ones, which become
/// blocks.
#[derive(Debug)]
pub struct CpuBackend {
    cpu: Cpu,
    budget: PageBudget,
    rope: Option<(Pairing, RopeTable)>,
}

type Evaluated<T> = Result<Ran<CpuDevice, T>, EngineError>;

impl CpuBackend {
    /// Makes a backend of a kernel set with `threads` threads, the caller's included; its caches share `budget`.
    ///
    /// # Errors
    /// [`EngineError::BackendUnavailable`] if the threads cannot be started.
    pub fn new(
        kernels: CpuKernelSet,
        threads: usize,
        budget: PageBudget,
    ) -> Result<Self, EngineError> {
        let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        let cpu = Cpu::new(kernels, threads).map_err(|error| EngineError::BackendUnavailable {
            backend: BackendLabel::Cpu.name(),
            reason: format!("{threads} threads cannot be started: {error}"),
        })?;
        Ok(Self {
            cpu,
            budget,
            rope: None,
        })
    }

    /// Returns the name of the kernel set.
    #[must_use]
    pub fn kernel(&self) -> &'static str {
        self.cpu.kernels().name()
    }

    fn normed(&self, input: &[f32], norm: &Norm<Vec<f32>>) -> Evaluated<Vec<f32>> {
        let mut out = vec![0.0; input.len()];
        let ran = cpu::rms_norm(&self.cpu, input, &norm.weight, norm.epsilon, &mut out)?;
        Ok(ran.map(|()| out))
    }

    /// `[T, in]` to `[T, out]` each, with bias, as one parallel job.
    fn project<const N: usize>(
        &self,
        input: &[f32],
        projections: [&Linear<Matrix, Vec<f32>>; N],
    ) -> Evaluated<[Vec<f32>; N]> {
        let columns = projections.first().map_or(0, |p| p.weight.columns());
        let tokens = rows_of(input, columns);
        let types = projections.map(|projection| projection.weight.block_type());
        let activations = Activations::new(&self.cpu, input, columns, types)?;
        let mut outputs =
            projections.map(|projection| vec![0.0; tokens * projection.weight.rows()]);
        let mut targets = outputs.iter_mut();
        let products = projections.map(|projection| Product {
            matrix: &projection.weight,
            out: targets.next().map_or(&mut [], Vec::as_mut_slice),
        });
        let mut ran = cpu::multiply(&self.cpu, &activations, products)?;
        for (output, projection) in outputs.iter_mut().zip(projections) {
            if let Some(bias) = &projection.bias {
                ran = ran
                    .zip(cpu::add(&self.cpu, output, bias)?)
                    .map(|((), ())| ());
            }
        }
        Ok(ran.map(|()| outputs))
    }

    /// Projects and adds to the residual.
    fn project_onto(
        &self,
        mut residual: Vec<f32>,
        input: &[f32],
        projection: &Linear<Matrix, Vec<f32>>,
    ) -> Evaluated<Vec<f32>> {
        let projected = self.project(input, [projection])?;
        let [addend] = projected.value();
        let added = cpu::add(&self.cpu, &mut residual, addend)?;
        Ok(projected.zip(added).map(|_| residual))
    }
}

/// Appends the spans' keys and values, then views their caches; a row that fails is skipped and has no view.
fn append<'s>(
    qkv: &Qkv<Vec<f32>>,
    spans: &'s mut [RowSpan<'_, PagedCache>],
    layer: usize,
    key_width: usize,
) -> Vec<Option<PagedView<'s>>> {
    spans
        .iter_mut()
        .map(|span| {
            if span.failure.is_some() {
                return None;
            }
            let range = span.tokens.start * key_width..span.tokens.end * key_width;
            let (keys, values) = (&qkv.keys[range.clone()], &qkv.values[range]);
            let appended = span.cache.append(layer, keys, values);
            match appended.and_then(|()| span.cache.view(layer)) {
                Ok(view) => Some(view),
                Err(error) => {
                    span.failure = Some(error.into());
                    None
                }
            }
        })
        .collect()
}

impl Backend for CpuBackend {
    type Device = CpuDevice;
    type Sampler = CpuDevice;
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Group<const N: usize> = [Linear<Matrix, Vec<f32>>; N];
    type Awaited = Infallible;
    type Flight = ();
    type Activation = Vec<f32>;
    type Cache = PagedCache;
    type Logits = LogitRows;

    fn prepare_matrix(&mut self, matrix: StoredMatrix) -> Result<Matrix, EngineError> {
        host::matrix_of(matrix, self.cpu.pool().threads())
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
        let pairing = host::pairing_of(rope.pairing);
        let table = RopeTable::new(&rope.inverse_frequencies, rope.attention_factor);
        self.rope = Some((pairing, table));
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
        let ran = cpu::embed(&self.cpu, table, &token_ids, &mut out)?;
        Ok(ran.map(|()| out))
    }

    fn norm_project(
        &mut self,
        hidden: &Vec<f32>,
        norm: &Norm<Vec<f32>>,
        projections: &[Linear<Matrix, Vec<f32>>; 3],
    ) -> Evaluated<Qkv<Vec<f32>>> {
        let input = self.normed(hidden, norm)?;
        let projected = self.project(input.value(), projections.each_ref())?;
        Ok(input
            .zip(projected)
            .map(|(_, [queries, keys, values])| Qkv {
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
            queries = self.normed(&queries, &norms.q_norm)?.into_value();
            keys = self.normed(&keys, &norms.k_norm)?.into_value();
        }
        let (pairing, table) = self.rope.as_mut().ok_or_else(|| {
            EngineError::InvalidPlan("the rotary embedding was not prepared".to_owned())
        })?;
        let heads = (*pairing, shape.head_dim);
        let rotated = table.rotate(&mut queries, positions, heads)?;
        let rotated = rotated.zip(table.rotate(&mut keys, positions, heads)?);
        Ok(rotated.map(|_| Qkv {
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
        let width = shape.n_heads * shape.head_dim;
        let places: Vec<_> = spans
            .iter()
            .map(|span| (span.tokens.clone(), span.start))
            .collect();
        let views = append(qkv, spans, layer, shape.n_kv_heads * shape.head_dim);
        let mut output = vec![0.0; qkv.queries.len()];
        let mut rest = output.as_mut_slice();
        let mut taken = 0;
        let mut batch = Vec::with_capacity(views.len());
        for ((tokens, start), view) in places.into_iter().zip(&views) {
            let range = tokens.start * width..tokens.end * width;
            // Spans lie in the batch in order and do not overlap.
            let (_, from_here) = rest.split_at_mut(range.start - taken);
            let (out, later) = from_here.split_at_mut(range.len());
            (rest, taken) = (later, range.end);
            if let Some(view) = view {
                let call = AttendCall {
                    queries: &qkv.queries[range],
                    start,
                    n_heads: shape.n_heads,
                    sliding_window: shape.sliding_window,
                    scale: score_scale(shape.head_dim),
                    statistics,
                };
                batch.push(AttendSpan { call, view, out });
            }
        }
        let attended = cpu::attend_all(&self.cpu, batch)?;
        Ok(attended.map(|found| {
            let mut found = found.into_iter();
            let statistics = views
                .iter()
                .map(|view| view.as_ref().and_then(|_| found.next()).unwrap_or_default())
                .collect();
            Attended { output, statistics }
        }))
    }

    fn output_project(
        &mut self,
        residual: Vec<f32>,
        attended: &Vec<f32>,
        o_proj: &Linear<Matrix, Vec<f32>>,
    ) -> Evaluated<Vec<f32>> {
        self.project_onto(residual, attended, o_proj)
    }

    fn gated_mlp(&mut self, residual: Vec<f32>, mlp: &MlpOf<Self>) -> Evaluated<Vec<f32>> {
        let input = self.normed(&residual, &mlp.norm)?;
        let projected = self.project(input.value(), mlp.gate_up.each_ref())?;
        let mut gated = Vec::new();
        let projected = projected.map(|[gate, up]| {
            gated = gate;
            up
        });
        let product = cpu::silu_mul(&self.cpu, &mut gated, projected.value())?;
        let down = self.project_onto(residual, &gated, &mlp.down_proj)?;
        Ok(input
            .zip(projected)
            .zip(product)
            .zip(down)
            .map(|(_, out)| out))
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
        let input = self.normed(&gathered, norm)?;
        let mut values = vec![0.0; rows.len() * head.rows()];
        let ran = cpu::mat_mul(&self.cpu, input.value(), head, &mut values)?;
        Ok(input.zip(ran).map(|_| LogitRows {
            vocab_size: head.rows(),
            values,
        }))
    }

    fn sample(
        &mut self,
        logits: &Ran<CpuDevice, LogitRows>,
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
