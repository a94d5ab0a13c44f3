//! What a model is, independent of the file it came from.

/// Families whose graph this engine knows. All are pre-norm decoders with grouped-query attention and a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2/3.x, SmolLM2, Mistral, MiniCPM5.
    Llama,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: RMS norm of each query and key head before RoPE.
    Qwen3,
}

impl Architecture {
    /// Returns the name as config.json and GGUF write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// Which elements of a head form a rotated pair. GGUF converters reorder q and k rows of the Llama family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// Element `i` with `i + K/2`: Hugging Face, and GGUF of Qwen.
    HalfSplit,
    /// Element `2i` with `2i + 1`: GGUF of the Llama family.
    Interleaved,
}

/// Rotary embedding: angle of pair `i` at position `p` is `p * inverse_frequencies[i]`.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// How a head's elements pair up.
    pub pairing: RopePairing,
    /// One per rotated pair, scaling already applied; `2 * len` is the number of rotated elements.
    pub inverse_frequencies: Vec<f64>,
    /// Factor on cosine and sine (YaRN, LongRoPE); 1 otherwise.
    pub attention_factor: f32,
}

/// Sizes and constants of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Family.
    pub architecture: Architecture,
    /// `D`.
    pub hidden_size: usize,
    /// `F`.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub n_layers: usize,
    /// `H`.
    pub n_heads: usize,
    /// `G`; divides `n_heads`.
    pub n_kv_heads: usize,
    /// `K`; may differ from `hidden_size / n_heads`.
    pub head_dim: usize,
    /// `V`: rows of the head.
    pub vocab_size: usize,
    /// Most positions the model was trained for.
    pub context_length: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Window of sliding-window attention, `None` = full attention.
    pub sliding_window: Option<usize>,
}

/// One transformer block's tensors.
#[derive(Debug)]
pub struct LayerTensors<M> {
    /// `[D]`, before attention.
    pub attention_norm: Vec<f32>,
    /// `[H*K, D]`.
    pub q_proj: LinearTensors<M>,
    /// `[G*K, D]`.
    pub k_proj: LinearTensors<M>,
    /// `[G*K, D]`.
    pub v_proj: LinearTensors<M>,
    /// `[D, H*K]`.
    pub o_proj: LinearTensors<M>,
    /// `[K]` each, Qwen3.
    pub qk_norm: Option<QkNormTensors>,
    /// `[D]`, before the MLP.
    pub mlp_norm: Vec<f32>,
    /// `[F, D]`.
    pub gate_proj: LinearTensors<M>,
    /// `[F, D]`.
    pub up_proj: LinearTensors<M>,
    /// `[D, F]`.
    pub down_proj: LinearTensors<M>,
}

/// A matrix `[out, in]` with an optional bias `[out]`.
#[derive(Debug)]
pub struct LinearTensors<M> {
    /// The matrix.
    pub weight: M,
    /// Added to the product.
    pub bias: Option<Vec<f32>>,
}

/// Per-head norms of queries and keys.
#[derive(Debug)]
pub struct QkNormTensors {
    /// `[K]`.
    pub q_norm: Vec<f32>,
    /// `[K]`.
    pub k_norm: Vec<f32>,
}

/// All tensors of a model, generic over the stored matrix.
#[derive(Debug)]
pub struct ModelTensors<M> {
    /// `[V, D]`.
    pub embedding: M,
    /// Blocks in order.
    pub layers: Vec<LayerTensors<M>>,
    /// `[D]`.
    pub final_norm: Vec<f32>,
    /// `[V, D]`; `None` = tied to the embedding.
    pub head: Option<M>,
}
