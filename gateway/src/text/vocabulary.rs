//! From `tokenizer.ggml.*` of a GGUF file to a tokenizer of the `tokenizers` crate.

use std::collections::{HashMap, HashSet};

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NFC, Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};
use velox_proto::worker::v1::GgufVocabulary;

use super::pre_type::PreType;
use super::token_table::{Entry, Kind, Spelling, TokenTable, too_large};
use super::{MAX_VOCABULARY_TOKENS, TextError};

/// Most merges of a vocabulary; the largest published one has about 450,000.
const MAX_MERGES: usize = 8 << 20;

/// Longest piece whose splits become merges; published vocabularies stay below 100 bytes.
const MAX_PIECE_BYTES: usize = 256;

/// Words whose ids each thread remembers.
const CACHED_WORDS: usize = 10_000;

/// A vocabulary turned into its working parts.
pub(super) struct Built {
    pub(super) inner: tokenizers::Tokenizer,
    pub(super) table: TokenTable,
    pub(super) add_bos: bool,
    /// Decoding drops the space that encoding put in front.
    pub(super) strip_space: bool,
}

/// Kind of a token in `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// Builds the tokenizer of a vocabulary; `unknown` is the id for what it cannot spell.
pub(super) fn build(vocabulary: &GgufVocabulary, unknown: Option<u32>) -> Result<Built, TextError> {
    let tokens = &vocabulary.tokens;
    too_large("tokens", tokens.len(), MAX_VOCABULARY_TOKENS)?;
    too_large("merges", vocabulary.merges.len(), MAX_MERGES)?;
    if tokens.is_empty() {
        return Err(TextError::NoTokenizer);
    }
    let types = token_types(vocabulary)?;
    match vocabulary.model.as_str() {
        "gpt2" => byte_level(vocabulary, &types),
        "llama" => sentence_piece(vocabulary, &types, unknown),
        other => Err(TextError::UnsupportedTokenizer(other.to_owned())),
    }
}

fn byte_level(vocabulary: &GgufVocabulary, types: &[TokenType]) -> Result<Built, TextError> {
    let pre = PreType::named(&vocabulary.pre)?;
    let special = special_texts(vocabulary, types);
    let mut merges = Vec::with_capacity(vocabulary.merges.len());
    for merge in &vocabulary.merges {
        // The left part is never empty, but may be a space in vocabularies that do not escape it.
        let at = merge
            .char_indices()
            .skip(1)
            .find(|&(_, character)| character == ' ');
        let Some((at, _)) = at else {
            return Err(invalid(format!("merge {merge:?} is not a pair")));
        };
        let pair = (merge[..at].to_owned(), merge[at + 1..].to_owned());
        if !special.contains(format!("{}{}", pair.0, pair.1).as_str()) {
            merges.push(pair);
        }
    }
    let model = BPE::builder()
        .vocab_and_merges(ids(vocabulary), merges)
        .ignore_merges(pre.ignore_merges)
        .cache_capacity(CACHED_WORDS)
        .build()
        .map_err(TextError::Library)?;

    let mut splits: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in pre.splits {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
        splits.push(split.map_err(TextError::Library)?.into());
    }
    splits.push(ByteLevel::new(false, false, false).into());

    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_pre_tokenizer(Some(PreTokenizers::new(splits)));
    if pre.compose {
        inner
            .with_normalizer(Some(NFC))
            .map_err(TextError::Library)?;
    }
    finish(inner, vocabulary, types, Spelling::ByteLevel, pre.add_bos)
}

fn sentence_piece(
    vocabulary: &GgufVocabulary,
    types: &[TokenType],
    unknown: Option<u32>,
) -> Result<Built, TextError> {
    let mut model = BPE::builder()
        .vocab_and_merges(ids(vocabulary), merges_from_scores(vocabulary, types)?)
        .byte_fallback(true)
        .fuse_unk(true)
        .cache_capacity(CACHED_WORDS);
    let unknown = unknown.and_then(|id| usize::try_from(id).ok());
    if let Some(text) = unknown.and_then(|id| vocabulary.tokens.get(id)) {
        model = model.unk_token(text.clone());
    }
    let mut inner = tokenizers::Tokenizer::new(model.build().map_err(TextError::Library)?);

    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    let prefix = vocabulary.add_space_prefix.unwrap_or(true);
    if prefix {
        normalizers.push(Prepend::new("\u{2581}".to_owned()).into());
    }
    let replace = Replace::new(" ", "\u{2581}").map_err(TextError::Library)?;
    normalizers.push(replace.into());
    inner
        .with_normalizer(Some(Normalizers::new(normalizers)))
        .map_err(TextError::Library)?;
    let built = finish(inner, vocabulary, types, Spelling::SentencePiece, true)?;
    Ok(Built {
        strip_space: prefix,
        ..built
    })
}

/// Merges that lead to the same pieces as merging the adjacent pair with the best score: every way to put a piece
/// together from two others, the pieces with the best score first.
fn merges_from_scores(
    vocabulary: &GgufVocabulary,
    types: &[TokenType],
) -> Result<Vec<(String, String)>, TextError> {
    if vocabulary.scores.len() != vocabulary.tokens.len() {
        return Err(invalid(format!(
            "{} scores for {} tokens",
            vocabulary.scores.len(),
            vocabulary.tokens.len()
        )));
    }
    let mut pieces: HashMap<&str, usize> = HashMap::with_capacity(vocabulary.tokens.len());
    for (id, (token, kind)) in vocabulary.tokens.iter().zip(types).enumerate() {
        let merges = matches!(
            kind,
            TokenType::Normal | TokenType::UserDefined | TokenType::Unused
        );
        if merges && token.len() <= MAX_PIECE_BYTES {
            pieces.entry(token.as_str()).or_insert(id);
        }
    }
    let mut order: Vec<usize> = pieces.values().copied().collect();
    order.sort_by(|&left, &right| {
        let score = |id: usize| vocabulary.scores[id];
        score(right).total_cmp(&score(left)).then(left.cmp(&right))
    });
    let mut merges = Vec::new();
    for id in order {
        let piece = vocabulary.tokens[id].as_str();
        let mut splits: Vec<(usize, usize, &str, &str)> = piece
            .char_indices()
            .skip(1)
            .filter_map(|(at, _)| {
                let (left, right) = piece.split_at(at);
                Some((*pieces.get(left)?, *pieces.get(right)?, left, right))
            })
            .collect();
        splits.sort_unstable();
        merges.extend(
            splits
                .into_iter()
                .map(|(_, _, left, right)| (left.to_owned(), right.to_owned())),
        );
        too_large("merges", merges.len(), MAX_MERGES)?;
    }
    Ok(merges)
}

/// Adds the tokens that are found before splitting, and lays out the bytes of all.
fn finish(
    mut inner: tokenizers::Tokenizer,
    vocabulary: &GgufVocabulary,
    types: &[TokenType],
    spelling: Spelling,
    add_bos: bool,
) -> Result<Built, TextError> {
    let mut added = Vec::new();
    let mut entries = Vec::with_capacity(types.len());
    for ((id, text), kind) in (0..).zip(&vocabulary.tokens).zip(types) {
        let kind = match kind {
            TokenType::Control | TokenType::Unknown => Kind::Special,
            TokenType::UserDefined => Kind::Verbatim,
            TokenType::Normal | TokenType::Unused | TokenType::Byte => Kind::Ordinary,
        };
        if kind != Kind::Ordinary {
            let token = AddedToken::from(text.clone(), kind == Kind::Special);
            added.push(token.normalized(false));
        }
        entries.push(Entry { id, text, kind });
    }
    inner.add_tokens(added).map_err(TextError::Library)?;
    Ok(Built {
        inner,
        table: TokenTable::new(entries, spelling)?,
        add_bos,
        strip_space: false,
    })
}

fn token_types(vocabulary: &GgufVocabulary) -> Result<Vec<TokenType>, TextError> {
    let (tokens, types) = (&vocabulary.tokens, &vocabulary.token_types);
    if types.len() != tokens.len() {
        return Err(invalid(format!(
            "{} token types for {} tokens",
            types.len(),
            tokens.len()
        )));
    }
    types
        .iter()
        .map(|number| match number {
            1 => Ok(TokenType::Normal),
            2 => Ok(TokenType::Unknown),
            3 => Ok(TokenType::Control),
            4 => Ok(TokenType::UserDefined),
            5 => Ok(TokenType::Unused),
            6 => Ok(TokenType::Byte),
            other => Err(invalid(format!("token type {other}, the largest is 6"))),
        })
        .collect()
}

fn special_texts<'a>(vocabulary: &'a GgufVocabulary, types: &[TokenType]) -> HashSet<&'a str> {
    vocabulary
        .tokens
        .iter()
        .zip(types)
        .filter(|(_, kind)| matches!(kind, TokenType::Control | TokenType::Unknown))
        .map(|(token, _)| token.as_str())
        .collect()
}

/// Text -> id; of equal texts the first counts.
fn ids(vocabulary: &GgufVocabulary) -> Vocab {
    // Later entries of a map win, hence the way back.
    let ids = 0..u32::try_from(vocabulary.tokens.len()).unwrap_or(u32::MAX);
    let pairs = vocabulary.tokens.iter().zip(ids).rev();
    pairs.map(|(token, id)| (token.clone(), id)).collect()
}

fn invalid(what: String) -> TextError {
    TextError::InvalidVocabulary(what)
}
