//! Rotary embedding as config.json describes it: `rope_theta` with `rope_scaling`, or `rope_parameters` with both.

use serde_json::Value;

use super::blame::Blame;
use super::json_fields::Fields;
use super::rope::{RopeScaling, Yarn, inverse_frequencies};
use super::sizes::to_f32;
use crate::error::EngineError;
use crate::spec::{RopePairing, RopeSpec};

const DEFAULT_THETA: f64 = 10_000.0;

/// Reads the rotary embedding of heads with `head_dim` elements.
pub(super) fn read(
    config: &Fields<'_>,
    head_dim: usize,
    context_length: usize,
    blame: &Blame,
) -> Result<RopeSpec, EngineError> {
    let scaling = config.object("rope_scaling")?.filter(|old| !old.is_empty());
    let parameters = config.object("rope_parameters")?;
    let theta = config.number("rope_theta")?;
    let (object, path) = match (scaling, parameters) {
        (Some(old), Some(new)) if old != new => {
            return Err(blame.unsupported("rope_scaling beside different rope_parameters"));
        }
        (Some(object), _) => (object, "rope_scaling."),
        (None, Some(object)) => (object, "rope_parameters."),
        (None, None) => return Ok(spec(theta, head_dim, &RopeScaling::None)),
    };
    let fields = Fields::new(object, path, blame);
    if let Some((layer_type, _)) = object.iter().find(|(_, value)| value.is_object()) {
        return Err(fields.unsupported(layer_type));
    }
    if fields
        .number("partial_rotary_factor")?
        .is_some_and(|factor| factor != 1.0)
    {
        return Err(fields.unsupported("partial_rotary_factor"));
    }
    let theta = fields.number("rope_theta")?.or(theta);
    Ok(spec(
        theta,
        head_dim,
        &read_scaling(&fields, context_length)?,
    ))
}

fn spec(theta: Option<f64>, head_dim: usize, scaling: &RopeScaling) -> RopeSpec {
    RopeSpec {
        pairing: RopePairing::HalfSplit,
        inverse_frequencies: inverse_frequencies(theta.unwrap_or(DEFAULT_THETA), head_dim, scaling),
        attention_factor: to_f32(scaling.attention_factor()),
    }
}

fn read_scaling(fields: &Fields<'_>, context_length: usize) -> Result<RopeScaling, EngineError> {
    let name = if fields.get("rope_type").is_some() {
        "rope_type"
    } else {
        "type"
    };
    match fields.text(name)? {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear {
            factor: fields.required_number("factor")?,
        }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: fields.required_number("factor")?,
            low_frequency_factor: fields.required_number("low_freq_factor")?,
            high_frequency_factor: fields.required_number("high_freq_factor")?,
            original_context: fields.required_number("original_max_position_embeddings")?,
        }),
        Some("yarn") => read_yarn(fields, context_length).map(RopeScaling::Yarn),
        Some(_) => Err(fields.unsupported(name)),
    }
}

fn read_yarn(fields: &Fields<'_>, context_length: usize) -> Result<Yarn, EngineError> {
    if fields.get("truncate") == Some(&Value::Bool(false)) {
        return Err(fields.unsupported("truncate"));
    }
    let original_context = match fields.number("original_max_position_embeddings")? {
        Some(original) => original,
        None => u32::try_from(context_length)
            .map(f64::from)
            .map_err(|_| fields.missing("original_max_position_embeddings"))?,
    };
    let factor = fields.required_number("factor")?;
    let scales = (fields.number("mscale")?, fields.number("mscale_all_dim")?);
    let attention_factor = match (fields.number("attention_factor")?, scales) {
        (Some(given), _) => given,
        (None, (Some(scale), Some(scale_all))) if scale != 0.0 && scale_all != 0.0 => {
            let weighted =
                |weight: f64| (Yarn::default_attention_factor(factor) - 1.0).mul_add(weight, 1.0);
            weighted(scale) / weighted(scale_all)
        }
        _ => Yarn::default_attention_factor(factor),
    };
    Ok(Yarn {
        factor,
        original_context,
        beta_fast: fields.number("beta_fast")?.unwrap_or(32.0),
        beta_slow: fields.number("beta_slow")?.unwrap_or(1.0),
        attention_factor,
    })
}
