//! config.json of a Hugging Face checkpoint to a model's sizes and constants.

use serde_json::{Map, Value};

use super::affine_rules::AffineRules;
use super::assemble::{Bias, Head, Optional};
use super::blame::Blame;
use super::hf_rope;
use super::json_fields::Fields;
use super::sizes::{check_head_dim, check_layers, check_spec, to_f32};
use crate::error::EngineError;
use crate::spec::{Architecture, ModelSpec};

/// Fields that ask for something not computed here, unless their value says that they do nothing.
const REFUSED: [(&str, &[Neutral]); 32] = [
    ("attention_multiplier", &[]),
    ("attn_logit_softcapping", &[]),
    ("dim_model_base", &[]),
    ("embedding_multiplier", &[Neutral::Number(1.0)]),
    ("final_logit_softcapping", &[]),
    ("first_k_dense_replace", &[]),
    ("kv_lora_rank", &[]),
    ("logit_scale", &[Neutral::Number(1.0)]),
    ("logits_scaling", &[Neutral::Number(1.0)]),
    ("moe_intermediate_size", &[]),
    ("n_routed_experts", &[Neutral::Number(0.0)]),
    ("n_shared_experts", &[Neutral::Number(0.0)]),
    ("no_rope_layer_interval", &[]),
    ("no_rope_layers", &[]),
    ("num_experts", &[Neutral::Number(0.0)]),
    ("num_experts_per_tok", &[Neutral::Number(0.0)]),
    ("num_local_experts", &[Neutral::Number(0.0)]),
    ("partial_rotary_factor", &[Neutral::Number(1.0)]),
    ("q_lora_rank", &[]),
    ("qk_layernorm", &[Neutral::False]),
    ("qk_nope_head_dim", &[]),
    ("query_pre_attn_scalar", &[]),
    ("residual_multiplier", &[Neutral::Number(1.0)]),
    ("rotary_pct", &[Neutral::Number(1.0)]),
    ("scale_depth", &[]),
    ("scale_emb", &[Neutral::Number(1.0)]),
    ("text_config", &[]),
    ("use_bidirectional_attention", &[Neutral::False]),
    ("use_mrope", &[Neutral::False]),
    ("use_qk_norm", &[Neutral::False]),
    ("v_head_dim", &[]),
    ("vision_config", &[]),
];

/// A value under which a refused field does nothing.
#[derive(Debug, Clone, Copy)]
enum Neutral {
    False,
    Number(f64),
}

impl Neutral {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::False => value == &Value::Bool(false),
            Self::Number(number) => value.as_f64() == Some(number),
        }
    }
}

/// What the library takes for Mistral where the file says nothing.
const MISTRAL_DEFAULT_WINDOW: usize = 4096;
/// The same for the length of a Qwen3 head.
const QWEN3_DEFAULT_HEAD_DIM: usize = 128;

/// A checked configuration.
#[derive(Debug)]
pub struct Config {
    /// Sizes and constants.
    pub spec: ModelSpec,
    /// How quantised matrices are packed; `None` if there are none.
    pub(super) affine: Option<AffineRules>,
    pub(super) optional: Optional,
    pub(super) object: Map<String, Value>,
}

/// Model types with a graph here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

impl Family {
    const ALL: [(&'static str, &'static str, Self); 4] = [
        ("llama", "LlamaForCausalLM", Self::Llama),
        ("mistral", "MistralForCausalLM", Self::Mistral),
        ("qwen2", "Qwen2ForCausalLM", Self::Qwen2),
        ("qwen3", "Qwen3ForCausalLM", Self::Qwen3),
    ];

    fn of(config: &Fields<'_>) -> Result<Self, EngineError> {
        let model_type = config
            .text("model_type")?
            .ok_or_else(|| config.missing("model_type"))?;
        let (_, class, family) = Self::ALL
            .into_iter()
            .find(|(name, ..)| *name == model_type)
            .ok_or_else(|| config.unsupported("model_type"))?;
        match config.texts("architectures")? {
            Some(classes) if classes != [class] => Err(config.unsupported("architectures")),
            _ => Ok(family),
        }
    }

    fn architecture(self) -> Architecture {
        match self {
            Self::Llama | Self::Mistral => Architecture::Llama,
            Self::Qwen2 => Architecture::Qwen2,
            Self::Qwen3 => Architecture::Qwen3,
        }
    }
}

/// Parses and checks config.json.
///
/// # Errors
/// [`EngineError::InvalidModel`] for a missing or senseless field, [`EngineError::UnsupportedModel`] naming the field
/// that asks for something not computed here; `file` is the name that they carry.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Config, EngineError> {
    let blame = Blame::new(file);
    let object: Map<String, Value> = serde_json::from_slice(bytes)
        .map_err(|error| blame.invalid(format!("is no JSON object: {error}")))?;
    let config = Fields::new(&object, "", &blame);
    let family = Family::of(&config)?;
    for (name, neutral) in REFUSED {
        if let Some(value) = config.get(name)
            && !neutral.iter().any(|neutral| neutral.is(value))
        {
            return Err(config.unsupported(name));
        }
    }
    if config.text("hidden_act")?.is_some_and(|act| act != "silu") {
        return Err(config.unsupported("hidden_act"));
    }
    let affine = AffineRules::read(&config, &blame)?;
    let spec = read_spec(&config, family, &blame)?;
    check_spec(&spec, &blame)?;
    let optional = read_optional(&config, family)?;
    Ok(Config {
        spec,
        affine,
        optional,
        object,
    })
}

fn read_spec(config: &Fields<'_>, family: Family, blame: &Blame) -> Result<ModelSpec, EngineError> {
    let hidden_size = config.required_size("hidden_size")?;
    let n_heads = config.required_size("num_attention_heads")?;
    let n_layers = config.required_size("num_hidden_layers")?;
    let context_length = config.required_size("max_position_embeddings")?;
    let head_dim = match config.size("head_dim")? {
        Some(head_dim) => head_dim,
        None if family == Family::Qwen3 && !config.has("head_dim") => QWEN3_DEFAULT_HEAD_DIM,
        None => hidden_size
            .checked_div(n_heads)
            .filter(|_| hidden_size.is_multiple_of(n_heads))
            .ok_or_else(|| {
                blame.invalid(format!(
                    "hidden_size is {hidden_size}, no multiple of num_attention_heads {n_heads}"
                ))
            })?,
    };
    check_layers(n_layers, blame)?;
    check_head_dim(head_dim, blame)?;
    Ok(ModelSpec {
        architecture: family.architecture(),
        hidden_size,
        intermediate_size: config.required_size("intermediate_size")?,
        n_layers,
        n_heads,
        n_kv_heads: config.size("num_key_value_heads")?.unwrap_or(n_heads),
        head_dim,
        vocab_size: config.required_size("vocab_size")?,
        context_length,
        rms_norm_eps: to_f32(config.required_number("rms_norm_eps")?),
        rope: hf_rope::read(config, head_dim, context_length, blame)?,
        sliding_window: read_window(config, family, n_layers)?
            .filter(|window| *window < context_length),
    })
}

/// `layer_types` wins over the older fields where it is given.
fn read_window(
    config: &Fields<'_>,
    family: Family,
    n_layers: usize,
) -> Result<Option<usize>, EngineError> {
    let window = match config.size("sliding_window")? {
        Some(0) => return Err(config.unsupported("sliding_window")),
        None if family == Family::Mistral && !config.has("sliding_window") => {
            Some(MISTRAL_DEFAULT_WINDOW)
        }
        window => window,
    };
    if let Some(types) = config.texts("layer_types")? {
        let all = |wanted| types.len() == n_layers && types.iter().all(|kind| *kind == wanted);
        return match (all("full_attention"), all("sliding_attention"), window) {
            (true, ..) => Ok(None),
            (_, true, Some(window)) => Ok(Some(window)),
            _ => Err(config.unsupported("layer_types")),
        };
    }
    match family {
        Family::Llama => Ok(None),
        Family::Mistral => Ok(window),
        Family::Qwen2 | Family::Qwen3 => {
            if !config.flag("use_sliding_window")?.unwrap_or(false) {
                return Ok(None);
            }
            // Layers from `max_window_layers` on slide; a mixture of both kinds is not computed here.
            match config.size("max_window_layers")? {
                Some(0) => Ok(window),
                Some(first) if first >= n_layers => Ok(None),
                _ => Err(config.unsupported("max_window_layers")),
            }
        }
    }
}

fn read_optional(config: &Fields<'_>, family: Family) -> Result<Optional, EngineError> {
    let flagged = |name: &str| -> Result<Bias, EngineError> {
        Ok(if config.flag(name)?.unwrap_or(false) {
            Bias::Required
        } else {
            Bias::Absent
        })
    };
    let (qkv_bias, output_bias, mlp_bias) = match family {
        Family::Llama => {
            let attention = flagged("attention_bias")?;
            (attention, attention, flagged("mlp_bias")?)
        }
        Family::Mistral => (Bias::Absent, Bias::Absent, Bias::Absent),
        Family::Qwen2 => (Bias::Required, Bias::Absent, Bias::Absent),
        Family::Qwen3 => {
            let attention = flagged("attention_bias")?;
            (attention, attention, Bias::Absent)
        }
    };
    Ok(Optional {
        qkv_bias,
        output_bias,
        mlp_bias,
        // Libraries disagree on the default; a head in the file is used, and only an explicit "not tied" demands one.
        head: if config.flag("tie_word_embeddings")? == Some(false) {
            Head::Required
        } else {
            Head::AsStored
        },
    })
}
