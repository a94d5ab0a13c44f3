//! Files that are good containers: what is read from them, and which models are refused.

use velox_engine::files::{self, Vocabulary};
use velox_engine::spec::{Architecture, RopePairing};

use crate::writer::{File, OnDisk, VOCABULARY, Value};
use crate::{assert_refused, open};

/// Moves the tiny model to another architecture.
fn rename(file: &mut File, architecture: &str) {
    file.set("general.architecture", Value::text(architecture));
    for (key, _) in &mut file.pairs {
        if let Some(name) = key.strip_prefix("llama.") {
            *key = format!("{architecture}.{name}");
        }
    }
}

#[test]
fn end_tokens_are_the_union_of_keys_and_control_texts() {
    let mut file = File::tiny();
    file.set("tokenizer.ggml.eot_token_id", Value::U32(3));
    file.set("tokenizer.ggml.eom_token_id", Value::U32(3));
    let source = open(&file).unwrap();
    let ends: Vec<_> = source
        .tokenizer
        .end_tokens
        .iter()
        .map(|end| (end.token_id, end.text.as_str(), end.source.as_str()))
        .collect();
    assert_eq!(
        ends,
        [
            (4, "b", "tokenizer.ggml.eos_token_id"),
            (3, "a", "tokenizer.ggml.eot_token_id"),
            (2, "</s>", "tokenizer.ggml.token_type"),
            (5, "<|im_end|>", "tokenizer.ggml.token_type"),
        ]
    );
    assert_eq!(source.tokenizer.eos_token_id, Some(4));
    assert_eq!(source.tokenizer.bos_token_id, Some(1));
    assert_eq!(source.tokenizer.vocab_size, 6);
}

#[test]
fn a_tokenizer_json_inside_is_passed_on_as_it_is() {
    let mut file = File::tiny();
    file.set("tokenizer.huggingface.json", Value::text("{\"a\": 1}"));
    let Vocabulary::HuggingFaceJson(json) = open(&file).unwrap().tokenizer.vocabulary else {
        panic!("the json must win");
    };
    assert_eq!(json, b"{\"a\": 1}");
}

#[test]
fn templates_keep_their_names() {
    let mut file = File::tiny();
    file.set("tokenizer.chat_template.tool_use", Value::text("tools"));
    file.set("tokenizer.chat_template", Value::text("plain"));
    let expected = [("default", "plain"), ("tool_use", "tools")];
    let templates = open(&file).unwrap().tokenizer.chat_templates;
    assert_eq!(
        templates,
        expected.map(|(a, b)| (a.to_owned(), b.to_owned()))
    );
}

#[test]
fn qwen_keeps_half_split_pairs_and_takes_its_own_tensors() {
    let mut qwen2 = File::tiny();
    rename(&mut qwen2, "qwen2");
    qwen2.add_f32("blk.0.attn_q.bias", vec![8]);
    let source = open(&qwen2).unwrap();
    assert_eq!(source.spec.architecture, Architecture::Qwen2);
    assert_eq!(source.spec.rope.pairing, RopePairing::HalfSplit);
    let layer = &source.tensors.layers[0];
    assert_eq!(layer.q_proj.bias.as_deref(), Some([0.5_f32; 8].as_slice()));
    assert!(layer.k_proj.bias.is_none());

    let mut qwen3 = File::tiny();
    rename(&mut qwen3, "qwen3");
    let error = open(&qwen3).unwrap_err().to_string();
    assert!(
        error.contains("blk.0.attn_q_norm.weight is missing"),
        "{error}"
    );
    qwen3.add_f32("blk.0.attn_q_norm.weight", vec![4]);
    qwen3.add_f32("blk.0.attn_k_norm.weight", vec![4]);
    assert!(open(&qwen3).unwrap().tensors.layers[0].qk_norm.is_some());
}

#[test]
fn an_own_head_is_not_the_embedding() {
    let mut file = File::tiny();
    let tied = open(&file).unwrap();
    assert!(tied.tensors.head.is_none());
    file.add_f32("output.weight", vec![8, 6]);
    let own = open(&file).unwrap();
    assert!(own.tensors.head.is_some());
    assert_eq!(own.parameters, tied.parameters + 48);
    assert_eq!(own.weight_bytes, tied.weight_bytes + 192);
    assert_ne!(own.fingerprint, tied.fingerprint);
}

#[test]
fn rope_divisors_stretch_frequencies_once() {
    let mut file = File::tiny();
    let plain = open(&file).unwrap().spec.rope.inverse_frequencies;
    file.add_f32("rope_freqs.weight", vec![2]);
    let divided = open(&file).unwrap().spec.rope.inverse_frequencies;
    // The writer fills every tensor with 0.5.
    assert_eq!(divided, [plain[0] / 0.5, plain[1] / 0.5]);
    file.set("llama.rope.scaling.type", Value::text("linear"));
    file.set("llama.rope.scaling.factor", Value::F32(2.0));
    let error = open(&file).unwrap_err().to_string();
    assert!(error.contains("rope_freqs.weight"), "{error}");
}

#[test]
fn equal_head_counts_of_all_layers_are_one_head_count() {
    let mut file = File::tiny();
    file.set("llama.attention.head_count_kv", Value::U32s(vec![1]));
    assert_eq!(open(&file).unwrap().spec.n_kv_heads, 1);
}

#[test]
fn a_window_as_long_as_the_context_is_full_attention() {
    let mut file = File::tiny();
    file.set("llama.attention.sliding_window", Value::U32(32));
    assert_eq!(open(&file).unwrap().spec.sliding_window, None);
    file.set("llama.attention.sliding_window", Value::U32(8));
    assert_eq!(open(&file).unwrap().spec.sliding_window, Some(8));
}

#[test]
fn metadata_that_would_compute_another_model() {
    assert_refused(&[
        (
            "architecture",
            |file| rename(file, "minicpm"),
            &["general.architecture minicpm is not supported"],
        ),
        (
            "no architecture",
            |file| file.unset("general.architecture"),
            &["general.architecture is missing"],
        ),
        (
            "architecture of the wrong type",
            |file| file.set("general.architecture", Value::U32(1)),
            &["general.architecture must be a UTF-8 string"],
        ),
        (
            "adapter",
            |file| file.set("general.type", Value::text("adapter")),
            &["general.type adapter"],
        ),
        (
            "experts",
            |file| file.set("llama.expert_count", Value::U32(8)),
            &["llama.expert_count"],
        ),
        (
            "scaled logits",
            |file| file.set("llama.logit_scale", Value::F32(0.5)),
            &["llama.logit_scale"],
        ),
        (
            "a key from the future",
            |file| file.set("llama.attention.telepathy", Value::Bool(true)),
            &["llama.attention.telepathy"],
        ),
        (
            "scaling type",
            |file| file.set("llama.rope.scaling.type", Value::text("longrope")),
            &["llama.rope.scaling.type longrope"],
        ),
        (
            "linear scaling without a factor",
            |file| file.set("llama.rope.scaling.type", Value::text("linear")),
            &["llama.rope.scaling.factor is missing"],
        ),
        (
            "factor 0",
            |file| {
                file.set("llama.rope.scaling.type", Value::text("linear"));
                file.set("llama.rope.scaling.factor", Value::F32(0.0));
            },
            &["frequency inf"],
        ),
        (
            "partial rotation",
            |file| file.set("llama.rope.dimension_count", Value::U32(2)),
            &["llama.rope.dimension_count 2"],
        ),
        (
            "unequal lengths of keys and values",
            |file| {
                file.set("llama.attention.key_length", Value::U32(4));
                file.set("llama.attention.value_length", Value::U32(2));
            },
            &["llama.attention.value_length 2 with llama.attention.key_length 4"],
        ),
        (
            "heads that differ between layers",
            |file| {
                file.set("llama.block_count", Value::U32(2));
                file.set("llama.attention.head_count_kv", Value::U32s(vec![1, 2]));
            },
            &["llama.attention.head_count_kv that differs between layers"],
        ),
        (
            "head counts for other layers",
            |file| file.set("llama.attention.head_count_kv", Value::U32s(vec![1, 1, 1])),
            &["head_count_kv has 3 entries, must have 1"],
        ),
        (
            "head counts as text",
            |file| {
                let texts = Value::Texts(vec!["1".to_owned()]);
                file.set("llama.attention.head_count_kv", texts);
            },
            &[
                "head_count_kv must be an array of unsigned integers",
                "array of strings",
            ],
        ),
        (
            "heads that do not divide",
            |file| file.set("llama.attention.head_count", Value::U32(3)),
            &["llama.embedding_length is 8", "head_count 3"],
        ),
        (
            "no heads",
            |file| file.set("llama.attention.head_count", Value::U32(0)),
            &["llama.attention.head_count is missing or 0"],
        ),
        (
            "layers without end",
            |file| file.set("llama.block_count", Value::U64(u64::MAX)),
            &["number of layers", "limit is 1 to 1024"],
        ),
        (
            "a head without end",
            |file| file.set("llama.attention.key_length", Value::U64(u64::MAX)),
            &["head dimension", "limit is 1 to 1024"],
        ),
        (
            "a hidden size without end",
            |file| file.set("llama.embedding_length", Value::U64(u64::MAX - 1)),
            &["head dimension", "limit is 1 to 1024"],
        ),
        (
            "an odd head",
            |file| file.set("llama.attention.key_length", Value::U32(3)),
            &["head dimension is 3", "even"],
        ),
        (
            "negative layers",
            |file| file.set("llama.block_count", Value::I32(-1)),
            &["llama.block_count must be an unsigned integer"],
        ),
        (
            "epsilon",
            |file| file.set("llama.attention.layer_norm_rms_epsilon", Value::F32(-1.0)),
            &["epsilon of the RMS norm is -1"],
        ),
        (
            "epsilon that is no number",
            |file| {
                file.set(
                    "llama.attention.layer_norm_rms_epsilon",
                    Value::F32(f32::NAN),
                )
            },
            &["layer_norm_rms_epsilon must be a finite float"],
        ),
        (
            "stated vocabulary",
            |file| file.set("llama.vocab_size", Value::U32(7)),
            &["llama.vocab_size is 7", "6 rows"],
        ),
    ]);
}

#[test]
fn tensors_that_do_not_fit_the_metadata() {
    assert_refused(&[
        (
            "missing tensor",
            |file| {
                file.tensors
                    .retain(|tensor| tensor.name != "blk.0.ffn_up.weight")
            },
            &["blk.0.ffn_up.weight is missing"],
        ),
        (
            "unused tensors",
            |file| {
                file.add_f32("blk.1.attn_norm.weight", vec![8]);
                file.add_f32("blk.0.post_ffw_norm.weight", vec![8]);
            },
            &[
                "blk.0.post_ffw_norm.weight, blk.1.attn_norm.weight",
                "is not supported",
            ],
        ),
        (
            "shape",
            |file| file.tensor("blk.0.ffn_down.weight").dims = vec![8, 12],
            &["blk.0.ffn_down.weight has shape [12, 8], must have [8, 12]"],
        ),
        (
            "rank",
            |file| file.tensor("token_embd.weight").dims = vec![48],
            &["token_embd.weight has shape [48]", "2 dimensions"],
        ),
        (
            "a norm that is no number",
            |file| {
                let at = usize::try_from(file.tensor("output_norm.weight").offset).unwrap();
                file.data[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
            },
            &["output_norm.weight[0] is NaN"],
        ),
    ]);
}

#[test]
fn tokenizers_that_do_not_fit() {
    assert_refused(&[
        (
            "no vocabulary",
            |file| file.unset("tokenizer.ggml.tokens"),
            &["tokenizer.ggml.tokens is missing"],
        ),
        (
            "tokens as numbers",
            |file| file.set("tokenizer.ggml.tokens", Value::U32s(vec![1])),
            &[
                "tokenizer.ggml.tokens must be an array of strings",
                "array of unsigned integers",
            ],
        ),
        (
            "more tokens than rows",
            |file| {
                let texts = vec!["a".to_owned(); VOCABULARY + 1];
                file.set("tokenizer.ggml.tokens", Value::Texts(texts));
            },
            &["tokenizer.ggml.tokens has 7 entries, limit is 6"],
        ),
        (
            "tokens that are not UTF-8",
            |file| {
                let mut bytes = 8_u32.to_le_bytes().to_vec();
                bytes.extend(1_u64.to_le_bytes());
                bytes.extend(crate::writer::string(&[0xff]));
                file.set("tokenizer.ggml.tokens", Value::Raw(9, bytes));
            },
            &["tokenizer.ggml.tokens[0] is not UTF-8"],
        ),
        (
            "types of other tokens",
            |file| file.set("tokenizer.ggml.token_type", Value::I32s(vec![1; 5])),
            &["tokenizer.ggml.token_type has 5 entries, must have 6"],
        ),
        (
            "unknown token type",
            |file| file.set("tokenizer.ggml.token_type", Value::I32s(vec![7; 6])),
            &["tokenizer.ggml.token_type has the value 7"],
        ),
        (
            "scores of other tokens",
            |file| file.set("tokenizer.ggml.scores", Value::F32s(vec![0.0])),
            &["tokenizer.ggml.scores has 1 entries"],
        ),
        (
            "sentencepiece without scores",
            |file| file.set("tokenizer.ggml.model", Value::text("llama")),
            &["tokenizer.ggml.scores is missing"],
        ),
        (
            "tokenizer model",
            |file| file.set("tokenizer.ggml.model", Value::text("t5")),
            &["tokenizer.ggml.model t5"],
        ),
        (
            "merge of one part",
            |file| file.set("tokenizer.ggml.merges", Value::Texts(vec!["ab".to_owned()])),
            &["tokenizer.ggml.merges[0] is \"ab\""],
        ),
        (
            "end token outside the vocabulary",
            |file| file.set("tokenizer.ggml.eos_token_id", Value::U32(6)),
            &["tokenizer.ggml.eos_token_id is 6", "6 tokens"],
        ),
        (
            "begin token of 2^32",
            |file| file.set("tokenizer.ggml.bos_token_id", Value::U64(1 << 32)),
            &["tokenizer.ggml.bos_token_id is 4294967296"],
        ),
        (
            "flag as a number",
            |file| file.set("tokenizer.ggml.add_bos_token", Value::U8(1)),
            &["tokenizer.ggml.add_bos_token must be a bool"],
        ),
    ]);
}

/// Splits the tiny model into two shards.
fn shards() -> [File; 2] {
    let mut first = File::tiny();
    first.set("split.no", Value::U32(0));
    first.set("split.count", Value::U32(2));
    first.set("split.tensors.count", Value::I32(11));
    let mut second = first.clone();
    second.pairs.retain(|(key, _)| key.starts_with("split."));
    second.set("split.no", Value::U32(1));
    second.tensors.drain(..6);
    first.tensors.truncate(6);
    [first, second]
}

#[test]
fn a_split_model_opens_by_any_of_its_shards() {
    let [first, second] = shards();
    let disk = OnDisk::named("m-00001-of-00002.gguf", &first.bytes());
    disk.add("m-00002-of-00002.gguf", &second.bytes());
    let whole = files::open(&disk.path(), &mut |_| {}).unwrap();
    let path = disk.path().with_file_name("m-00002-of-00002.gguf");
    let by_second = files::open(&path, &mut |_| {}).unwrap();
    assert_eq!(whole.fingerprint, by_second.fingerprint);
    assert_eq!(whole.parameters, open(&File::tiny()).unwrap().parameters);
}

#[test]
fn shards_that_do_not_belong_together() {
    let open_pair = |first: &File, second: &File| {
        let disk = OnDisk::named("m-00001-of-00002.gguf", &first.bytes());
        disk.add("m-00002-of-00002.gguf", &second.bytes());
        files::open(&disk.path(), &mut |_| {})
            .unwrap_err()
            .to_string()
    };
    let [first, mut second] = shards();
    second.set("split.no", Value::U32(0));
    let error = open_pair(&first, &second);
    assert!(
        error.contains("m-00002-of-00002.gguf: split.no is 0"),
        "{error}"
    );

    let [mut first, second] = shards();
    first.set("split.count", Value::U32(3));
    let error = open_pair(&first, &second);
    assert!(error.contains("split.count is 3"), "{error}");

    let [first, mut second] = shards();
    second.tensors.pop();
    let error = open_pair(&first, &second);
    assert!(
        error.contains("split.tensors.count is 11, the files found say 10"),
        "{error}"
    );

    let [first, mut second] = shards();
    second.tensors[0].name = "token_embd.weight".to_owned();
    let error = open_pair(&first, &second);
    assert!(
        error.contains("token_embd.weight occurs in m-00001-of-00002.gguf as well"),
        "{error}"
    );
}

#[test]
fn a_missing_shard_is_named() {
    let [first, _] = shards();
    let disk = OnDisk::named("m-00001-of-00002.gguf", &first.bytes());
    let error = files::open(&disk.path(), &mut |_| {})
        .unwrap_err()
        .to_string();
    assert_eq!(error, "cannot read m-00002-of-00002.gguf");
    // The same shard under a name that hides its number.
    let alone = OnDisk::new(&first.bytes());
    let error = files::open(&alone.path(), &mut |_| {})
        .unwrap_err()
        .to_string();
    assert!(error.contains("split.count is 2"), "{error}");
}

#[test]
fn what_is_no_file_is_unreadable_and_an_empty_one_is_damaged() {
    let disk = OnDisk::new(&[]);
    let error = files::open(&disk.path(), &mut |_| {})
        .unwrap_err()
        .to_string();
    assert_eq!(error, "model.gguf: file is empty");
    let missing = disk.path().with_file_name("none.gguf");
    let error = files::open(&missing, &mut |_| {}).unwrap_err().to_string();
    assert_eq!(error, "cannot read none.gguf");
}
