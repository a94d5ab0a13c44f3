//! The oracle with a fault: what probes are there to find.

use std::convert::Infallible;

use velox_kernels::affine::StoredMatrix;
use velox_kernels::matrix::Matrix;
use velox_kernels::ran::Ran;
use velox_kernels::reference::ReferenceDevice;
use velox_kvcache::{PageBudget, PagedCache};

use crate::backend::host::LogitRows;
use crate::backend::reference::ReferenceBackend;
use crate::backend::{
    Attended, AttentionShape, Backend, CacheBytes, FedToken, Linear, MlpOf, Norm, QkNorm, Qkv,
    RowSamples, RowSpan, ScoreRequest, ScoreResult, StatsRequest,
};
use crate::error::EngineError;
use crate::sampler::SampleRequest;
use crate::spec::RopeSpec;

/// What is wrong with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// It reads every logit as a fifth too large.
    HeadIsOff,
    /// The embedding of a token grows a little with the tokens beside it.
    BatchLeaks,
}

/// A backend with a fault.
#[derive(Debug)]
pub(super) struct Crooked {
    inner: ReferenceBackend,
    fault: Fault,
}

impl Crooked {
    pub(super) fn new(fault: Fault, budget: &PageBudget) -> Self {
        Self {
            inner: ReferenceBackend::new(1, budget.clone()),
            fault,
        }
    }
}

type Evaluated<T> = Result<Ran<ReferenceDevice, T>, EngineError>;
type Values = Vec<f32>;

impl Backend for Crooked {
    type Device = ReferenceDevice;
    type Sampler = ReferenceDevice;
    type Matrix = Matrix;
    type Vector = Values;
    type Group<const N: usize> = [Linear<Matrix, Values>; N];
    type Awaited = Infallible;
    type Flight = ();
    type Activation = Values;
    type Cache = PagedCache;
    type Logits = LogitRows;

    fn embed(&mut self, table: &Matrix, tokens: &[FedToken<Infallible>]) -> Evaluated<Values> {
        let mut ran = self.inner.embed(table, tokens)?;
        if self.fault == Fault::BatchLeaks {
            let grown = 1.0 + 1e-5 * f32::from(u8::try_from(tokens.len()).unwrap());
            ran = ran.map(|values| values.into_iter().map(|value| value * grown).collect());
        }
        Ok(ran)
    }

    fn read_logits(&mut self, logits: &LogitRows) -> Result<Values, EngineError> {
        let mut values = self.inner.read_logits(logits)?;
        if self.fault == Fault::HeadIsOff {
            values.iter_mut().for_each(|value| *value *= 1.2);
        }
        Ok(values)
    }

    fn prepare_matrix(&mut self, matrix: StoredMatrix) -> Result<Matrix, EngineError> {
        self.inner.prepare_matrix(matrix)
    }

    fn prepare_vector(&mut self, values: &[f32]) -> Result<Values, EngineError> {
        self.inner.prepare_vector(values)
    }

    fn prepare_group<const N: usize>(
        &mut self,
        projections: [Linear<Matrix, Values>; N],
    ) -> Result<[Linear<Matrix, Values>; N], EngineError> {
        Ok(projections)
    }

    fn prepare_rope(&mut self, rope: &RopeSpec, context_length: usize) -> Result<(), EngineError> {
        self.inner.prepare_rope(rope, context_length)
    }

    fn new_cache(
        &mut self,
        n_layers: usize,
        shape: AttentionShape,
        capacity_tokens: usize,
    ) -> Result<PagedCache, EngineError> {
        self.inner.new_cache(n_layers, shape, capacity_tokens)
    }

    fn reserve(&mut self, cache: &mut PagedCache, tokens: usize) -> Result<(), EngineError> {
        self.inner.reserve(cache, tokens)
    }

    fn truncate_cache(&mut self, cache: &mut PagedCache, tokens: usize) {
        self.inner.truncate_cache(cache, tokens);
    }

    fn cache_bytes(&self, cache: &PagedCache) -> CacheBytes {
        self.inner.cache_bytes(cache)
    }

    fn norm_project(
        &mut self,
        hidden: &Values,
        norm: &Norm<Values>,
        projections: &[Linear<Matrix, Values>; 3],
    ) -> Evaluated<Qkv<Values>> {
        self.inner.norm_project(hidden, norm, projections)
    }

    fn rope(
        &mut self,
        qkv: Qkv<Values>,
        norms: Option<&QkNorm<Values>>,
        positions: &[usize],
        shape: AttentionShape,
    ) -> Evaluated<Qkv<Values>> {
        self.inner.rope(qkv, norms, positions, shape)
    }

    fn append_attend(
        &mut self,
        qkv: &Qkv<Values>,
        spans: &mut [RowSpan<'_, PagedCache>],
        layer: usize,
        shape: AttentionShape,
        statistics: StatsRequest,
    ) -> Evaluated<Attended<Values>> {
        self.inner
            .append_attend(qkv, spans, layer, shape, statistics)
    }

    fn output_project(
        &mut self,
        residual: Values,
        attended: &Values,
        o_proj: &Linear<Matrix, Values>,
    ) -> Evaluated<Values> {
        self.inner.output_project(residual, attended, o_proj)
    }

    fn gated_mlp(&mut self, residual: Values, mlp: &MlpOf<Self>) -> Evaluated<Values> {
        self.inner.gated_mlp(residual, mlp)
    }

    fn head(
        &mut self,
        hidden: &Values,
        rows: &[usize],
        norm: &Norm<Values>,
        head: &Matrix,
    ) -> Evaluated<LogitRows> {
        self.inner.head(hidden, rows, norm, head)
    }

    fn sample(
        &mut self,
        logits: &Ran<ReferenceDevice, LogitRows>,
        requests: &mut [SampleRequest<'_>],
    ) -> Evaluated<RowSamples> {
        self.inner.sample(logits, requests)
    }

    fn score(
        &mut self,
        logits: &LogitRows,
        requests: &[ScoreRequest],
    ) -> Result<Vec<ScoreResult>, EngineError> {
        self.inner.score(logits, requests)
    }

    fn read_activation(&mut self, activation: &Values) -> Result<Values, EngineError> {
        self.inner.read_activation(activation)
    }
}
