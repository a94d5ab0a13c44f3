//! A tokenizer.json is used as it is, its contradictions included.

use velox_gateway::text::{Bos, Markup, SpecialTokens, TextError, Tokenizer};
use velox_proto::error::{Reason, ServiceError as _};
use velox_proto::worker::v1::TokenizerDescription;
use velox_proto::worker::v1::tokenizer_description::Source;

use crate::support::{spelled, tokenizer};

/// A tokenizer.json over bytes and a few merges, with the given parts.
fn huggingface(
    pre_tokenizer: &str,
    decoder: &str,
    vocabulary: &str,
    merges: &str,
) -> TokenizerDescription {
    let json = format!(
        r#"{{"version":"1.0","truncation":null,"padding":null,
        "added_tokens":[{{"id":900,"content":"<end>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}},
        {{"id":901,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],
        "normalizer":null,"pre_tokenizer":{pre_tokenizer},"decoder":{decoder},
        "post_processor":{{"type":"TemplateProcessing","single":[{{"SpecialToken":{{"id":"<s>","type_id":0}}}},{{"Sequence":{{"id":"A","type_id":0}}}}],
        "pair":[],"special_tokens":{{"<s>":{{"id":"<s>","ids":[901],"tokens":["<s>"]}}}}}},
        "model":{{"type":"BPE","vocab":{{{vocabulary},"<end>":900,"<s>":901}},"merges":{merges}}}}}"#
    );
    TokenizerDescription {
        source: Some(Source::HuggingfaceJson(json.into_bytes().into())),
        bos_token_id: Some(901),
        ..TokenizerDescription::default()
    }
}

fn byte_alphabet() -> String {
    let entries: Vec<String> = (0..=255_u8)
        .map(|byte| format!("{}:{byte}", serde_json::to_string(&spelled(byte)).unwrap()))
        .collect();
    entries.join(",") + r#","Ġa":300"#
}

const BYTE_LEVEL: &str =
    r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":true}"#;

const LLAMA_DECODER: &str = r#"{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#;

#[test]
fn a_contradictory_decoder_does_not_leak_byte_markers() {
    let text = "a a\n日 b";
    for decoder in [BYTE_LEVEL, LLAMA_DECODER, "null"] {
        for pre_tokenizer in [
            BYTE_LEVEL.to_owned(),
            format!(
                r#"{{"type":"Sequence","pretokenizers":[{{"type":"Digits","individual_digits":true}},{BYTE_LEVEL}]}}"#
            ),
        ] {
            let description =
                huggingface(&pre_tokenizer, decoder, &byte_alphabet(), r#"[["Ġ","a"]]"#);
            let tokenizer = tokenizer(&description);
            let ids = tokenizer.encode(text, Markup::Plain, Bos::Omit).unwrap();
            assert!(ids.contains(&300));
            assert_eq!(tokenizer.decode(&ids, SpecialTokens::Hide), text);
        }
    }
}

#[test]
fn a_tokenizer_json_keeps_markup_and_bos_apart() {
    let tokenizer = tokenizer(&huggingface(BYTE_LEVEL, BYTE_LEVEL, &byte_alphabet(), "[]"));
    assert_eq!(
        tokenizer
            .encode("<end>", Markup::Special, Bos::Omit)
            .unwrap(),
        [900]
    );
    assert_eq!(
        tokenizer.encode("<end>", Markup::Plain, Bos::Omit).unwrap(),
        b"<end>".map(u32::from)
    );
    // The post-processor puts BOS in front, so the tokenizer wants one.
    assert_eq!(
        tokenizer.encode("b", Markup::Special, Bos::Add).unwrap(),
        [901, 98]
    );
    assert_eq!(
        tokenizer.encode("<s>b", Markup::Special, Bos::Add).unwrap(),
        [901, 98]
    );
    assert_eq!(tokenizer.decode(&[901, 98, 900], SpecialTokens::Hide), "b");
}

#[test]
fn a_sentence_piece_tokenizer_json_drops_the_space_in_front() {
    let vocabulary = r#""▁":0,"a":1,"▁a":2,"<0xE6>":3,"<0x97>":4,"<0xA5>":5"#;
    let metaspace =
        r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"first","split":false}"#;
    let tokenizer = tokenizer(&huggingface(
        metaspace,
        LLAMA_DECODER,
        vocabulary,
        r#"[["▁","a"]]"#,
    ));
    let ids = tokenizer.encode("a a", Markup::Plain, Bos::Omit).unwrap();
    assert_eq!(ids, [2, 2]);
    assert_eq!(tokenizer.decode(&ids, SpecialTokens::Hide), "a a");
    assert_eq!(tokenizer.decode(&[3, 4, 5], SpecialTokens::Hide), "日");
}

#[test]
fn malformed_descriptions_are_errors() {
    let source = |bytes: &[u8]| TokenizerDescription {
        source: Some(Source::HuggingfaceJson(bytes.to_vec().into())),
        ..TokenizerDescription::default()
    };
    let deep = "[".repeat(100_000);
    for bytes in [
        &b""[..],
        b"{}",
        b"\xFF",
        deep.as_bytes(),
        br#"{"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#,
    ] {
        let error = Tokenizer::from_description(&source(bytes)).unwrap_err();
        assert_eq!(error.reason(), Reason::InvalidModel, "{error}");
    }
    assert!(matches!(
        Tokenizer::from_description(&TokenizerDescription::default()),
        Err(TextError::NoTokenizer)
    ));
    let huge_id = huggingface(BYTE_LEVEL, BYTE_LEVEL, r#""a":4294967295"#, "[]");
    assert!(Tokenizer::from_description(&huge_id).is_err());
}
