//! Whether the logits of a token depend on what else is in the batch.

use velox_kernels::affine::StoredMatrix;
use velox_kernels::block::BlockType;

use super::{EPSILON, KV_WIDTH, Random, SHAPE, VOCABULARY, WIDTH, sample_matrix, sample_rope};
use crate::backend::{Backend, FedToken, RowSpan, StageCounts};
use crate::error::EngineError;
use crate::graph::{Batch, Transformer, Watch};
use crate::spec::{Architecture, LayerTensors, LinearTensors, ModelSpec, ModelTensors};
use crate::step::Progress;

/// Tokens of the row that is compared: more than any kernel takes at a time, and more than a page of the cache.
const ROW_TOKENS: usize = 35;
/// Tokens of the row beside it.
const COMPANION_TOKENS: usize = 5;
/// Where the row is cut when it runs beside the other one.
const CUT: usize = 3;

struct Unwatched;

impl Progress for Unwatched {
    fn layer_done(&self) {}
}

/// Runs a tiny model of every block type over the same tokens in one chunk alone, and in two chunks before and behind
/// those of another row. Returns whether every logit came out with the same bits.
///
/// # Errors
/// What the backend says.
pub(crate) fn is_batch_invariant<B: Backend>(backend: &mut B) -> Result<bool, EngineError> {
    let spec = spec();
    let model = Transformer::new(backend, &spec, tensors(), &mut |_| {})?;
    let row: Vec<u32> = token_ids(3, ROW_TOKENS);
    let companion: Vec<u32> = token_ids(5, COMPANION_TOKENS);
    let new_cache = |backend: &mut B, tokens| model.new_cache(backend, tokens);

    let mut alone = new_cache(backend, ROW_TOKENS)?;
    let expected = pass(backend, &model, &mut [(&mut alone, 0, &row)], 0)?;

    let mut cache = new_cache(backend, ROW_TOKENS)?;
    let mut other = new_cache(backend, COMPANION_TOKENS)?;
    let (head, tail) = row.split_at(CUT);
    let (other_head, other_tail) = companion.split_at(COMPANION_TOKENS - 1);
    let mut before = [(&mut cache, 0, head), (&mut other, 0, other_head)];
    let mut found = pass(backend, &model, &mut before, 0)?;
    let mut behind = [
        (&mut other, other_head.len(), other_tail),
        (&mut cache, CUT, tail),
    ];
    found.extend(pass(backend, &model, &mut behind, 1)?);
    let same = |(found, expected): (&f32, &f32)| found.to_bits() == expected.to_bits();
    Ok(found.len() == expected.len() && found.iter().zip(&expected).all(same))
}

/// A row of a pass: its cache, the position of its first token, its tokens.
type Part<'a, C> = (&'a mut C, usize, &'a [u32]);

/// Runs the model over the parts and returns the logits of every token of one of them.
fn pass<B: Backend>(
    backend: &mut B,
    model: &Transformer<B>,
    parts: &mut [Part<'_, B::Cache>],
    wanted: usize,
) -> Result<Vec<f32>, EngineError> {
    let mut fed = Vec::new();
    let mut positions = Vec::new();
    let mut spans = Vec::new();
    let mut rows = Vec::new();
    for (index, (cache, start, tokens)) in parts.iter_mut().enumerate() {
        backend.reserve(cache, tokens.len())?;
        let from = fed.len();
        fed.extend(tokens.iter().copied().map(FedToken::Known));
        positions.extend(*start..*start + tokens.len());
        if index == wanted {
            rows.extend(from..fed.len());
        }
        spans.push(RowSpan {
            cache: &mut **cache,
            tokens: from..fed.len(),
            start: *start,
            failure: None,
        });
    }
    let batch = Batch {
        tokens: &fed,
        positions: &positions,
        spans: &mut spans,
    };
    let mut watch = Watch {
        progress: &Unwatched,
        stages: &mut StageCounts::default(),
    };
    let hidden = model.forward(backend, batch, &mut watch)?;
    if let Some(failure) = spans.iter_mut().find_map(|span| span.failure.take()) {
        return Err(failure);
    }
    let logits = model.logits(backend, &hidden, &rows)?;
    backend.read_logits(logits.value())
}

fn token_ids(stride: u32, count: usize) -> Vec<u32> {
    let vocabulary = u32::try_from(VOCABULARY).unwrap_or(u32::MAX);
    (0..vocabulary)
        .map(|index| index * stride % vocabulary)
        .take(count)
        .collect()
}

/// Two layers of seven matrices and an embedding: one of every block type in all.
fn spec() -> ModelSpec {
    ModelSpec {
        architecture: Architecture::Llama,
        hidden_size: WIDTH,
        intermediate_size: WIDTH,
        n_layers: 2,
        n_heads: SHAPE.n_heads,
        n_kv_heads: SHAPE.n_kv_heads,
        head_dim: SHAPE.head_dim,
        vocab_size: VOCABULARY,
        context_length: VOCABULARY,
        rms_norm_eps: EPSILON,
        rope: sample_rope(),
        sliding_window: None,
    }
}

fn tensors() -> ModelTensors<StoredMatrix> {
    let mut random = Random(13);
    let mut norm = || -> Vec<f32> { (0..WIDTH).map(|_| 1.0 + 0.1 * random.signed()).collect() };
    let [layers @ .., last] = BlockType::ALL;
    let (first, second) = layers.split_at(7);
    let layers = [first, second].map(|types| {
        let linear = |place: usize, rows| LinearTensors {
            weight: sample_matrix(types[place], rows, WIDTH).into(),
            bias: None,
        };
        LayerTensors {
            attention_norm: norm(),
            q_proj: linear(0, WIDTH),
            k_proj: linear(1, KV_WIDTH),
            v_proj: linear(2, KV_WIDTH),
            o_proj: linear(3, WIDTH),
            qk_norm: None,
            mlp_norm: norm(),
            gate_proj: linear(4, WIDTH),
            up_proj: linear(5, WIDTH),
            down_proj: linear(6, WIDTH),
        }
    });
    ModelTensors {
        embedding: sample_matrix(last, VOCABULARY, WIDTH).into(),
        layers: layers.into(),
        final_norm: norm(),
        head: None,
    }
}

#[cfg(test)]
mod tests {
    use velox_kernels::cpu::CpuKernelSet;
    use velox_kvcache::PageBudget;

    use super::super::crooked::{Crooked, Fault};
    use super::*;
    use crate::backend::cpu::CpuBackend;
    use crate::backend::reference::ReferenceBackend;

    #[test]
    fn the_host_backends_do_not_depend_on_the_batch() {
        let budget = PageBudget::new(1 << 24);
        let mut reference = ReferenceBackend::new(1, budget.clone());
        assert!(is_batch_invariant(&mut reference).unwrap());
        let mut cpu = CpuBackend::new(CpuKernelSet::detect(), 2, budget).unwrap();
        assert!(is_batch_invariant(&mut cpu).unwrap());
    }

    #[test]
    fn a_backend_that_looks_at_the_whole_batch_is_found_out() {
        let budget = PageBudget::new(1 << 24);
        let probe = |fault| is_batch_invariant(&mut Crooked::new(fault, &budget)).unwrap();
        assert!(probe(Fault::None));
        // The same error everywhere is wrong, but invariant.
        assert!(probe(Fault::HeadIsOff));
        assert!(!probe(Fault::BatchLeaks));
    }
}
