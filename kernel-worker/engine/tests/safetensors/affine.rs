//! Matrices that MLX quantised: `quantization` of config.json and the tensors that it speaks of.

use serde_json::{Value, json};
use velox_kernels::affine::{StoredMatrix, StoredType};

use crate::folder::{Folder, Tensors};

const UP: &str = "model.layers.0.mlp.up_proj";
const DOWN: &str = "model.layers.0.mlp.down_proj";

fn mixed() -> Folder {
    Folder::copy_of("affine", "mixed")
}

fn type_of(matrix: &StoredMatrix) -> &'static str {
    matrix.stored_type().name()
}

#[test]
fn facts_are_those_of_the_file() {
    let folder = mixed();
    let source = folder.open().unwrap();
    let [first, second] = source.tensors.layers.as_slice() else {
        panic!("two layers");
    };
    assert_eq!(type_of(&source.tensors.embedding), "MLX_AFFINE_6_G32");
    assert_eq!(type_of(&first.q_proj.weight), "MLX_AFFINE_2_G32");
    assert_eq!(type_of(&first.up_proj.weight), "BF16");
    assert_eq!(type_of(&second.q_proj.weight), "MLX_AFFINE_4_G64");
    assert_eq!(
        source.tensor_types,
        [
            "BF16",
            "MLX_AFFINE_2_G32",
            "MLX_AFFINE_3_G128",
            "MLX_AFFINE_3_G64",
            "MLX_AFFINE_4_G128",
            "MLX_AFFINE_4_G64",
            "MLX_AFFINE_5_G128",
            "MLX_AFFINE_5_G32",
            "MLX_AFFINE_6_G32",
            "MLX_AFFINE_6_G64",
            "MLX_AFFINE_8_G128",
            "MLX_AFFINE_8_G32",
            "MLX_AFFINE_8_G64",
        ]
    );
    // Embedding and head, and two layers of 8 + 2 + 2 + 8 + 8 + 8 + 8 KiB elements, and five norms.
    assert_eq!(source.parameters, 2 * 64 * 64 + 2 * (44 << 10) + 5 * 64);
    let mut stored = 0;
    folder.change_tensors(|tensors| {
        stored = tensors.values().map(|tensor| tensor.bytes.len()).sum();
    });
    assert_eq!(source.weight_bytes, u64::try_from(stored).unwrap());
}

/// A change of config.json and words of the refusal.
type ConfigCase = (&'static str, fn(&mut Value), &'static str);

#[test]
fn configurations_that_ask_for_something_else() {
    /// Both fields say the same.
    fn both(config: &mut Value, change: impl Fn(&mut Value)) {
        change(&mut config["quantization"]);
        change(&mut config["quantization_config"]);
    }
    let cases: [ConfigCase; 17] = [
        (
            "mxfp4",
            |c| both(c, |q| q["mode"] = json!("mxfp4")),
            "quantization.mode \\\"mxfp4\\\" is not supported",
        ),
        (
            "mxfp8",
            |c| both(c, |q| q["mode"] = json!("mxfp8")),
            "quantization.mode \\\"mxfp8\\\" is not supported",
        ),
        (
            "nvfp4 in one module",
            |c| both(c, |q| q["lm_head"] = json!({"mode": "nvfp4"})),
            "quantization.lm_head.mode \\\"nvfp4\\\" is not supported",
        ),
        (
            "AWQ",
            |c| {
                c["quantization_config"] =
                    json!({"quant_method": "awq", "bits": 4, "group_size": 64})
            },
            "quantization_config with quant_method awq",
        ),
        (
            "GPTQ",
            |c| both(c, |q| q["quant_method"] = json!("gptq")),
            "quantization with quant_method gptq",
        ),
        (
            "compressed tensors",
            |c| both(c, |q| q["quant_method"] = json!("compressed-tensors")),
            "quant_method compressed-tensors",
        ),
        (
            "two layouts",
            |c| c["quantization_config"]["bits"] = json!(8),
            "quantization_config beside a different quantization is not supported",
        ),
        (
            "bits",
            |c| both(c, |q| q["bits"] = json!(7)),
            "quantization.bits 7 with group_size 64",
        ),
        (
            "group",
            |c| both(c, |q| q["group_size"] = json!(16)),
            "quantization.bits 4 with group_size 16",
        ),
        (
            "no bits",
            |c| both(c, |q| q["bits"] = Value::Null),
            "quantization.bits is missing",
        ),
        (
            "no group",
            |c| both(c, |q| q["group_size"] = Value::Null),
            "quantization.group_size is missing",
        ),
        (
            "negative bits",
            |c| both(c, |q| q["bits"] = json!(-4)),
            "quantization.bits must be an integer",
        ),
        (
            "bits of a module",
            |c| both(c, |q| q["lm_head"] = json!({"bits": 1})),
            "quantization.lm_head.bits 1 with group_size 64",
        ),
        (
            "quantised activations",
            |c| both(c, |q| q["quantize_input"] = json!(true)),
            "quantization.quantize_input true is not supported",
        ),
        (
            "quantised activations of a module",
            |c| {
                both(c, |q| {
                    q["lm_head"] = json!({"bits": 8, "quantize_input": true})
                })
            },
            "quantization.lm_head.quantize_input true is not supported",
        ),
        (
            "a number for a module",
            |c| both(c, |q| q["lm_head"] = json!(8)),
            "quantization.lm_head 8",
        ),
        (
            "no object",
            |c| both(c, |q| *q = json!("4bit")),
            "quantization must be an object",
        ),
    ];
    for (title, change, words) in cases {
        let folder = mixed();
        folder.configure(change);
        let error = folder.error();
        assert!(error.starts_with("config.json: "), "{title}: {error}");
        assert!(
            error.contains(words),
            "{title}: \"{error}\" lacks \"{words}\""
        );
    }
}

/// Changes config.json.
fn rule(folder: &Folder, module: &str, rule: &Value) {
    folder.configure(|config| {
        config["quantization"][module] = rule.clone();
        config["quantization_config"] = Value::Null;
    });
}

#[test]
fn a_rule_must_be_that_of_the_tensors() {
    let cases = [
        // More and fewer bits than the words hold; another group; groups that do not divide the row.
        (
            DOWN,
            json!({"bits": 4, "group_size": 128}),
            "down_proj.weight has shape [64, 32], must have [64, 16]",
        ),
        (
            DOWN,
            json!({"bits": 8, "group_size": 32}),
            "down_proj.scales has shape [64, 1], must have [64, 4]",
        ),
        (
            "lm_head",
            json!({"bits": 8, "group_size": 128}),
            "64 columns, no whole number of groups of 128",
        ),
        // Without fields of its own a module has MLX's defaults, 4 bits in groups of 64.
        (
            DOWN,
            json!({}),
            "down_proj.weight has shape [64, 32], must have [64, 16]",
        ),
        (
            DOWN,
            json!(true),
            "down_proj.weight has shape [64, 32], must have [64, 16]",
        ),
        // Not quantised in one of the two.
        (
            DOWN,
            json!(false),
            "down_proj.scales belongs to a module that config.json does not call quantised",
        ),
        (
            UP,
            json!({"bits": 8}),
            "up_proj.weight has shape [128, 64], must have [128, 16]",
        ),
    ];
    for (module, own, words) in cases {
        let folder = mixed();
        rule(&folder, module, &own);
        let error = folder.error();
        assert!(
            error.contains(words),
            "{module} {own}: \"{error}\" lacks \"{words}\""
        );
    }
    let folder = mixed();
    folder.configure(|config| {
        config["quantization"] = Value::Null;
        config["quantization_config"] = Value::Null;
    });
    let error = folder.error();
    assert!(
        error.contains("embed_tokens.scales belongs to a module"),
        "{error}"
    );
}

#[test]
fn scales_alone_decide_where_no_rule_is_given() {
    for own in [Value::Null, json!(false)] {
        let folder = mixed();
        if own.is_null() {
            folder.configure(|config| {
                config["quantization"].as_object_mut().unwrap().remove(UP);
                config["quantization_config"] = Value::Null;
            });
        } else {
            rule(&folder, UP, &own);
        }
        let source = folder.open().unwrap();
        let up = &source.tensors.layers[0].up_proj.weight;
        assert!(matches!(up.stored_type(), StoredType::Blocks(_)));
    }
}

/// A change of the tensors and words of the refusal.
type TensorCase = (&'static str, fn(&mut Tensors), &'static str);

#[test]
fn every_part_of_a_matrix_must_be_there_and_fit() {
    let cases: [TensorCase; 9] = [
        (
            "no biases",
            |tensors| drop(tensors.remove("lm_head.biases")),
            "tensor lm_head.biases is missing",
        ),
        (
            "no scales although there is a rule",
            |tensors| drop(tensors.remove("lm_head.scales")),
            "tensor lm_head.scales is missing",
        ),
        (
            "no scales and no rule",
            |tensors| {
                for kind in ["scales", "biases"] {
                    tensors.remove(&format!("model.layers.1.mlp.gate_proj.{kind}"));
                }
            },
            "model.layers.1.mlp.gate_proj.weight has shape [128, 8], must have [128, 64]",
        ),
        (
            "words of one element",
            |tensors| {
                for kind in ["scales", "biases"] {
                    tensors.remove(&format!("model.layers.1.mlp.gate_proj.{kind}"));
                }
                let weight = tensors
                    .get_mut("model.layers.1.mlp.gate_proj.weight")
                    .unwrap();
                weight.shape = vec![128, 64];
                weight.bytes = vec![0; 128 * 64 * 4];
            },
            "gate_proj.weight is packed in U32 words, but has no scales",
        ),
        (
            "a word less",
            |tensors| {
                let weight = tensors.get_mut("lm_head.weight").unwrap();
                weight.shape = vec![64, 15];
                weight.bytes.truncate(64 * 15 * 4);
            },
            "lm_head.weight has shape [64, 15], must have [64, 16]",
        ),
        (
            "words called floats",
            |tensors| tensors.get_mut("lm_head.weight").unwrap().dtype = "F32".to_owned(),
            "lm_head.weight of type F32 has scales, must be packed in U32 words",
        ),
        (
            "scales called words",
            |tensors| {
                let scales = tensors.get_mut("lm_head.scales").unwrap();
                scales.dtype = "U32".to_owned();
                scales.bytes = vec![0; 64 * 4];
            },
            "lm_head.scales is packed in U32 words",
        ),
        (
            "a norm of words",
            |tensors| {
                let norm = tensors.get_mut("model.norm.weight").unwrap();
                norm.dtype = "U32".to_owned();
                norm.bytes = vec![0; 64 * 4];
            },
            "vector model.norm.weight of type U32",
        ),
        (
            "scales of what is no matrix",
            |tensors| {
                let scales = tensors["lm_head.scales"].clone();
                tensors.insert("model.norm.scales".to_owned(), scales);
            },
            "further tensors (model.norm.scales)",
        ),
    ];
    for (title, change, words) in cases {
        let folder = mixed();
        folder.change_tensors(change);
        let error = folder.error();
        assert!(
            error.contains(words),
            "{title}: \"{error}\" lacks \"{words}\""
        );
    }
}

#[test]
fn scales_may_be_of_another_type_than_biases() {
    let folder = mixed();
    folder.change_tensors(|tensors| {
        let scales = tensors.get_mut("lm_head.scales").unwrap();
        scales.dtype = "F32".to_owned();
        // The upper half of an f32 is the bf16.
        scales.bytes = scales
            .bytes
            .chunks(2)
            .flat_map(|half| [0, 0, half[0], half[1]])
            .collect();
    });
    let source = folder.open().unwrap();
    assert!(source.tensor_types.contains(&"F32"));
}
