use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::{
    AddedVocabulary, DecoderWrapper, Model as _, ModelWrapper, OffsetType, PreTokenizer as _,
    PreTokenizerWrapper,
};
use velox_proto::limits::MAX_TOKENIZER_BYTES;
use velox_proto::worker::v1::TokenizerDescription;
use velox_proto::worker::v1::tokenizer_description::Source;

use super::token_table::{Entry, Kind, Spelling, TokenTable, too_large};
use super::vocabulary::{self, Built};
use super::{Bos, MAX_TEXT_BYTES, Markup, SpecialTokens, TextError};

/// The tokenizer of one model.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The added tokens of `inner`, blind for control tokens.
    plain: AddedVocabulary,
    table: TokenTable,
    /// The token that stands for one byte and nothing else.
    byte_ids: Box<[Option<u32>; 256]>,
    strip_space: bool,
    add_bos: bool,
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    end_tokens: Vec<u32>,
    vocab_size: u32,
}

impl Tokenizer {
    /// Builds the tokenizer that a worker read from a model.
    ///
    /// # Errors
    /// When the description is malformed, too large or of a kind without support.
    pub fn from_description(description: &TokenizerDescription) -> Result<Self, TextError> {
        let built = guarded(|| match &description.source {
            Some(Source::HuggingfaceJson(json)) => huggingface(json, description.bos_token_id),
            Some(Source::Gguf(gguf)) => vocabulary::build(gguf, description.unknown_token_id),
            None => Err(TextError::NoTokenizer),
        })?;
        let Built {
            inner,
            table,
            add_bos,
            strip_space,
        } = built;
        let mut plain = inner.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        let vocab_size = match description.vocab_size {
            0 => table.len(),
            width => width,
        };
        let mut end_tokens: Vec<u32> = description
            .end_tokens
            .iter()
            .map(|end| end.token_id)
            .chain(description.eos_token_id)
            .filter(|&id| id < vocab_size)
            .collect();
        end_tokens.sort_unstable();
        end_tokens.dedup();
        Ok(Self {
            byte_ids: byte_ids(&table),
            inner,
            plain,
            strip_space,
            add_bos: description.add_bos.unwrap_or(add_bos),
            bos: description.bos_token_id.filter(|&id| id < table.len()),
            eos: description.eos_token_id.filter(|&id| id < table.len()),
            unknown: description.unknown_token_id,
            table,
            end_tokens,
            vocab_size,
        })
    }

    /// Turns text into ids.
    ///
    /// # Errors
    /// When the text is too long, or spells a control token that the vocabulary cannot write otherwise.
    pub fn encode(&self, text: &str, markup: Markup, bos: Bos) -> Result<Vec<u32>, TextError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(TextError::TextTooLong {
                actual: text.len(),
                limit: MAX_TEXT_BYTES,
            });
        }
        let mut ids = guarded(|| {
            self.split_and_merge(text, markup)
                .map_err(TextError::Library)
        })?;
        if markup == Markup::Plain {
            ids = self.defuse(ids)?;
        }
        if bos == Bos::Add
            && self.add_bos
            && let Some(bos) = self.bos
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        match ids.iter().find(|&&id| id >= self.vocab_size) {
            Some(&id) => Err(TextError::TokenOutsideModel {
                id,
                limit: self.vocab_size,
            }),
            None => Ok(ids),
        }
    }

    /// Turns ids into text; bytes that are no characters become U+FFFD, ids without text nothing.
    #[must_use]
    pub fn decode(&self, ids: &[u32], special: SpecialTokens) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if special == SpecialTokens::Show || !self.is_special(id) {
                bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
            }
        }
        let bytes = match bytes.as_slice() {
            [b' ', rest @ ..] if self.strip_space => rest,
            bytes => bytes,
        };
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// Returns the bytes that a token stands for, `None` if it has none.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.table.bytes(id)
    }

    /// Tells whether a token is control markup, which users do not see.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.table.is_special(id)
    }

    /// Returns every id that ends a generation, ascending.
    #[must_use]
    pub fn end_token_ids(&self) -> &[u32] {
        &self.end_tokens
    }

    /// Returns the width of the logits: every id is below it.
    #[must_use]
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Returns the id of the begin-of-sequence token.
    #[must_use]
    pub fn bos_token_id(&self) -> Option<u32> {
        self.bos
    }

    /// Returns the markup of the begin-of-sequence token, empty if there is none.
    #[must_use]
    pub fn bos_text(&self) -> &str {
        self.text_of(self.bos)
    }

    /// Returns the markup of the end-of-sequence token, empty if there is none.
    #[must_use]
    pub fn eos_text(&self) -> &str {
        self.text_of(self.eos)
    }

    /// Tells whether decoding drops one space in front.
    pub(super) fn strips_space(&self) -> bool {
        self.strip_space
    }

    fn text_of(&self, id: Option<u32>) -> &str {
        let bytes = id.and_then(|id| self.token_bytes(id)).unwrap_or_default();
        std::str::from_utf8(bytes).unwrap_or_default()
    }

    /// The pipeline of the crate, with a choice of added tokens and without the offsets.
    fn split_and_merge(&self, text: &str, markup: Markup) -> tokenizers::Result<Vec<u32>> {
        let added = match markup {
            Markup::Plain => &self.plain,
            Markup::Special => self.inner.get_added_vocabulary(),
        };
        let mut pieces = added.extract_and_normalize(self.inner.get_normalizer(), text);
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        let model = self.inner.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get()))?;
        let encoding = pieces.into_encoding(None, 0, OffsetType::None)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Spells control tokens byte by byte: a vocabulary that takes whole words as they are would otherwise turn the
    /// word of a control token into the token.
    fn defuse(&self, ids: Vec<u32>) -> Result<Vec<u32>, TextError> {
        let armed = |id: u32| self.is_special(id) && Some(id) != self.unknown;
        if !ids.iter().any(|&id| armed(id)) {
            return Ok(ids);
        }
        let mut safe = Vec::with_capacity(ids.len());
        for id in ids {
            if !armed(id) {
                safe.push(id);
                continue;
            }
            for &byte in self.token_bytes(id).unwrap_or_default() {
                let spelled = self.byte_ids[usize::from(byte)];
                safe.push(spelled.ok_or_else(|| {
                    TextError::UnwritableMarkup(self.text_of(Some(id)).to_owned())
                })?);
            }
        }
        Ok(safe)
    }
}

/// Reads a tokenizer.json.
fn huggingface(json: &[u8], bos: Option<u32>) -> Result<Built, TextError> {
    too_large("bytes", json.len(), MAX_TOKENIZER_BYTES)?;
    let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(TextError::Library)?;
    let unsupported = |what: &str| Err(TextError::UnsupportedTokenizer(what.to_owned()));
    match inner.get_model() {
        ModelWrapper::BPE(model) if model.dropout.is_some_and(|dropout| dropout > 0.0) => {
            return unsupported("BPE with dropout");
        }
        ModelWrapper::BPE(_) | ModelWrapper::Unigram(_) => {}
        ModelWrapper::WordPiece(_) => return unsupported("WordPiece"),
        ModelWrapper::WordLevel(_) => return unsupported("WordLevel"),
    }
    inner.with_truncation(None).map_err(TextError::Library)?;
    inner.with_padding(None);

    let words = inner.get_vocab(false);
    let mut entries: Vec<Entry<'_>> = words
        .iter()
        .map(|(text, &id)| Entry {
            id,
            text,
            kind: Kind::Ordinary,
        })
        .collect();
    let spelling = Spelling::of(entries.iter().map(|entry| entry.text)).unwrap_or_else(|| {
        if inner.get_pre_tokenizer().is_some_and(is_byte_level) {
            Spelling::ByteLevel
        } else {
            Spelling::SentencePiece
        }
    });
    let added = inner.get_added_tokens_decoder();
    entries.extend(added.iter().map(|(&id, token)| Entry {
        id,
        text: &token.content,
        kind: if token.special {
            Kind::Special
        } else {
            Kind::Verbatim
        },
    }));
    let table = TokenTable::new(entries, spelling)?;
    Ok(Built {
        strip_space: spelling == Spelling::SentencePiece
            && inner.get_decoder().is_some_and(strips_leading_space),
        add_bos: puts_bos_in_front(&inner, bos)?,
        table,
        inner,
    })
}

/// Asks the post-processor of a tokenizer.json what it puts before a text.
fn puts_bos_in_front(inner: &tokenizers::Tokenizer, bos: Option<u32>) -> Result<bool, TextError> {
    let Some(bos) = bos else {
        return Ok(false);
    };
    let bare = inner.encode_fast("a", false).map_err(TextError::Library)?;
    let whole = inner.encode_fast("a", true).map_err(TextError::Library)?;
    Ok(whole.get_ids().first() == Some(&bos) && bare.get_ids().first() != Some(&bos))
}

fn is_byte_level(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_) => true,
        PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().any(is_byte_level),
        _ => false,
    }
}

fn strips_leading_space(decoder: &DecoderWrapper) -> bool {
    use tokenizers::pre_tokenizers::metaspace::PrependScheme;
    match decoder {
        DecoderWrapper::Metaspace(spaces) => spaces.get_prepend_scheme() != PrependScheme::Never,
        DecoderWrapper::Strip(strip) => strip.content == ' ' && strip.start > 0,
        DecoderWrapper::Sequence(all) => all.get_decoders().iter().any(strips_leading_space),
        _ => false,
    }
}

fn byte_ids(table: &TokenTable) -> Box<[Option<u32>; 256]> {
    let mut ids = Box::new([None; 256]);
    for id in (0..table.len()).filter(|&id| !table.is_special(id)) {
        if let Some(&[byte]) = table.bytes(id) {
            ids[usize::from(byte)].get_or_insert(id);
        }
    }
    ids
}

/// Turns a panic of the tokenizer library into an error: some malformed descriptions trip its asserts.
fn guarded<T>(work: impl FnOnce() -> Result<T, TextError>) -> Result<T, TextError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(TextError::LibraryPanicked))
}
