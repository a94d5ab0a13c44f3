//! Limits that every model must keep, whatever file it came from.

use super::blame::Blame;
use crate::error::EngineError;
use crate::spec::ModelSpec;

const MAX_LAYERS: usize = 1024;
const MAX_HEADS: usize = 4096;
const MAX_HEAD_DIM: usize = 1024;
const MAX_FEATURES: usize = 1 << 20;
const MAX_VOCABULARY: usize = 1 << 24;
const MAX_CONTEXT: usize = 1 << 30;

/// Refuses sizes with which arithmetic further on could overflow, and constants that make no sense.
///
/// # Errors
/// [`EngineError::InvalidModel`] naming the size, its limit and its value.
pub(super) fn check_spec(spec: &ModelSpec, blame: &Blame) -> Result<(), EngineError> {
    check_layers(spec.n_layers, blame)?;
    check_head_dim(spec.head_dim, blame)?;
    let sizes = [
        ("number of heads", spec.n_heads, MAX_HEADS),
        ("number of key/value heads", spec.n_kv_heads, MAX_HEADS),
        ("hidden size", spec.hidden_size, MAX_FEATURES),
        ("intermediate size", spec.intermediate_size, MAX_FEATURES),
        ("vocabulary size", spec.vocab_size, MAX_VOCABULARY),
        ("context length", spec.context_length, MAX_CONTEXT),
    ];
    for (name, value, limit) in sizes {
        check_size(name, value, limit, blame)?;
    }
    if !spec.n_heads.is_multiple_of(spec.n_kv_heads) {
        return Err(blame.invalid(format!(
            "number of heads is {}, no multiple of the {} key/value heads",
            spec.n_heads, spec.n_kv_heads
        )));
    }
    let epsilon = spec.rms_norm_eps;
    if !(epsilon > 0.0 && epsilon < 1.0) {
        return Err(blame.invalid(format!(
            "epsilon of the RMS norm is {epsilon}, must lie between 0 and 1"
        )));
    }
    let frequencies = &spec.rope.inverse_frequencies;
    if let Some(bad) = frequencies
        .iter()
        .find(|frequency| !(frequency.is_finite() && **frequency > 0.0))
    {
        return Err(blame.invalid(format!(
            "rotary embedding has the frequency {bad}, must be positive and finite"
        )));
    }
    let factor = spec.rope.attention_factor;
    if !(factor.is_finite() && factor > 0.0) {
        return Err(blame.invalid(format!(
            "attention factor of the rotary embedding is {factor}, must be positive and finite"
        )));
    }
    Ok(())
}

/// Checks the number of layers before anything is read per layer.
pub(super) fn check_layers(n_layers: usize, blame: &Blame) -> Result<(), EngineError> {
    check_size("number of layers", n_layers, MAX_LAYERS, blame)
}

/// Checks the length of a head before its frequencies are computed.
pub(super) fn check_head_dim(head_dim: usize, blame: &Blame) -> Result<(), EngineError> {
    check_size("head dimension", head_dim, MAX_HEAD_DIM, blame)?;
    if !head_dim.is_multiple_of(2) {
        return Err(blame.invalid(format!(
            "head dimension is {head_dim}, rotary embedding needs an even one"
        )));
    }
    Ok(())
}

fn check_size(name: &str, value: usize, limit: usize, blame: &Blame) -> Result<(), EngineError> {
    if value == 0 || value > limit {
        return Err(blame.invalid(format!("{name} is {value}, limit is 1 to {limit}")));
    }
    Ok(())
}

/// Rounds a constant of a file to the precision in which models compute.
pub(super) fn to_f32(value: f64) -> f32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "rounding is meant; overflow gives infinity, which the checks above refuse"
    )]
    let rounded = value as f32;
    rounded
}
