//! Special tokens and templates: every source counts.

use serde_json::json;

use crate::folder::Folder;

/// The end tokens of a folder as (id, text, source).
fn ends(folder: &Folder) -> Vec<(u32, String, String)> {
    folder
        .open()
        .unwrap()
        .tokenizer
        .end_tokens
        .into_iter()
        .map(|end| (end.token_id, end.text, end.source))
        .collect()
}

fn end(id: u32, text: &str, source: &str) -> (u32, String, String) {
    (id, text.to_owned(), source.to_owned())
}

#[test]
fn the_end_set_is_the_union_of_all_files() {
    let folder = Folder::of("llama-tied");
    assert_eq!(ends(&folder), [end(2, "</s>", "config.json eos_token_id")]);

    folder.write("special_tokens_map.json", r#"{"eos_token": "t6"}"#);
    folder.write(
        "tokenizer_config.json",
        r#"{"eos_token": {"content": "t5", "lstrip": false}}"#,
    );
    folder.write("generation_config.json", r#"{"eos_token_id": [3, 4]}"#);
    let expected = [
        end(3, "t3", "generation_config.json eos_token_id"),
        end(4, "t4", "generation_config.json eos_token_id"),
        end(2, "</s>", "config.json eos_token_id"),
        end(5, "t5", "tokenizer_config.json eos_token"),
        end(6, "t6", "special_tokens_map.json eos_token"),
    ];
    assert_eq!(ends(&folder), expected);
    assert_eq!(folder.open().unwrap().tokenizer.eos_token_id, Some(5));
}

#[test]
fn each_source_alone_is_enough() {
    let cases = [
        (
            "generation_config.json",
            r#"{"eos_token_id": 7}"#,
            "generation_config.json eos_token_id",
        ),
        (
            "tokenizer_config.json",
            r#"{"eos_token": "t7"}"#,
            "tokenizer_config.json eos_token",
        ),
        (
            "special_tokens_map.json",
            r#"{"eos_token": {"content": "t7"}}"#,
            "special_tokens_map.json eos_token",
        ),
    ];
    for (file, content, source) in cases {
        let folder = Folder::of("llama-tied");
        folder.configure(|config| config["eos_token_id"] = json!(null));
        folder.write(file, content);
        assert_eq!(ends(&folder), [end(7, "t7", source)]);
    }
}

#[test]
fn special_tokens_and_flags_are_read() {
    let folder = Folder::of("llama-tied");
    folder.configure(|config| config["pad_token_id"] = json!(-1));
    folder.write(
        "tokenizer_config.json",
        r#"{"bos_token": "<s>", "unk_token": "<unk>", "add_bos_token": true, "add_eos_token": false}"#,
    );
    let tokenizer = folder.open().unwrap().tokenizer;
    assert_eq!(tokenizer.bos_token_id, Some(1));
    assert_eq!(tokenizer.unknown_token_id, Some(0));
    assert_eq!(tokenizer.padding_token_id, None);
    assert_eq!(
        (tokenizer.add_bos, tokenizer.add_eos),
        (Some(true), Some(false))
    );
    assert_eq!(tokenizer.vocab_size, 96);
}

#[test]
fn templates_come_from_the_file_first() {
    let named = |list: &[(&str, &str)]| -> Vec<(String, String)> {
        list.iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
            .collect()
    };
    let folder = Folder::of("llama-tied");
    let templates = || folder.open().unwrap().tokenizer.chat_templates;
    assert!(templates().is_empty());
    folder.write("tokenizer_config.json", r#"{"chat_template": "one"}"#);
    assert_eq!(templates(), named(&[("default", "one")]));
    folder.write(
        "tokenizer_config.json",
        r#"{"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}"#,
    );
    assert_eq!(templates(), named(&[("default", "a"), ("tool_use", "b")]));
    folder.write("chat_template.jinja", "c");
    assert_eq!(templates(), named(&[("default", "c"), ("tool_use", "b")]));
}

#[test]
fn tokenizer_files_that_make_no_sense_are_refused() {
    let cases = [
        (
            "tokenizer.json",
            "{}",
            "tokenizer.json: is not the JSON expected",
        ),
        (
            "tokenizer.json",
            r#"{"model": {"vocab": 5}}"#,
            "ids by text",
        ),
        (
            "tokenizer.json",
            r#"{"model": {"vocab": {"a": -1}}}"#,
            "tokenizer.json: is not the JSON expected",
        ),
        (
            "tokenizer_config.json",
            "[]",
            "tokenizer_config.json: is not the JSON expected",
        ),
        (
            "tokenizer_config.json",
            r#"{"eos_token": 5}"#,
            "eos_token must be a string or an object with content",
        ),
        (
            "tokenizer_config.json",
            r#"{"add_bos_token": "yes"}"#,
            "add_bos_token must be true or false",
        ),
        (
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "x"}]}"#,
            "chat_template must be a string or a list",
        ),
        (
            "generation_config.json",
            r#"{"eos_token_id": [1, 96]}"#,
            "has the token 96, the model has 96 tokens",
        ),
        (
            "generation_config.json",
            r#"{"eos_token_id": -1}"#,
            "has the token -1",
        ),
        (
            "generation_config.json",
            r#"{"eos_token_id": "2"}"#,
            "must be an integer or a list of integers",
        ),
    ];
    for (file, content, words) in cases {
        let folder = Folder::of("llama-tied");
        folder.write(file, content);
        let error = folder.error();
        assert!(
            error.contains(words),
            "{file} {content}: \"{error}\" lacks \"{words}\""
        );
    }
}

#[test]
fn a_named_token_outside_the_head_is_refused() {
    let folder = Folder::of("llama-tied");
    folder.write(
        "tokenizer.json",
        r#"{"added_tokens": [{"id": 96, "content": "</x>"}], "model": {"vocab": [["a", -1.5], ["b", -2]]}}"#,
    );
    folder.write("tokenizer_config.json", r#"{"eos_token": "b"}"#);
    assert_eq!(
        ends(&folder)[1],
        end(1, "b", "tokenizer_config.json eos_token")
    );
    folder.write("tokenizer_config.json", r#"{"eos_token": "</x>"}"#);
    let error = folder.error();
    assert!(
        error.contains("eos_token </x> is token 96, the model has 96 tokens"),
        "{error}"
    );
}
