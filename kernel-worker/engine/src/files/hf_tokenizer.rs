//! Tokenizer, templates and end tokens of a model folder.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::blame::{Blame, excerpt};
use super::ends::EndTokens;
use super::hf_folder::Folder;
use super::json_fields::Fields;
use super::{TokenizerSource, Vocabulary};
use crate::error::EngineError;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";
const MAX_TOKENIZER_BYTES: u64 = 96 << 20;
const MAX_SMALL_BYTES: u64 = 16 << 20;
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// Reads everything the gateway needs; `config` is the content of config.json.
pub(super) fn read(
    folder: &Folder,
    config: &Map<String, Value>,
    vocab_size: u32,
) -> Result<TokenizerSource, EngineError> {
    let json = folder.read(TOKENIZER, MAX_TOKENIZER_BYTES)?;
    let vocabulary = TokenTable::parse(&json)?;
    let object = |name| folder.json::<Map<String, Value>>(name, MAX_SMALL_BYTES);
    let files = Sources {
        generation: object(GENERATION_CONFIG)?.unwrap_or_default(),
        tokenizer: object(TOKENIZER_CONFIG)?.unwrap_or_default(),
        special: object(SPECIAL_TOKENS)?.unwrap_or_default(),
        config,
        vocabulary,
        vocab_size,
    };
    let end_tokens = files.end_tokens()?;
    let blame = Blame::new(TOKENIZER_CONFIG);
    let tokenizer_config = Fields::new(&files.tokenizer, "", &blame);
    Ok(TokenizerSource {
        chat_templates: chat_templates(folder, &tokenizer_config)?,
        bos_token_id: files.special_id("bos_token")?,
        eos_token_id: files.special_id("eos_token")?,
        unknown_token_id: files.special_id("unk_token")?,
        padding_token_id: files.special_id("pad_token")?,
        add_bos: tokenizer_config.flag("add_bos_token")?,
        add_eos: tokenizer_config.flag("add_eos_token")?,
        end_tokens: end_tokens.into_vec(),
        vocab_size,
        vocabulary: Vocabulary::HuggingFaceJson(json),
    })
}

/// chat_template.jinja, else `chat_template` of tokenizer_config.json: one template or a list of named ones.
fn chat_templates(
    folder: &Folder,
    tokenizer_config: &Fields<'_>,
) -> Result<Vec<(String, String)>, EngineError> {
    const FIELD: &str = "chat_template";
    let default = |source: &str| vec![("default".to_owned(), source.to_owned())];
    let mut templates = match tokenizer_config.get(FIELD) {
        None => Vec::new(),
        Some(Value::String(source)) => default(source),
        Some(value) => value
            .as_array()
            .and_then(|list| {
                list.iter()
                    .map(|entry| {
                        let text = |name| entry.get(name)?.as_str().map(str::to_owned);
                        Some((text("name")?, text("template")?))
                    })
                    .collect()
            })
            .ok_or_else(|| {
                Blame::new(TOKENIZER_CONFIG).invalid(
                    "chat_template must be a string or a list of objects with name and template",
                )
            })?,
    };
    if folder.has(TEMPLATE) {
        let source = String::from_utf8(folder.read(TEMPLATE, MAX_TEMPLATE_BYTES)?)
            .map_err(|_| Blame::new(TEMPLATE).invalid("is not UTF-8"))?;
        templates.retain(|(name, _)| name != "default");
        templates.insert(0, ("default".to_owned(), source));
    }
    Ok(templates)
}

struct Sources<'a> {
    generation: Map<String, Value>,
    tokenizer: Map<String, Value>,
    special: Map<String, Value>,
    config: &'a Map<String, Value>,
    vocabulary: TokenTable,
    vocab_size: u32,
}

impl Sources<'_> {
    /// Files that name tokens by id, in order of precedence.
    fn by_id(&self) -> [(&'static str, &Map<String, Value>); 2] {
        [
            (GENERATION_CONFIG, &self.generation),
            ("config.json", self.config),
        ]
    }

    /// Files that name tokens by text, in order of precedence.
    fn by_text(&self) -> [(&'static str, &Map<String, Value>); 2] {
        [
            (TOKENIZER_CONFIG, &self.tokenizer),
            (SPECIAL_TOKENS, &self.special),
        ]
    }

    fn end_tokens(&self) -> Result<EndTokens, EngineError> {
        let mut ends = EndTokens::default();
        for (file, object) in self.by_id() {
            let blame = Blame::new(file);
            let fields = Fields::new(object, "", &blame);
            for id in fields.token_ids("eos_token_id", self.vocab_size)? {
                let text = self.vocabulary.text(id).unwrap_or_default();
                ends.add(id, text, &format!("{file} eos_token_id"));
            }
        }
        for (file, object) in self.by_text() {
            if let Some((id, text)) = self.named(file, object, "eos_token")? {
                ends.add(id, text, &format!("{file} eos_token"));
            }
        }
        Ok(ends)
    }

    /// The tokenizer's own files know best which token it means; the model's ids fill in.
    fn special_id(&self, name: &str) -> Result<Option<u32>, EngineError> {
        for (file, object) in self.by_text() {
            if let Some((id, _)) = self.named(file, object, name)? {
                return Ok(Some(id));
            }
        }
        let field = format!("{name}_id");
        for (file, object) in self.by_id() {
            // Old configurations write -1 for "none".
            if object.get(&field).and_then(Value::as_i64) == Some(-1) {
                continue;
            }
            let blame = Blame::new(file);
            let ids = Fields::new(object, "", &blame).token_ids(&field, self.vocab_size)?;
            if let Some(id) = ids.first() {
                return Ok(Some(*id));
            }
        }
        Ok(None)
    }

    /// A token given as text or as an object with `content`; `None` if the vocabulary lacks it.
    fn named<'b>(
        &'b self,
        file: &str,
        object: &'b Map<String, Value>,
        field: &str,
    ) -> Result<Option<(u32, &'b str)>, EngineError> {
        let text = match object.get(field) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => Some(text.as_str()),
            Some(value) => value.get("content").and_then(Value::as_str),
        };
        let text = text.ok_or_else(|| {
            Blame::new(file).invalid(format!(
                "{field} must be a string or an object with content"
            ))
        })?;
        match self.vocabulary.id(text) {
            Some(id) if id >= self.vocab_size => Err(Blame::new(file).invalid(format!(
                "{field} {} is token {id}, the model has {} tokens",
                excerpt(text),
                self.vocab_size
            ))),
            found => Ok(found.map(|id| (id, text))),
        }
    }
}

/// Ids and texts of tokenizer.json, enough to find special tokens.
struct TokenTable {
    ids: HashMap<String, u32>,
    texts: HashMap<u32, String>,
}

impl TokenTable {
    fn parse(json: &[u8]) -> Result<Self, EngineError> {
        let file: TokenizerFile = serde_json::from_slice(json).map_err(|error| {
            Blame::new(TOKENIZER).invalid(format!("is not the JSON expected: {error}"))
        })?;
        let mut ids = file.model.vocab.unwrap_or_default().0;
        for token in file.added_tokens {
            ids.insert(token.content, token.id);
        }
        let texts = ids.iter().map(|(text, id)| (*id, text.clone())).collect();
        Ok(Self { ids, texts })
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(&id).map(String::as_str)
    }
}

#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: TokenizerModel,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct TokenizerModel {
    vocab: Option<VocabularyIds>,
}

/// Text to id; a list of `[text, score]` numbers its entries.
#[derive(Default)]
struct VocabularyIds(HashMap<String, u32>);

impl<'de> Deserialize<'de> for VocabularyIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabularyVisitor).map(Self)
    }
}

struct VocabularyVisitor;

impl<'de> Visitor<'de> for VocabularyVisitor {
    type Value = HashMap<String, u32>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ids by text, or a list of texts with scores")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut ids = HashMap::new();
        while let Some((text, id)) = map.next_entry()? {
            ids.insert(text, id);
        }
        Ok(ids)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut ids = HashMap::new();
        let mut next = 0;
        while let Some((text, _)) = list.next_element::<(String, IgnoredAny)>()? {
            ids.insert(text, next);
            next += 1;
        }
        Ok(ids)
    }
}
