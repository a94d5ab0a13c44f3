//! Plans that begin before the last one is read: the device draws tokens that nobody knows yet.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; the model is tiny"
)]

mod devices;
#[path = "../../engine/tests/golden/plans.rs"]
mod plans;
#[path = "../../engine/tests/invariance/tiny.rs"]
mod tiny;

use velox_engine::error::EngineError;
use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    DecodeRow, OpenRow, PrefillChunk, PrefillGoal, RowId, RowOutcome, Runner, StepOutcome, StepPlan,
};
use velox_kernels::label::BackendLabel;
use velox_kvcache::PageBudget;
use velox_mlx::backend::MlxBackend;
use velox_mlx::ffi::{HalfPrecision, MlxDevice};

use devices::on_every_device;
use plans::{Undisturbed, open, run};
use tiny::{Family, POISON};

const A: RowId = RowId(1);
const B: RowId = RowId(2);
const C: RowId = RowId(3);
const D: RowId = RowId(4);

on_every_device!(
    plans_begun_ahead_draw_what_waiting_draws,
    what_was_drawn_behind_an_end_token_is_cut_off,
    a_row_that_is_no_number_fails_alone_when_it_is_read,
    a_row_may_be_closed_before_its_tokens_are_read,
);

fn engine<D: MlxDevice>() -> Box<dyn Runner> {
    let backend = MlxBackend::<D>::open(&["Q4_1"], PageBudget::new(1 << 28)).unwrap();
    Box::new(tiny::engine(Family::Everything, backend))
}

fn decode(rows: &[RowId], steps: usize) -> StepPlan {
    let decode = |&row| DecodeRow {
        row,
        token: None,
        steps,
        draft: Vec::new(),
    };
    StepPlan {
        decode: rows.iter().map(decode).collect(),
        ..StepPlan::default()
    }
}

fn prompt(row: OpenRow, token_ids: &[u32]) -> StepPlan {
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

fn tokens(outcome: &RowOutcome) -> Vec<u32> {
    let output = outcome.result.as_ref().unwrap();
    output.tokens.iter().map(|token| token.token_id).collect()
}

/// Begins each plan before the last one is collected.
fn run_ahead(runner: &mut dyn Runner, plans: Vec<StepPlan>) -> Vec<StepOutcome> {
    let mut outcomes = Vec::new();
    let mut waiting = None;
    for plan in plans {
        let ticket = runner.submit(plan, &Undisturbed).unwrap();
        if let Some(before) = waiting.replace(ticket) {
            outcomes.push(runner.collect(before, &Undisturbed).unwrap());
        }
    }
    outcomes.extend(waiting.map(|last| runner.collect(last, &Undisturbed).unwrap()));
    outcomes
}

/// A greedy row, one that draws, one with a penalty and one with log-probabilities: the host chooses for the last two.
fn mixed_rows() -> [OpenRow; 4] {
    let row = |id, sampling| OpenRow {
        sampling,
        ..open(id, 40, 3)
    };
    let warm = SamplingParameters {
        temperature: 0.9,
        top_k: 40,
        top_p: 0.95,
        seed: 7,
        ..SamplingParameters::greedy()
    };
    let penalised = SamplingParameters {
        frequency_penalty: 1.5,
        ..warm.clone()
    };
    [
        row(A, SamplingParameters::greedy()),
        row(B, warm.clone()),
        row(C, penalised),
        OpenRow {
            top_logprobs: Some(2),
            ..row(D, warm)
        },
    ]
}

/// Prompts of all rows, then plans of their steps.
fn mixed_plans(rows: &[OpenRow]) -> Vec<StepPlan> {
    let ids: Vec<RowId> = rows.iter().map(|row| row.row).collect();
    let mut plans: Vec<StepPlan> = rows
        .iter()
        .map(|row| prompt(row.clone(), &tiny::text(5, 3)))
        .collect();
    plans.extend([3, 1, 4, 2].map(|steps| decode(&ids, steps)));
    plans
}

/// Tokens of a row over all plans.
fn text_of(outcomes: &[StepOutcome], id: RowId) -> Vec<u32> {
    let rows = outcomes.iter().flat_map(|outcome| &outcome.rows);
    rows.filter(|row| row.row == id).flat_map(tokens).collect()
}

fn plans_begun_ahead_draw_what_waiting_draws<D: MlxDevice>() {
    let rows = mixed_rows();
    let mut waiting = engine::<D>();
    let plans = mixed_plans(&rows);
    let calm: Vec<StepOutcome> = plans
        .into_iter()
        .map(|plan| run(waiting.as_mut(), plan))
        .collect();
    let ahead = run_ahead(engine::<D>().as_mut(), mixed_plans(&rows));
    for row in &rows {
        let text = text_of(&ahead, row.row);
        assert_eq!(text.len(), 11);
        assert_eq!(text, text_of(&calm, row.row), "row {}", row.row.0);
    }
    // Rows that share a seed and no penalty differ in who chose: device and host agree.
    assert_eq!(text_of(&ahead, B), text_of(&ahead, D));
    let samplers: Vec<BackendLabel> = ahead.iter().map(|outcome| outcome.sampler).collect();
    let (device, host) = (D::LABEL, BackendLabel::Reference);
    assert_eq!(
        samplers,
        [device, device, host, host, host, host, host, host],
        "the weakest of a plan is named"
    );
    let alone = run_ahead(engine::<D>().as_mut(), mixed_plans(&rows[..2]));
    assert!(alone.iter().all(|outcome| outcome.sampler == device));
    // With 16 bits the shape of a batch may tip a draw.
    if D::HALF_PRECISION == HalfPrecision::Slow {
        assert_eq!(text_of(&alone, B), text_of(&ahead, B));
    }
}

fn what_was_drawn_behind_an_end_token_is_cut_off<D: MlxDevice>() {
    let mut free = engine::<D>();
    run(free.as_mut(), prompt(open(A, 40, 2), &[1, 2]));
    let free = tokens(&run(free.as_mut(), decode(&[A], 8)).rows[0]);
    let end = free[2];
    let before_end = free.iter().position(|token| *token == end).unwrap();
    let ending = || OpenRow {
        end_token_ids: vec![end],
        ..open(A, 40, 2)
    };

    let mut runner = engine::<D>();
    run(runner.as_mut(), prompt(ending(), &[1, 2]));
    let plan = run(runner.as_mut(), decode(&[A], 6));
    assert_eq!(tokens(&plan.rows[0]), free[..=before_end]);
    let rest = run(runner.as_mut(), decode(&[A], 2));
    assert_eq!(
        tokens(&rest.rows[0]),
        free[before_end + 1..before_end + 3],
        "the row was cut to its end token"
    );

    // A plan that was on its way already has nothing to be cut back to.
    let mut runner = engine::<D>();
    let plans = vec![prompt(ending(), &[1, 2]), decode(&[A], 6), decode(&[A], 2)];
    let outcomes = run_ahead(runner.as_mut(), plans);
    assert_eq!(tokens(&outcomes[1].rows[0]), free[..=before_end]);
    assert_eq!(tokens(&outcomes[2].rows[0]), free[6..8]);
}

fn a_row_that_is_no_number_fails_alone_when_it_is_read<D: MlxDevice>() {
    let mut calm = engine::<D>();
    run(calm.as_mut(), prompt(open(A, 40, 3), &[1, 2, 3]));
    let expected = tokens(&run(calm.as_mut(), decode(&[A], 4)).rows[0]);

    let mut runner = engine::<D>();
    run(runner.as_mut(), prompt(open(A, 40, 3), &[1, 2, 3]));
    let broken = StepPlan {
        decode: decode(&[A], 2).decode,
        ..prompt(open(B, 40, 2), &[4, POISON])
    };
    let outcomes = run_ahead(runner.as_mut(), vec![broken, decode(&[B, A], 2)]);
    let failure = outcomes[0].rows[0].result.as_ref().unwrap_err();
    assert!(matches!(failure, EngineError::Numeric(_)), "{failure}");
    assert_eq!(tokens(&outcomes[0].rows[1]), expected[..2]);
    // It was begun on nonsense before anybody knew: an error of the row, not of the plan.
    let later = outcomes[1].rows[0].result.as_ref().unwrap_err();
    assert!(later.to_string().contains("row 2"), "{later}");
    assert_eq!(tokens(&outcomes[1].rows[1]), expected[2..]);
    assert_eq!(runner.open_rows(), 1);
}

fn a_row_may_be_closed_before_its_tokens_are_read<D: MlxDevice>() {
    let mut calm = engine::<D>();
    run(calm.as_mut(), prompt(open(A, 40, 3), &[1, 2, 3]));
    let expected = tokens(&run(calm.as_mut(), decode(&[A], 5)).rows[0]);

    let mut runner = engine::<D>();
    let closing = StepPlan {
        close_rows: vec![B],
        ..decode(&[A], 3)
    };
    let plans = vec![
        prompt(open(A, 40, 3), &[1, 2, 3]),
        prompt(open(B, 40, 3), &[1, 2, 3]),
        decode(&[A, B], 2),
        closing,
    ];
    let outcomes = run_ahead(runner.as_mut(), plans);
    assert_eq!(tokens(&outcomes[2].rows[0]), expected[..2]);
    assert_eq!(tokens(&outcomes[2].rows[1]), expected[..2]);
    assert_eq!(tokens(&outcomes[3].rows[0]), expected[2..]);
    assert_eq!(runner.open_rows(), 1);
}
