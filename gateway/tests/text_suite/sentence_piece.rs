//! SentencePiece vocabularies of GGUF files.

use proptest::prelude::*;
use velox_gateway::text::{Bos, Markup, SpecialTokens, Tokenizer};
use velox_proto::worker::v1::{GgufVocabulary, TokenizerDescription};

use crate::support::{describe, tokenizer};

/// Pieces with scores, as a SentencePiece model has them: bytes at 3..259, then `pieces`.
fn sentence_piece(pieces: &[(&str, f32, u32)]) -> TokenizerDescription {
    let mut gguf = GgufVocabulary {
        model: "llama".to_owned(),
        tokens: vec!["<unk>".into(), "<s>".into(), "</s>".into()],
        token_types: vec![2, 3, 3],
        scores: vec![0.0; 3],
        ..GgufVocabulary::default()
    };
    for byte in 0..=255_u8 {
        gguf.tokens.push(format!("<0x{byte:02X}>"));
        gguf.token_types.push(6);
        gguf.scores.push(0.0);
    }
    for &(piece, score, token_type) in pieces {
        gguf.tokens.push(piece.to_owned());
        gguf.token_types.push(token_type);
        gguf.scores.push(score);
    }
    TokenizerDescription {
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        unknown_token_id: Some(0),
        ..describe(gguf)
    }
}

const PIECES: &[(&str, f32, u32)] = &[
    ("\u{2581}h", -1.0, 1),
    ("el", -2.0, 1),
    ("\u{2581}hel", -3.0, 1),
    ("lo", -4.0, 1),
    ("he", -5.0, 1),
    ("\u{2581}", -10.0, 1),
    ("h", -11.0, 1),
    ("e", -12.0, 1),
    ("l", -13.0, 1),
    ("o", -14.0, 1),
    ("<tool>", 0.0, 4),
];

#[test]
fn sentence_piece_merges_the_best_score_first_and_falls_back_to_bytes() {
    let tokenizer = tokenizer(&sentence_piece(PIECES));
    let texts = |text| -> Vec<String> {
        let ids = tokenizer.encode(text, Markup::Plain, Bos::Omit).unwrap();
        ids.iter()
            .map(|&id| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap()).into_owned())
            .collect()
    };
    assert_eq!(texts("hello"), [" hel", "lo"]);
    assert_eq!(texts("hello hello"), [" hel", "lo", " hel", "lo"]);
    assert_eq!(texts("<tool>"), ["<tool>"]);
    let ids = tokenizer.encode("h日", Markup::Plain, Bos::Add).unwrap();
    let bytes: Vec<u32> = "日".bytes().map(|byte| 3 + u32::from(byte)).collect();
    assert_eq!(ids, [&[1, 259], bytes.as_slice()].concat());
    assert_eq!(tokenizer.decode(&ids, SpecialTokens::Hide), "h日");
    assert_eq!(
        tokenizer
            .encode("</s>", Markup::Plain, Bos::Omit)
            .unwrap()
            .iter()
            .filter(|&&id| tokenizer.is_special(id))
            .count(),
        0
    );
    assert_eq!(
        tokenizer.encode("<s>h", Markup::Special, Bos::Add).unwrap(),
        [1, 259]
    );
}

/// Greedy merging straight from its definition.
fn merge_by_score(text: &str, pieces: &[(&str, f32, u32)]) -> Vec<String> {
    let mut parts: Vec<String> = format!("\u{2581}{}", text.replace(' ', "\u{2581}"))
        .chars()
        .map(String::from)
        .collect();
    loop {
        let best = (1..parts.len())
            .filter_map(|at| {
                let joined = parts[at - 1].clone() + &parts[at];
                let score = pieces
                    .iter()
                    .find(|(piece, _, kind)| *piece == joined && *kind == 1)?
                    .1;
                Some((score, at, joined))
            })
            .min_by(|left, right| right.0.total_cmp(&left.0).then(left.1.cmp(&right.1)));
        let Some((_, at, joined)) = best else {
            return parts;
        };
        parts.splice(at - 1..=at, [joined]);
    }
}

proptest! {
    #[test]
    fn sentence_piece_agrees_with_the_definition(text in "[helo ]{0,16}") {
        let tokenizer = tokenizer(&sentence_piece(PIECES));
        let ids = tokenizer.encode(&text, Markup::Plain, Bos::Omit).unwrap();
        let found: Vec<String> = ids
            .iter()
            .map(|&id| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap()).replace(' ', "\u{2581}"))
            .collect();
        let expected = if text.is_empty() { Vec::new() } else { merge_by_score(&text, PIECES) };
        prop_assert_eq!(found, expected);
        prop_assert_eq!(tokenizer.decode(&ids, SpecialTokens::Hide), text);
    }

    #[test]
    fn any_vocabulary_is_built_or_refused(
        model in "gpt2|llama",
        tokens in proptest::collection::vec("[ab\u{2581}Ġ< >]{0,3}", 0..12),
        types in proptest::collection::vec(0u32..8, 0..12),
        scores in proptest::collection::vec(any::<f32>(), 0..12),
        merges in proptest::collection::vec("[ab ]{0,3}", 0..6),
        text in "[ab\u{2581}<> ]{0,12}",
        special in any::<u32>(),
    ) {
        let description = TokenizerDescription {
            bos_token_id: Some(special % 16),
            unknown_token_id: Some(special % 7),
            ..describe(GgufVocabulary { model, pre: "llama-bpe".to_owned(), tokens, token_types: types, scores, merges, add_space_prefix: None })
        };
        if let Ok(tokenizer) = Tokenizer::from_description(&description)
            && let Ok(ids) = tokenizer.encode(&text, Markup::Plain, Bos::Add)
        {
            prop_assert!(ids.iter().all(|&id| id < tokenizer.vocab_size()));
            let _ = tokenizer.decode(&ids, SpecialTokens::Show);
        }
    }
}
