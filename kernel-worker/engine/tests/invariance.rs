//! The logits of a token are a function of its row's tokens alone: same bits for any chunking, batch mix, number of
//! threads, and on any worker that takes the row over.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; the model is tiny"
)]

#[path = "golden/model.rs"]
mod model;
#[path = "golden/plans.rs"]
mod plans;
#[path = "invariance/tiny.rs"]
mod tiny;

use velox_engine::backend::cpu::CpuBackend;
use velox_engine::backend::reference::ReferenceBackend;
use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    DecodeRow, LogitsWanted, OpenRow, PrefillChunk, PrefillGoal, RowId, RowOutput, Runner,
    SampledToken, ScorePart, StepOutcome, StepPlan,
};
use velox_kernels::cpu::CpuKernelSet;
use velox_kernels::label::BackendLabel;
use velox_kvcache::PageBudget;

use model::{load_model, model_path};
use plans::{open, run};
use tiny::Family;

/// Makes a runner with a number of threads.
type Make<'a> = &'a dyn Fn(usize) -> Box<dyn Runner>;

const SCORED: RowId = RowId(7);
const GENERATED: RowId = RowId(8);

fn reference(family: Family) -> impl Fn(usize) -> Box<dyn Runner> {
    move |threads| {
        let backend = ReferenceBackend::new(threads, PageBudget::new(1 << 28));
        Box::new(tiny::engine(family, backend))
    }
}

fn cpu(family: Family, kernels: CpuKernelSet) -> impl Fn(usize) -> Box<dyn Runner> {
    move |threads| {
        let backend = CpuBackend::new(kernels, threads, PageBudget::new(1 << 28)).unwrap();
        Box::new(tiny::engine(family, backend))
    }
}

fn output(outcome: &mut StepOutcome, row: RowId) -> RowOutput {
    let place = outcome
        .rows
        .iter()
        .position(|found| found.row == row)
        .unwrap();
    outcome.rows.remove(place).result.unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Scores a text chunk by chunk; a companion generates beside each chunk if there are any.
fn logits(
    runner: &mut dyn Runner,
    text: &[u32],
    chunk_tokens: usize,
    companions: &[RowId],
) -> Vec<u32> {
    let mut found = Vec::new();
    let mut open_rows = vec![open(SCORED, text.len(), 0)];
    for (index, chunk) in text.chunks(chunk_tokens).enumerate() {
        let decode = companions.iter().map(|row| DecodeRow {
            row: *row,
            token: None,
            steps: 1,
            draft: vec![],
        });
        let plan = StepPlan {
            open_rows: std::mem::take(&mut open_rows),
            prefill: Some(PrefillChunk {
                row: SCORED,
                start: index * chunk_tokens,
                token_ids: chunk.to_vec(),
                goal: PrefillGoal::Score(ScorePart {
                    first_position: 0,
                    top_n: 0,
                    next_token: None,
                    logits: LogitsWanted::Yes,
                }),
            }),
            decode: decode.collect(),
            ..StepPlan::default()
        };
        let mut outcome = run(runner, plan);
        found.extend(bits(&output(&mut outcome, SCORED).logits));
    }
    let closed = StepPlan {
        close_rows: vec![SCORED],
        ..StepPlan::default()
    };
    run(runner, closed);
    found
}

/// A row that uses every part of the sampler and reports log-probabilities.
fn sampled(row: RowId, capacity_tokens: usize, prompt_tokens: usize) -> OpenRow {
    OpenRow {
        sampling: SamplingParameters {
            temperature: 0.9,
            top_k: 50,
            top_p: 0.95,
            min_p: 0.01,
            seed: 11 + row.0,
            repetition_penalty: 1.1,
            frequency_penalty: 0.1,
            presence_penalty: 0.1,
            penalty_window_tokens: 24,
            ..SamplingParameters::greedy()
        },
        top_logprobs: Some(3),
        ..open(row, capacity_tokens, prompt_tokens)
    }
}

fn prefill(row: OpenRow, token_ids: &[u32]) -> StepPlan {
    StepPlan {
        prefill: Some(PrefillChunk {
            row: row.row,
            start: 0,
            token_ids: token_ids.to_vec(),
            goal: PrefillGoal::Sample,
        }),
        open_rows: vec![row],
        ..StepPlan::default()
    }
}

/// Generates `count` tokens, `steps` a plan, and leaves the row open.
fn generate(
    runner: &mut dyn Runner,
    row: OpenRow,
    prompt: &[u32],
    (count, steps): (usize, usize),
) -> Vec<SampledToken> {
    let id = row.row;
    let mut found = output(&mut run(runner, prefill(row, prompt)), id).tokens;
    while found.len() < count {
        let plan = StepPlan {
            decode: vec![DecodeRow {
                row: id,
                token: None,
                steps: steps.min(count - found.len()),
                draft: vec![],
            }],
            ..StepPlan::default()
        };
        found.extend(output(&mut run(runner, plan), id).tokens);
    }
    found
}

fn check_chunks(make: Make<'_>, text: &[u32], sizes: &[usize]) {
    let expected = logits(make(2).as_mut(), text, text.len(), &[]);
    for size in sizes {
        let found = logits(make(2).as_mut(), text, *size, &[]);
        assert!(found == expected, "chunks of {size}");
    }
}

fn check_threads(make: Make<'_>, text: &[u32], threads: &[usize]) {
    let expected = logits(make(1).as_mut(), text, 64, &[]);
    for count in threads {
        assert!(
            logits(make(*count).as_mut(), text, 64, &[]) == expected,
            "{count} threads"
        );
    }
}

/// A row alone, and beside rows of other lengths that generate: neither notices the other.
fn check_batch_mix(make: Make<'_>, text: &[u32], chunk_tokens: usize) {
    let expected = logits(make(2).as_mut(), text, chunk_tokens, &[]);
    let companions: Vec<RowId> = (100..103).map(RowId).collect();
    let prompts = [&text[..1], &text[3..12], &text[5..40]];
    let capacity = 40 + text.len().div_ceil(chunk_tokens);
    let chunks = text.len().div_ceil(chunk_tokens);
    let mut mixed = make(2);
    for (row, prompt) in companions.iter().zip(prompts) {
        run(
            mixed.as_mut(),
            prefill(sampled(*row, capacity, prompt.len()), prompt),
        );
    }
    assert!(logits(mixed.as_mut(), text, chunk_tokens, &companions) == expected);
    for (row, prompt) in companions.iter().zip(prompts) {
        let alone = generate(
            make(1).as_mut(),
            sampled(*row, capacity, prompt.len()),
            prompt,
            (1 + chunks + 1, 1),
        );
        let plan = StepPlan {
            decode: vec![DecodeRow {
                row: *row,
                token: None,
                steps: 1,
                draft: vec![],
            }],
            ..StepPlan::default()
        };
        let last = output(&mut run(mixed.as_mut(), plan), *row).tokens;
        assert_eq!(last, alone[chunks + 1..], "row {} in company", row.0);
    }
}

/// Several steps a plan, single steps, and a replay elsewhere give the same tokens and log-probabilities.
fn check_generation(make: Make<'_>, prompt: &[u32], count: usize) {
    let row = || sampled(GENERATED, prompt.len() + count, prompt.len());
    let expected = generate(make(2).as_mut(), row(), prompt, (count, count));
    let single = generate(make(1).as_mut(), row(), prompt, (count, 1));
    assert_eq!(single, expected, "single steps");
    let died_at = count / 2;
    let mut history = prompt.to_vec();
    history.extend(expected[..died_at].iter().map(|token| token.token_id));
    let rest = generate(make(2).as_mut(), row(), &history, (count - died_at, 4));
    assert_eq!(rest, expected[died_at..], "replay");
    // The same tokens, forced instead of sampled.
    let mut forced = make(2);
    let mut found = output(&mut run(forced.as_mut(), prefill(row(), prompt)), GENERATED).tokens;
    for token in &expected[..count - 1] {
        let plan = StepPlan {
            decode: vec![DecodeRow {
                row: GENERATED,
                token: Some(token.token_id),
                steps: 1,
                draft: vec![],
            }],
            ..StepPlan::default()
        };
        found.extend(output(&mut run(forced.as_mut(), plan), GENERATED).tokens);
    }
    assert_eq!(found, expected, "forced");
}

fn check_tiny(make: Make<'_>) {
    let text = tiny::text(1, 600);
    check_chunks(make, &text, &[1, 3, 7, 32, 33, 512]);
    check_threads(make, &text, &[2, 3, 5]);
    check_batch_mix(make, &text, 33);
    check_batch_mix(make, &text[..100], 3);
    check_generation(make, &text[..37], 40);
}

fn check_real(test: &str, backend: BackendLabel) {
    let Some(path) = model_path(test) else {
        return;
    };
    if load_model(test, &path, backend, 1).is_none() {
        return;
    }
    let make = |threads: usize| load_model(test, &path, backend, threads).unwrap().runner;
    let text: Vec<u32> = serde_json::from_str(include_str!("golden/alice_ids.json")).unwrap();
    check_chunks(&make, &text[..48], &[1, 7, 33]);
    check_threads(&make, &text[..48], &[2]);
    check_batch_mix(&make, &text[..40], 33);
    check_generation(&make, &text[..20], 12);
}

#[test]
fn reference_llama() {
    check_tiny(&reference(Family::Llama));
}

#[test]
fn reference_with_every_option() {
    check_tiny(&reference(Family::Everything));
}

#[test]
fn every_cpu_kernel_set() {
    for kernels in CpuKernelSet::available() {
        eprintln!("kernel set {}", kernels.name());
        check_tiny(&cpu(Family::Llama, kernels));
        check_tiny(&cpu(Family::Everything, kernels));
    }
}

#[test]
fn reference_on_the_real_model() {
    check_real("reference_on_the_real_model", BackendLabel::Reference);
}

#[test]
fn cpu_on_the_real_model() {
    check_real("cpu_on_the_real_model", BackendLabel::Cpu);
}
