//! The text of a stream of ids: its pieces add up to the whole, and stops end it where a search would.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use velox_gateway::text::{Detokenizer, SpecialTokens, StopMatcher, Tokenizer};
use velox_proto::worker::v1::tokenizer_description::Source;
use velox_proto::worker::v1::{GgufVocabulary, TokenizerDescription};

/// Control tokens in `tokenizer.ggml.token_type`.
const CONTROL: u32 = 3;

/// Tokens behind the 256 bytes: spelled, and with their type.
const MORE: [(&str, u32); 6] = [
    ("<s>", CONTROL),
    ("Ġworld", 1),
    // A character's first two bytes, its last two, and the last of one with the first of another.
    ("ðŁ", 1),
    ("ĺĢ", 1),
    ("©Ã", 1),
    // Verbatim, not spelled.
    ("é\u{FFFD}", 4),
];

/// Bytes from here on never occur in UTF-8 (as those just before), so they stand for ids behind the bytes.
const FIRST_MORE: u8 = 0xF8;

static BYTE_LEVEL: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let mut tokens: Vec<String> = (0..=255).map(|byte| spelled(byte).to_string()).collect();
    tokens.extend(MORE.map(|(token, _)| token.to_owned()));
    let mut token_types = vec![1; 256];
    token_types.extend(MORE.map(|(_, token_type)| token_type));
    tokenizer(GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: "qwen2".to_owned(),
        tokens,
        token_types,
        ..GgufVocabulary::default()
    })
});

/// The same ids where a space is U+2581 and the first one of a text is dropped.
static SENTENCE_PIECE: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let mut tokens: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    let more = ["<s>", "▁world", "▁", "▁▁a", "é", "\u{FFFD}"];
    tokens.extend(more.map(str::to_owned));
    let mut token_types = vec![6; 256];
    token_types.extend([CONTROL, 1, 1, 1, 1, 1]);
    tokenizer(GgufVocabulary {
        model: "llama".to_owned(),
        scores: vec![0.0; tokens.len()],
        tokens,
        token_types,
        ..GgufVocabulary::default()
    })
});

fn tokenizer(vocabulary: GgufVocabulary) -> Arc<Tokenizer> {
    let description = TokenizerDescription {
        source: Some(Source::Gguf(vocabulary)),
        ..TokenizerDescription::default()
    };
    Arc::new(Tokenizer::from_description(&description).expect("a vocabulary made by hand"))
}

/// GPT-2's character for a byte.
fn spelled(byte: u8) -> char {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..);
    if printable(&byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !printable(other)).count();
    let code = 256 + u32::try_from(before).expect("at most 68");
    char::from_u32(code).expect("Latin Extended-A")
}

fn id_of(byte: u8) -> u32 {
    match byte.checked_sub(FIRST_MORE) {
        // The largest two name no token.
        Some(more) => 256 + u32::from(more),
        None => u32::from(byte),
    }
}

/// Returns the text before the first stop, and which one it was.
fn before_stop<'a>(
    pieces: impl Iterator<Item = &'a str>,
    stops: &[String],
) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops.to_vec());
    let mut text = String::new();
    for piece in pieces {
        let step = matcher.push(piece);
        text.push_str(&step.emit);
        if step.matched.is_some() {
            return (text, step.matched);
        }
    }
    text.push_str(&matcher.finish());
    (text, None)
}

/// The same by a search over the whole text.
fn found_stop(text: &str, stops: &[String]) -> (String, Option<usize>) {
    stops
        .iter()
        .enumerate()
        .filter(|(_, stop)| !stop.is_empty())
        .filter_map(|(index, stop)| Some((text.find(stop.as_str())? + stop.len(), stop, index)))
        .min_by_key(|&(end, stop, index)| (end, end - stop.len(), index))
        .map_or((text.to_owned(), None), |(end, stop, index)| {
            (text[..end - stop.len()].to_owned(), Some(index))
        })
}

/// Up to five characters of a text from a place in it on.
fn excerpt(text: &str, from: u8, length: u8) -> String {
    let from = usize::from(from) % (text.chars().count() + 1);
    let length = usize::from(length % 6);
    text.chars().skip(from).take(length).collect()
}

fuzz_target!(|input: ([u8; 5], &[u8])| {
    let ([cut, first, first_length, second, second_length], bytes) = input;
    let ids: Vec<u32> = bytes.iter().map(|&byte| id_of(byte)).collect();
    let cut = usize::from(cut) % (ids.len() + 1);
    for tokenizer in [&*BYTE_LEVEL, &*SENTENCE_PIECE] {
        for special in [SpecialTokens::Hide, SpecialTokens::Show] {
            let whole = tokenizer.decode(&ids, special);
            let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), special);
            let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
            pieces.push(detokenizer.finish());
            assert_eq!(pieces.concat(), whole);

            // At any place nothing is held back but the begin of one character.
            let shown = pieces[..cut].concat();
            let known = tokenizer.decode(&ids[..cut], special);
            assert!(known == shown || known.strip_suffix('\u{FFFD}') == Some(&shown));

            let stops = [
                excerpt(&whole, first, first_length),
                excerpt(&whole, second, second_length),
            ];
            let expected = found_stop(&whole, &stops);
            let pieces = pieces.iter().map(String::as_str);
            assert_eq!(before_stop(pieces, &stops), expected);
            assert_eq!(before_stop([whole.as_str()].into_iter(), &stops), expected);
        }
    }
});
