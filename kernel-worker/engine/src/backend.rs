//! The fused stages of a transformer block as a trait.
//!
//! A stage takes whole batches: `T` tokens of any mix of rows, flattened. Only attention looks at rows. An eager
//! SIMD backend computes in the call; a lazy one records a graph and evaluates when logits are read. What a
//! token's stage returns must not depend on the other tokens of the batch (`REFERENCE` and `CPU`: bit for bit).

pub mod cpu;
pub mod host;
pub mod reference;

use std::convert::Infallible;
use std::fmt::Debug;
use std::ops::Range;

use velox_kernels::affine::StoredMatrix;
pub use velox_kernels::attention::StatsRequest;
use velox_kernels::ran::{Device, Ran};
use velox_kvcache::{KvGeometry, KvMethod, KvShape};

use crate::error::EngineError;
use crate::sampler::{SampleRequest, SampleResult};
use crate::spec::{ModelSpec, RopeSpec};
use crate::step::{Alternative, Progress};

/// A fused stage; the worker maps it to the op table of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Rows of the embedding table.
    Embed,
    /// RMS norm and a group of projections.
    NormProject,
    /// Per-head norms and rotary embedding.
    Rope,
    /// Append to the cache and attend.
    AppendAttend,
    /// Output projection added to the residual.
    OutputProject,
    /// Gated MLP added to the residual.
    GatedMlp,
    /// Final norm and output head.
    Head,
    /// Choice of the next token.
    Sample,
}

impl Stage {
    /// Every stage in the order of a forward pass.
    pub const ALL: [Self; 8] = [
        Self::Embed,
        Self::NormProject,
        Self::Rope,
        Self::AppendAttend,
        Self::OutputProject,
        Self::GatedMlp,
        Self::Head,
        Self::Sample,
    ];
}

/// How often each stage ran: `Head` and `Sample` once per pass that needed them, the layer stages once per layer
/// and pass, `Embed` once per pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageCounts([u64; Stage::ALL.len()]);

impl StageCounts {
    /// Counts one execution.
    pub fn record(&mut self, stage: Stage) {
        self.0[stage as usize] += 1;
    }

    /// Returns how often a stage ran.
    #[must_use]
    pub fn count(&self, stage: Stage) -> u64 {
        self.0[stage as usize]
    }
}

/// A prepared projection.
#[derive(Debug)]
pub struct Linear<M, V> {
    /// `[out, in]`.
    pub weight: M,
    /// `[out]`.
    pub bias: Option<V>,
}

/// Weights of one RMS norm.
#[derive(Debug)]
pub struct Norm<V> {
    /// `[D]` or `[K]`.
    pub weight: V,
    /// Added to the mean square.
    pub epsilon: f32,
}

/// Per-head norms before RoPE (Qwen3).
#[derive(Debug)]
pub struct QkNorm<V> {
    /// `[K]`.
    pub q_norm: Norm<V>,
    /// `[K]`.
    pub k_norm: Norm<V>,
}

/// Gate, up and down projections.
#[derive(Debug)]
pub struct GatedMlp<G, M, V> {
    /// Before the projections.
    pub norm: Norm<V>,
    /// The gate `[F, D]`, through SiLU, and up `[F, D]`.
    pub gate_up: G,
    /// `[D, F]`.
    pub down_proj: Linear<M, V>,
}

/// The gated MLP of a backend.
pub type MlpOf<B> =
    GatedMlp<<B as Backend>::Group<2>, <B as Backend>::Matrix, <B as Backend>::Vector>;

/// A token to feed.
#[derive(Debug, Clone)]
pub enum FedToken<P> {
    /// Its number.
    Known(u32),
    /// The device has yet to choose it.
    Awaited(P),
}

impl FedToken<Infallible> {
    /// Returns the number: where nothing is awaited every token has one.
    #[must_use]
    pub fn id(&self) -> u32 {
        match self {
            Self::Known(id) => *id,
            Self::Awaited(never) => match *never {},
        }
    }
}

/// Queries, keys and values of a batch.
#[derive(Debug)]
pub struct Qkv<A> {
    /// `[T, H*K]`.
    pub queries: A,
    /// `[T, G*K]`.
    pub keys: A,
    /// `[T, G*K]`.
    pub values: A,
}

/// Sizes that attention needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// `H`.
    pub n_heads: usize,
    /// `G`.
    pub n_kv_heads: usize,
    /// `K`.
    pub head_dim: usize,
    /// A query at `p` sees positions above `p - window` only.
    pub sliding_window: Option<usize>,
}

impl AttentionShape {
    /// Reads the sizes from a spec.
    #[must_use]
    pub fn of(spec: &ModelSpec) -> Self {
        Self {
            n_heads: spec.n_heads,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            sliding_window: spec.sliding_window,
        }
    }
}

/// The tokens of a batch that belong to one row, and its cache.
#[derive(Debug)]
pub struct RowSpan<'a, C> {
    /// The row's cache over all layers.
    pub cache: &'a mut C,
    /// Which of the batch's tokens are its own, in order of position.
    pub tokens: Range<usize>,
    /// Position of the first of them: the length of the cache before the pass.
    pub start: usize,
    /// Why the row cannot go on, set by the backend. From then on the pass leaves its cache alone and the row attends
    /// to nothing (zeros): the other rows of the batch are not disturbed.
    pub failure: Option<EngineError>,
}

/// Attention output and requested statistics.
#[derive(Debug)]
pub struct Attended<A> {
    /// `[T, H*K]`.
    pub output: A,
    /// Per row span `[H, positions]`, empty if not requested.
    pub statistics: Vec<Vec<f32>>,
}

/// Bytes that a cache holds allocated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheBytes {
    /// For keys.
    pub keys: u64,
    /// For values.
    pub values: u64,
}

/// The prediction at one position, against a given next token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreRequest {
    /// Row of the logits.
    pub logits_row: usize,
    /// Token whose log-probability is wanted.
    pub next_token: Option<u32>,
    /// Alternatives wanted.
    pub top_n: usize,
}

/// Log-probabilities at one position.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ScoreResult {
    /// Of the given token.
    pub next_logprob: Option<f32>,
    /// Best alternatives, best first, ties by lowest id.
    pub top: Vec<Alternative>,
}

/// One entry per request; a row's error is its own.
pub type RowSamples = Vec<Result<SampleResult, EngineError>>;

/// A device that runs the stages.
pub trait Backend: Sized {
    /// Witness type of the device.
    type Device: Device;
    /// Witness type of where tokens are chosen: a device may leave that to plain code.
    type Sampler: Device;
    /// A stored matrix in the backend's layout.
    type Matrix: Debug;
    /// A small f32 vector.
    type Vector: Debug;
    /// Projections of one input.
    type Group<const N: usize>: Debug;
    /// A token that the device has yet to choose; [`Infallible`] where tokens are chosen in the call.
    type Awaited: Clone + Debug;
    /// Work that the device was given and may not have done.
    type Flight: Debug + Default;
    /// `[T, features]`, f32.
    type Activation: Debug;
    /// Keys and values of one row over all layers.
    type Cache: Debug;
    /// `[rows, V]`, f32.
    type Logits: Debug;

    /// Takes over a matrix of the model file.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`] if there is no room for another layout of it, else as the device says.
    fn prepare_matrix(&mut self, matrix: StoredMatrix) -> Result<Self::Matrix, EngineError>;

    /// Takes over a vector.
    ///
    /// # Errors
    /// As the device says.
    fn prepare_vector(&mut self, values: &[f32]) -> Result<Self::Vector, EngineError>;

    /// Takes over projections of one input, to compute them together.
    ///
    /// # Errors
    /// As the device says.
    fn prepare_group<const N: usize>(
        &mut self,
        projections: [Linear<Self::Matrix, Self::Vector>; N],
    ) -> Result<Self::Group<N>, EngineError>;

    /// Takes over the rotary embedding; called once per model before the first pass.
    ///
    /// # Errors
    /// As the device says.
    fn prepare_rope(&mut self, rope: &RopeSpec, context_length: usize) -> Result<(), EngineError>;

    /// Returns what a token costs in the caches of this backend: pages of 16-bit elements unless it says otherwise.
    ///
    /// # Errors
    /// [`EngineError::Kernel`] if the shape overflows.
    fn kv_geometry(&self, shape: KvShape) -> Result<KvGeometry, EngineError> {
        Ok(KvMethod::None.geometry(shape)?)
    }

    /// Makes an empty cache; pages are allocated as tokens arrive, up to `capacity_tokens`.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    fn new_cache(
        &mut self,
        n_layers: usize,
        shape: AttentionShape,
        capacity_tokens: usize,
    ) -> Result<Self::Cache, EngineError>;

    /// Makes sure that a cache can take `tokens` more tokens in every layer, so that a pass cannot run out of pages
    /// in its middle: a row that gets none fails alone, before anything was computed.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    fn reserve(&mut self, cache: &mut Self::Cache, tokens: usize) -> Result<(), EngineError>;

    /// Cuts a cache to its first `tokens` tokens in every layer, exactly: what is kept is as if the rest had never been
    /// appended. A store of pages gives those beyond back. Called between passes, never with more tokens than there are.
    fn truncate_cache(&mut self, cache: &mut Self::Cache, tokens: usize);

    /// Returns what a cache holds allocated.
    fn cache_bytes(&self, cache: &Self::Cache) -> CacheBytes;

    /// `[T]` ids to `[T, D]`.
    ///
    /// # Errors
    /// As the device says; known ids are checked by the caller.
    fn embed(
        &mut self,
        table: &Self::Matrix,
        tokens: &[FedToken<Self::Awaited>],
    ) -> Result<Ran<Self::Device, Self::Activation>, EngineError>;

    /// RMS norm of `[T, D]`, then each projection of it: `[T, out]` each. The normed input is made once.
    ///
    /// # Errors
    /// As the device says.
    fn norm_project(
        &mut self,
        hidden: &Self::Activation,
        norm: &Norm<Self::Vector>,
        projections: &Self::Group<3>,
    ) -> Result<Ran<Self::Device, Qkv<Self::Activation>>, EngineError>;

    /// Optional per-head norms, then rotation of queries and keys by their positions `[T]`.
    ///
    /// # Errors
    /// As the device says.
    fn rope(
        &mut self,
        qkv: Qkv<Self::Activation>,
        norms: Option<&QkNorm<Self::Vector>>,
        positions: &[usize],
        shape: AttentionShape,
    ) -> Result<Ran<Self::Device, Qkv<Self::Activation>>, EngineError>;

    /// Appends keys and values of every span to its cache's `layer`, then attends causally: `[T, H*K]`. What only one
    /// row is to blame for (a key that is no number, no memory for a page) goes to [`RowSpan::failure`].
    ///
    /// # Errors
    /// As the device says.
    fn append_attend(
        &mut self,
        qkv: &Qkv<Self::Activation>,
        spans: &mut [RowSpan<'_, Self::Cache>],
        layer: usize,
        shape: AttentionShape,
        statistics: StatsRequest,
    ) -> Result<Ran<Self::Device, Attended<Self::Activation>>, EngineError>;

    /// Output projection of `[T, H*K]`, added to the residual `[T, D]`.
    ///
    /// # Errors
    /// As the device says.
    fn output_project(
        &mut self,
        residual: Self::Activation,
        attended: &Self::Activation,
        o_proj: &Linear<Self::Matrix, Self::Vector>,
    ) -> Result<Ran<Self::Device, Self::Activation>, EngineError>;

    /// `residual + down(silu(gate(norm(residual))) * up(norm(residual)))`.
    ///
    /// # Errors
    /// As the device says.
    fn gated_mlp(
        &mut self,
        residual: Self::Activation,
        mlp: &MlpOf<Self>,
    ) -> Result<Ran<Self::Device, Self::Activation>, EngineError>;

    /// Final norm and head for the batch's tokens at `rows`: `[rows, V]`.
    ///
    /// # Errors
    /// As the device says.
    fn head(
        &mut self,
        hidden: &Self::Activation,
        rows: &[usize],
        norm: &Norm<Self::Vector>,
        head: &Self::Matrix,
    ) -> Result<Ran<Self::Device, Self::Logits>, EngineError>;

    /// Chooses a token per request from its row of logits.
    ///
    /// # Errors
    /// As the device says.
    fn sample(
        &mut self,
        logits: &Ran<Self::Device, Self::Logits>,
        requests: &mut [SampleRequest<'_>],
    ) -> Result<Ran<Self::Sampler, RowSamples>, EngineError>;

    /// Whether the device itself can choose this token, without anybody waiting for it.
    fn can_draw(&self, _request: &SampleRequest<'_>) -> bool {
        false
    }

    /// Has the device choose a token for each request of those that it can draw.
    ///
    /// # Errors
    /// As the device says.
    fn draw(
        &mut self,
        _logits: &Ran<Self::Device, Self::Logits>,
        _requests: &[SampleRequest<'_>],
    ) -> Result<Ran<Self::Device, Vec<Self::Awaited>>, EngineError> {
        Err(EngineError::InvalidPlan(
            "this device draws no tokens".to_owned(),
        ))
    }

    /// Log-probabilities from the raw logits.
    ///
    /// # Errors
    /// As the device says.
    fn score(
        &mut self,
        logits: &Self::Logits,
        requests: &[ScoreRequest],
    ) -> Result<Vec<ScoreResult>, EngineError>;

    /// Copies an activation out, `[T, features]`; probes and parity tests compare it with the reference.
    ///
    /// # Errors
    /// As the device says.
    fn read_activation(&mut self, activation: &Self::Activation) -> Result<Vec<f32>, EngineError>;

    /// Copies rows of logits out, `[rows, V]`.
    ///
    /// # Errors
    /// As the device says.
    fn read_logits(&mut self, logits: &Self::Logits) -> Result<Vec<f32>, EngineError>;

    /// Called after the last stage of a layer, with its result. An eager backend has computed it; a lazy one evaluates
    /// it here or reports nothing.
    ///
    /// # Errors
    /// As the device says.
    fn end_layer(
        &mut self,
        _hidden: &Self::Activation,
        progress: &dyn Progress,
    ) -> Result<(), EngineError> {
        progress.layer_done();
        Ok(())
    }

    /// Ends a pass: a lazy backend starts to compute what was recorded, and what is awaited of it, and does not wait.
    ///
    /// # Errors
    /// As the device says.
    fn dispatch(&mut self, _awaited: &[Self::Awaited]) -> Result<Self::Flight, EngineError> {
        Ok(Self::Flight::default())
    }

    /// Whether [`Backend::finish`] would not have to wait.
    fn is_finished(&self, _flight: &Self::Flight) -> bool {
        true
    }

    /// Waits for what was started, reporting to `progress`, and reads what was drawn: a token or what is wrong with
    /// its row.
    ///
    /// # Errors
    /// As the device says.
    fn finish(
        &mut self,
        _flights: Vec<Self::Flight>,
        _awaited: &[Self::Awaited],
        _progress: &dyn Progress,
    ) -> Result<Vec<Result<u32, EngineError>>, EngineError> {
        Ok(Vec::new())
    }
}
