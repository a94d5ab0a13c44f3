//! `tokenizer.*` of a GGUF file.

use super::blame::{Blame, excerpt};
use super::ends::EndTokens;
use super::gguf::Metadata;
use super::{GgufVocabulary, TokenizerSource, Vocabulary};
use crate::error::EngineError;

const CONTROL: u32 = 3;
const MAX_TOKEN_TYPE: u32 = 6;
/// Far above any vocabulary of today (a few 100,000).
const MAX_MERGES: usize = 1 << 22;
const DEFAULT_TEMPLATE: &str = "default";

/// Reads vocabulary, templates and end tokens of a model with `vocab_size` embedding rows.
pub(super) fn read(
    metadata: &Metadata<'_>,
    vocab_size: u32,
    blame: &Blame,
) -> Result<TokenizerSource, EngineError> {
    let reader = VocabularyReader { metadata, blame };
    let vocabulary = reader.vocabulary(vocab_size)?;
    let special = |name: &str| reader.special(name, vocab_size);
    let end_tokens = reader.end_tokens(&vocabulary, vocab_size)?;
    Ok(TokenizerSource {
        chat_templates: reader.chat_templates()?,
        bos_token_id: special("bos_token_id")?,
        eos_token_id: special("eos_token_id")?,
        unknown_token_id: special("unknown_token_id")?,
        padding_token_id: special("padding_token_id")?,
        add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
        end_tokens: end_tokens.into_vec(),
        vocab_size,
        vocabulary: match metadata.text("tokenizer.huggingface.json")? {
            Some(json) => Vocabulary::HuggingFaceJson(json.as_bytes().to_vec()),
            None => Vocabulary::Gguf(vocabulary),
        },
    })
}

struct VocabularyReader<'a> {
    metadata: &'a Metadata<'a>,
    blame: &'a Blame,
}

impl VocabularyReader<'_> {
    fn vocabulary(&self, vocab_size: u32) -> Result<GgufVocabulary, EngineError> {
        let model = self
            .metadata
            .text("tokenizer.ggml.model")?
            .ok_or_else(|| self.blame.invalid("tokenizer.ggml.model is missing"))?;
        if !matches!(model, "gpt2" | "llama") {
            return Err(self
                .blame
                .unsupported(format!("tokenizer.ggml.model {}", excerpt(model))));
        }
        let tokens = self
            .metadata
            .texts(
                "tokenizer.ggml.tokens",
                usize::try_from(vocab_size).unwrap_or(usize::MAX),
            )?
            .filter(|tokens| !tokens.is_empty())
            .ok_or_else(|| {
                self.blame
                    .invalid("tokenizer.ggml.tokens is missing or empty")
            })?;
        let token_types = self.token_types(tokens.len())?;
        let scores = self.scores(tokens.len())?;
        if model == "llama" && scores.is_empty() {
            return Err(self
                .blame
                .invalid("tokenizer.ggml.scores is missing, model llama needs it"));
        }
        let merges = self.merges()?;
        if model == "gpt2" && merges.is_empty() {
            return Err(self
                .blame
                .invalid("tokenizer.ggml.merges is missing, model gpt2 needs it"));
        }
        Ok(GgufVocabulary {
            model: model.to_owned(),
            pre: self
                .metadata
                .text("tokenizer.ggml.pre")?
                .unwrap_or_default()
                .to_owned(),
            tokens,
            token_types,
            scores,
            merges,
            add_space_prefix: self.metadata.bool("tokenizer.ggml.add_space_prefix")?,
        })
    }

    fn token_types(&self, n_tokens: usize) -> Result<Vec<u32>, EngineError> {
        const KEY: &str = "tokenizer.ggml.token_type";
        let Some(types) = self.metadata.unsigned_array(KEY, n_tokens)? else {
            return Ok(Vec::new());
        };
        types
            .into_iter()
            .map(|kind| {
                u32::try_from(kind)
                    .ok()
                    .filter(|kind| (1..=MAX_TOKEN_TYPE).contains(kind))
                    .ok_or_else(|| {
                        self.blame.invalid(format!(
                            "{KEY} has the value {kind}, limit is 1 to {MAX_TOKEN_TYPE}"
                        ))
                    })
            })
            .collect()
    }

    fn scores(&self, n_tokens: usize) -> Result<Vec<f32>, EngineError> {
        const KEY: &str = "tokenizer.ggml.scores";
        let Some(scores) = self.metadata.float_array(KEY, n_tokens)? else {
            return Ok(Vec::new());
        };
        if scores.iter().any(|score| score.is_nan()) {
            return Err(self
                .blame
                .invalid(format!("{KEY} has a value that is no number")));
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "scores are only compared; rounding to f32 keeps their order up to ties"
        )]
        Ok(scores.into_iter().map(|score| score as f32).collect())
    }

    fn merges(&self) -> Result<Vec<String>, EngineError> {
        const KEY: &str = "tokenizer.ggml.merges";
        let merges = self.metadata.texts(KEY, MAX_MERGES)?.unwrap_or_default();
        // The left part has at least one character, so a space in first place cannot be the one between the parts.
        let broken = merges.iter().position(|merge| {
            let mut characters = merge.char_indices();
            characters.next();
            !characters.any(|(at, character)| character == ' ' && at + 1 < merge.len())
        });
        match broken {
            None => Ok(merges),
            Some(index) => Err(self.blame.invalid(format!(
                "{KEY}[{index}] is \"{}\", must be two parts with a space between",
                excerpt(&merges[index])
            ))),
        }
    }

    fn special(&self, name: &str, vocab_size: u32) -> Result<Option<u32>, EngineError> {
        let key = format!("tokenizer.ggml.{name}");
        let Some(id) = self.metadata.unsigned(&key)? else {
            return Ok(None);
        };
        match u32::try_from(id) {
            Ok(id) if id < vocab_size => Ok(Some(id)),
            _ => Err(self
                .blame
                .invalid(format!("{key} is {id}, the model has {vocab_size} tokens"))),
        }
    }

    fn end_tokens(
        &self,
        vocabulary: &GgufVocabulary,
        vocab_size: u32,
    ) -> Result<EndTokens, EngineError> {
        let mut ends = EndTokens::default();
        let text = |id: u32| {
            usize::try_from(id)
                .ok()
                .and_then(|id| vocabulary.tokens.get(id))
                .map_or("", String::as_str)
        };
        for name in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            if let Some(id) = self.special(name, vocab_size)? {
                ends.add(id, text(id), &format!("tokenizer.ggml.{name}"));
            }
        }
        let control_tokens = (0_u32..)
            .zip(&vocabulary.tokens)
            .zip(&vocabulary.token_types)
            .filter(|(_, kind)| **kind == CONTROL)
            .map(|((id, text), _)| (id, text.as_str()));
        ends.add_by_text(control_tokens, "tokenizer.ggml.token_type");
        Ok(ends)
    }

    fn chat_templates(&self) -> Result<Vec<(String, String)>, EngineError> {
        const KEY: &str = "tokenizer.chat_template";
        let mut templates = Vec::new();
        if let Some(template) = self.metadata.text(KEY)? {
            templates.push((DEFAULT_TEMPLATE.to_owned(), template.to_owned()));
        }
        for key in self.metadata.keys() {
            if let Some(name) = key
                .strip_prefix(KEY)
                .and_then(|rest| rest.strip_prefix('.'))
                && let Some(template) = self.metadata.text(key)?
            {
                templates.push((name.to_owned(), template.to_owned()));
            }
        }
        Ok(templates)
    }
}
