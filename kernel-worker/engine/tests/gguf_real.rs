//! The reader on a real model file, named by the environment variable `VELOX_TEST_MODEL`.

use std::path::PathBuf;

use velox_engine::files::{self, Vocabulary};
use velox_engine::spec::{Architecture, RopePairing};

#[test]
fn smollm2_is_read_whole() {
    let Some(path) = std::env::var_os("VELOX_TEST_MODEL").map(PathBuf::from) else {
        eprintln!("SKIPPED: VELOX_TEST_MODEL not set");
        return;
    };
    let mut phases = Vec::new();
    let source = files::open(&path, &mut |progress| phases.push(progress)).unwrap();

    let spec = &source.spec;
    assert_eq!(spec.architecture, Architecture::Llama);
    assert_eq!(spec.rope.pairing, RopePairing::Interleaved);
    assert_eq!((spec.hidden_size, spec.intermediate_size), (576, 1536));
    assert_eq!((spec.n_layers, spec.n_heads, spec.n_kv_heads), (30, 9, 3));
    assert_eq!((spec.head_dim, spec.vocab_size), (64, 49_152));
    assert_eq!(spec.context_length, 8192);
    assert!((spec.rope.inverse_frequencies[1] - 1e5_f64.powf(-1.0 / 32.0)).abs() < 1e-12);
    assert!(spec.sliding_window.is_none());

    assert!(source.tensors.head.is_none(), "the head is tied");
    assert_eq!(source.tensors.layers.len(), 30);
    assert_eq!(source.parameters, 134_515_008);
    let folder_bytes = std::fs::metadata(&path).unwrap().len();
    assert!(source.weight_bytes < folder_bytes && source.weight_bytes > folder_bytes / 10 * 9);
    assert!(
        source.tensor_types.contains(&"Q4_1"),
        "{:?}",
        source.tensor_types
    );
    assert_eq!(source.fingerprint.len(), 64);

    let Vocabulary::Gguf(vocabulary) = &source.tokenizer.vocabulary else {
        panic!("the file has no tokenizer.json inside");
    };
    assert_eq!(
        (vocabulary.model.as_str(), vocabulary.pre.as_str()),
        ("gpt2", "smollm")
    );
    assert_eq!(vocabulary.tokens.len(), 49_152);
    assert_eq!(vocabulary.token_types.len(), 49_152);
    let ends: Vec<_> = source
        .tokenizer
        .end_tokens
        .iter()
        .map(|end| (end.token_id, end.text.as_str()))
        .collect();
    assert!(ends.contains(&(2, "<|im_end|>")), "{ends:?}");
    assert!(ends.contains(&(0, "<|endoftext|>")), "{ends:?}");
    assert_eq!(source.tokenizer.chat_templates.len(), 1);

    let last = phases.last().unwrap();
    assert_eq!((last.phase, last.done_bytes), ("map", source.weight_bytes));
    assert_eq!(phases[0].phase, "open");
}
