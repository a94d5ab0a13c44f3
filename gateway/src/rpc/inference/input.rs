//! What callers send to be made into tokens, read from their messages and bounded.

use velox_proto::v1::{self, generate_request, score_request};

use crate::error::GatewayError;
use crate::request::GenerationParts;
use crate::response::Opening;
use crate::text::{Bos, MAX_TEXT_BYTES, Markup, Message};

/// Longest JSON object of template arguments.
const MAX_ARGUMENTS_BYTES: usize = 1024 * 1024;

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 16_384;

/// Bytes of prompt for each position of the context above which a text cannot fit, so that nobody counts its
/// tokens: published vocabularies average 3 to 5 bytes a token.
const MAX_BYTES_PER_TOKEN: usize = 64;

/// A text of so many bytes is tokenized whatever the context is, so that the refusal can name tokens.
const SHORT_TEXT_BYTES: usize = 64 * 1024;

/// What tokens are made of.
pub(super) enum Input {
    Chat {
        messages: Vec<Message>,
        arguments: serde_json::Map<String, serde_json::Value>,
    },
    Text {
        text: String,
        markup: Markup,
        bos: Bos,
    },
    Ids(Vec<u32>),
}

impl Input {
    /// Bytes of the text before a template adds to it.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Chat { messages, .. } => messages
                .iter()
                .map(|message| message.role.len().saturating_add(message.content.len()))
                .fold(0, usize::saturating_add),
            Self::Text { text, .. } => text.len(),
            Self::Ids(_) => 0,
        }
    }

    /// Text that a model continues or scores.
    fn text(text: String, parse_special: bool) -> Self {
        Self::Text {
            text,
            markup: markup(parse_special),
            bos: Bos::Add,
        }
    }
}

/// A message that asks for an answer.
pub(super) struct Prompt {
    /// Name of the model; empty = the default.
    pub(super) model: String,
    pub(super) input: Input,
    pub(super) parts: GenerationParts,
    pub(super) opening: Opening,
}

impl TryFrom<v1::ChatRequest> for Prompt {
    type Error = GatewayError;

    fn try_from(request: v1::ChatRequest) -> Result<Self, GatewayError> {
        Ok(Self {
            model: request.model,
            input: Input::Chat {
                messages: messages(request.messages)?,
                arguments: arguments(&request.template_arguments_json)?,
            },
            parts: GenerationParts {
                sampling: request.sampling,
                generation: request.generation,
                policy: request.policy,
            },
            opening: Opening::Fresh,
        })
    }
}

impl TryFrom<v1::GenerateRequest> for Prompt {
    type Error = GatewayError;

    fn try_from(request: v1::GenerateRequest) -> Result<Self, GatewayError> {
        let input = match request.prompt {
            Some(generate_request::Prompt::Text(text)) => Input::text(text, request.parse_special),
            Some(generate_request::Prompt::TokenIds(ids)) => Input::Ids(ids.ids),
            None => return Err(GatewayError::invalid("prompt", "prompt is missing")),
        };
        Ok(Self {
            model: request.model,
            input,
            parts: GenerationParts {
                sampling: request.sampling,
                generation: request.generation,
                policy: request.policy,
            },
            opening: Opening::Continuing,
        })
    }
}

/// Reads what a Score call scores.
pub(super) fn scored(
    input: Option<score_request::Input>,
    parse_special: bool,
) -> Result<Input, GatewayError> {
    match input {
        Some(score_request::Input::Text(text)) => Ok(Input::text(text, parse_special)),
        Some(score_request::Input::TokenIds(ids)) => Ok(Input::Ids(ids.ids)),
        None => Err(GatewayError::invalid("input", "input is missing")),
    }
}

pub(super) fn markup(parse_special: bool) -> Markup {
    if parse_special {
        Markup::Special
    } else {
        Markup::Plain
    }
}

/// Returns the longest text that may fit a context.
pub(super) fn max_prompt_bytes(context_length: u32) -> usize {
    usize::try_from(context_length)
        .unwrap_or(usize::MAX)
        .saturating_mul(MAX_BYTES_PER_TOKEN)
        .clamp(SHORT_TEXT_BYTES, MAX_TEXT_BYTES)
}

pub(super) fn check_bytes(bytes: usize, limit: usize) -> Result<(), GatewayError> {
    if bytes > limit {
        return Err(GatewayError::PromptTextTooLong { bytes, limit });
    }
    Ok(())
}

fn messages(wire: Vec<v1::ChatMessage>) -> Result<Vec<Message>, GatewayError> {
    if wire.is_empty() || wire.len() > MAX_MESSAGES {
        return Err(GatewayError::invalid(
            "messages",
            format!("{} messages, allowed are 1 to {MAX_MESSAGES}", wire.len()),
        ));
    }
    let messages = wire.into_iter().map(|message| Message {
        role: message.role,
        content: message.content,
    });
    Ok(messages.collect())
}

fn arguments(json: &str) -> Result<serde_json::Map<String, serde_json::Value>, GatewayError> {
    let field = "template_arguments_json";
    if json.is_empty() {
        return Ok(serde_json::Map::new());
    }
    if json.len() > MAX_ARGUMENTS_BYTES {
        return Err(GatewayError::invalid(
            field,
            format!(
                "template arguments have {} bytes, limit is {MAX_ARGUMENTS_BYTES}",
                json.len()
            ),
        ));
    }
    serde_json::from_str(json).map_err(|error| {
        GatewayError::invalid(
            field,
            format!("template arguments are no JSON object: {error}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use velox_proto::error::{Reason, ServiceError as _};

    #[test]
    fn template_arguments_are_a_bounded_json_object() {
        assert!(arguments("").unwrap().is_empty());
        assert_eq!(arguments("{\"enable_thinking\": false}").unwrap().len(), 1);
        for bad in ["[]", "1", "{", "null"] {
            assert!(arguments(bad).is_err(), "{bad}");
        }
        let long = format!("{{\"a\":\"{}\"}}", "x".repeat(MAX_ARGUMENTS_BYTES));
        assert!(
            arguments(&long)
                .unwrap_err()
                .to_string()
                .contains("limit is")
        );
    }

    #[test]
    fn a_conversation_has_at_least_one_message() {
        assert!(messages(vec![]).is_err());
        assert_eq!(messages(vec![v1::ChatMessage::default()]).unwrap().len(), 1);
    }

    #[test]
    fn a_prompt_that_cannot_fit_is_refused_by_its_bytes() {
        assert_eq!(max_prompt_bytes(8), SHORT_TEXT_BYTES);
        assert_eq!(max_prompt_bytes(2048), 128 * 1024);
        assert_eq!(max_prompt_bytes(u32::MAX), MAX_TEXT_BYTES);
        assert!(check_bytes(5, 5).is_ok());
        let error = check_bytes(131_073, max_prompt_bytes(2048)).unwrap_err();
        assert_eq!(error.reason(), Reason::PromptTooLong);
        assert_eq!(
            error.to_string(),
            "prompt has 131073 bytes, limit is 131072"
        );
        let chat = Input::Chat {
            messages: messages(vec![v1::ChatMessage {
                role: "user".to_owned(),
                content: "12345".to_owned(),
            }])
            .unwrap(),
            arguments: serde_json::Map::new(),
        };
        assert_eq!(chat.text_bytes(), 9);
    }
}
