//! From named tensors to a model, for both naming schemes.

use velox_kernels::affine::StoredMatrix;

use super::tensors::TensorSet;
use crate::error::EngineError;
use crate::spec::{
    Architecture, LayerTensors, LinearTensors, ModelSpec, ModelTensors, QkNormTensors,
};

/// How a file format names the tensors; layers are `{layers}.{number}.{name}`.
#[derive(Debug)]
pub(super) struct Naming {
    pub(super) embedding: &'static str,
    pub(super) final_norm: &'static str,
    pub(super) head: &'static str,
    layers: &'static str,
    attention_norm: &'static str,
    q_proj: &'static str,
    k_proj: &'static str,
    v_proj: &'static str,
    o_proj: &'static str,
    q_norm: &'static str,
    k_norm: &'static str,
    mlp_norm: &'static str,
    gate_proj: &'static str,
    up_proj: &'static str,
    down_proj: &'static str,
}

/// Names in GGUF files.
pub(super) const GGUF: Naming = Naming {
    embedding: "token_embd.weight",
    final_norm: "output_norm.weight",
    head: "output.weight",
    layers: "blk",
    attention_norm: "attn_norm",
    q_proj: "attn_q",
    k_proj: "attn_k",
    v_proj: "attn_v",
    o_proj: "attn_output",
    q_norm: "attn_q_norm",
    k_norm: "attn_k_norm",
    mlp_norm: "ffn_norm",
    gate_proj: "ffn_gate",
    up_proj: "ffn_up",
    down_proj: "ffn_down",
};

/// Names in Hugging Face checkpoints.
pub(super) const HUGGING_FACE: Naming = Naming {
    embedding: "model.embed_tokens.weight",
    final_norm: "model.norm.weight",
    head: "lm_head.weight",
    layers: "model.layers",
    attention_norm: "input_layernorm",
    q_proj: "self_attn.q_proj",
    k_proj: "self_attn.k_proj",
    v_proj: "self_attn.v_proj",
    o_proj: "self_attn.o_proj",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    mlp_norm: "post_attention_layernorm",
    gate_proj: "mlp.gate_proj",
    up_proj: "mlp.up_proj",
    down_proj: "mlp.down_proj",
};

/// Whether a projection has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bias {
    /// It has none; one in the file is an unused tensor.
    Absent,
    /// It must have one.
    Required,
    /// The file decides.
    AsStored,
}

/// Whether the head is a matrix of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Head {
    /// It must be.
    Required,
    /// It is if the file has one, else it is the embedding.
    AsStored,
}

/// What the configuration says about optional tensors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Optional {
    pub(super) qkv_bias: Bias,
    pub(super) output_bias: Bias,
    pub(super) mlp_bias: Bias,
    pub(super) head: Head,
}

/// Takes every tensor of a model from the set, checking shapes against the spec.
pub(super) fn assemble(
    set: &mut TensorSet,
    spec: &ModelSpec,
    naming: &'static Naming,
    optional: Optional,
) -> Result<ModelTensors<StoredMatrix>, EngineError> {
    let hidden = spec.hidden_size;
    let embedding = set.matrix(naming.embedding, spec.vocab_size, hidden)?;
    let layers = (0..spec.n_layers)
        .map(|number| {
            Layer {
                set,
                spec,
                naming,
                number,
            }
            .take(optional)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let final_norm = set.vector(naming.final_norm, hidden)?;
    let head = if optional.head == Head::Required || set.contains(naming.head) {
        Some(set.matrix(naming.head, spec.vocab_size, hidden)?)
    } else {
        None
    };
    Ok(ModelTensors {
        embedding,
        layers,
        final_norm,
        head,
    })
}

struct Layer<'a> {
    set: &'a mut TensorSet,
    spec: &'a ModelSpec,
    naming: &'static Naming,
    number: usize,
}

impl Layer<'_> {
    fn take(&mut self, optional: Optional) -> Result<LayerTensors<StoredMatrix>, EngineError> {
        let ModelSpec {
            hidden_size: hidden,
            intermediate_size: intermediate,
            head_dim,
            ..
        } = *self.spec;
        let queries = self.spec.n_heads * head_dim;
        let keys = self.spec.n_kv_heads * head_dim;
        let names = self.naming;
        let qkv_bias = optional.qkv_bias;
        let qk_norm = match self.spec.architecture {
            Architecture::Qwen3 => Some(QkNormTensors {
                q_norm: self.norm(names.q_norm, head_dim)?,
                k_norm: self.norm(names.k_norm, head_dim)?,
            }),
            Architecture::Llama | Architecture::Qwen2 => None,
        };
        Ok(LayerTensors {
            attention_norm: self.norm(names.attention_norm, hidden)?,
            q_proj: self.linear(names.q_proj, [queries, hidden], qkv_bias)?,
            k_proj: self.linear(names.k_proj, [keys, hidden], qkv_bias)?,
            v_proj: self.linear(names.v_proj, [keys, hidden], qkv_bias)?,
            o_proj: self.linear(names.o_proj, [hidden, queries], optional.output_bias)?,
            qk_norm,
            mlp_norm: self.norm(names.mlp_norm, hidden)?,
            gate_proj: self.linear(names.gate_proj, [intermediate, hidden], optional.mlp_bias)?,
            up_proj: self.linear(names.up_proj, [intermediate, hidden], optional.mlp_bias)?,
            down_proj: self.linear(names.down_proj, [hidden, intermediate], optional.mlp_bias)?,
        })
    }

    fn name(&self, module: &str, kind: &str) -> String {
        format!("{}.{}.{module}.{kind}", self.naming.layers, self.number)
    }

    fn norm(&mut self, module: &str, length: usize) -> Result<Vec<f32>, EngineError> {
        let name = self.name(module, "weight");
        self.set.vector(&name, length)
    }

    fn linear(
        &mut self,
        module: &str,
        [rows, columns]: [usize; 2],
        bias: Bias,
    ) -> Result<LinearTensors<StoredMatrix>, EngineError> {
        let weight = self.name(module, "weight");
        let weight = self.set.matrix(&weight, rows, columns)?;
        let name = self.name(module, "bias");
        let wanted = match bias {
            Bias::Absent => false,
            Bias::Required => true,
            Bias::AsStored => self.set.contains(&name),
        };
        let bias = wanted.then(|| self.set.vector(&name, rows)).transpose()?;
        Ok(LinearTensors { weight, bias })
    }
}
