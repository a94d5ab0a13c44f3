//! The contract between gateway and engine: what plans are refused, and what one row's misfortune leaves alone.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; the model is tiny"
)]

#[path = "golden/plans.rs"]
mod plans;
#[path = "invariance/tiny.rs"]
mod tiny;

use std::cell::Cell;

use velox_engine::backend::Stage;
use velox_engine::backend::reference::ReferenceBackend;
use velox_engine::error::EngineError;
use velox_engine::step::{
    DecodeRow, LogitsWanted, OpenRow, PrefillChunk, PrefillGoal, Progress, RowId, RowOutcome,
    Runner, ScorePart, StepPlan,
};
use velox_kernels::label::BackendLabel;
use velox_kvcache::PageBudget;

use plans::{Undisturbed, open, run};
use tiny::{Family, POISON, VOCAB};

const A: RowId = RowId(1);
const B: RowId = RowId(2);
const LAYERS: u64 = 2;

fn engine() -> Box<dyn Runner> {
    engine_with_cache(1 << 28)
}

fn engine_with_cache(limit_bytes: u64) -> Box<dyn Runner> {
    let backend = ReferenceBackend::new(1, PageBudget::new(limit_bytes));
    Box::new(tiny::engine(Family::Everything, backend))
}

fn chunk(row: RowId, start: usize, token_ids: &[u32], goal: PrefillGoal) -> StepPlan {
    StepPlan {
        prefill: Some(PrefillChunk {
            row,
            start,
            token_ids: token_ids.to_vec(),
            goal,
        }),
        ..StepPlan::default()
    }
}

fn decode(row: RowId, token: Option<u32>, steps: usize) -> StepPlan {
    StepPlan {
        decode: vec![DecodeRow {
            row,
            token,
            steps,
            draft: vec![],
        }],
        ..StepPlan::default()
    }
}

fn opening(rows: Vec<OpenRow>, plan: StepPlan) -> StepPlan {
    StepPlan {
        open_rows: rows,
        ..plan
    }
}

/// Opens a row with a prompt and samples its first token.
fn start(runner: &mut dyn Runner, row: OpenRow, prompt: &[u32]) {
    let plan = chunk(row.row, 0, prompt, PrefillGoal::Sample);
    let outcome = run(runner, opening(vec![row], plan));
    assert_eq!(tokens(&outcome.rows[0]).len(), 1);
}

fn tokens(outcome: &RowOutcome) -> Vec<u32> {
    let output = outcome.result.as_ref().unwrap();
    output.tokens.iter().map(|token| token.token_id).collect()
}

fn scoring(first_position: usize, next_token: Option<u32>, logits: LogitsWanted) -> PrefillGoal {
    PrefillGoal::Score(ScorePart {
        first_position,
        top_n: 2,
        next_token,
        logits,
    })
}

#[test]
fn a_broken_plan_is_refused_whole() {
    let mut runner = engine();
    let runner = runner.as_mut();
    start(runner, open(A, 20, 3), &[1, 2, 3]);
    run(runner, opening(vec![open(B, 8, 4)], StepPlan::default()));
    let beyond_vocabulary = VOCAB as u32;
    let twice = StepPlan {
        decode: vec![
            DecodeRow {
                row: A,
                token: None,
                steps: 1,
                draft: vec![],
            },
            DecodeRow {
                row: A,
                token: None,
                steps: 1,
                draft: vec![],
            },
        ],
        ..StepPlan::default()
    };
    let both = StepPlan {
        decode: decode(A, None, 1).decode,
        ..chunk(A, 3, &[1], PrefillGoal::Fill)
    };
    let closed_and_used = StepPlan {
        close_rows: vec![A],
        ..decode(A, None, 1)
    };
    let hot = {
        let mut row = open(RowId(9), 8, 0);
        row.sampling.temperature = f32::NAN;
        row
    };
    let broken = [
        ("row 5 is not open", decode(RowId(5), None, 1)),
        (
            "row 1 is open already",
            opening(vec![open(A, 8, 0)], StepPlan::default()),
        ),
        (
            "row 9 is open already",
            opening(
                vec![open(RowId(9), 8, 0), open(RowId(9), 8, 0)],
                StepPlan::default(),
            ),
        ),
        (
            "limits are 1 and 640",
            opening(vec![open(RowId(9), 641, 0)], StepPlan::default()),
        ),
        (
            "limits are 1 and 640",
            opening(vec![open(RowId(9), 0, 0)], StepPlan::default()),
        ),
        (
            "temperature is NaN",
            opening(vec![hot], StepPlan::default()),
        ),
        (
            "starts at 2, the row has 3",
            chunk(A, 2, &[1], PrefillGoal::Fill),
        ),
        (
            "chunk of row 1 is empty",
            chunk(A, 3, &[], PrefillGoal::Fill),
        ),
        (
            "has 18 tokens, 17 are left",
            chunk(A, 3, &[1; 18], PrefillGoal::Fill),
        ),
        (
            "has 320",
            chunk(A, 3, &[beyond_vocabulary], PrefillGoal::Fill),
        ),
        (
            "has 320",
            chunk(
                A,
                3,
                &[1],
                scoring(0, Some(beyond_vocabulary), LogitsWanted::No),
            ),
        ),
        ("has 320", decode(A, Some(beyond_vocabulary), 1)),
        ("decodes 0 steps", decode(A, None, 0)),
        ("a sample it does not have", decode(B, None, 1)),
        (
            "samples after 1 tokens, its prompt has 4",
            chunk(B, 0, &[1], PrefillGoal::Sample),
        ),
        (
            "samples after 1 tokens, its prompt has 4",
            decode(B, Some(1), 1),
        ),
        ("row 1 appears twice", twice),
        ("row 1 appears twice", both),
        ("closed and used", closed_and_used),
    ];
    for (expected, mut plan) in broken {
        // Were the plan not checked before it runs, this row would be open afterwards.
        plan.open_rows.push(open(RowId(77), 8, 0));
        let error = runner.submit(plan, &Undisturbed).unwrap_err();
        assert!(matches!(error, EngineError::InvalidPlan(_)), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(runner.open_rows(), 2);
    }
    let outcome = run(runner, decode(A, None, 2));
    assert_eq!(tokens(&outcome.rows[0]).len(), 2, "the rows still work");
}

#[test]
fn two_plans_may_wait_and_each_is_collected_once() {
    let mut runner = engine();
    let prompt = chunk(A, 0, &[1, 2], PrefillGoal::Sample);
    let first = runner
        .submit(opening(vec![open(A, 9, 2)], prompt), &Undisturbed)
        .unwrap();
    let second = runner.submit(decode(A, None, 1), &Undisturbed).unwrap();
    let third = runner.submit(decode(A, None, 1), &Undisturbed);
    assert!(third.unwrap_err().to_string().contains("limit is 2"));
    assert_eq!(
        tokens(&runner.collect(second, &Undisturbed).unwrap().rows[0]).len(),
        1
    );
    assert_eq!(
        tokens(&runner.collect(first, &Undisturbed).unwrap().rows[0]).len(),
        1
    );
}

#[test]
fn stages_are_counted_by_pass_and_layer() {
    let mut runner = engine();
    let runner = runner.as_mut();
    start(runner, open(A, 20, 1), &[5]);
    let plan = StepPlan {
        decode: decode(A, None, 3).decode,
        ..chunk(B, 0, &[1, 2, 3], scoring(0, None, LogitsWanted::No))
    };
    let outcome = run(runner, opening(vec![open(B, 20, 0)], plan));
    assert_eq!(outcome.label, BackendLabel::Reference);
    assert_eq!(outcome.sampler, BackendLabel::Reference);
    assert_eq!(
        outcome.rows.iter().map(|row| row.row).collect::<Vec<_>>(),
        [B, A]
    );
    for stage in Stage::ALL {
        let expected = match stage {
            Stage::Embed | Stage::Head | Stage::Sample => 3,
            _ => 3 * LAYERS,
        };
        assert_eq!(outcome.stages.count(stage), expected, "{stage:?}");
    }
    let filled = run(runner, chunk(B, 3, &[4], PrefillGoal::Fill));
    assert_eq!(filled.stages.count(Stage::Head), 0);
    assert_eq!(filled.stages.count(Stage::Sample), 0);
    let idle = run(runner, StepPlan::default());
    assert_eq!(idle.stages.count(Stage::Embed), 0);
}

#[test]
fn scores_cover_what_was_asked() {
    let mut runner = engine();
    let runner = runner.as_mut();
    let text = tiny::text(3, 150);
    let rows = vec![open(A, 150, 0), open(B, 150, 0)];
    run(runner, opening(rows, StepPlan::default()));
    let outcome = run(
        runner,
        chunk(A, 0, &text, scoring(40, Some(7), LogitsWanted::Yes)),
    );
    let whole = outcome.rows[0].result.as_ref().unwrap();
    let positions: Vec<usize> = whole.scores.iter().map(|score| score.position).collect();
    assert_eq!(positions, (40..150).collect::<Vec<_>>());
    assert_eq!(whole.logits.len(), 110 * VOCAB);
    for (score, row) in whole.scores.iter().zip(whole.logits.chunks_exact(VOCAB)) {
        let next = text.get(score.position + 1).copied().unwrap_or(7) as usize;
        let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = f64::from(row[next]) - sum.ln();
        assert!((f64::from(score.next_logprob.unwrap()) - expected).abs() < 1e-5);
        assert_eq!(score.top.len(), 2);
    }
    let first = run(
        runner,
        chunk(B, 0, &text[..50], scoring(60, None, LogitsWanted::No)),
    );
    assert!(first.rows[0].result.as_ref().unwrap().scores.is_empty());
    assert_eq!(first.stages.count(Stage::Head), 0);
    let second = run(
        runner,
        chunk(B, 50, &text[50..], scoring(60, None, LogitsWanted::No)),
    );
    let second = second.rows[0].result.as_ref().unwrap();
    assert_eq!(second.scores[..89], whole.scores[20..109]);
    assert_eq!(second.scores[89].next_logprob, None, "nothing follows");
}

#[test]
fn an_end_token_stops_the_plan_but_not_the_row() {
    let mut runner = engine();
    start(runner.as_mut(), open(A, 40, 2), &[1, 2]);
    let free = tokens(&run(runner.as_mut(), decode(A, None, 6)).rows[0]);
    let mut ending = open(A, 40, 2);
    ending.end_token_ids = vec![free[2]];
    let before_end = free.iter().position(|token| *token == free[2]).unwrap();
    let mut runner = engine();
    start(runner.as_mut(), ending, &[1, 2]);
    let first = tokens(&run(runner.as_mut(), decode(A, None, 6)).rows[0]);
    assert_eq!(first, free[..=before_end]);
    let second = tokens(&run(runner.as_mut(), decode(A, None, 1)).rows[0]);
    assert_eq!(
        second,
        free[before_end + 1..=before_end + 1],
        "the plan in flight goes on"
    );
}

#[test]
fn a_full_row_yields_fewer_tokens_and_no_fault() {
    let mut runner = engine();
    let runner = runner.as_mut();
    start(runner, open(A, 5, 3), &[1, 2, 3]);
    assert_eq!(tokens(&run(runner, decode(A, None, 9)).rows[0]).len(), 2);
    assert!(tokens(&run(runner, decode(A, None, 1)).rows[0]).is_empty());
    let forced = runner
        .submit(decode(A, Some(1), 1), &Undisturbed)
        .unwrap_err();
    assert!(
        forced.to_string().contains("capacity of 5 is full"),
        "{forced}"
    );
}

#[test]
fn a_row_that_is_no_number_fails_alone() {
    let expected = {
        let mut runner = engine();
        start(runner.as_mut(), open(A, 20, 3), &[1, 2, 3]);
        tokens(&run(runner.as_mut(), decode(A, None, 4)).rows[0])
    };
    let mut runner = engine();
    let runner = runner.as_mut();
    start(runner, open(A, 20, 3), &[1, 2, 3]);
    let plan = StepPlan {
        decode: decode(A, None, 2).decode,
        ..chunk(B, 0, &[4, POISON], PrefillGoal::Sample)
    };
    let outcome = run(runner, opening(vec![open(B, 20, 2)], plan));
    let failure = outcome.rows[0].result.as_ref().unwrap_err();
    assert!(matches!(failure, EngineError::Numeric(_)), "{failure}");
    assert_eq!(tokens(&outcome.rows[1]), expected[..2]);
    assert_eq!(runner.open_rows(), 1);
    // Whoever runs the engine closes what failed, between the two.
    let close = StepPlan {
        close_rows: vec![B],
        ..StepPlan::default()
    };
    run(runner, close);
    // The next plan was already on its way: the lost row is an error in it, not of it.
    let in_flight = StepPlan {
        decode: vec![
            DecodeRow {
                row: B,
                token: None,
                steps: 1,
                draft: vec![],
            },
            DecodeRow {
                row: A,
                token: None,
                steps: 2,
                draft: vec![],
            },
        ],
        ..StepPlan::default()
    };
    let outcome = run(runner, in_flight);
    assert!(
        outcome.rows[0]
            .result
            .as_ref()
            .unwrap_err()
            .to_string()
            .contains("row 2")
    );
    assert_eq!(tokens(&outcome.rows[1]), expected[2..]);
    // Closing it is no fault, using it later is one.
    run(
        runner,
        StepPlan {
            close_rows: vec![B],
            ..StepPlan::default()
        },
    );
    assert!(runner.submit(decode(B, None, 1), &Undisturbed).is_err());
}

#[test]
fn a_row_without_memory_fails_alone_and_gives_its_pages_back() {
    // A page holds 32 tokens: 2 layers of 2 heads of 32 elements, keys and values, f16.
    let page = 32 * 2 * 2 * 32 * 2 * 2;
    let mut runner = engine_with_cache(3 * page);
    let runner = runner.as_mut();
    start(runner, open(A, 96, 3), &[1, 2, 3]);
    let plan = StepPlan {
        decode: decode(A, None, 2).decode,
        ..chunk(B, 0, &[5; 65], PrefillGoal::Sample)
    };
    let outcome = run(runner, opening(vec![open(B, 96, 65)], plan));
    let failure = outcome.rows[0].result.as_ref().unwrap_err();
    assert!(
        matches!(failure, EngineError::OutOfMemory { .. }),
        "{failure}"
    );
    assert_eq!(tokens(&outcome.rows[1]).len(), 2);
    assert_eq!(
        outcome.rows[1].key_bytes + outcome.rows[1].value_bytes,
        page
    );
    assert_eq!(runner.open_rows(), 1);
    run(runner, chunk(A, 5, &[6; 91], PrefillGoal::Fill));
    run(
        runner,
        StepPlan {
            close_rows: vec![A],
            ..StepPlan::default()
        },
    );
    start(runner, open(RowId(3), 96, 96), &[5; 96]);
}

/// Counts layers.
#[derive(Default)]
struct Layers(Cell<u64>);

impl Progress for Layers {
    fn layer_done(&self) {
        self.0.set(self.0.get() + 1);
    }
}

#[test]
fn every_layer_is_reported() {
    let mut runner = engine();
    let layers = Layers::default();
    let plan = chunk(A, 0, &[1, 2, 3], PrefillGoal::Sample);
    runner
        .submit(opening(vec![open(A, 9, 3)], plan), &layers)
        .unwrap();
    runner.submit(decode(A, None, 4), &layers).unwrap();
    assert_eq!(layers.0.get(), 5 * LAYERS);
}
