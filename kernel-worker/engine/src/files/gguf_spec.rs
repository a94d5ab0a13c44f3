//! From GGUF metadata to a model's sizes and constants.
//!
//! Keys in the architecture's own namespace are a closed list: a key that is not known here could change what the
//! model computes, so it is refused by name, unless its value says that it does nothing.

use super::blame::{Blame, excerpt};
use super::gguf::{Metadata, Value};
use super::rope::{RopeScaling, Yarn, inverse_frequencies};
use super::sizes::{check_head_dim, check_layers, check_spec, to_f32};
use crate::error::EngineError;
use crate::spec::{Architecture, ModelSpec, RopePairing, RopeSpec};

/// Keys below `{architecture}.` that are read here or cannot change the result.
const KNOWN_KEYS: [&str; 19] = [
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
];

/// Further keys and the one value under which they do nothing.
const NEUTRAL_VALUES: [(&str, Value<'static>); 12] = [
    ("attention.causal", Value::Bool(true)),
    ("attention.clamp_kqv", Value::Float(0.0)),
    ("attention.max_alibi_bias", Value::Float(0.0)),
    ("embedding_scale", Value::Float(1.0)),
    ("expert_count", Value::Unsigned(0)),
    ("expert_used_count", Value::Unsigned(0)),
    ("logit_scale", Value::Float(1.0)),
    ("residual_scale", Value::Float(1.0)),
    ("rope.scale_linear", Value::Float(1.0)),
    ("rope.scaling.attn_factor", Value::Float(1.0)),
    ("rope.scaling.yarn_log_multiplier", Value::Float(0.0)),
    ("use_parallel_residual", Value::Bool(false)),
];

const DEFAULT_ROPE_THETA: f64 = 10_000.0;

/// What the tensors say and the metadata does not.
#[derive(Debug)]
pub(super) struct TensorFacts {
    /// Rows of the embedding.
    pub(super) vocab_size: usize,
    /// `rope_freqs.weight`: a divisor per frequency, in place of a scaling rule.
    pub(super) frequency_divisors: Option<Vec<f32>>,
}

/// Reads one architecture's keys.
pub(super) struct SpecReader<'a> {
    metadata: &'a Metadata<'a>,
    architecture: Architecture,
    blame: &'a Blame,
}

impl<'a> SpecReader<'a> {
    /// Refuses files that hold something else than a model of a known architecture.
    pub(super) fn new(metadata: &'a Metadata<'a>, blame: &'a Blame) -> Result<Self, EngineError> {
        if let Some(kind) = metadata.text("general.type")?
            && kind != "model"
        {
            return Err(blame.unsupported(format!("general.type {}", excerpt(kind))));
        }
        let name = metadata
            .text("general.architecture")?
            .ok_or_else(|| blame.invalid("general.architecture is missing"))?;
        let architecture = [
            Architecture::Llama,
            Architecture::Qwen2,
            Architecture::Qwen3,
        ]
        .into_iter()
        .find(|known| known.name() == name)
        .ok_or_else(|| blame.unsupported(format!("general.architecture {}", excerpt(name))))?;
        let reader = Self {
            metadata,
            architecture,
            blame,
        };
        reader.refuse_unknown_keys()?;
        Ok(reader)
    }

    /// Reads the length of a query head, which the tensors of rotary divisors depend on.
    pub(super) fn head_dim(&self) -> Result<usize, EngineError> {
        let n_heads = self.size("attention.head_count")?;
        let hidden_size = self.size("embedding_length")?;
        let key_length = self.optional_size("attention.key_length")?;
        let value_length = self.optional_size("attention.value_length")?;
        if key_length != value_length && key_length.is_some() && value_length.is_some() {
            return Err(self.unsupported_pair(
                "attention.value_length",
                value_length,
                "attention.key_length",
                key_length,
            ));
        }
        let head_dim = match key_length.or(value_length) {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
            None => {
                return Err(self.blame.invalid(format!(
                    "{} is {hidden_size}, no multiple of {} {n_heads}",
                    self.key("embedding_length"),
                    self.key("attention.head_count")
                )));
            }
        };
        check_head_dim(head_dim, self.blame)?;
        let rotated = self.optional_size("rope.dimension_count")?;
        if rotated.is_some_and(|rotated| rotated != head_dim) {
            return Err(self.unsupported_pair(
                "rope.dimension_count",
                rotated,
                "attention.key_length",
                Some(head_dim),
            ));
        }
        Ok(head_dim)
    }

    /// Reads everything.
    pub(super) fn spec(&self, facts: &TensorFacts) -> Result<ModelSpec, EngineError> {
        let head_dim = self.head_dim()?;
        let n_heads = self.size("attention.head_count")?;
        let n_layers = self.size("block_count")?;
        check_layers(n_layers, self.blame)?;
        let context_length = self.size("context_length")?;
        let epsilon = self
            .metadata
            .float(&self.key("attention.layer_norm_rms_epsilon"))?
            .ok_or_else(|| self.missing("attention.layer_norm_rms_epsilon"))?;
        if let Some(stated) = self.optional_size("vocab_size")?
            && stated != facts.vocab_size
        {
            return Err(self.blame.invalid(format!(
                "{} is {stated}, the embedding has {} rows",
                self.key("vocab_size"),
                facts.vocab_size
            )));
        }
        let spec = ModelSpec {
            architecture: self.architecture,
            hidden_size: self.size("embedding_length")?,
            intermediate_size: self.size("feed_forward_length")?,
            n_layers,
            n_heads,
            n_kv_heads: self.n_kv_heads(n_heads, n_layers)?,
            head_dim,
            vocab_size: facts.vocab_size,
            context_length,
            rms_norm_eps: to_f32(epsilon),
            rope: self.rope(head_dim, context_length, facts)?,
            sliding_window: self
                .optional_size("attention.sliding_window")?
                .filter(|window| *window < context_length),
        };
        check_spec(&spec, self.blame)?;
        Ok(spec)
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture.name())
    }

    fn missing(&self, name: &str) -> EngineError {
        self.blame.invalid(format!("{} is missing", self.key(name)))
    }

    fn unsupported_pair(
        &self,
        name: &str,
        value: Option<usize>,
        other_name: &str,
        other: Option<usize>,
    ) -> EngineError {
        self.blame.unsupported(format!(
            "{} {} with {} {}",
            self.key(name),
            value.unwrap_or_default(),
            self.key(other_name),
            other.unwrap_or_default()
        ))
    }

    /// A size; 0 counts as not given, as converters write it so.
    fn optional_size(&self, name: &str) -> Result<Option<usize>, EngineError> {
        let key = self.key(name);
        let Some(value) = self.metadata.unsigned(&key)? else {
            return Ok(None);
        };
        let value = usize::try_from(value)
            .map_err(|_| self.blame.invalid(format!("{key} is {value}, too large")))?;
        Ok((value != 0).then_some(value))
    }

    fn size(&self, name: &str) -> Result<usize, EngineError> {
        self.optional_size(name)?.ok_or_else(|| {
            self.blame
                .invalid(format!("{} is missing or 0", self.key(name)))
        })
    }

    fn n_kv_heads(&self, n_heads: usize, n_layers: usize) -> Result<usize, EngineError> {
        const NAME: &str = "attention.head_count_kv";
        let key = self.key(NAME);
        if !matches!(self.metadata.get(&key), Some(Value::Array(_))) {
            return Ok(self.optional_size(NAME)?.unwrap_or(n_heads));
        }
        let per_layer = self
            .metadata
            .unsigned_array(&key, n_layers)?
            .unwrap_or_default();
        match per_layer.split_first() {
            Some((first, rest)) if rest.iter().all(|count| count == first) => {
                usize::try_from(*first)
                    .map_err(|_| self.blame.invalid(format!("{key} is {first}, too large")))
            }
            _ => Err(self
                .blame
                .unsupported(format!("{key} that differs between layers"))),
        }
    }

    fn rope(
        &self,
        head_dim: usize,
        context_length: usize,
        facts: &TensorFacts,
    ) -> Result<RopeSpec, EngineError> {
        let theta = self
            .metadata
            .float(&self.key("rope.freq_base"))?
            .unwrap_or(DEFAULT_ROPE_THETA);
        let scaling = self.scaling(context_length)?;
        let mut frequencies = inverse_frequencies(theta, head_dim, &scaling);
        if let Some(divisors) = &facts.frequency_divisors {
            if scaling != RopeScaling::None {
                return Err(self.blame.unsupported(format!(
                    "{} together with the tensor rope_freqs.weight",
                    self.key("rope.scaling.type")
                )));
            }
            for (frequency, divisor) in frequencies.iter_mut().zip(divisors) {
                *frequency /= f64::from(*divisor);
            }
        }
        Ok(RopeSpec {
            pairing: match self.architecture {
                Architecture::Llama => RopePairing::Interleaved,
                Architecture::Qwen2 | Architecture::Qwen3 => RopePairing::HalfSplit,
            },
            inverse_frequencies: frequencies,
            attention_factor: to_f32(scaling.attention_factor()),
        })
    }

    fn scaling(&self, context_length: usize) -> Result<RopeScaling, EngineError> {
        let type_key = self.key("rope.scaling.type");
        let factor = self.metadata.float(&self.key("rope.scaling.factor"))?;
        let kind = self.metadata.text(&type_key)?;
        let needs_factor = || factor.ok_or_else(|| self.missing("rope.scaling.factor"));
        match kind {
            Some("none") => Ok(RopeScaling::None),
            // Files of the time before `rope.scaling.type` mean linear when they give a factor.
            None => Ok(match factor {
                Some(factor) if factor != 1.0 && factor != 0.0 => RopeScaling::Linear { factor },
                _ => RopeScaling::None,
            }),
            Some("linear") => Ok(RopeScaling::Linear {
                factor: needs_factor()?,
            }),
            Some("yarn") => {
                let factor = needs_factor()?;
                let original = self
                    .optional_size("rope.scaling.original_context_length")?
                    .unwrap_or(context_length);
                let original = u32::try_from(original).map_err(|_| {
                    self.blame.invalid(format!(
                        "{} is {original}, too large",
                        self.key("rope.scaling.original_context_length")
                    ))
                })?;
                Ok(RopeScaling::Yarn(Yarn {
                    factor,
                    original_context: f64::from(original),
                    beta_fast: 32.0,
                    beta_slow: 1.0,
                    attention_factor: Yarn::default_attention_factor(factor),
                }))
            }
            Some(other) => Err(self
                .blame
                .unsupported(format!("{type_key} {}", excerpt(other)))),
        }
    }

    fn refuse_unknown_keys(&self) -> Result<(), EngineError> {
        let prefix = self.key("");
        for key in self.metadata.keys() {
            let Some(name) = key.strip_prefix(&prefix) else {
                continue;
            };
            if KNOWN_KEYS.contains(&name) {
                continue;
            }
            let neutral = NEUTRAL_VALUES
                .iter()
                .find(|(known, _)| *known == name)
                .is_some_and(|(_, neutral)| self.metadata.get(key) == Some(*neutral));
            if !neutral {
                return Err(self
                    .blame
                    .unsupported(format!("metadata key {}", excerpt(key))));
            }
        }
        Ok(())
    }
}
