//! A small random model built in memory.

use velox_engine::backend::Backend;
use velox_engine::graph::Transformer;
use velox_engine::spec::{
    Architecture, LayerTensors, LinearTensors, ModelSpec, ModelTensors, QkNormTensors, RopePairing,
    RopeSpec,
};
use velox_engine::step::Engine;
use velox_kernels::affine::StoredMatrix;
use velox_kernels::block::BlockType;
use velox_kernels::buffer::ByteSource;
use velox_kernels::matrix::Matrix;

pub(crate) const VOCAB: usize = 320;
/// Its embedding is no number: a row that is fed this token fails.
pub(crate) const POISON: u32 = 319;
pub(crate) const CONTEXT: usize = 640;
const HIDDEN: usize = 128;
const INTERMEDIATE: usize = 256;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 32;
const LAYERS: usize = 2;

/// Which family the model imitates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// Tied head, interleaved pairs, no biases.
    Llama,
    /// Own head, per-head norms, biases, a sliding window.
    Everything,
}

/// SplitMix64: the same model everywhere.
struct Random(u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// Even in `-1..1`.
    fn number(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn vector(&mut self, length: usize, center: f32, spread: f32) -> Vec<f32> {
        (0..length)
            .map(|_| center + spread * self.number())
            .collect()
    }

    /// Blocks of random quants whose scales give values of about `spread`.
    fn matrix(&mut self, block_type: BlockType, rows: usize, columns: usize) -> Matrix {
        let spread = 1.7 / (columns as f32).sqrt();
        let half = |value: f32| half::f16::from_f32(value).to_le_bytes();
        let mut bytes = Vec::new();
        for _ in 0..rows * columns / 32 {
            let scale = spread * (0.75 + 0.25 * self.number());
            let quants = match block_type {
                BlockType::Q8_0 => {
                    bytes.extend(half(scale / 127.0));
                    32
                }
                BlockType::Q4_1 => {
                    bytes.extend(half(scale / 7.5));
                    bytes.extend(half(-scale));
                    16
                }
                other => panic!("no blocks of {}", other.name()),
            };
            bytes.extend((0..quants).map(|_| self.word().to_le_bytes()[0]));
        }
        Matrix::new(block_type, rows, columns, ByteSource::copy_of(&bytes)).unwrap()
    }

    fn linear(&mut self, rows: usize, columns: usize, biased: bool) -> LinearTensors<StoredMatrix> {
        LinearTensors {
            weight: self.matrix(BlockType::Q4_1, rows, columns).into(),
            bias: biased.then(|| self.vector(rows, 0.0, 0.2)),
        }
    }

    fn layer(&mut self, family: Family) -> LayerTensors<StoredMatrix> {
        let rich = family == Family::Everything;
        LayerTensors {
            attention_norm: self.vector(HIDDEN, 1.0, 0.2),
            q_proj: self.linear(HEADS * HEAD_DIM, HIDDEN, rich),
            k_proj: self.linear(KV_HEADS * HEAD_DIM, HIDDEN, rich),
            v_proj: self.linear(KV_HEADS * HEAD_DIM, HIDDEN, rich),
            o_proj: self.linear(HIDDEN, HEADS * HEAD_DIM, false),
            qk_norm: rich.then(|| QkNormTensors {
                q_norm: self.vector(HEAD_DIM, 1.5, 0.2),
                k_norm: self.vector(HEAD_DIM, 1.5, 0.2),
            }),
            mlp_norm: self.vector(HIDDEN, 1.0, 0.2),
            gate_proj: self.linear(INTERMEDIATE, HIDDEN, false),
            up_proj: self.linear(INTERMEDIATE, HIDDEN, false),
            down_proj: self.linear(HIDDEN, INTERMEDIATE, false),
        }
    }
}

pub(crate) fn spec(family: Family) -> ModelSpec {
    let pairs = HEAD_DIM / 2;
    ModelSpec {
        architecture: match family {
            Family::Llama => Architecture::Llama,
            Family::Everything => Architecture::Qwen3,
        },
        hidden_size: HIDDEN,
        intermediate_size: INTERMEDIATE,
        n_layers: LAYERS,
        n_heads: HEADS,
        n_kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        vocab_size: VOCAB,
        context_length: CONTEXT,
        rms_norm_eps: 1e-5,
        rope: RopeSpec {
            pairing: match family {
                Family::Llama => RopePairing::Interleaved,
                Family::Everything => RopePairing::HalfSplit,
            },
            inverse_frequencies: (0..pairs)
                .map(|pair| 10_000_f64.powf(-(pair as f64) / pairs as f64))
                .collect(),
            attention_factor: 1.0,
        },
        sliding_window: (family == Family::Everything).then_some(100),
    }
}

fn tensors(family: Family) -> ModelTensors<StoredMatrix> {
    let mut random = Random(42);
    let mut embedding = random.vector(VOCAB * HIDDEN, 0.0, 1.0);
    let poison = POISON as usize * HIDDEN;
    // In a tied head the poisoned token would poison every row's logits.
    let own_head = random.matrix(BlockType::Q8_0, VOCAB, HIDDEN);
    embedding[poison..poison + HIDDEN].fill(f32::NAN);
    let tied = family == Family::Llama;
    if tied {
        embedding[poison..poison + HIDDEN].fill(0.0);
    }
    ModelTensors {
        embedding: Matrix::from_f32(VOCAB, HIDDEN, &embedding).unwrap().into(),
        layers: (0..LAYERS).map(|_| random.layer(family)).collect(),
        final_norm: random.vector(HIDDEN, 1.0, 0.2),
        head: (!tied).then(|| own_head.into()),
    }
}

/// The model on a backend.
pub(crate) fn engine<B: Backend>(family: Family, mut backend: B) -> Engine<B> {
    let spec = spec(family);
    let model = Transformer::new(&mut backend, &spec, tensors(family), &mut |_| {}).unwrap();
    Engine::new(backend, model, &spec)
}

/// Tokens of a text that never was; none is [`POISON`].
pub(crate) fn text(seed: u64, length: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..length)
        .map(|_| (random.word() % u64::from(POISON)) as u32)
        .collect()
}
