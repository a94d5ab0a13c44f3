//! Sampling options with every default filled in.

use std::ops::RangeInclusive;

use velox_proto::limits::MAX_TOKEN_LIST;
use velox_proto::v1;
use velox_proto::worker::v1 as wire;

use super::{ModelLimits, check_tokens, outside};
use crate::error::GatewayError;

/// Tokens that the repetition penalty sees unless told otherwise.
const DEFAULT_PENALTY_WINDOW_TOKENS: u32 = 64;

/// Above this a distribution is flat for every model.
const MAX_TEMPERATURE: f32 = 100.0;

/// Larger repetition penalties only forbid.
const MAX_REPETITION_PENALTY: f32 = 100.0;

/// Larger penalties per token only forbid.
const MAX_PENALTY: f32 = 100.0;

/// Larger biases only force or forbid; sums of them stay finite.
const MAX_BIAS: f32 = 1.0e6;

/// Checks the options and fills in the defaults of the public contract.
pub(super) fn complete(
    model: &ModelLimits,
    options: v1::SamplingOptions,
    fresh_seed: u64,
) -> Result<wire::Sampling, GatewayError> {
    if options.logit_bias.len() > MAX_TOKEN_LIST {
        return Err(GatewayError::invalid(
            "sampling.logit_bias",
            format!(
                "{} biases, limit is {MAX_TOKEN_LIST}",
                options.logit_bias.len()
            ),
        ));
    }
    for bias in &options.logit_bias {
        if bias.token_id >= model.vocab_size {
            return Err(outside(model, "sampling.logit_bias", bias.token_id));
        }
        within("sampling.logit_bias", bias.bias, -MAX_BIAS..=MAX_BIAS)?;
    }
    check_tokens(
        model,
        "sampling.allowed_token_ids",
        &options.allowed_token_ids,
    )?;
    let repetition_penalty = within(
        "sampling.repetition_penalty",
        options.repetition_penalty.unwrap_or(1.0),
        f32::MIN_POSITIVE..=MAX_REPETITION_PENALTY,
    )?;
    let penalty =
        |field, value: Option<f32>| within(field, value.unwrap_or(0.0), -MAX_PENALTY..=MAX_PENALTY);
    Ok(wire::Sampling {
        temperature: within(
            "sampling.temperature",
            options.temperature.unwrap_or(0.0),
            0.0..=MAX_TEMPERATURE,
        )?,
        top_k: options.top_k.unwrap_or(0).min(model.vocab_size),
        top_p: within(
            "sampling.top_p",
            options.top_p.unwrap_or(1.0),
            f32::MIN_POSITIVE..=1.0,
        )?,
        min_p: within("sampling.min_p", options.min_p.unwrap_or(0.0), 0.0..=1.0)?,
        seed: options.seed.unwrap_or(fresh_seed),
        repetition_penalty,
        frequency_penalty: penalty("sampling.frequency_penalty", options.frequency_penalty)?,
        presence_penalty: penalty("sampling.presence_penalty", options.presence_penalty)?,
        penalty_window_tokens: options
            .penalty_window_tokens
            .unwrap_or(DEFAULT_PENALTY_WINDOW_TOKENS)
            .min(model.context_length),
        bias_token_ids: options
            .logit_bias
            .iter()
            .map(|bias| bias.token_id)
            .collect(),
        biases: options.logit_bias.iter().map(|bias| bias.bias).collect(),
        allowed_token_ids: options.allowed_token_ids,
    })
}

/// Refuses what is not a number in the range; -0 counts as 0.
fn within(
    field: &'static str,
    value: f32,
    range: RangeInclusive<f32>,
) -> Result<f32, GatewayError> {
    if range.contains(&value) {
        return Ok(value + 0.0);
    }
    let name = field.rsplit('.').next().unwrap_or(field);
    let (least, most) = (*range.start(), *range.end());
    let allowed = if least == f32::MIN_POSITIVE {
        format!("above 0 and at most {most}")
    } else {
        format!("between {least} and {most}")
    };
    Err(GatewayError::invalid(
        field,
        format!("{name} is {value}, must be {allowed}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_field_the_value_and_the_bounds() {
        let text = |field, value, range| within(field, value, range).unwrap_err().to_string();
        assert_eq!(
            text("sampling.temperature", f32::NAN, 0.0..=MAX_TEMPERATURE),
            "temperature is NaN, must be between 0 and 100"
        );
        assert_eq!(
            text("sampling.top_p", 0.0, f32::MIN_POSITIVE..=1.0),
            "top_p is 0, must be above 0 and at most 1"
        );
    }
}
