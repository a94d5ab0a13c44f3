//! Chat templates, rendered as Hugging Face's transformers render them.
//!
//! The engine is minijinja; what templates expect of Python is added here: `json.dumps`, string methods,
//! `raise_exception`, `strftime_now`, `{% generation %}`. A template is a program from a model file, so it runs on
//! fuel, which bounds its time and its memory. One hole is known: minijinja 3.1.0 does not charge for `list + list`,
//! so a template that doubles a list some 32 times takes all memory.

mod clock;
mod generation;
mod json;
mod methods;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};
use velox_proto::worker::v1::TokenizerDescription;

pub use self::clock::Clock;
use super::token_table::too_large;
use super::{MAX_TEXT_BYTES, TextError, Tokenizer};

/// Work that one rendering may do: about so many instructions, or 64 times as many bytes. A conversation of a
/// thousand turns needs a tenth of it.
const FUEL: u64 = 300_000;

/// Stack of the thread that compiles and renders. The engine walks expressions and values recursively, without a
/// limit of its own on chains of operators or lists in lists; length of tags and fuel limit them to what fits here.
const STACK_BYTES: usize = 512 * 1024 * 1024;

/// Longest source of a template; the longest published ones have about 30 KiB.
const MAX_SOURCE_BYTES: usize = 128 * 1024;

/// Most templates of a model.
const MAX_TEMPLATES: usize = 64;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// "system", "user", "assistant" or what else the template knows.
    pub role: String,
    /// Text of the turn.
    pub content: String,
}

/// The chat templates of one model.
#[derive(Debug)]
pub struct ChatTemplates {
    environment: Environment<'static>,
    /// Names and rewritten sources; the first is the fallback for a missing "default".
    sources: Vec<(String, String)>,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplates {
    /// Takes the templates that a worker read from a model; `tokenizer` knows the texts of BOS and EOS.
    ///
    /// A template that does not compile is reported when it is used: the model still serves plain prompts.
    ///
    /// # Errors
    /// When the templates are too many or too long.
    pub fn from_description(
        description: &TokenizerDescription,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TextError> {
        let templates = &description.chat_templates;
        too_large("chat templates", templates.len(), MAX_TEMPLATES)?;
        let mut environment = environment(Clock::System);
        let mut sources: Vec<(String, String)> = Vec::new();
        for template in templates {
            too_large(
                "bytes of chat template",
                template.source.len(),
                MAX_SOURCE_BYTES,
            )?;
            let name = match template.name.as_str() {
                "" => "default",
                name => name,
            };
            if sources.iter().any(|(known, _)| known == name) {
                continue;
            }
            sources.push((name.to_owned(), generation::rewrite(&template.source)?));
        }
        on_deep_stack(|| {
            for (name, source) in &sources {
                // The error of a broken template is made anew by `render`.
                let _ = environment.add_template_owned(name.clone(), source.clone());
            }
            Ok(())
        })?;
        Ok(Self {
            environment,
            sources,
            bos_token: tokenizer.bos_text().to_owned(),
            eos_token: tokenizer.eos_text().to_owned(),
        })
    }

    /// Sets the time that templates see.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        add_clock(&mut self.environment, clock);
        self
    }

    /// Tells whether messages can be rendered at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Renders messages up to the point where the assistant speaks.
    ///
    /// `arguments` are variables of the template, such as `tools`, `documents` or `enable_thinking`. With tools the
    /// template named "tool_use" is taken if the model has one, else "default".
    ///
    /// # Errors
    /// When the model has no template, or the template refuses the messages, fails or does too much.
    pub fn render(
        &self,
        messages: &[Message],
        arguments: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        let messages = messages.iter().map(|message| {
            Value::from_pairs([("role", &message.role), ("content", &message.content)])
        });
        on_deep_stack(|| self.render_value(messages.collect(), arguments))
    }

    /// Renders messages in the form of JSON, for turns with more than role and content.
    ///
    /// # Errors
    /// As [`ChatTemplates::render`].
    pub fn render_json(
        &self,
        messages: &[serde_json::Value],
        arguments: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        on_deep_stack(|| self.render_value(messages.iter().map(from_json).collect(), arguments))
    }

    fn render_value(
        &self,
        messages: Value,
        arguments: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, TextError> {
        let has_tools = arguments.get("tools").is_some_and(|tools| match tools {
            serde_json::Value::Array(tools) => !tools.is_empty(),
            other => !other.is_null(),
        });
        let (name, source) = self.choose(has_tools).ok_or(TextError::NoChatTemplate)?;
        let template = self
            .environment
            .get_template(name)
            .or_else(|_| self.environment.template_from_named_str(name, source))
            .map_err(|source| TextError::InvalidTemplate {
                name: name.to_owned(),
                source: Box::new(source),
            })?;

        let mut context: Vec<(&str, Value)> = vec![
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(true)),
        ];
        for (name, text) in [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
        ] {
            if !text.is_empty() {
                context.push((name, Value::from(text.as_str())));
            }
        }
        for (name, value) in arguments {
            context.push((name, from_json(value)));
        }
        context.push(("messages", messages));

        let text = template
            .render(Value::from_pairs(context))
            .map_err(failure)?;
        if text.len() > MAX_TEXT_BYTES {
            return Err(TextError::TextTooLong {
                actual: text.len(),
                limit: MAX_TEXT_BYTES,
            });
        }
        Ok(text)
    }

    fn choose(&self, has_tools: bool) -> Option<(&str, &str)> {
        let named = |wanted: &str| self.sources.iter().find(|(name, _)| name == wanted);
        has_tools
            .then(|| named("tool_use"))
            .flatten()
            .or_else(|| named("default"))
            .or_else(|| self.sources.first())
            .map(|(name, source)| (name.as_str(), source.as_str()))
    }
}

/// What a template said with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn environment(clock: Clock) -> Environment<'static> {
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .expect("the default delimiters are valid");
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_debug(false);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(|out, state, value| {
        if value.kind() == ValueKind::Number && !value.is_integer() {
            return Ok(write!(out, "{}", json::number(value))?);
        }
        minijinja::escape_formatter(out, state, value)
    });
    environment.add_filter("tojson", json::tojson);
    // They write every level of a value on its own line, so their output grows with the square of its depth.
    environment.remove_filter("pprint");
    environment.remove_global("debug");
    // Python asks whether a value can be iterated or indexed, so text and maps are sequences, and nothing is neither.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    environment.add_test("sequence", |value: &Value| {
        let kind = value.kind();
        matches!(kind, ValueKind::Seq | ValueKind::String | ValueKind::Map) || value.is_undefined()
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, _> {
        let error = minijinja::Error::new(ErrorKind::InvalidOperation, message.clone());
        Err(error.with_source(Raised(message)))
    });
    add_clock(&mut environment, clock);
    environment
}

/// Runs `work` on a thread of its own with room for deep recursion; pages of the stack that are not used cost nothing.
fn on_deep_stack<T: Send>(
    work: impl FnOnce() -> Result<T, TextError> + Send,
) -> Result<T, TextError> {
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("chat-template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work)
            .map_err(TextError::NoThread)?
            .join()
            .unwrap_or(Err(TextError::LibraryPanicked))
    })
}

fn add_clock(environment: &mut Environment<'static>, clock: Clock) {
    environment.add_function("strftime_now", move |format: &str| clock.format(format));
}

fn failure(error: minijinja::Error) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return TextError::TemplateRefused(message.clone());
        }
        cause = current.source();
    }
    TextError::TemplateFailed(Box::new(error))
}

fn from_json(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(truth) => Value::from(*truth),
        serde_json::Value::Number(number) => {
            if let Some(integer) = number.as_i64() {
                Value::from(integer)
            } else if let Some(integer) = number.as_u64() {
                Value::from(integer)
            } else {
                Value::from(number.as_f64().unwrap_or(f64::NAN))
            }
        }
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(elements) => elements.iter().map(from_json).collect(),
        serde_json::Value::Object(fields) => Value::from_pairs(
            fields
                .iter()
                .map(|(name, value)| (name.as_str(), from_json(value))),
        ),
    }
}
