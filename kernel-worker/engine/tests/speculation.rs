//! A draft is checked in one pass and changes nothing: the tokens, their log-probabilities, the history that penalties
//! see and the bytes of the cache are those of single steps, whatever was guessed.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; the model is tiny"
)]

#[path = "golden/plans.rs"]
mod plans;
#[path = "invariance/tiny.rs"]
mod tiny;

use std::collections::HashSet;

use velox_engine::backend::Stage;
use velox_engine::backend::cpu::CpuBackend;
use velox_engine::backend::reference::ReferenceBackend;
use velox_engine::error::EngineError;
use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    DecodeRow, OpenRow, PrefillChunk, PrefillGoal, RowId, Runner, SampledToken, StepOutcome,
    StepPlan,
};
use velox_kernels::cpu::CpuKernelSet;
use velox_kvcache::PageBudget;

use plans::{Undisturbed, open, run};
use tiny::{Family, POISON, VOCAB};

const ROW: RowId = RowId(1);
const COMPANION: RowId = RowId(2);
const PROMPT: usize = 29;
/// Enough to pass a page of 32 tokens, the window of the penalties, and the sliding window.
const OUTPUTS: usize = 90;

fn reference(family: Family) -> Box<dyn Runner> {
    let backend = ReferenceBackend::new(2, PageBudget::new(1 << 28));
    Box::new(tiny::engine(family, backend))
}

fn cpu(family: Family, kernels: CpuKernelSet) -> Box<dyn Runner> {
    let backend = CpuBackend::new(kernels, 2, PageBudget::new(1 << 28)).unwrap();
    Box::new(tiny::engine(family, backend))
}

/// Never chooses the token that is no number.
fn sane() -> SamplingParameters {
    SamplingParameters {
        bias: vec![(POISON, -1e9)],
        ..SamplingParameters::greedy()
    }
}

/// The most likely tokens.
fn likely(row: RowId, capacity_tokens: usize) -> OpenRow {
    OpenRow {
        sampling: sane(),
        ..open(row, capacity_tokens, PROMPT)
    }
}

/// A row whose choice depends on all of its history.
fn drawn(row: RowId, capacity_tokens: usize) -> OpenRow {
    OpenRow {
        sampling: SamplingParameters {
            temperature: 8.0,
            top_k: 50,
            top_p: 0.95,
            seed: 5,
            repetition_penalty: 1.2,
            frequency_penalty: 0.2,
            presence_penalty: 0.3,
            penalty_window_tokens: 24,
            ..sane()
        },
        top_logprobs: Some(2),
        ..open(row, capacity_tokens, PROMPT)
    }
}

fn decode(row: RowId, token: Option<u32>, draft: &[u32]) -> DecodeRow {
    DecodeRow {
        row,
        token,
        steps: 1,
        draft: draft.to_vec(),
    }
}

fn decoding(rows: Vec<DecodeRow>) -> StepPlan {
    StepPlan {
        decode: rows,
        ..StepPlan::default()
    }
}

fn start(runner: &mut dyn Runner, row: OpenRow, prompt: &[u32]) -> SampledToken {
    let plan = StepPlan {
        prefill: Some(PrefillChunk {
            row: row.row,
            start: 0,
            token_ids: prompt.to_vec(),
            goal: PrefillGoal::Sample,
        }),
        open_rows: vec![row],
        ..StepPlan::default()
    };
    tokens(&run(runner, plan), 0).remove(0)
}

fn tokens(outcome: &StepOutcome, place: usize) -> Vec<SampledToken> {
    outcome.rows[place].result.as_ref().unwrap().tokens.clone()
}

/// What single steps yield, with the bytes of the cache after each.
fn single_steps(runner: &mut dyn Runner, row: OpenRow, prompt: &[u32]) -> Vec<(SampledToken, u64)> {
    let id = row.row;
    let first = start(runner, row, prompt);
    let mut found = vec![(first, 0)];
    while found.len() < OUTPUTS {
        let outcome = run(runner, decoding(vec![decode(id, None, &[])]));
        let bytes = outcome.rows[0].key_bytes + outcome.rows[0].value_bytes;
        found.push((tokens(&outcome, 0).remove(0), bytes));
    }
    found
}

/// A guess of the next tokens of which the first `right` are what comes; the next one is not.
fn guess(comes: &[u32], right: usize, length: usize) -> Vec<u32> {
    let mut draft: Vec<u32> = comes.iter().copied().take(length).collect();
    draft.resize(length, 7);
    if let Some(wrong) = draft.get_mut(right) {
        *wrong = (*wrong + 1) % (VOCAB as u32 - 1);
    }
    draft
}

fn check(make: &dyn Fn() -> Box<dyn Runner>, row: &OpenRow, seed: u64) {
    let prompt = tiny::text(seed, PROMPT);
    let expected = single_steps(make().as_mut(), row.clone(), &prompt);
    let ids: Vec<u32> = expected.iter().map(|(token, _)| token.token_id).collect();
    if row.sampling.temperature > 0.0 {
        let distinct: HashSet<&u32> = ids.iter().collect();
        assert!(distinct.len() > 20, "{} tokens", distinct.len());
    }
    let mut runner = make();
    let runner = runner.as_mut();
    let other = drawn(COMPANION, PROMPT + OUTPUTS);
    let other_expected = single_steps(make().as_mut(), other.clone(), &prompt);
    start(runner, other, &prompt);
    let mut found = vec![start(runner, row.clone(), &prompt)];
    let shapes = tiny::text(seed + 100, 2 * OUTPUTS);
    for (turn, shape) in (1..).zip(shapes.chunks_exact(2)) {
        let left = OUTPUTS - found.len();
        if left == 0 {
            break;
        }
        let length = (shape[0] as usize % 9).min(left - 1);
        let right = (shape[1] as usize % 9).min(length);
        let draft = guess(&ids[found.len()..], right, length);
        let token = (length > 0).then(|| ids[found.len() - 1]);
        let plan = decoding(vec![
            decode(ROW, token, &draft),
            decode(COMPANION, None, &[]),
        ]);
        let outcome = run(runner, plan);
        for (stage, count) in [(Stage::Embed, 1), (Stage::Head, 1), (Stage::Sample, 1)] {
            assert_eq!(outcome.stages.count(stage), count, "one pass: {stage:?}");
        }
        let got = tokens(&outcome, 0);
        assert_eq!(got.len(), right + 1, "{right} of {length} were right");
        found.extend(got);
        let bytes = outcome.rows[0].key_bytes + outcome.rows[0].value_bytes;
        assert_eq!(bytes, expected[found.len() - 1].1, "pages went back");
        assert_eq!(tokens(&outcome, 1), [other_expected[turn].0.clone()]);
    }
    let expected: Vec<SampledToken> = expected.into_iter().map(|(token, _)| token).collect();
    assert_eq!(found, expected);
}

fn check_all(make: &dyn Fn() -> Box<dyn Runner>) {
    for seed in 1..4 {
        check(make, &likely(ROW, PROMPT + OUTPUTS), seed);
        check(make, &drawn(ROW, PROMPT + OUTPUTS), seed);
    }
}

#[test]
fn reference_drafts_change_nothing() {
    check_all(&|| reference(Family::Llama));
    check_all(&|| reference(Family::Everything));
}

#[test]
fn cpu_drafts_change_nothing() {
    for kernels in CpuKernelSet::available() {
        check_all(&|| cpu(Family::Llama, kernels));
        check_all(&|| cpu(Family::Everything, kernels));
    }
}

#[test]
fn an_end_token_in_a_draft_is_the_last_that_comes_back() {
    let prompt = tiny::text(1, PROMPT);
    let row = drawn(ROW, PROMPT + OUTPUTS);
    let expected = single_steps(reference(Family::Llama).as_mut(), row.clone(), &prompt);
    let ids: Vec<u32> = expected.iter().map(|(token, _)| token.token_id).collect();
    let end = (1..20)
        .find(|&place| !ids[..place].contains(&ids[place]) && place > 2)
        .unwrap();
    let ending = OpenRow {
        end_token_ids: vec![ids[end]],
        ..row
    };
    let mut runner = reference(Family::Llama);
    start(runner.as_mut(), ending, &prompt);
    let draft = &ids[1..end + 4];
    let outcome = run(
        runner.as_mut(),
        decoding(vec![decode(ROW, Some(ids[0]), draft)]),
    );
    let got: Vec<u32> = tokens(&outcome, 0).iter().map(|t| t.token_id).collect();
    assert_eq!(got, ids[1..=end]);
}

#[test]
fn a_draft_that_is_no_number_fails_its_row_alone() {
    let prompt = tiny::text(1, PROMPT);
    let mut runner = reference(Family::Everything);
    let runner = runner.as_mut();
    let first = start(runner, open(ROW, 60, PROMPT), &prompt);
    start(runner, open(COMPANION, 60, PROMPT), &prompt);
    let rows = vec![
        decode(ROW, Some(first.token_id), &[1, POISON]),
        decode(COMPANION, None, &[]),
    ];
    let outcome = run(runner, decoding(rows));
    let failure = outcome.rows[0].result.as_ref().unwrap_err();
    assert!(matches!(failure, EngineError::Numeric(_)), "{failure}");
    assert_eq!(tokens(&outcome, 1).len(), 1);
    assert_eq!(runner.open_rows(), 1);
}

#[test]
fn a_broken_draft_is_refused() {
    let prompt = tiny::text(1, PROMPT);
    let mut runner = reference(Family::Llama);
    let runner = runner.as_mut();
    start(runner, open(ROW, PROMPT + 4, PROMPT), &prompt);
    let two_steps = DecodeRow {
        steps: 2,
        ..decode(ROW, Some(1), &[1])
    };
    for (row, problem) in [
        (two_steps, "goes with 1 step and a token"),
        (decode(ROW, None, &[1]), "goes with 1 step and a token"),
        (decode(ROW, Some(1), &[VOCAB as u32]), "has 320"),
        (
            decode(ROW, Some(1), &[1; 4]),
            "a draft of 4 tokens, 3 are left",
        ),
    ] {
        let refusal = runner
            .submit(decoding(vec![row]), &Undisturbed)
            .unwrap_err();
        assert!(refusal.to_string().contains(problem), "{refusal}");
    }
    run(runner, decoding(vec![decode(ROW, Some(1), &[1; 3])]));
}
