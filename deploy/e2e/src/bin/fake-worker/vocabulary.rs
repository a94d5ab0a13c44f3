//! A byte-level vocabulary: every byte is a token, and a few tokens are several bytes long.

use prost::Message as _;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use velox_e2e::copying::{END_TOKEN, PIECES, POISON_TOKEN, START_TOKEN, VOCABULARY_TOKENS};
use velox_proto::v1;
use velox_proto::worker::v1 as wire;
use wire::tokenizer_description::Source;

/// ChatML, and an exception for one role.
const TEMPLATE: &str = "{% for message in messages %}{% if message['role'] == 'forbidden' %}\
    {{ raise_exception('the role forbidden is not allowed here') }}{% endif %}\
    {{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}";

/// The encoded description, as it is sent in chunks.
pub(crate) fn description() -> Vec<u8> {
    let description = wire::TokenizerDescription {
        source: Some(Source::HuggingfaceJson(
            tokenizer_json().to_string().into_bytes().into(),
        )),
        chat_templates: vec![wire::ChatTemplate {
            name: "default".to_owned(),
            source: TEMPLATE.to_owned(),
        }],
        eos_token_id: Some(END_TOKEN),
        add_bos: Some(false),
        add_eos: Some(false),
        end_tokens: end_tokens(),
        vocab_size: VOCABULARY_TOKENS,
        ..wire::TokenizerDescription::default()
    };
    description.encode_to_vec()
}

/// The one token that ends an answer.
pub(crate) fn end_tokens() -> Vec<v1::EndToken> {
    vec![v1::EndToken {
        token_id: END_TOKEN,
        text: "<|end|>".to_owned(),
        source: "velox-fake-worker".to_owned(),
    }]
}

/// Digest in hex.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn tokenizer_json() -> Value {
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [
            special(START_TOKEN, "<|start|>"),
            special(END_TOKEN, "<|end|>"),
            special(POISON_TOKEN, "<|poison|>"),
        ],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary(), "merges": [],
        },
    })
}

fn vocabulary() -> Map<String, Value> {
    let bytes = (0..=u8::MAX).map(|byte| (vec![byte], u32::from(byte)));
    let pieces = PIECES
        .iter()
        .zip(256..)
        .map(|(piece, id)| (piece.as_bytes().to_vec(), id));
    bytes
        .chain(pieces)
        .map(|(bytes, id)| (spelled(&bytes), id.into()))
        .collect()
}

/// Spells bytes as byte-level vocabularies do: printable Latin-1 as it is, the others from U+0100 on.
fn spelled(bytes: &[u8]) -> String {
    let is_plain = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let spell = |byte: u8| {
        if is_plain(byte) {
            return char::from(byte);
        }
        let before = (0..byte).filter(|&other| !is_plain(other)).count();
        u32::try_from(before)
            .ok()
            .and_then(|place| char::from_u32(0x100 + place))
            .unwrap_or('?')
    };
    bytes.iter().map(|&byte| spell(byte)).collect()
}
