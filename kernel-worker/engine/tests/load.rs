//! What the loader may choose: another backend than the strongest, other weights than the stored ones, a shorter
//! context. `make_quantised_fixtures.py` wrote the files that loading with quantisation is compared with.
#![expect(clippy::unwrap_used, reason = "a failed assumption is a failed test")]

#[path = "golden/plans.rs"]
mod plans;

use std::path::{Path, PathBuf};

use velox_engine::backend::Stage;
use velox_engine::error::EngineError;
use velox_engine::files::Quantisation;
use velox_engine::load::{LoadOptions, LoadedModel, load};
use velox_engine::probe::{ProbeCase, ProbeOutcome, ProbedBackends};
use velox_engine::step::{LogitsWanted, PrefillChunk, PrefillGoal, RowId, ScorePart, StepPlan};
use velox_kernels::affine::StoredType;
use velox_kernels::block::BlockType;
use velox_kernels::label::BackendLabel;

use plans::{open, run};

const TOKENS: [u32; 9] = [5, 17, 3, 88, 41, 5, 60, 2, 33];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn options() -> LoadOptions {
    LoadOptions {
        backend: None,
        threads: 2,
        cache_limit_bytes: 64 << 20,
        quantise: None,
        max_context: None,
        probed: ProbedBackends::of_the_host(1),
    }
}

fn loaded(name: &str, options: &LoadOptions) -> LoadedModel {
    load(&fixture(name), options, &mut |_| {}).unwrap()
}

/// Bits of the logits of every position.
fn logits(model: &mut LoadedModel) -> Vec<u32> {
    let row = RowId(1);
    let goal = PrefillGoal::Score(ScorePart {
        first_position: 0,
        top_n: 0,
        next_token: None,
        logits: LogitsWanted::Yes,
    });
    let plan = StepPlan {
        open_rows: vec![open(row, TOKENS.len(), TOKENS.len())],
        prefill: Some(PrefillChunk {
            row,
            start: 0,
            token_ids: TOKENS.to_vec(),
            goal,
        }),
        ..StepPlan::default()
    };
    let mut outcome = run(model.runner.as_mut(), plan);
    let scored = outcome.rows.remove(0).result.unwrap().logits;
    assert!(!scored.is_empty());
    scored.iter().map(|logit| logit.to_bits()).collect()
}

fn wrong(stage: Stage, block_type: Option<BlockType>) -> ProbedBackends {
    let mut probed = ProbedBackends::of_the_host(1);
    let off = Ok(ProbeOutcome {
        max_error: 3.0,
        tolerance: 0.01,
    });
    probed.record(
        BackendLabel::Cpu,
        ProbeCase {
            stage,
            matrices: block_type.map(StoredType::Blocks),
        },
        &off,
    );
    probed
}

#[test]
fn a_weaker_backend_says_why_not_the_stronger_one() {
    let strongest = loaded("families/llama-tied", &options());
    assert_eq!(strongest.facts.backend, BackendLabel::Cpu);
    assert_eq!(strongest.facts.fallback_reason, "");
    let fallen = LoadOptions {
        probed: wrong(Stage::GatedMlp, Some(BlockType::F32)),
        ..options()
    };
    let mut model = loaded("families/llama-tied", &fallen);
    assert_eq!(model.facts.backend, BackendLabel::Reference);
    assert_eq!(
        model.facts.fallback_reason,
        "CPU: GatedMlp of F32: its probe is off by 3.000e0, tolerance is 1.000e-2"
    );
    assert!(!logits(&mut model).is_empty());
    // Nothing was preferred to what was asked for.
    let asked = LoadOptions {
        backend: Some(BackendLabel::Reference),
        ..fallen
    };
    assert_eq!(
        loaded("families/llama-tied", &asked).facts.fallback_reason,
        ""
    );
}

#[test]
fn a_withdrawn_stage_refuses_the_backend_that_was_asked_for() {
    let asked = LoadOptions {
        backend: Some(BackendLabel::Cpu),
        probed: wrong(Stage::Head, Some(BlockType::Q8_0)),
        ..options()
    };
    // This model has no such matrix,
    assert_eq!(
        loaded("families/llama-tied", &asked).facts.fallback_reason,
        ""
    );
    // and now it has.
    let quantised = LoadOptions {
        quantise: Some(Quantisation::Bits8),
        ..asked
    };
    let error = load(&fixture("families/llama-tied"), &quantised, &mut |_| {}).unwrap_err();
    assert_eq!(
        error.to_string(),
        "backend CPU cannot run this model: Head of Q8_0: its probe is off by 3.000e0, tolerance is 1.000e-2"
    );
}

#[test]
fn quantised_at_load_is_the_file_with_the_same_blocks() {
    let plain = loaded("families/llama-tied.gguf", &options()).facts;
    assert_eq!(plain.quantised_to, None);
    for (bits, name) in [(4, "Q4_1"), (5, "Q5_1"), (8, "Q8_0")] {
        for backend in [BackendLabel::Cpu, BackendLabel::Reference] {
            let stored = LoadOptions {
                backend: Some(backend),
                ..options()
            };
            let at_load = LoadOptions {
                quantise: Quantisation::of_bits(bits),
                ..stored.clone()
            };
            let mut expected = loaded(&format!("quantised/llama-tied.{name}.gguf"), &stored);
            let mut found = loaded("families/llama-tied.gguf", &at_load);
            assert_eq!(
                logits(&mut found),
                logits(&mut expected),
                "{name} {backend}"
            );
            let facts = &found.facts;
            assert_eq!(facts.quantised_to, Some(name));
            // Both keep the matrices of a width of 48 as they are stored, and vectors of f32.
            assert_eq!(facts.weight_bytes, expected.facts.weight_bytes);
            assert_eq!(facts.tensor_types, expected.facts.tensor_types);
            assert_eq!(facts.parameters, plain.parameters);
            assert!(facts.weight_bytes < plain.weight_bytes);
            assert_ne!(facts.fingerprint, plain.fingerprint);
        }
    }
    assert_eq!(Quantisation::of_bits(6), None);
}

#[test]
fn what_is_quantised_stays_as_it_is() {
    let stored = loaded("quantised/llama-tied.Q8_0.gguf", &options()).facts;
    let at_load = LoadOptions {
        quantise: Some(Quantisation::Bits4),
        ..options()
    };
    let found = loaded("quantised/llama-tied.Q8_0.gguf", &at_load).facts;
    assert_eq!(found.quantised_to, None);
    assert_eq!(found.fingerprint, stored.fingerprint);
    assert_eq!(found.weight_bytes, stored.weight_bytes);
    assert_eq!(found.tensor_types, stored.tensor_types);
}

#[test]
fn a_weight_that_no_block_can_hold_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("families/llama-untied");
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(source.join(name), folder.path().join(name)).unwrap();
    }
    let mut weights = std::fs::read(source.join("model.safetensors")).unwrap();
    let header = usize::try_from(u64::from_le_bytes(weights[..8].try_into().unwrap())).unwrap();
    let table: serde_json::Value = serde_json::from_slice(&weights[8..8 + header]).unwrap();
    let tensor = &table["model.layers.1.self_attn.k_proj.weight"];
    assert_eq!(tensor["dtype"], "BF16");
    let start = usize::try_from(tensor["data_offsets"][0].as_u64().unwrap()).unwrap();
    let at = 8 + header + start + 2 * 5;
    // The upper half of an f32 is a bf16.
    weights[at..at + 2].copy_from_slice(&1e30_f32.to_le_bytes()[2..]);
    std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();

    let at_load = LoadOptions {
        quantise: Some(Quantisation::Bits4),
        ..options()
    };
    let error = load(folder.path(), &at_load, &mut |_| {}).unwrap_err();
    assert!(matches!(error, EngineError::InvalidModel { .. }));
    let text = error.to_string();
    assert!(
        text.ends_with(
            "k_proj of layer 1 of type BF16 cannot be quantised: a value is no number, or too large for a block with \
             an f16 scale"
        ),
        "{text}"
    );
}

#[test]
fn quantising_tells_where_it_stands() {
    let at_load = LoadOptions {
        quantise: Some(Quantisation::Bits8),
        ..options()
    };
    let mut phases = Vec::new();
    let mut last = (0, 0);
    load(
        &fixture("families/llama-untied"),
        &at_load,
        &mut |progress| {
            phases.push(progress.phase);
            if progress.phase == "quantize" {
                last = (progress.done_bytes, progress.total_bytes);
            }
        },
    )
    .unwrap();
    // One report a matrix: the process around it shows that it lives.
    let reports = phases.iter().filter(|phase| **phase == "quantize").count();
    assert_eq!(reports, 2 + 2 * 7);
    phases.dedup();
    assert_eq!(phases, ["open", "check", "map", "quantize", "map", "ready"]);
    assert!(0 < last.0 && last.0 <= last.1);
}

#[test]
fn a_context_can_be_made_shorter_but_not_longer() {
    let own = loaded("families/llama-tied", &options()).facts;
    for (limit, expected) in [(1, 1), (8, 8), (64, 64), (65, 64), (1 << 40, 64)] {
        let capped = LoadOptions {
            max_context: std::num::NonZeroUsize::new(limit),
            ..options()
        };
        let facts = loaded("families/llama-tied", &capped).facts;
        assert_eq!(facts.spec.context_length, expected);
        assert_eq!(facts.fingerprint, own.fingerprint);
    }
    let capped = LoadOptions {
        max_context: std::num::NonZeroUsize::new(TOKENS.len() - 1),
        ..options()
    };
    let mut model = loaded("families/llama-tied", &capped);
    let plan = StepPlan {
        open_rows: vec![open(RowId(1), TOKENS.len(), TOKENS.len())],
        prefill: Some(PrefillChunk {
            row: RowId(1),
            start: 0,
            token_ids: TOKENS.to_vec(),
            goal: PrefillGoal::Fill,
        }),
        ..StepPlan::default()
    };
    let refused = model.runner.submit(plan, &plans::Undisturbed).unwrap_err();
    assert!(matches!(refused, EngineError::InvalidPlan(_)), "{refused}");
}
