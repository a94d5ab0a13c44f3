use velox_proto::v1;

use super::*;
use crate::pool::facts::WorkerFacts;

fn worker() -> WorkerFacts {
    let wire = wire::WorkerFacts {
        protocol_min: 1,
        protocol_max: 1,
        pid: 7,
        backends: vec![v1::BackendCapability {
            backend: v1::Backend::Cpu.into(),
            available: true,
            reason: String::new(),
            ..v1::BackendCapability::default()
        }],
        ..Default::default()
    };
    WorkerFacts::try_from_wire(wire, 7).unwrap()
}

fn models() -> HashMap<String, Arc<ModelFacts>> {
    ["small", "large"]
        .map(|name| {
            let wire = wire::ModelFacts {
                model: Some(v1::Model {
                    name: name.to_owned(),
                    vocab_size: 100,
                    context_length: 64,
                    ..Default::default()
                }),
                backend: v1::Backend::Cpu.into(),
                n_layers: 3,
                max_rows: 8,
                ..Default::default()
            };
            let facts = ModelFacts::try_from_wire(wire, name, &worker()).unwrap();
            (name.to_owned(), Arc::new(facts))
        })
        .into()
}

fn open(row: u64, model: &str) -> wire::OpenRow {
    wire::OpenRow {
        row,
        model: model.to_owned(),
        ..Default::default()
    }
}

fn chunk(row: u64) -> wire::PrefillChunk {
    wire::PrefillChunk {
        row,
        token_ids: vec![1, 2, 3],
        sample: true,
        ..Default::default()
    }
}

fn drafted(row: u64, tokens: usize) -> wire::DecodeRow {
    wire::DecodeRow {
        token: Some(3),
        draft_token_ids: vec![9; tokens],
        ..decode(row, 1)
    }
}

fn decode(row: u64, steps: u32) -> wire::DecodeRow {
    wire::DecodeRow {
        row,
        steps,
        ..Default::default()
    }
}

/// A plan that opens row 1 of "small" and prefills it.
fn first_plan() -> wire::StepPlan {
    wire::StepPlan {
        sequence: 1,
        open_rows: vec![open(1, "small")],
        prefill: Some(chunk(1)),
        ..Default::default()
    }
}

#[test]
fn rows_live_from_open_to_close() {
    let (models, mut ledger) = (models(), RowLedger::default());
    let first = ledger.expect(&first_plan(), &models).unwrap();
    assert_eq!(first.rows[0].work, Work::Sample);
    assert_eq!(first.pass_tokens, 3);
    assert_eq!(ledger.rows_of("small"), 1);

    let second = wire::StepPlan {
        sequence: 2,
        open_rows: vec![open(2, "small"), open(3, "large")],
        prefill: Some(chunk(2)),
        decode: vec![decode(1, 4)],
        ..Default::default()
    };
    let second = ledger.expect(&second, &models).unwrap();
    let rows: Vec<u64> = second.rows.iter().map(|expected| expected.row).collect();
    assert_eq!(rows, [2, 1], "the chunk comes first");
    assert_eq!(second.pass_tokens, 4);
    assert_eq!(second.only_opened, HashSet::from([3]));

    let third = wire::StepPlan {
        sequence: 3,
        close_rows: vec![1, 2, 3],
        ..Default::default()
    };
    let third = ledger.expect(&third, &models).unwrap();
    assert!(third.model.is_none());
    assert_eq!(ledger.len(), 0);
}

#[test]
fn a_draft_makes_the_pass_larger() {
    let (models, mut ledger) = (models(), RowLedger::default());
    ledger.expect(&first_plan(), &models).unwrap();
    let plan = wire::StepPlan {
        sequence: 2,
        decode: vec![drafted(1, 32)],
        ..Default::default()
    };
    let expectation = ledger.expect(&plan, &models).unwrap();
    assert_eq!(expectation.pass_tokens, 33);
    let draft = vec![9; 32];
    assert_eq!(expectation.rows[0].work, Work::Verify { draft });
}

#[test]
fn a_row_may_be_closed_and_its_number_opened_again_in_one_plan() {
    let (models, mut ledger) = (models(), RowLedger::default());
    ledger.expect(&first_plan(), &models).unwrap();
    let again = wire::StepPlan {
        sequence: 2,
        close_rows: vec![1],
        open_rows: vec![open(1, "large")],
        prefill: Some(chunk(1)),
        ..Default::default()
    };
    let expectation = ledger.expect(&again, &models).unwrap();
    assert_eq!(expectation.model.unwrap().name(), "large");
}

#[test]
fn a_plan_that_breaks_the_contract_changes_nothing() {
    type Change = fn(&mut wire::StepPlan);
    let cases: [(&str, Change); 16] = [
        ("sequence", |plan| plan.sequence = 1),
        ("unknown model", |plan| {
            plan.open_rows.push(open(9, "other"));
        }),
        ("open twice", |plan| plan.open_rows.push(open(1, "small"))),
        ("two models", |plan| {
            plan.open_rows.push(open(9, "large"));
            plan.prefill = Some(chunk(9));
        }),
        ("row twice", |plan| plan.decode.push(decode(1, 1))),
        ("closed row", |plan| plan.close_rows.push(1)),
        ("unknown row", |plan| plan.decode.push(decode(5, 1))),
        ("no steps", |plan| plan.decode[0].steps = 0),
        ("too many steps", |plan| {
            plan.decode[0].steps = MAX_DECODE_STEPS + 1;
        }),
        ("draft without a token", |plan| {
            plan.decode[0].draft_token_ids = vec![1];
        }),
        ("draft and two steps", |plan| {
            plan.decode[0] = drafted(1, 1);
            plan.decode[0].steps = 2;
        }),
        ("draft too long", |plan| plan.decode[0] = drafted(1, 33)),
        ("empty chunk", |plan| {
            plan.open_rows.push(open(9, "small"));
            plan.prefill = Some(wire::PrefillChunk {
                row: 9,
                ..Default::default()
            });
        }),
        ("sampled and scored", |plan| {
            plan.open_rows.push(open(9, "small"));
            plan.prefill = Some(wire::PrefillChunk {
                score: Some(wire::ScorePart::default()),
                ..chunk(9)
            });
        }),
        ("bad handle", |plan| {
            plan.open_rows.push(open(9, "small"));
            plan.prefill = Some(wire::PrefillChunk {
                token_ids: Vec::new(),
                token_handle: Some(v1::TensorHandle::default()),
                ..chunk(9)
            });
        }),
        ("too many rows", |plan| {
            plan.open_rows = (10..400).map(|row| open(row, "small")).collect();
            plan.decode = (10..400).map(|row| decode(row, 1)).collect();
        }),
    ];
    for (name, change) in cases {
        let (models, mut ledger) = (models(), RowLedger::default());
        ledger.expect(&first_plan(), &models).unwrap();
        let good = wire::StepPlan {
            sequence: 2,
            decode: vec![decode(1, 1)],
            ..Default::default()
        };
        let mut bad = good.clone();
        change(&mut bad);
        let refused = ledger.expect(&bad, &models);
        assert!(refused.is_err(), "{name}");
        assert_eq!(ledger.len(), 1, "{name}");
        assert!(ledger.expect(&good, &models).is_ok(), "{name}");
    }
}

#[test]
fn a_score_part_is_clipped_to_its_chunk() {
    let (models, mut ledger) = (models(), RowLedger::default());
    let mut plan = first_plan();
    plan.prefill = Some(wire::PrefillChunk {
        start: 4,
        sample: false,
        score: Some(wire::ScorePart {
            first_position: 2,
            top_n: 5,
            ..Default::default()
        }),
        ..chunk(1)
    });
    let expectation = ledger.expect(&plan, &models).unwrap();
    let expected = Work::Score {
        first: 4,
        end: 7,
        last_known: false,
        top_n: 5,
    };
    assert_eq!(expectation.rows[0].work, expected);
}
