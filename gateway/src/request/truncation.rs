//! What happens to a prompt that does not fit the context.

use velox_proto::v1;

use super::{DEFAULT_MAX_TOKENS, ModelLimits, index};
use crate::error::GatewayError;

/// What happens to a prompt that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Truncation {
    /// It is refused.
    Refuse,
    /// It loses tokens behind the first `sink_tokens`, so many that the answer gets its room.
    Cut { sink_tokens: u32, room: u32 },
}

fn truncation(
    model: &ModelLimits,
    options: &v1::GenerationOptions,
) -> Result<Truncation, GatewayError> {
    match (options.truncate_prompt, options.truncation_sink_tokens) {
        // Whoever lets the prompt be cut wants an answer; but not one that leaves nothing of it.
        (true, sink_tokens) => Ok(Truncation::Cut {
            sink_tokens: sink_tokens.unwrap_or_default(),
            room: options
                .max_tokens
                .unwrap_or(DEFAULT_MAX_TOKENS)
                .min(model.context_length / 2)
                .max(1),
        }),
        (false, None) => Ok(Truncation::Refuse),
        (false, Some(_)) => Err(GatewayError::invalid(
            "generation.truncation_sink_tokens",
            "truncation_sink_tokens needs truncate_prompt",
        )),
    }
}

/// Makes a prompt fit the context, which keeps room for one token at least. Returns how many tokens it lost.
pub(super) fn fit(
    model: &ModelLimits,
    prompt: &mut Vec<u32>,
    options: &v1::GenerationOptions,
) -> Result<u32, GatewayError> {
    let truncation = truncation(model, options)?;
    let limit = model.context_length.saturating_sub(1);
    if prompt.len() <= index(limit) {
        return Ok(0);
    }
    let (sink_tokens, kept) = match truncation {
        Truncation::Cut { sink_tokens, room } if limit > 0 => {
            (sink_tokens, model.context_length - room)
        }
        Truncation::Cut { .. } | Truncation::Refuse => {
            return Err(GatewayError::PromptTooLong {
                tokens: prompt.len(),
                limit,
            });
        }
    };
    if sink_tokens >= kept {
        return Err(GatewayError::invalid(
            "generation.truncation_sink_tokens",
            format!(
                "truncation_sink_tokens is {sink_tokens}, the cut prompt has {kept} tokens and must keep its last"
            ),
        ));
    }
    let excess = prompt.len() - index(kept);
    let sink = index(sink_tokens);
    prompt.drain(sink..sink + excess);
    Ok(u32::try_from(excess).unwrap_or(u32::MAX))
}
