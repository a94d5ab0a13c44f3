//! Tiny cases of every stage and block type, run on a backend and on the reference: what capabilities are made of.
//!
//! A backend offers a stage for a block type only if its case ran on this machine and came out right.

mod backends;
#[cfg(test)]
mod crooked;
mod invariance;

use velox_kernels::affine::{AffineLayout, AffineMatrix, StoredMatrix, StoredType};
use velox_kernels::block::BlockType;
use velox_kernels::buffer::ByteSource;
use velox_kernels::matrix::Matrix;
use velox_kernels::ran::Ran;

use crate::backend::{
    AttentionShape, Backend, FedToken, GatedMlp, Linear, Norm, Qkv, RowSpan, Stage, StatsRequest,
};
use crate::error::EngineError;
use crate::sampler::{SampleRequest, SamplingParameters};
use crate::spec::{RopePairing, RopeSpec};

pub use self::backends::{EachProbe, ProbedBackends};
pub(crate) use self::invariance::is_batch_invariant;

/// `D`, `F` and `H*K` of the cases: one block of the widest type.
const WIDTH: usize = 256;
/// `G*K`.
const KV_WIDTH: usize = 128;
/// `V`, and rows of every table: more than any token id of the cases.
const VOCABULARY: usize = 64;
/// `T`: odd, more than one.
const TOKEN_IDS: [u32; 3] = [0, 5, 63];
const SHAPE: AttentionShape = AttentionShape {
    n_heads: 4,
    n_kv_heads: 2,
    head_dim: 64,
    sliding_window: None,
};
const EPSILON: f32 = 1e-5;
const FLOATS: StoredType = StoredType::Blocks(BlockType::F32);

/// Part of the largest magnitude that a stage may be off when activations are rounded to 8 bits.
const QUANTISED_TOLERANCE: f64 = 2e-2;
/// The same when everything is f32 or f16 weights: another order of additions, keys and values in f16.
const FLOAT_TOLERANCE: f64 = 2e-3;

/// One probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeCase {
    /// Stage under test.
    pub stage: Stage,
    /// Type of its matrices; `None` for stages without any.
    pub matrices: Option<StoredType>,
}

/// How far a case came out from the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProbeOutcome {
    /// Largest absolute difference.
    pub max_error: f64,
    /// What is tolerated in this case, absolute.
    pub tolerance: f64,
}

impl ProbeOutcome {
    /// Whether the result may be trusted.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.max_error <= self.tolerance
    }

    /// Says what is wrong; `None` if the result may be trusted.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        (!self.is_right()).then(|| {
            format!(
                "its probe is off by {:.3e}, tolerance is {:.3e}",
                self.max_error, self.tolerance
            )
        })
    }
}

impl ProbeCase {
    /// Returns every case.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for stage in Stage::ALL {
            match stage {
                Stage::Rope | Stage::AppendAttend | Stage::Sample => {
                    cases.push(Self {
                        stage,
                        matrices: None,
                    });
                }
                Stage::Embed
                | Stage::NormProject
                | Stage::OutputProject
                | Stage::GatedMlp
                | Stage::Head => cases.extend(matrix_types().map(|matrices| Self {
                    stage,
                    matrices: Some(matrices),
                })),
            }
        }
        cases
    }

    /// Returns the type that capabilities name.
    #[must_use]
    pub fn dtype(&self) -> &'static str {
        match (self.matrices, self.stage) {
            (Some(stored), _) => stored.name(),
            (None, Stage::AppendAttend) => BlockType::F16.name(),
            (None, _) => BlockType::F32.name(),
        }
    }

    /// Runs the case on a backend and on the oracle.
    ///
    /// # Errors
    /// What the backend says, or [`EngineError::Numeric`] if it gave something that is no number.
    pub fn run<B: Backend, O: Backend>(
        &self,
        backend: &mut B,
        oracle: &mut O,
    ) -> Result<ProbeOutcome, EngineError> {
        let got = self.outputs(backend)?;
        let expected = self.outputs(oracle)?;
        if got.len() != expected.len() || got.iter().any(|value| !value.is_finite()) {
            return Err(EngineError::Numeric(format!(
                "the probe gave {} values, {} of them no numbers, expected {}",
                got.len(),
                got.iter().filter(|value| !value.is_finite()).count(),
                expected.len()
            )));
        }
        let difference = |(got, expected): (&f32, &f32)| f64::from((got - expected).abs());
        let max_error = got
            .iter()
            .zip(&expected)
            .map(difference)
            .fold(0.0, f64::max);
        let magnitude = expected
            .iter()
            .map(|value| f64::from(value.abs()))
            .fold(0.0, f64::max);
        let relative = match self.matrices {
            Some(StoredType::Blocks(BlockType::F32 | BlockType::F16 | BlockType::Bf16)) | None => {
                FLOAT_TOLERANCE
            }
            Some(_) => QUANTISED_TOLERANCE,
        };
        Ok(ProbeOutcome {
            max_error,
            tolerance: relative * magnitude,
        })
    }

    fn outputs<B: Backend>(&self, backend: &mut B) -> Result<Vec<f32>, EngineError> {
        let stored = self.matrices.unwrap_or(FLOATS);
        match self.stage {
            Stage::Embed => {
                let table = backend.prepare_matrix(sample(stored, VOCABULARY, WIDTH))?;
                let embedded = backend.embed(&table, &fed())?.into_value();
                backend.read_activation(&embedded)
            }
            Stage::NormProject => norm_project(backend, stored),
            Stage::Rope => rope(backend),
            Stage::AppendAttend => append_attend(backend),
            Stage::OutputProject => {
                let residual = activation(backend, WIDTH)?;
                let attended = activation(backend, WIDTH)?;
                let o_proj = linear(backend, stored, WIDTH)?;
                let sum = backend
                    .output_project(residual, &attended, &o_proj)?
                    .into_value();
                backend.read_activation(&sum)
            }
            Stage::GatedMlp => {
                let residual = activation(backend, WIDTH)?;
                let gate_proj = linear(backend, stored, WIDTH)?;
                let up_proj = linear(backend, stored, WIDTH)?;
                let mlp = GatedMlp {
                    norm: norm(backend)?,
                    gate_up: backend.prepare_group([gate_proj, up_proj])?,
                    down_proj: linear(backend, stored, WIDTH)?,
                };
                let sum = backend.gated_mlp(residual, &mlp)?.into_value();
                backend.read_activation(&sum)
            }
            Stage::Head => {
                let logits = head(backend, stored)?.into_value();
                backend.read_logits(&logits)
            }
            Stage::Sample => sample_tokens(backend),
        }
    }
}

/// Every type of stored matrices.
fn matrix_types() -> impl Iterator<Item = StoredType> {
    let blocks = BlockType::ALL.map(StoredType::Blocks);
    let affine = AffineLayout::all().map(StoredType::Affine);
    blocks.into_iter().chain(affine)
}

fn fed<P>() -> [FedToken<P>; TOKEN_IDS.len()] {
    TOKEN_IDS.map(FedToken::Known)
}

/// `[T, columns]` f32 that every backend can make: rows of an f32 table.
fn activation<B: Backend>(backend: &mut B, columns: usize) -> Result<B::Activation, EngineError> {
    let table = backend.prepare_matrix(sample(FLOATS, VOCABULARY, columns))?;
    Ok(backend.embed(&table, &fed())?.into_value())
}

fn qkv<B: Backend>(backend: &mut B) -> Result<Qkv<B::Activation>, EngineError> {
    Ok(Qkv {
        queries: activation(backend, WIDTH)?,
        keys: activation(backend, KV_WIDTH)?,
        values: activation(backend, KV_WIDTH)?,
    })
}

fn norm<B: Backend>(backend: &mut B) -> Result<Norm<B::Vector>, EngineError> {
    let mut random = Random(7);
    let weight: Vec<f32> = (0..WIDTH).map(|_| 1.0 + 0.1 * random.signed()).collect();
    Ok(Norm {
        weight: backend.prepare_vector(&weight)?,
        epsilon: EPSILON,
    })
}

fn linear<B: Backend>(
    backend: &mut B,
    stored: StoredType,
    rows: usize,
) -> Result<Linear<B::Matrix, B::Vector>, EngineError> {
    Ok(Linear {
        weight: backend.prepare_matrix(sample(stored, rows, WIDTH))?,
        bias: None,
    })
}

fn norm_project<B: Backend>(backend: &mut B, stored: StoredType) -> Result<Vec<f32>, EngineError> {
    let hidden = activation(backend, WIDTH)?;
    let norm = norm(backend)?;
    let q_proj = linear(backend, stored, WIDTH)?;
    let k_proj = linear(backend, stored, KV_WIDTH)?;
    let v_proj = linear(backend, stored, KV_WIDTH)?;
    let projections = backend.prepare_group([q_proj, k_proj, v_proj])?;
    let projected = backend.norm_project(&hidden, &norm, &projections)?;
    read_qkv(backend, &projected.into_value())
}

fn read_qkv<B: Backend>(
    backend: &mut B,
    qkv: &Qkv<B::Activation>,
) -> Result<Vec<f32>, EngineError> {
    let mut values = backend.read_activation(&qkv.queries)?;
    values.extend(backend.read_activation(&qkv.keys)?);
    values.extend(backend.read_activation(&qkv.values)?);
    Ok(values)
}

fn prepare_rope<B: Backend>(backend: &mut B) -> Result<(), EngineError> {
    backend.prepare_rope(&sample_rope(), VOCABULARY)
}

fn sample_rope() -> RopeSpec {
    let pairs = SHAPE.head_dim / 2;
    let inverse_frequencies =
        (0..u32::try_from(pairs).unwrap_or(0)).map(|i| 1e4_f64.powf(-f64::from(i) / 32.0));
    RopeSpec {
        pairing: RopePairing::HalfSplit,
        inverse_frequencies: inverse_frequencies.collect(),
        attention_factor: 1.0,
    }
}

fn rope<B: Backend>(backend: &mut B) -> Result<Vec<f32>, EngineError> {
    prepare_rope(backend)?;
    let qkv = qkv(backend)?;
    let rotated = backend.rope(qkv, None, &[0, 7, 63], SHAPE)?.into_value();
    read_qkv(backend, &rotated)
}

fn append_attend<B: Backend>(backend: &mut B) -> Result<Vec<f32>, EngineError> {
    prepare_rope(backend)?;
    let qkv = qkv(backend)?;
    let mut cache = backend.new_cache(1, SHAPE, TOKEN_IDS.len())?;
    backend.reserve(&mut cache, TOKEN_IDS.len())?;
    let mut spans = [RowSpan {
        cache: &mut cache,
        tokens: 0..TOKEN_IDS.len(),
        start: 0,
        failure: None,
    }];
    let attended = backend.append_attend(&qkv, &mut spans, 0, SHAPE, StatsRequest::None)?;
    let output = attended.into_value().output;
    if let Some(failure) = spans[0].failure.take() {
        return Err(failure);
    }
    backend.read_activation(&output)
}

fn head<B: Backend>(
    backend: &mut B,
    stored: StoredType,
) -> Result<Ran<B::Device, B::Logits>, EngineError> {
    let hidden = activation(backend, WIDTH)?;
    let norm = norm(backend)?;
    let head = backend.prepare_matrix(sample(stored, VOCABULARY, WIDTH))?;
    backend.head(&hidden, &[0, 2], &norm, &head)
}

fn sample_tokens<B: Backend>(backend: &mut B) -> Result<Vec<f32>, EngineError> {
    let logits = head(backend, FLOATS)?;
    let parameters = SamplingParameters {
        temperature: 0.7,
        top_k: 20,
        top_p: 0.9,
        min_p: 0.01,
        seed: 11,
        repetition_penalty: 1.1,
        frequency_penalty: 0.1,
        presence_penalty: 0.1,
        penalty_window_tokens: 64,
        bias: vec![(3, 0.5)],
        allowed: Vec::new(),
    };
    let mut requests = [0, 1].map(|logits_row| SampleRequest {
        logits_row,
        parameters: &parameters,
        history: &TOKEN_IDS,
        prompt_tokens: 1,
        output_index: 2,
        top_logprobs: Some(1),
    });
    let chosen = backend.sample(&logits, &mut requests)?.into_value();
    let mut values = Vec::new();
    for result in chosen {
        let result = result?;
        // Ids of this vocabulary are exact in f32.
        values.push(f32::from(
            u16::try_from(result.token_id).unwrap_or(u16::MAX),
        ));
        values.extend(result.logprob);
    }
    Ok(values)
}

/// A small generator: the cases are the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea, Flood 2014).
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    /// Uniform in -1..1.
    fn signed(&mut self) -> f32 {
        let fraction = u16::from_le_bytes([self.byte(), self.byte()]);
        f32::from(fraction) / 32768.0 - 1.0
    }
}

/// Makes a random matrix of any type.
fn sample(stored: StoredType, rows: usize, columns: usize) -> StoredMatrix {
    match stored {
        StoredType::Blocks(block_type) => sample_matrix(block_type, rows, columns).into(),
        StoredType::Affine(layout) => StoredMatrix::Affine(sample_affine(layout, rows, columns)),
    }
}

/// Makes a matrix of random groups whose weights lie around 0, with scales in f16, the same on every machine.
fn sample_affine(layout: AffineLayout, rows: usize, columns: usize) -> AffineMatrix {
    let mut random = Random(u64::try_from(rows * 31 + columns).unwrap_or(1));
    let words = rows * layout.row_words(columns).unwrap_or(0);
    let packed: Vec<u8> = (0..4 * words).map(|_| random.byte()).collect();
    let groups = columns / layout.group();
    let largest_code = f32::from(u8::MAX >> (8 - layout.bits()));
    let (mut scales, mut biases) = (Vec::new(), Vec::new());
    for _ in 0..rows * groups {
        let scale = 0.2 / largest_code * (1.0 + 0.5 * random.signed());
        scales.extend(half::f16::from_f32(scale).to_le_bytes());
        biases.extend(half::f16::from_f32(-0.5 * scale * largest_code).to_le_bytes());
    }
    let floats = |bytes: &[u8]| {
        Matrix::new(BlockType::F16, rows, groups, ByteSource::copy_of(bytes))
            .expect("one scale and bias a group")
    };
    let (scales, biases) = (floats(&scales), floats(&biases));
    AffineMatrix::new(layout, ByteSource::copy_of(&packed), scales, biases)
        .expect("words and groups are those of one shape")
}

/// Makes a matrix of random blocks with scales of ordinary size, the same on every machine.
///
/// # Panics
/// If a row of `columns` is no whole number of blocks.
#[must_use]
pub fn sample_matrix(block_type: BlockType, rows: usize, columns: usize) -> Matrix {
    let mut random = Random(u64::try_from(rows * 31 + columns).unwrap_or(1));
    let mut bytes = Vec::new();
    for _ in 0..rows * columns / block_type.elements() {
        match block_type {
            BlockType::F32 => bytes.extend(random.signed().to_le_bytes()),
            BlockType::F16 => bytes.extend(half::f16::from_f32(random.signed()).to_le_bytes()),
            BlockType::Bf16 => bytes.extend(half::bf16::from_f32(random.signed()).to_le_bytes()),
            _ => {
                let start = bytes.len();
                bytes.extend((0..block_type.bytes()).map(|_| random.byte()));
                for &offset in scale_offsets(block_type) {
                    let scale = scale(block_type) * (1.0 + 0.5 * random.signed());
                    let place = &mut bytes[start + offset..];
                    if block_type == BlockType::Q8Affine {
                        place[..4].copy_from_slice(&scale.to_le_bytes());
                    } else {
                        place[..2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
                    }
                }
            }
        }
    }
    Matrix::new(block_type, rows, columns, ByteSource::copy_of(&bytes))
        .expect("rows are whole blocks by construction")
}

/// A scale with which the largest weight of a type is about 0.1, so that outputs are of the order of 1.
const fn scale(block_type: BlockType) -> f32 {
    let largest_code = match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::Bf16 => 1.0,
        BlockType::Q4_0 => 8.0,
        BlockType::Q4_1 => 15.0,
        BlockType::Q5_0 => 16.0,
        BlockType::Q5_1 => 31.0,
        BlockType::Q8_0 | BlockType::Iq4Nl => 127.0,
        BlockType::Q8Affine => 255.0,
        BlockType::Q2K => 15.0 * 3.0,
        BlockType::Q3K => 32.0 * 4.0,
        BlockType::Q4K => 63.0 * 15.0,
        BlockType::Q5K => 63.0 * 31.0,
        BlockType::Q6K => 127.0 * 32.0,
    };
    0.1 / largest_code
}

/// Where a block keeps its scales, f16 but for Q8_AFFINE's f32: random bits there could be infinite.
const fn scale_offsets(block_type: BlockType) -> &'static [usize] {
    match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::Bf16 => &[],
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 | BlockType::Iq4Nl => &[0],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
        BlockType::Q8Affine => &[0, 4],
        BlockType::Q2K => &[80, 82],
        BlockType::Q3K => &[108],
        BlockType::Q6K => &[208],
    }
}

#[cfg(test)]
mod tests {
    use velox_kvcache::PageBudget;

    use super::crooked::{Crooked, Fault};
    use super::*;
    use crate::backend::reference::ReferenceBackend;

    #[test]
    fn a_wrong_stage_is_found_for_every_type_and_no_other_stage_is_blamed() {
        let budget = PageBudget::new(1 << 20);
        let mut backend = Crooked::new(Fault::HeadIsOff, &budget);
        let mut oracle = ReferenceBackend::new(1, budget);
        for case in ProbeCase::all() {
            let outcome = case.run(&mut backend, &mut oracle).unwrap();
            assert_eq!(outcome.is_right(), case.stage != Stage::Head, "{case:?}");
            assert_eq!(outcome.fault().is_some(), case.stage == Stage::Head);
        }
    }

    #[test]
    fn the_reference_agrees_with_itself_in_every_case() {
        let budget = PageBudget::new(1 << 20);
        let mut backend = ReferenceBackend::new(1, budget.clone());
        let mut oracle = ReferenceBackend::new(2, budget);
        for case in ProbeCase::all() {
            let outcome = case.run(&mut backend, &mut oracle).unwrap();
            assert!(outcome.max_error == 0.0, "{case:?}: {outcome:?}");
            assert!(outcome.tolerance > 0.0, "{case:?} compares nothing");
        }
    }
}
