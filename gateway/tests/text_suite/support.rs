//! Vocabularies for tests: that of SmolLM2, and small ones made by hand.

use std::sync::Arc;

use velox_gateway::text::Tokenizer;
use velox_proto::worker::v1::tokenizer_description::Source;
use velox_proto::worker::v1::{GgufVocabulary, TokenizerDescription};

/// The description that a worker reads from SmolLM2-135M-Instruct.
pub(crate) fn smollm2() -> TokenizerDescription {
    let mut gguf = GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: "smollm".to_owned(),
        add_space_prefix: Some(false),
        ..GgufVocabulary::default()
    };
    for line in include_str!("../fixtures/smollm2_vocabulary.txt")
        .lines()
        .skip(1)
    {
        let (kind, text) = line.split_once(' ').unwrap();
        let (token, token_type) = match kind {
            "C" => (text.to_owned(), 3),
            "T" => (text.to_owned(), 1),
            _ => {
                gguf.merges.push(text.to_owned());
                (text.replacen(' ', "", 1), 1)
            }
        };
        gguf.tokens.push(token);
        gguf.token_types.push(token_type);
    }
    assert_eq!(gguf.tokens.len(), 49_152);
    TokenizerDescription {
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        unknown_token_id: Some(0),
        padding_token_id: Some(2),
        add_bos: Some(false),
        vocab_size: 49_152,
        ..describe(gguf)
    }
}

/// A description with nothing but a vocabulary.
pub(crate) fn describe(gguf: GgufVocabulary) -> TokenizerDescription {
    TokenizerDescription {
        source: Some(Source::Gguf(gguf)),
        ..TokenizerDescription::default()
    }
}

/// A byte-level vocabulary: ids 0..=255 are the bytes, then what `more` names with its type.
pub(crate) fn byte_level(pre: &str, more: &[(&str, u32)], merges: &[&str]) -> TokenizerDescription {
    let mut tokens: Vec<String> = (0..=255).map(|byte| spelled(byte).to_string()).collect();
    let mut token_types = vec![1; 256];
    for (token, token_type) in more {
        tokens.push((*token).to_owned());
        token_types.push(*token_type);
    }
    describe(GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: pre.to_owned(),
        tokens,
        token_types,
        merges: merges.iter().map(|&merge| merge.to_owned()).collect(),
        ..GgufVocabulary::default()
    })
}

/// Builds a tokenizer that has to be valid.
pub(crate) fn tokenizer(description: &TokenizerDescription) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_description(description).unwrap())
}

/// GPT-2's character for a byte, written as its authors describe it.
pub(crate) fn spelled(byte: u8) -> char {
    let printable =
        |byte: u8| (b'!'..=b'~').contains(&byte) || (0xA1..=0xAC).contains(&byte) || byte >= 0xAE;
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !printable(other)).count();
    char::from_u32(256 + u32::try_from(before).unwrap()).unwrap()
}
