//! Texts become the ids that the model was trained on, and control tokens only where they may.

use velox_gateway::text::{Bos, MAX_TEXT_BYTES, Markup, SpecialTokens, TextError, Tokenizer};
use velox_proto::error::{Reason, ServiceError as _};
use velox_proto::v1::EndToken;

use crate::support::{byte_level, smollm2, spelled, tokenizer};

#[test]
fn ids_equal_those_of_an_independent_engine_on_every_golden_text() {
    let tokenizer = tokenizer(&smollm2());
    let mut texts = 0;
    for line in include_str!("../fixtures/tokens.jsonl").lines() {
        let golden: serde_json::Value = serde_json::from_str(line).unwrap();
        let text = golden["text"].as_str().unwrap();
        for (key, markup) in [("plain", Markup::Plain), ("with_special", Markup::Special)] {
            let expected: Vec<u32> = serde_json::from_value(golden[key].clone()).unwrap();
            let ids = tokenizer.encode(text, markup, Bos::Add).unwrap();
            assert_eq!(ids, expected, "{key} {text:?}");
            if markup == Markup::Plain {
                assert_eq!(tokenizer.decode(&ids, SpecialTokens::Hide), text);
            }
            assert_eq!(tokenizer.decode(&ids, SpecialTokens::Show), text);
        }
        texts += 1;
    }
    assert!(texts > 100, "{texts} texts");
}

#[test]
fn facts_of_the_vocabulary_are_told() {
    let mut description = smollm2();
    description.end_tokens = [0, 2, 2, 70_000]
        .map(|token_id| EndToken {
            token_id,
            ..EndToken::default()
        })
        .to_vec();
    let tokenizer = tokenizer(&description);
    assert_eq!(tokenizer.vocab_size(), 49_152);
    assert_eq!(tokenizer.end_token_ids(), [0, 2]);
    assert_eq!(tokenizer.bos_token_id(), Some(1));
    assert_eq!(
        (tokenizer.bos_text(), tokenizer.eos_text()),
        ("<|im_start|>", "<|im_end|>")
    );
    assert!(tokenizer.is_special(16) && !tokenizer.is_special(17) && !tokenizer.is_special(90_000));
    assert_eq!(tokenizer.token_bytes(905), Some(&b" world"[..]));
    assert_eq!(tokenizer.token_bytes(49_152), None);
}

#[test]
fn bos_is_put_in_front_once_and_only_where_it_is_wanted() {
    let mut description = smollm2();
    description.add_bos = Some(true);
    let wants = tokenizer(&description);
    let ids = |text, markup, bos| wants.encode(text, markup, bos).unwrap();
    assert_eq!(ids("Hello", Markup::Special, Bos::Add), [1, 19_556]);
    assert_eq!(ids("Hello", Markup::Special, Bos::Omit), [19_556]);
    assert_eq!(
        ids("<|im_start|>Hello", Markup::Special, Bos::Add),
        [1, 19_556]
    );
    assert_eq!(ids("<|im_start|>", Markup::Plain, Bos::Add)[0], 1);
    assert!(ids("<|im_start|>", Markup::Plain, Bos::Add).len() > 2);
    assert_eq!(ids("", Markup::Plain, Bos::Add), [1]);

    // Without a word in the file the pre type decides, and llama-bpe wants one.
    for (pre, expected) in [
        ("llama-bpe", vec![256, 97]),
        ("qwen2", vec![97]),
        ("minicpm5", vec![97]),
    ] {
        let mut description = byte_level(pre, &[("<s>", 3)], &[]);
        description.bos_token_id = Some(256);
        let by_default = tokenizer(&description);
        assert_eq!(
            by_default.encode("a", Markup::Plain, Bos::Add).unwrap(),
            expected,
            "{pre}"
        );
        description.add_bos = Some(false);
        let told = tokenizer(&description);
        assert_eq!(
            told.encode("a", Markup::Plain, Bos::Add).unwrap(),
            [97],
            "{pre}"
        );
    }
}

#[test]
fn no_plain_text_becomes_a_control_token() {
    // llama-bpe takes a whole word from the vocabulary, be it a control token.
    let description = byte_level(
        "llama-bpe",
        &[
            ("ab", 1),
            ("stop", 3),
            ("<s>", 3),
            ("aba", 3),
            ("<think>", 4),
        ],
        &["a b", "ab a"],
    );
    let tokenizer = tokenizer(&description);
    let plain = |text| tokenizer.encode(text, Markup::Plain, Bos::Omit).unwrap();
    assert_eq!(plain("stop"), b"stop".map(u32::from));
    assert_eq!(plain("<s>"), b"<s>".map(u32::from));
    assert_eq!(plain("aba"), [97, 98, 97]);
    assert_eq!(plain("xaba"), [120, 256, 97]);
    assert_eq!(plain("<think>"), [260]);
    let special = |text| tokenizer.encode(text, Markup::Special, Bos::Omit).unwrap();
    assert_eq!(special("<s>stop"), [258, 257]);
    assert_eq!(
        tokenizer.decode(&[258, 97, 257, 260], SpecialTokens::Hide),
        "a<think>"
    );
    assert_eq!(
        tokenizer.decode(&[258, 97, 257], SpecialTokens::Show),
        "<s>astop"
    );
}

#[test]
fn a_pre_type_without_support_is_refused_by_name() {
    let build = |pre| Tokenizer::from_description(&byte_level(pre, &[], &[])).unwrap_err();
    let unknown = build("klingon");
    assert!(matches!(&unknown, TextError::UnsupportedPreType(pre) if pre == "klingon"));
    assert!(unknown.to_string().contains("klingon"));
    assert_eq!(unknown.reason(), Reason::InvalidModel);
    let missing = build("");
    assert!(
        missing.to_string().contains("tokenizer.ggml.pre"),
        "{missing}"
    );
}

#[test]
fn every_pre_type_splits_as_its_family_does() {
    // Every pair of neighbours merges, so the pieces show as tokens.
    let text = "I'll go,\n\n  HelloWorld'S 12345 e\u{301}a //x\u{a0} 日本1";
    let cases: &[(&str, &[&str])] = &[
        (
            "gpt-2",
            &[
                "I",
                "'ll",
                " go",
                ",",
                "\n\n ",
                " HelloWorld",
                "'",
                "S",
                " 12345",
                " e",
                "\u{301}",
                "a",
                " //",
                "x",
                "\u{a0}",
                " 日本",
                "1",
            ],
        ),
        (
            "smollm",
            &[
                "I",
                "'ll",
                " go",
                ",",
                "\n\n ",
                " HelloWorld",
                "'",
                "S",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                " e",
                "\u{301}",
                "a",
                " //",
                "x",
                "\u{a0}",
                " 日本",
                "1",
            ],
        ),
        (
            "llama-bpe",
            &[
                "I",
                "'ll",
                " go",
                ",\n\n",
                " ",
                " HelloWorld",
                "'S",
                " ",
                "123",
                "45",
                " e",
                "\u{301}a",
                " //",
                "x",
                "\u{a0}",
                " 日本",
                "1",
            ],
        ),
        (
            "qwen2",
            &[
                "I",
                "'ll",
                " go",
                ",\n\n",
                " ",
                " HelloWorld",
                "'S",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                " éa",
                " //",
                "x",
                "\u{a0}",
                " 日本",
                "1",
            ],
        ),
        (
            "qwen35",
            &[
                "I",
                "'ll",
                " go",
                ",\n\n",
                " ",
                " HelloWorld",
                "'S",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                " éa",
                " //",
                "x",
                "\u{a0}",
                " 日本",
                "1",
            ],
        ),
        (
            "minicpm5",
            &[
                "I",
                "'ll",
                " go",
                ",\n\n",
                " ",
                " HelloWorld",
                "'S",
                " ",
                "123",
                "45",
                " e",
                "\u{301}a",
                " //",
                "x",
                "\u{a0}",
                " 日本",
                "1",
            ],
        ),
        (
            "tekken",
            &[
                "I",
                "'ll",
                " go",
                ",\n\n",
                " ",
                " Hello",
                "World",
                "'S",
                " ",
                "1",
                "2",
                "3",
                "4",
                "5",
                " e\u{301}a",
                " //",
                "x",
                "\u{a0}",
                " 日本",
                "1",
            ],
        ),
        (
            "gpt-4o",
            &[
                "I'll",
                " go",
                ",\n\n",
                " ",
                " Hello",
                "World'S",
                " ",
                "123",
                "45",
                " e\u{301}a",
                " //",
                "x",
                "\u{a0}",
                " 日本",
                "1",
            ],
        ),
        (
            "glm4",
            &[
                "I",
                "'ll",
                " go",
                ",\n\n",
                " ",
                " HelloWorld",
                "'S",
                " ",
                "123",
                "45",
                " e",
                "\u{301}a",
                " //",
                "x",
                "\u{a0}",
                " 日本",
                "1",
            ],
        ),
    ];
    for (pre, expected) in cases {
        let (mut pieces, mut merges) = (Vec::new(), Vec::new());
        for piece in *expected {
            let letters: Vec<String> = piece
                .bytes()
                .map(|byte| spelled(byte).to_string())
                .collect();
            for end in 2..=letters.len() {
                let whole = letters[..end].concat();
                if !pieces.contains(&whole) {
                    merges.push(format!(
                        "{} {}",
                        letters[..end - 1].concat(),
                        letters[end - 1]
                    ));
                    pieces.push(whole);
                }
            }
        }
        // Longer pieces first, so that no merge eats into a neighbour.
        let more: Vec<(&str, u32)> = pieces.iter().map(|piece| (piece.as_str(), 1)).collect();
        let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
        let tokenizer = tokenizer(&byte_level(pre, &more, &merges));
        let ids = tokenizer.encode(text, Markup::Plain, Bos::Omit).unwrap();
        let found: Vec<String> = ids
            .iter()
            .map(|&id| tokenizer.decode(&[id], SpecialTokens::Show))
            .collect();
        assert_eq!(&found, expected, "{pre}");
    }
}

#[test]
fn a_long_text_is_refused_and_a_monotonous_one_is_not_slow() {
    let tokenizer = tokenizer(&smollm2());
    let error = tokenizer
        .encode(&"a".repeat(MAX_TEXT_BYTES + 1), Markup::Plain, Bos::Omit)
        .unwrap_err();
    assert_eq!(error.reason(), Reason::InvalidRequest);
    assert!(error.to_string().contains("8388608"), "{error}");
    for text in [" ", "a", "\n", "日", "'", "<|im_start|>"] {
        let text = text.repeat(200_000 / text.len());
        let ids = tokenizer.encode(&text, Markup::Special, Bos::Omit).unwrap();
        assert_eq!(tokenizer.decode(&ids, SpecialTokens::Show), text);
    }
}

#[test]
fn an_id_that_the_model_lacks_is_never_made() {
    let mut description = byte_level("gpt-2", &[("<s>", 3)], &[]);
    description.vocab_size = 190;
    let tokenizer = tokenizer(&description);
    assert!(tokenizer.encode("a", Markup::Plain, Bos::Omit).is_ok());
    let error = tokenizer
        .encode("\u{ff}", Markup::Plain, Bos::Omit)
        .unwrap_err();
    assert!(
        matches!(error, TextError::TokenOutsideModel { limit: 190, .. }),
        "{error}"
    );
}
