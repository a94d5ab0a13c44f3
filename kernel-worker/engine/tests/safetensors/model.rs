//! config.json, shards and links of a folder.

use proptest::prelude::*;
use serde_json::{Value, json};
use velox_engine::files::hf_config;
use velox_engine::spec::{Architecture, RopePairing};

use crate::folder::Folder;

#[test]
fn sizes_come_from_the_configuration() {
    let source = Folder::of("llama-head-dim").open().unwrap();
    let spec = &source.spec;
    assert_eq!(spec.architecture, Architecture::Llama);
    assert_eq!((spec.n_heads, spec.n_kv_heads, spec.head_dim), (4, 2, 16));
    assert_eq!(spec.rope.pairing, RopePairing::HalfSplit);
    assert_eq!(spec.rope.inverse_frequencies.len(), 8);
    assert_eq!(source.format, "safetensors");
    assert_eq!(source.tensor_types, ["BF16"]);
    assert_eq!(source.weight_bytes, source.parameters * 2);
    assert!(source.tensors.head.is_some());
}

#[test]
fn absent_fields_take_the_value_that_the_library_gives_them() {
    let folder = Folder::of("llama-untied");
    folder.configure(|config| {
        config["head_dim"] = Value::Null;
        config["num_key_value_heads"] = Value::Null;
        config["tie_word_embeddings"] = Value::Null;
    });
    let source = folder.open().unwrap();
    assert_eq!((source.spec.head_dim, source.spec.n_kv_heads), (8, 4));
    assert!(source.tensors.head.is_some(), "a head in the file is used");
}

/// A family, a change of its configuration, and words of the refusal.
type Case = (&'static str, &'static str, fn(&mut Value), &'static str);

#[test]
fn configurations_that_would_compute_another_model() {
    let cases: [Case; 30] = [
        (
            "model type",
            "qwen3",
            |c| c["model_type"] = json!("minicpm3"),
            "model_type \\\"minicpm3\\\" is not supported",
        ),
        (
            "no model type",
            "qwen3",
            |c| c["model_type"] = Value::Null,
            "model_type is missing",
        ),
        (
            "class",
            "qwen3",
            |c| c["architectures"] = json!(["Qwen3ForSequenceClassification"]),
            "architectures",
        ),
        (
            "activation",
            "qwen3",
            |c| c["hidden_act"] = json!("gelu"),
            "hidden_act \\\"gelu\\\"",
        ),
        (
            "experts",
            "qwen3",
            |c| c["num_experts"] = json!(8),
            "num_experts 8",
        ),
        (
            "latent attention",
            "qwen3",
            |c| c["kv_lora_rank"] = json!(512),
            "kv_lora_rank 512",
        ),
        (
            "quantised",
            "qwen3",
            |c| c["quantization_config"] = json!({"bits": 4, "quant_method": "awq"}),
            "quantization_config with quant_method awq",
        ),
        (
            "partial rotation",
            "qwen3",
            |c| c["partial_rotary_factor"] = json!(0.5),
            "partial_rotary_factor 0.5",
        ),
        (
            "scaled embedding",
            "llama-tied",
            |c| c["scale_emb"] = json!(12),
            "scale_emb 12",
        ),
        (
            "dynamic scaling",
            "llama-rope-linear",
            |c| c["rope_scaling"] = json!({"type": "dynamic", "factor": 2.0}),
            "rope_scaling.type \\\"dynamic\\\"",
        ),
        (
            "longrope",
            "qwen3",
            |c| c["rope_parameters"] = json!({"rope_type": "longrope", "factor": 2.0}),
            "rope_parameters.rope_type \\\"longrope\\\"",
        ),
        (
            "no factor",
            "llama-rope-llama3",
            |c| c["rope_parameters"]["low_freq_factor"] = Value::Null,
            "rope_parameters.low_freq_factor is missing",
        ),
        (
            "rules by layer type",
            "qwen3",
            |c| c["rope_parameters"] = json!({"full_attention": {"rope_type": "default"}}),
            "rope_parameters.full_attention",
        ),
        (
            "two rules",
            "qwen3",
            |c| c["rope_scaling"] = json!({"type": "linear", "factor": 2.0}),
            "rope_scaling beside different rope_parameters",
        ),
        (
            "factor 0",
            "llama-rope-linear",
            |c| c["rope_scaling"]["factor"] = json!(0),
            "frequency inf",
        ),
        (
            "theta 0",
            "qwen3",
            |c| c["rope_parameters"]["rope_theta"] = json!(0),
            "frequency inf",
        ),
        (
            "mixed layers",
            "qwen2",
            |c| c["layer_types"] = json!(["full_attention", "sliding_attention"]),
            "layer_types",
        ),
        (
            "too few layer types",
            "qwen2",
            |c| c["layer_types"] = json!(["full_attention"]),
            "layer_types",
        ),
        (
            "mixed window",
            "qwen2-window",
            |c| {
                c["layer_types"] = Value::Null;
                c["max_window_layers"] = json!(1);
            },
            "max_window_layers 1",
        ),
        (
            "window 0",
            "mistral-window",
            |c| c["sliding_window"] = json!(0),
            "sliding_window 0",
        ),
        (
            "missing size",
            "qwen3",
            |c| c["hidden_size"] = Value::Null,
            "hidden_size is missing",
        ),
        (
            "negative size",
            "qwen3",
            |c| c["hidden_size"] = json!(-1),
            "hidden_size must be an integer from 0, it is -1",
        ),
        (
            "text as size",
            "qwen3",
            |c| c["hidden_size"] = json!("8"),
            "hidden_size must be an integer from 0",
        ),
        (
            "no heads",
            "llama-tied",
            |c| {
                c["num_attention_heads"] = json!(0);
                c["head_dim"] = Value::Null;
            },
            "num_attention_heads 0",
        ),
        (
            "huge layers",
            "llama-tied",
            |c| c["num_hidden_layers"] = json!(1_u64 << 40),
            "number of layers is 1099511627776",
        ),
        (
            "huge head",
            "qwen3",
            |c| c["head_dim"] = json!(1_u64 << 40),
            "head dimension is 1099511627776",
        ),
        (
            "odd head",
            "qwen3",
            |c| c["head_dim"] = json!(7),
            "head dimension is 7",
        ),
        (
            "kv heads",
            "qwen3",
            |c| c["num_key_value_heads"] = json!(3),
            "no multiple of the 3 key/value heads",
        ),
        (
            "epsilon",
            "qwen3",
            |c| c["rms_norm_eps"] = json!(2),
            "epsilon of the RMS norm is 2",
        ),
        (
            "an end token too many",
            "qwen3",
            |c| c["eos_token_id"] = json!([2, 96]),
            "eos_token_id has the token 96, the model has 96 tokens",
        ),
    ];
    for (title, family, change, words) in cases {
        let folder = Folder::of(family);
        folder.configure(change);
        let error = folder.error();
        assert!(error.starts_with("config.json: "), "{title}: {error}");
        assert!(
            error.contains(words),
            "{title}: \"{error}\" lacks \"{words}\""
        );
    }
}

#[test]
fn tensors_must_be_those_of_the_configuration() {
    let cases: [Case; 5] = [
        (
            "own head",
            "llama-tied",
            |c| c["tie_word_embeddings"] = json!(false),
            "lm_head.weight is missing",
        ),
        (
            "biases of attention",
            "llama-tied",
            |c| c["attention_bias"] = json!(true),
            "model.layers.0.self_attn.q_proj.bias is missing",
        ),
        (
            "no biases of the MLP",
            "llama-biases",
            |c| c["mlp_bias"] = json!(false),
            "further tensors (model.layers.0.mlp.down_proj.bias",
        ),
        (
            "one layer less",
            "llama-tied",
            |c| c["num_hidden_layers"] = json!(1),
            "further tensors (model.layers.1.",
        ),
        (
            "one token less",
            "llama-tied",
            |c| c["vocab_size"] = json!(95),
            "embed_tokens.weight has shape [96, 32], must have [95, 32]",
        ),
    ];
    for (title, family, change, words) in cases {
        let folder = Folder::of(family);
        folder.configure(change);
        let error = folder.error();
        assert!(
            error.contains(words),
            "{title}: \"{error}\" lacks \"{words}\""
        );
    }
}

/// Splits the weights of a folder: the second file gets an own tensor.
fn shard(folder: &Folder) -> Value {
    let bytes = folder.read("model.safetensors");
    folder.remove("model.safetensors");
    let header_bytes = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + header_bytes]).unwrap();
    let data = &bytes[8 + header_bytes..];
    let table = header.as_object_mut().unwrap();
    table.remove("__metadata__");
    let (last, entry) = table
        .iter()
        .max_by_key(|(_, entry)| entry["data_offsets"][1].as_u64())
        .map(|(name, entry)| (name.clone(), entry.clone()))
        .unwrap();
    table.remove(&last);
    let begin = usize::try_from(entry["data_offsets"][0].as_u64().unwrap()).unwrap();
    let mut entry = entry;
    entry["data_offsets"] = json!([0, data.len() - begin]);
    let mut weight_map: serde_json::Map<String, Value> = table
        .keys()
        .map(|name| (name.clone(), json!("a.safetensors")))
        .collect();
    weight_map.insert(last.clone(), json!("b.safetensors"));
    let file = |header: &Value, data: &[u8]| {
        let text = header.to_string();
        let text = format!("{text:<width$}", width = text.len().next_multiple_of(8));
        let mut bytes = u64::try_from(text.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes.extend(data);
        bytes
    };
    folder.write("a.safetensors", file(&header, &data[..begin]));
    folder.write("b.safetensors", file(&json!({last: entry}), &data[begin..]));
    json!({"metadata": {"total_size": 1}, "weight_map": weight_map})
}

const INDEX: &str = "model.safetensors.index.json";

#[test]
fn a_sharded_model_is_the_same_model() {
    let folder = Folder::of("llama-tied");
    let whole = folder.open().unwrap();
    let index = shard(&folder);
    folder.write(INDEX, index.to_string());
    let sharded = folder.open().unwrap();
    assert_eq!(sharded.parameters, whole.parameters);
    assert_eq!(sharded.tensors.final_norm, whole.tensors.final_norm);
}

#[test]
fn an_index_that_lies_is_refused() {
    let folder = Folder::of("llama-tied");
    let good = shard(&folder);
    let rename = |from: &str, to: &str| {
        let mut index = good.clone();
        for file in index["weight_map"].as_object_mut().unwrap().values_mut() {
            if file == from {
                *file = json!(to);
            }
        }
        folder.write(INDEX, index.to_string());
        folder.error()
    };
    for hostile in [
        "../b.safetensors",
        "/etc/passwd",
        "sub/b.safetensors",
        "..",
        ".",
        "",
        "..\\b.safetensors",
        "b.safetensors\0",
        ".hidden",
        "C:b",
    ] {
        let error = rename("b.safetensors", hostile);
        assert!(
            error.contains("plain file name inside"),
            "{hostile}: {error}"
        );
    }
    let error = rename("b.safetensors", "c.safetensors");
    assert_eq!(error, "cannot read c.safetensors");
    let error = rename("b.safetensors", "a.safetensors");
    assert!(error.contains("is in none of the files"), "{error}");

    let mut missing = good.clone();
    missing["weight_map"]
        .as_object_mut()
        .unwrap()
        .remove("model.embed_tokens.weight");
    folder.write(INDEX, missing.to_string());
    assert!(
        folder
            .error()
            .contains("tensor model.embed_tokens.weight is not in"),
        "{}",
        folder.error()
    );

    folder.write(INDEX, "{\"weight_map\": []}");
    assert!(
        folder.error().contains("is not the JSON expected"),
        "{}",
        folder.error()
    );
    folder.remove(INDEX);
    assert!(
        folder.error().contains("neither model.safetensors nor"),
        "{}",
        folder.error()
    );
}

#[cfg(unix)]
#[test]
fn links_may_not_leave_the_folder() {
    use std::os::unix::fs::symlink;
    let outside = Folder::of("llama-tied");
    let folder = Folder::of("llama-tied");
    folder.remove("tokenizer.json");
    symlink(
        outside.path("tokenizer.json"),
        folder.path("tokenizer.json"),
    )
    .unwrap();
    assert_eq!(
        folder.error(),
        "tokenizer.json: is a link that leads out of the model's folder"
    );

    // Inside it they may lead anywhere.
    let folder = Folder::of("llama-tied");
    std::fs::rename(folder.path("tokenizer.json"), folder.path("t")).unwrap();
    symlink("t", folder.path("tokenizer.json")).unwrap();
    folder.open().unwrap();
}

#[cfg(unix)]
#[test]
fn links_of_the_hub_cache_lead_to_its_blobs() {
    use std::os::unix::fs::symlink;
    let source = Folder::of("llama-tied");
    let cache = tempfile::tempdir().unwrap();
    let snapshot = cache.path().join("snapshots/0123");
    let blobs = cache.path().join("blobs");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(&blobs).unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(source.path(name), blobs.join(name)).unwrap();
        symlink(format!("../../blobs/{name}"), snapshot.join(name)).unwrap();
    }
    velox_engine::files::open(&snapshot, &mut |_| {}).unwrap();
}

#[test]
fn a_file_that_is_too_long_is_not_read() {
    let folder = Folder::of("llama-tied");
    folder.write("config.json", vec![b' '; (1 << 20) + 1]);
    assert_eq!(
        folder.error(),
        "config.json: has 1048577 bytes, limit is 1048576"
    );
    folder.remove("config.json");
    assert_eq!(folder.error(), "cannot read config.json");
    std::fs::create_dir(folder.path("config.json")).unwrap();
    assert_eq!(folder.error(), "cannot read config.json");
}

#[test]
fn the_fingerprint_follows_configuration_tokenizer_and_weights() {
    let folder = Folder::of("llama-tied");
    let first = folder.open().unwrap().fingerprint;
    assert_eq!(first, folder.open().unwrap().fingerprint);
    folder.configure(|config| config["rms_norm_eps"] = json!(1e-4));
    let second = folder.open().unwrap().fingerprint;
    assert_ne!(first, second);
    let mut tokenizer = folder.read("tokenizer.json");
    tokenizer.push(b' ');
    folder.write("tokenizer.json", tokenizer);
    let third = folder.open().unwrap().fingerprint;
    assert_ne!(second, third);
    let mut weights = folder.read("model.safetensors");
    // Low byte of the last f32: still a number.
    let at = weights.len() - 4;
    weights[at] ^= 1;
    folder.write("model.safetensors", weights);
    assert_ne!(third, folder.open().unwrap().fingerprint);
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0_u64..5).prop_map(Value::from),
        "[a-z_]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 8, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::hash_map("[a-z_]{1,8}", inner, 0..3)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn changed_fields_never_break_the_reader(
        family in prop::sample::select(vec!["qwen3", "llama-rope-yarn", "qwen2-window", "llama-rope-linear"]),
        field in any::<prop::sample::Index>(),
        value in any_json(),
        nested in any::<bool>(),
    ) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/families").join(family).join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let mut object = config.as_object_mut().unwrap();
        if nested && object.contains_key("rope_parameters") {
            object = object["rope_parameters"].as_object_mut().unwrap();
        }
        let key = object.keys().nth(field.index(object.len())).unwrap().clone();
        object.insert(key, value);
        if let Ok(config) = hf_config::parse("config.json", config.to_string().as_bytes()) {
            let spec = config.spec;
            prop_assert_eq!(spec.rope.inverse_frequencies.len() * 2, spec.head_dim);
            prop_assert!(spec.rope.inverse_frequencies.iter().all(|f| f.is_finite() && *f > 0.0));
        }
    }
}
