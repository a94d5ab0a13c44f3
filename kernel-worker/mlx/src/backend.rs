//! The stages as MLX ops: recorded in the call, evaluated when somebody reads.

use std::collections::VecDeque;
use std::rc::Rc;

use velox_engine::backend::host::LogitRows;
use velox_engine::backend::{
    Attended, AttentionShape, Backend, CacheBytes, FedToken, Linear, MlpOf, Norm, QkNorm, Qkv,
    RowSamples, RowSpan, ScoreRequest, ScoreResult, StatsRequest,
};
use velox_engine::error::EngineError;
use velox_engine::sampler::SampleRequest;
use velox_engine::spec::{RopePairing, RopeSpec};
use velox_engine::step::Progress;
use velox_kernels::affine::StoredMatrix;
use velox_kernels::ran::Ran;
use velox_kernels::reference::{ReferenceDevice, by_plain_code};
use velox_kvcache::{KvGeometry, KvMethod, KvShape, PageBudget};

use crate::cache::{GROWTH_TOKENS, MlxCache};
use crate::ffi::{
    AttentionMask, DeviceStream, DrawRule, Drawn, Dtype, Fused, HalfPrecision, MlxDevice, MlxError,
    Pairing, Rotary, Tensor, evaluate, start, window_mask,
};
use crate::group::Grouped;
use crate::weights::Weight;

/// Tokens of a pass from which on every layer is started by itself: the graph of a long chunk must not pile up, and the
/// process must show that it is alive.
const START_BY_LAYER_TOKENS: usize = 64;

/// Layers of a long chunk that may be under way: the device must not run dry while the next is recorded.
const LAYERS_UNDER_WAY: usize = 2;

/// Runs every stage on one device of MLX.
#[derive(Debug)]
pub struct MlxBackend<D> {
    stream: DeviceStream<D>,
    dtype: Dtype,
    budget: PageBudget,
    /// The rotation, and the factor on what it rotates.
    rope: Option<(Rotary, f32)>,
    fused: Fused,
    /// Positions of the pass at hand: every layer asks for the same.
    positions: Option<(Vec<usize>, Tensor)>,
    /// Results of its last layers, which are being computed in a long chunk.
    layers: VecDeque<Tensor>,
}

/// A token that the device chooses.
#[derive(Debug, Clone)]
pub struct AwaitedToken {
    drawn: Rc<Drawn>,
    row: usize,
}

/// What a pass ends in. Nobody may ask for more of a chunk that only fills a cache.
#[derive(Debug, Default)]
pub struct MlxFlight(Vec<Tensor>);

type Recorded<D, T> = Result<Ran<D, T>, EngineError>;

impl<D: MlxDevice> MlxBackend<D> {
    /// Opens the device on this thread, which must run the backend ever after. Activations, scales and caches get
    /// the type that suits a model of these block types and the device.
    ///
    /// # Errors
    /// [`EngineError::BackendUnavailable`] with the reason.
    pub fn open(stored_types: &[&str], budget: PageBudget) -> Result<Self, EngineError> {
        let stream = DeviceStream::open().map_err(|error| EngineError::BackendUnavailable {
            backend: D::LABEL.name(),
            reason: error.to_string(),
        })?;
        let dtype = match D::HALF_PRECISION {
            HalfPrecision::Fast => half_precision_for(stored_types),
            HalfPrecision::Slow => Dtype::F32,
        };
        Ok(Self {
            stream,
            dtype,
            budget,
            rope: None,
            fused: Fused::on::<D>(),
            positions: None,
            layers: VecDeque::new(),
        })
    }

    fn record<T>(&self, ops: impl FnOnce() -> Result<T, MlxError>) -> Recorded<D, T> {
        self.stream.record(ops).map_err(failed::<D>)
    }

    /// Makes or finds the array of positions.
    fn positions(&mut self, positions: &[usize]) -> Result<Tensor, EngineError> {
        if let Some((known, tensor)) = &self.positions
            && known == positions
        {
            return Ok(tensor.clone());
        }
        let tensor = self
            .record(|| Tensor::of_positions(positions))?
            .into_value();
        self.positions = Some((positions.to_vec(), tensor.clone()));
        Ok(tensor)
    }

    fn read(&self, tensor: &Tensor) -> Result<Vec<f32>, EngineError> {
        let values = self.record(|| tensor.cast(Dtype::F32)?.to_f32())?;
        Ok(values.into_value())
    }

    fn read_rows(&self, logits: &Tensor) -> Result<LogitRows, EngineError> {
        Ok(LogitRows::new(logits.axis(1), self.read(logits)?))
    }
}

/// The type that a model was made for: that of its numbers, or of the scales of its GGUF blocks, which are f16.
fn half_precision_for(stored_types: &[&str]) -> Dtype {
    let blocks = |name: &&str| name.starts_with('Q') || name.starts_with("IQ");
    if stored_types.iter().any(blocks) || stored_types.contains(&"F16") {
        Dtype::F16
    } else if stored_types.contains(&"BF16") {
        Dtype::Bf16
    } else {
        Dtype::F32
    }
}

fn failed<D: MlxDevice>(error: MlxError) -> EngineError {
    EngineError::Device {
        backend: D::LABEL.name(),
        reason: error.to_string(),
    }
}

fn rotary_of(spec: &RopeSpec) -> Result<Rotary, MlxError> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "rounded to f32 on purpose, as the device computes angles"
    )]
    let periods: Vec<f32> = spec
        .inverse_frequencies
        .iter()
        .map(|frequency| frequency.recip() as f32)
        .collect();
    Ok(Rotary {
        pairing: match spec.pairing {
            RopePairing::HalfSplit => Pairing::HalfSplit,
            RopePairing::Interleaved => Pairing::Interleaved,
        },
        dimensions: 2 * periods.len(),
        periods: Tensor::of_f32(&periods, &[periods.len()])?,
    })
}

/// `[K]`: the factor where a head is rotated, else 1.
fn factors_of(rotary: &Rotary, factor: f32, head_dim: usize) -> Result<Tensor, MlxError> {
    let factors: Vec<f32> = (0..head_dim)
        .map(|element| {
            if element < rotary.dimensions {
                factor
            } else {
                1.0
            }
        })
        .collect();
    Tensor::of_f32(&factors, &[head_dim])
}

/// `[T, heads * K]` rotated by the positions `[T]`, after an optional norm of every head.
fn rotated(
    input: &Tensor,
    norm: Option<&Norm<Tensor>>,
    (rotary, factor): (&Rotary, f32),
    positions: &Tensor,
    head_dim: usize,
) -> Result<Tensor, MlxError> {
    let (tokens, width) = (input.axis(0), input.axis(1));
    let mut heads = input.reshape(&[tokens, width / head_dim, 1, head_dim])?;
    if let Some(norm) = norm {
        heads = heads.rms_norm(&norm.weight, norm.epsilon)?;
    }
    if rotary.dimensions > 0 {
        heads = heads.rope(rotary, positions)?;
    }
    if factor != 1.0 {
        heads = heads.mul(&factors_of(rotary, factor, head_dim)?.cast_like(&heads)?)?;
    }
    heads.reshape(&[tokens, width])
}

fn projected(input: &Tensor, linear: &Linear<Weight, Tensor>) -> Result<Tensor, MlxError> {
    let product = linear.weight.multiply(input)?;
    match &linear.bias {
        Some(bias) => product.add(bias),
        None => Ok(product),
    }
}

/// Takes the results of a group apart.
fn taken<const N: usize>(results: Vec<Tensor>) -> Result<[Tensor; N], MlxError> {
    results.try_into().map_err(|results: Vec<Tensor>| {
        MlxError::Operation(format!("a group gave {} results, not {N}", results.len()))
    })
}

/// The draws that tokens belong to, each once, in order; tokens of one draw lie together.
fn batches(awaited: &[AwaitedToken]) -> impl Iterator<Item = &Rc<Drawn>> {
    let same = |one: &AwaitedToken, other: &AwaitedToken| Rc::ptr_eq(&one.drawn, &other.drawn);
    awaited.chunk_by(same).map(|tokens| &tokens[0].drawn)
}

/// `[T]`, u32: the numbers of tokens, some of which nobody knows yet.
fn ids_of(tokens: &[FedToken<AwaitedToken>]) -> Result<Tensor, MlxError> {
    let mut parts = Vec::new();
    let kind = |one: &FedToken<AwaitedToken>, other: &FedToken<AwaitedToken>| match (one, other) {
        (FedToken::Known(_), FedToken::Known(_)) => true,
        (FedToken::Awaited(one), FedToken::Awaited(other)) => {
            Rc::ptr_eq(&one.drawn, &other.drawn) && one.row + 1 == other.row
        }
        _ => false,
    };
    for run in tokens.chunk_by(kind) {
        parts.push(match &run[0] {
            FedToken::Awaited(AwaitedToken { drawn, row }) => {
                let range = *row..row + run.len();
                if range == (0..drawn.tokens().axis(0)) {
                    drawn.tokens().clone()
                } else {
                    drawn.tokens().slice(0, range)?
                }
            }
            FedToken::Known(_) => {
                let known = run.iter().filter_map(|token| match token {
                    FedToken::Known(id) => Some(*id),
                    FedToken::Awaited(_) => None,
                });
                let ids: Vec<u32> = known.collect();
                Tensor::of_u32(&ids, &[ids.len()])?
            }
        });
    }
    match parts.as_slice() {
        [only] => Ok(only.clone()),
        parts => Tensor::concatenate(parts, 0),
    }
}

fn rule_of(request: &SampleRequest<'_>) -> DrawRule {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the device draws with f32; what rounds up to 1 takes the last candidate"
    )]
    let uniform = request.uniform() as f32;
    let parameters = request.parameters;
    DrawRule {
        temperature: parameters.temperature,
        top_k: parameters.top_k,
        top_p: parameters.top_p,
        min_p: parameters.min_p,
        uniform,
    }
}

/// `[L, heads * K]` as `[1, heads, L, K]`.
fn by_head(input: &Tensor, head_dim: usize) -> Result<Tensor, MlxError> {
    let (tokens, width) = (input.axis(0), input.axis(1));
    input
        .reshape(&[1, tokens, width / head_dim, head_dim])?
        .swap_axes(1, 2)
}

/// Appends one row's tokens and attends to its cache: `[L, H * K]`.
fn attend_row(
    qkv: &Qkv<Tensor>,
    span: &mut RowSpan<'_, MlxCache>,
    layer: usize,
    shape: AttentionShape,
) -> Result<Tensor, MlxError> {
    let part = |whole: &Tensor| {
        if span.tokens == (0..whole.axis(0)) {
            Ok(whole.clone())
        } else {
            whole.slice(0, span.tokens.clone())
        }
    };
    let queries = by_head(&part(&qkv.queries)?, shape.head_dim)?;
    let keys = by_head(&part(&qkv.keys)?, shape.head_dim)?;
    let values = by_head(&part(&qkv.values)?, shape.head_dim)?;
    let (mut keys, mut values) = span.cache.append(layer, &keys, &values)?;
    let (tokens, seen) = (queries.axis(2), keys.axis(2));
    let mask = match shape.sliding_window {
        Some(window) if seen > window && tokens == 1 => {
            keys = keys.slice(2, seen - window..seen)?;
            values = values.slice(2, seen - window..seen)?;
            AttentionMask::Everything
        }
        Some(window) if seen > window => {
            AttentionMask::Allowed(window_mask(seen - tokens..seen, 0..seen, window)?)
        }
        _ if tokens == 1 => AttentionMask::Everything,
        _ => AttentionMask::Causal,
    };
    #[expect(
        clippy::cast_precision_loss,
        reason = "a head has far fewer than 2^24 elements"
    )]
    let scale = (shape.head_dim as f32).sqrt().recip();
    queries
        .attend(&keys, &values, scale, &mask)?
        .swap_axes(1, 2)?
        .reshape(&[tokens, shape.n_heads * shape.head_dim])
}

impl<D: MlxDevice> Backend for MlxBackend<D> {
    type Device = D;
    type Sampler = ReferenceDevice;
    type Matrix = Weight;
    type Vector = Tensor;
    type Group<const N: usize> = Grouped;
    type Awaited = AwaitedToken;
    type Flight = MlxFlight;
    type Activation = Tensor;
    type Cache = MlxCache;
    type Logits = Tensor;

    fn prepare_matrix(&mut self, matrix: StoredMatrix) -> Result<Weight, EngineError> {
        let weight = self.record(|| Weight::new(&matrix, self.dtype))?;
        Ok(weight.into_value())
    }

    fn prepare_vector(&mut self, values: &[f32]) -> Result<Tensor, EngineError> {
        let vector = self.record(|| {
            let vector = Tensor::of_f32(values, &[values.len()])?.cast(self.dtype)?;
            evaluate([&vector])?;
            Ok(vector)
        })?;
        Ok(vector.into_value())
    }

    fn prepare_group<const N: usize>(
        &mut self,
        projections: [Linear<Weight, Tensor>; N],
    ) -> Result<Grouped, EngineError> {
        let group = self.record(|| Grouped::new(projections))?;
        Ok(group.into_value())
    }

    fn prepare_rope(&mut self, rope: &RopeSpec, _context_length: usize) -> Result<(), EngineError> {
        let rotary = self.record(|| rotary_of(rope))?.into_value();
        self.rope = Some((rotary, rope.attention_factor));
        Ok(())
    }

    fn kv_geometry(&self, shape: KvShape) -> Result<KvGeometry, EngineError> {
        let elements = shape.n_layers * shape.n_kv_heads * shape.head_dim;
        let bytes = (elements * self.dtype.bytes()) as u64;
        Ok(KvGeometry {
            page_tokens: GROWTH_TOKENS,
            key_bytes_per_token: bytes,
            value_bytes_per_token: bytes,
            ..KvMethod::None.geometry(shape)?
        })
    }

    fn new_cache(
        &mut self,
        n_layers: usize,
        shape: AttentionShape,
        capacity_tokens: usize,
    ) -> Result<MlxCache, EngineError> {
        Ok(MlxCache::new(
            n_layers,
            shape,
            self.dtype,
            capacity_tokens,
            &self.budget,
        ))
    }

    fn reserve(&mut self, cache: &mut MlxCache, tokens: usize) -> Result<(), EngineError> {
        cache.reserve(tokens)
    }

    fn truncate_cache(&mut self, cache: &mut MlxCache, tokens: usize) {
        cache.truncate(tokens);
    }

    fn cache_bytes(&self, cache: &MlxCache) -> CacheBytes {
        cache.bytes()
    }

    fn embed(&mut self, table: &Weight, tokens: &[FedToken<AwaitedToken>]) -> Recorded<D, Tensor> {
        self.layers.clear();
        self.positions = None;
        self.record(|| table.take(&ids_of(tokens)?)?.cast(self.dtype))
    }

    fn norm_project(
        &mut self,
        hidden: &Tensor,
        norm: &Norm<Tensor>,
        projections: &Grouped,
    ) -> Recorded<D, Qkv<Tensor>> {
        self.record(|| {
            let input = hidden.rms_norm(&norm.weight, norm.epsilon)?;
            let [queries, keys, values] = taken(projections.multiply(&input)?)?;
            Ok(Qkv {
                queries,
                keys,
                values,
            })
        })
    }

    fn rope(
        &mut self,
        qkv: Qkv<Tensor>,
        norms: Option<&QkNorm<Tensor>>,
        positions: &[usize],
        shape: AttentionShape,
    ) -> Recorded<D, Qkv<Tensor>> {
        let at = self.positions(positions)?;
        let Some((rotary, factor)) = &self.rope else {
            return Err(EngineError::InvalidPlan(
                "the rotary embedding was not prepared".to_owned(),
            ));
        };
        let rope = (rotary, *factor);
        self.record(|| {
            let (q_norm, k_norm) = norms.map(|norms| (&norms.q_norm, &norms.k_norm)).unzip();
            Ok(Qkv {
                queries: rotated(&qkv.queries, q_norm, rope, &at, shape.head_dim)?,
                keys: rotated(&qkv.keys, k_norm, rope, &at, shape.head_dim)?,
                values: qkv.values,
            })
        })
    }

    fn append_attend(
        &mut self,
        qkv: &Qkv<Tensor>,
        spans: &mut [RowSpan<'_, MlxCache>],
        layer: usize,
        shape: AttentionShape,
        statistics: StatsRequest,
    ) -> Recorded<D, Attended<Tensor>> {
        if statistics != StatsRequest::None {
            return Err(EngineError::BackendUnavailable {
                backend: D::LABEL.name(),
                reason: "it gives no statistics of attention".to_owned(),
            });
        }
        let width = shape.n_heads * shape.head_dim;
        self.record(|| {
            let mut parts = Vec::with_capacity(spans.len());
            for span in spans.iter_mut() {
                parts.push(if span.failure.is_some() {
                    Tensor::zeros(self.dtype, &[span.tokens.len(), width])?
                } else {
                    attend_row(qkv, span, layer, shape)?
                });
            }
            let output = match parts.as_slice() {
                [only] => only.clone(),
                parts => Tensor::concatenate(parts, 0)?,
            };
            Ok(Attended {
                output,
                statistics: vec![Vec::new(); parts.len()],
            })
        })
    }

    fn output_project(
        &mut self,
        residual: Tensor,
        attended: &Tensor,
        o_proj: &Linear<Weight, Tensor>,
    ) -> Recorded<D, Tensor> {
        self.record(|| residual.add(&projected(attended, o_proj)?))
    }

    fn gated_mlp(&mut self, residual: Tensor, mlp: &MlpOf<Self>) -> Recorded<D, Tensor> {
        let Self { stream, fused, .. } = self;
        let sum = stream.record(|| {
            let input = residual.rms_norm(&mlp.norm.weight, mlp.norm.epsilon)?;
            let [gate, up] = taken(mlp.gate_up.multiply(&input)?)?;
            let gated = fused.gated(&gate, &up)?;
            residual.add(&projected(&gated, &mlp.down_proj)?)
        });
        sum.map_err(failed::<D>)
    }

    fn head(
        &mut self,
        hidden: &Tensor,
        rows: &[usize],
        norm: &Norm<Tensor>,
        head: &Weight,
    ) -> Recorded<D, Tensor> {
        self.record(|| {
            let wanted = if rows.iter().copied().eq(0..hidden.axis(0)) {
                hidden.clone()
            } else {
                hidden.take(&Tensor::of_positions(rows)?)?
            };
            let input = wanted.rms_norm(&norm.weight, norm.epsilon)?;
            head.multiply(&input)?.cast(Dtype::F32)
        })
    }

    fn sample(
        &mut self,
        logits: &Ran<D, Tensor>,
        requests: &mut [SampleRequest<'_>],
    ) -> Result<Ran<ReferenceDevice, RowSamples>, EngineError> {
        let rows = self.read_rows(logits.value())?;
        Ok(by_plain_code(|| rows.sample(requests)))
    }

    fn can_draw(&self, request: &SampleRequest<'_>) -> bool {
        request.is_plain()
    }

    fn draw(
        &mut self,
        logits: &Ran<D, Tensor>,
        requests: &[SampleRequest<'_>],
    ) -> Result<Ran<D, Vec<AwaitedToken>>, EngineError> {
        let rules: Vec<DrawRule> = requests.iter().map(rule_of).collect();
        let drawn = self.record(|| {
            let rows: Vec<usize> = requests.iter().map(|request| request.logits_row).collect();
            let logits = logits.value();
            if rows.iter().copied().eq(0..logits.axis(0)) {
                Drawn::record(logits, &rules)
            } else {
                Drawn::record(&logits.take(&Tensor::of_positions(&rows)?)?, &rules)
            }
        })?;
        Ok(drawn.map(|drawn| {
            let drawn = Rc::new(drawn);
            let token = |row| AwaitedToken {
                drawn: Rc::clone(&drawn),
                row,
            };
            (0..requests.len()).map(token).collect()
        }))
    }

    fn score(
        &mut self,
        logits: &Tensor,
        requests: &[ScoreRequest],
    ) -> Result<Vec<ScoreResult>, EngineError> {
        self.read_rows(logits)?.score(requests)
    }

    fn read_activation(&mut self, activation: &Tensor) -> Result<Vec<f32>, EngineError> {
        self.read(activation)
    }

    fn read_logits(&mut self, logits: &Tensor) -> Result<Vec<f32>, EngineError> {
        self.read(logits)
    }

    fn end_layer(&mut self, hidden: &Tensor, progress: &dyn Progress) -> Result<(), EngineError> {
        if hidden.axis(0) < START_BY_LAYER_TOKENS {
            self.layers.clear();
            self.layers.push_back(hidden.clone());
            return Ok(());
        }
        self.record(|| start([hidden]))?.into_value();
        self.layers.push_back(hidden.clone());
        if self.layers.len() > LAYERS_UNDER_WAY
            && let Some(earlier) = self.layers.pop_front()
        {
            self.record(|| evaluate([&earlier]))?.into_value();
            progress.layer_done();
        }
        Ok(())
    }

    fn dispatch(&mut self, awaited: &[AwaitedToken]) -> Result<MlxFlight, EngineError> {
        let mut ends: Vec<Tensor> = self.layers.drain(..).collect();
        for drawn in batches(awaited) {
            ends.extend([drawn.report().clone(), drawn.tokens().clone()]);
        }
        self.record(|| start(&ends))?.into_value();
        Ok(MlxFlight(ends))
    }

    fn is_finished(&self, flight: &MlxFlight) -> bool {
        flight.0.iter().all(Tensor::is_available)
    }

    fn finish(
        &mut self,
        flights: Vec<MlxFlight>,
        awaited: &[AwaitedToken],
        progress: &dyn Progress,
    ) -> Result<Vec<Result<u32, EngineError>>, EngineError> {
        for flight in flights {
            self.record(|| evaluate(&flight.0))?.into_value();
            progress.layer_done();
        }
        let mut tokens = Vec::with_capacity(awaited.len());
        for drawn in batches(awaited) {
            let read = self.record(|| drawn.read())?.into_value();
            let own = awaited
                .iter()
                .filter(|token| Rc::ptr_eq(&token.drawn, drawn));
            tokens.extend(own.map(|token| match read.get(token.row) {
                Some(Some(token_id)) => Ok(*token_id),
                _ => Err(EngineError::Numeric(
                    "a logit is not a number or not finite".to_owned(),
                )),
            }));
        }
        Ok(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_have_the_type_that_the_model_was_made_for() {
        assert_eq!(half_precision_for(&["BF16"]), Dtype::Bf16);
        assert_eq!(
            half_precision_for(&["BF16", "MLX_AFFINE_4_G64"]),
            Dtype::Bf16
        );
        // One tensor of another type does not round the scales of all others.
        assert_eq!(half_precision_for(&["BF16", "F32", "Q6_K"]), Dtype::F16);
        assert_eq!(half_precision_for(&["F16", "F32"]), Dtype::F16);
        assert_eq!(half_precision_for(&["F32", "MLX_AFFINE_4_G64"]), Dtype::F32);
    }
}
