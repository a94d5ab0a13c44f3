use std::sync::Arc;

use velox_proto::op::OpKind;

use super::*;
use crate::pool::plan::{RowExpectation, RowTerms, Work};

const WORKER: WorkerKey = WorkerKey {
    slot: 0,
    incarnation: 1,
};
const LAYERS: u64 = 3;
const END: u32 = 2;

fn facts() -> WorkerFacts {
    let backend = |backend: v1::Backend, available| v1::BackendCapability {
        backend: backend.into(),
        available,
        reason: String::new(),
        ..v1::BackendCapability::default()
    };
    let op = |op: &str, available| v1::OpCapability {
        op: op.to_owned(),
        dtype: "f32".to_owned(),
        backend: v1::Backend::Reference.into(),
        available,
        ..Default::default()
    };
    let wire = wire::WorkerFacts {
        protocol_min: 1,
        protocol_max: 1,
        pid: 7,
        device: "test device".to_owned(),
        kernel: "test kernel".to_owned(),
        backends: vec![
            backend(v1::Backend::Cpu, true),
            backend(v1::Backend::Reference, true),
            backend(v1::Backend::MlxCpu, false),
        ],
        ops: vec![op("gated_mlp", false), op("mat_mul", true)],
        ..Default::default()
    };
    WorkerFacts::try_from_wire(wire, 7).unwrap()
}

fn model(backend: v1::Backend) -> Arc<ModelFacts> {
    let wire = wire::ModelFacts {
        model: Some(v1::Model {
            name: "m".to_owned(),
            vocab_size: 100,
            context_length: 64,
            ..Default::default()
        }),
        backend: backend.into(),
        fallback_reason: "no GPU".to_owned(),
        n_layers: 3,
        max_rows: 8,
        ..Default::default()
    };
    Arc::new(ModelFacts::try_from_wire(wire, "m", &facts()).unwrap())
}

fn row(row: u64, work: Work, top_logprobs: Option<u32>) -> RowExpectation {
    RowExpectation {
        row,
        terms: Arc::new(RowTerms {
            model: model(v1::Backend::Cpu),
            end_token_ids: [END].into(),
            top_logprobs,
        }),
        work,
    }
}

fn expectation(rows: Vec<RowExpectation>) -> PlanExpectation {
    PlanExpectation {
        sequence: 5,
        model: Some(model(v1::Backend::Cpu)),
        rows,
        only_opened: [90].into(),
        pass_tokens: 1,
    }
}

fn tokens(ids: &[u32]) -> Vec<wire::SampledToken> {
    ids.iter()
        .map(|&token_id| wire::SampledToken {
            token_id,
            ..Default::default()
        })
        .collect()
}

fn answer(row: u64, ids: &[u32]) -> wire::RowResult {
    wire::RowResult {
        row,
        tokens: tokens(ids),
        ..Default::default()
    }
}

fn failure(row: u64, ids: &[u32]) -> wire::RowResult {
    wire::RowResult {
        error: Some(wire::RowError::default()),
        ..answer(row, ids)
    }
}

fn counts(passes: u64, heads: u64, samples: u64) -> Vec<v1::OpCount> {
    OpId::ALL
        .iter()
        .filter(|op| op.kind() == OpKind::Stage)
        .map(|op| v1::OpCount {
            op: op.name().to_owned(),
            count: match op {
                OpId::Embed => passes,
                OpId::Head => heads,
                OpId::Sample => samples,
                _ => passes * LAYERS,
            },
        })
        .collect()
}

fn result(rows: Vec<wire::RowResult>, op_counts: Vec<v1::OpCount>) -> wire::StepResult {
    wire::StepResult {
        sequence: 5,
        rows,
        backend: v1::Backend::Cpu.into(),
        sampler: v1::Backend::Cpu.into(),
        op_counts,
        compute_us: 1500,
    }
}

fn attest(
    expected: Vec<RowExpectation>,
    result: wire::StepResult,
) -> Result<AttestedResult, Violation> {
    AttestedResult::attest(WORKER, &facts(), &expectation(expected), result)
}

/// A chunk that is sampled beside rows of 4 and 2 steps, answered in full.
fn mixed_plan() -> Vec<RowExpectation> {
    vec![
        row(1, Work::Sample, None),
        row(2, Work::Decode { steps: 4 }, None),
        row(3, Work::Decode { steps: 2 }, None),
    ]
}

fn mixed_rows() -> Vec<wire::RowResult> {
    vec![
        answer(1, &[9]),
        answer(2, &[10, 11, 12, 13]),
        answer(3, &[20, 21]),
    ]
}

#[test]
fn an_honest_result_is_believed_and_says_what_ran() {
    let attested = attest(mixed_plan(), result(mixed_rows(), counts(4, 4, 4))).unwrap();
    assert_eq!(attested.sequence(), 5);
    assert_eq!(attested.compute(), Duration::from_micros(1500));
    let provenance = attested.provenance().unwrap();
    assert_eq!(provenance.worker(), WORKER);
    let wire = provenance.to_wire();
    assert_eq!(wire.backend(), v1::Backend::Cpu);
    assert_eq!(wire.sampler(), v1::Backend::Cpu);
    assert_eq!(wire.device, "test device");
    assert_eq!(wire.fallback_reason, "no GPU");
    assert_eq!(wire.op_counts, counts(4, 4, 4));
}

#[test]
fn counts_follow_from_what_the_rows_really_did() {
    let fill = || row(1, Work::Fill, None);
    let score = |last_known| {
        let (first, end, top_n) = (2, 5, 0);
        let work = Work::Score {
            first,
            end,
            last_known,
            top_n,
        };
        row(1, work, None)
    };
    let scored = |positions: std::ops::Range<u32>, last_known| {
        let scores = positions.map(|position| wire::ScoredToken {
            position,
            next_logprob: (last_known || position < 4).then_some(-1.0),
            ..Default::default()
        });
        wire::RowResult {
            scores: scores.collect(),
            ..answer(1, &[])
        }
    };
    let decode = |id, steps| row(id, Work::Decode { steps }, None);
    let verify = |id, draft: &[u32]| {
        let draft = draft.to_vec();
        row(id, Work::Verify { draft }, None)
    };
    type Case = (
        &'static str,
        Vec<RowExpectation>,
        Vec<wire::RowResult>,
        [u64; 3],
    );
    let cases: Vec<Case> = vec![
        (
            "a filling chunk needs no head",
            vec![fill()],
            vec![answer(1, &[])],
            [1, 0, 0],
        ),
        (
            "a filling chunk beside a decode row",
            vec![fill(), decode(2, 1)],
            vec![answer(1, &[]), answer(2, &[7])],
            [1, 1, 1],
        ),
        (
            "a scored chunk needs the head and no sampler",
            vec![score(true)],
            vec![scored(2..5, true)],
            [1, 1, 0],
        ),
        (
            "the last position has no next token",
            vec![score(false)],
            vec![scored(2..5, false)],
            [1, 1, 0],
        ),
        (
            "an end token shortens the plan",
            vec![decode(2, 8)],
            vec![answer(2, &[7, END])],
            [2, 2, 2],
        ),
        (
            "the longest row decides",
            vec![decode(2, 8), decode(3, 8)],
            vec![answer(2, &[END]), answer(3, &[7, 8, END])],
            [3, 3, 3],
        ),
        (
            "a draft is checked in one pass, wrong or right",
            vec![verify(2, &[7, 8]), verify(3, &[7, 8])],
            vec![answer(2, &[7, 9]), answer(3, &[7, 8, 5])],
            [1, 1, 1],
        ),
        (
            "a draft beside several steps",
            vec![verify(2, &[7, 8]), decode(3, 2)],
            vec![answer(2, &[6]), answer(3, &[7, 8])],
            [2, 2, 2],
        ),
        (
            "an end token in a draft is the last",
            vec![verify(2, &[7, END, 8])],
            vec![answer(2, &[7, END])],
            [1, 1, 1],
        ),
    ];
    for (name, expected, rows, [passes, heads, samples]) in cases {
        let result = result(rows, counts(passes, heads, samples));
        for stage in &result.op_counts {
            for lie in [stage.count + 1, stage.count.wrapping_sub(1)] {
                let mut lying = result.clone();
                let entry = lying.op_counts.iter_mut().find(|own| own.op == stage.op);
                entry.unwrap().count = lie;
                let expected = expected.iter().map(copy).collect();
                let refused = attest(expected, lying);
                assert!(refused.is_err(), "{name}: {} is {lie}", stage.op);
            }
        }
        attest(expected, result).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn a_row_that_ended_may_have_run_ahead_to_the_end_of_its_plan() {
    let plan = || vec![row(2, Work::Decode { steps: 4 }, None)];
    let ended = || vec![answer(2, &[7, END])];
    for passes in 2..=4 {
        attest(plan(), result(ended(), counts(passes, passes, passes))).unwrap();
    }
    for (passes, heads, samples) in [(1, 1, 1), (5, 5, 5), (4, 2, 2), (4, 4, 2), (2, 3, 3)] {
        let refused = attest(plan(), result(ended(), counts(passes, heads, samples)));
        assert!(refused.is_err(), "{passes} {heads} {samples}");
    }
    let mut thinner = counts(3, 3, 3);
    thinner.last_mut().unwrap().count -= 1;
    assert!(attest(plan(), result(ended(), thinner)).is_err());
    // Whoever did not end has one token for each pass.
    let going_on = vec![answer(2, &[7, 8, 9, 10])];
    assert!(attest(plan(), result(going_on, counts(5, 5, 5))).is_err());
}

fn copy(expected: &RowExpectation) -> RowExpectation {
    RowExpectation {
        row: expected.row,
        terms: Arc::clone(&expected.terms),
        work: expected.work.clone(),
    }
}

#[test]
fn a_draft_yields_its_right_tokens_and_one_more() {
    let draft = || {
        let draft = vec![7, 8, 5];
        vec![row(2, Work::Verify { draft }, None)]
    };
    let yields = |ids: &[u32]| attest(draft(), result(vec![answer(2, ids)], counts(1, 1, 1)));
    for honest in [
        &[6][..],
        &[7, 6],
        &[7, 8, 6],
        &[7, 8, 5, 1],
        &[END],
        &[7, END],
    ] {
        assert!(yields(honest).is_ok(), "{honest:?}");
    }
    for lie in [
        &[][..],
        &[7],
        &[6, 8],
        &[7, 8, 5],
        &[7, 8, 5, 1, 2],
        &[END, 1],
    ] {
        assert!(yields(lie).is_err(), "{lie:?}");
    }
    let failed = result(vec![failure(2, &[])], counts(1, 1, 1));
    assert!(attest(draft(), failed).is_ok());
    let failed = result(vec![failure(2, &[])], counts(2, 2, 2));
    assert!(attest(draft(), failed).is_err());
}

#[test]
fn a_failed_row_widens_the_counts_to_what_it_can_have_run() {
    let expected = || vec![row(2, Work::Decode { steps: 4 }, None)];
    for passes in 1..=4 {
        let result = result(vec![failure(2, &[])], counts(passes, passes, passes));
        assert!(attest(expected(), result).is_ok(), "{passes}");
    }
    let too_many = result(vec![failure(2, &[])], counts(5, 5, 5));
    assert!(attest(expected(), too_many).is_err());
    let too_few = result(vec![failure(2, &[7, 8])], counts(1, 1, 1));
    assert!(attest(expected(), too_few).is_err());
}

#[test]
fn a_refused_plan_computed_nothing_and_has_no_provenance() {
    let refused = wire::StepResult {
        sequence: 5,
        rows: vec![failure(1, &[]), failure(2, &[]), failure(3, &[])],
        ..Default::default()
    };
    let attested = attest(mixed_plan(), refused.clone()).unwrap();
    assert!(attested.provenance().is_none());

    let mut with_tokens = refused;
    with_tokens.rows = mixed_rows();
    let error = attest(mixed_plan(), with_tokens).unwrap_err();
    assert!(matches!(error, Violation::OpCount { .. }), "{error}");
}

#[test]
fn a_plan_that_only_opens_and_closes_has_no_provenance() {
    let bookkeeping = PlanExpectation {
        model: None,
        ..expectation(Vec::new())
    };
    let attest = |result| AttestedResult::attest(WORKER, &facts(), &bookkeeping, result);
    let quiet = wire::StepResult {
        sequence: 5,
        ..Default::default()
    };
    assert!(attest(quiet.clone()).unwrap().provenance().is_none());
    let failed_to_open = wire::StepResult {
        rows: vec![failure(90, &[])],
        ..quiet
    };
    assert!(attest(failed_to_open).is_ok());
    assert!(attest(result(Vec::new(), counts(1, 0, 0))).is_err());
}

#[test]
fn every_lie_is_found() {
    type Lie = fn(&mut wire::StepResult);
    let lies: [(&str, Lie); 20] = [
        ("other sequence", |r| r.sequence = 6),
        ("impossible label", |r| {
            r.backend = v1::Backend::Metal.into();
        }),
        ("other label", |r| r.backend = v1::Backend::Reference.into()),
        ("unknown label", |r| r.backend = 77),
        ("sampler not available", |r| {
            r.sampler = v1::Backend::MlxCpu.into();
        }),
        ("sampler unspecified", |r| r.sampler = 0),
        ("op not in the table", |r| {
            r.op_counts[0].op = "shell".into()
        }),
        ("op that is no stage", |r| {
            r.op_counts[0].op = "mat_mul".into();
        }),
        ("op twice", |r| r.op_counts.push(r.op_counts[0].clone())),
        ("op missing", |r| {
            r.op_counts.pop();
        }),
        ("no counts", |r| r.op_counts.clear()),
        ("row missing", |r| {
            r.rows.pop();
        }),
        ("row invented", |r| r.rows.push(answer(90, &[1]))),
        ("other row", |r| r.rows[0].row = 8),
        ("other order", |r| r.rows.swap(1, 2)),
        ("token too many", |r| r.rows[2].tokens = tokens(&[1, 1, 1])),
        ("token missing", |r| r.rows[2].tokens = tokens(&[1])),
        ("token after the end", |r| {
            r.rows[1].tokens = tokens(&[1, END, 1, 1]);
        }),
        ("token outside the vocabulary", |r| {
            r.rows[0].tokens = tokens(&[100]);
        }),
        ("scores not asked for", |r| {
            r.rows[0].scores = vec![wire::ScoredToken::default()];
        }),
    ];
    for (name, lie) in lies {
        let mut lying = result(mixed_rows(), counts(4, 4, 4));
        lie(&mut lying);
        assert!(attest(mixed_plan(), lying).is_err(), "{name}");
    }
}

#[test]
fn log_probabilities_come_if_asked_for_and_are_ones() {
    let expected = || vec![row(1, Work::Sample, Some(1))];
    let with = |logprob: Option<f32>, top: Vec<(u32, f32)>| {
        let top = top.into_iter();
        let top = top.map(|(token_id, logprob)| wire::Alternative { token_id, logprob });
        let token = wire::SampledToken {
            token_id: 9,
            logprob,
            top: top.collect(),
        };
        let row = wire::RowResult {
            tokens: vec![token],
            ..answer(1, &[])
        };
        attest(expected(), result(vec![row], counts(1, 1, 1)))
    };
    assert!(with(Some(-0.5), vec![(9, -0.5)]).is_ok());
    assert!(with(Some(0.0), vec![]).is_ok());
    assert!(with(None, vec![]).is_err());
    assert!(with(Some(-0.5), vec![(9, -0.5), (8, -1.0)]).is_err());
    assert!(with(Some(-0.5), vec![(100, -0.5)]).is_err());
    for value in [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, 0.5] {
        assert!(with(Some(value), vec![]).is_err(), "{value}");
        assert!(with(Some(-0.5), vec![(9, value)]).is_err(), "{value}");
    }
}

#[test]
fn scored_positions_are_the_chunks_own() {
    let work = Work::Score {
        first: 2,
        end: 4,
        last_known: true,
        top_n: 0,
    };
    let with = |scores: &[(u32, Option<f32>)]| {
        let scores = scores.iter();
        let scores = scores.map(|&(position, next_logprob)| wire::ScoredToken {
            position,
            next_logprob,
            ..Default::default()
        });
        let scored = wire::RowResult {
            scores: scores.collect(),
            ..answer(1, &[])
        };
        attest(
            vec![row(1, work.clone(), None)],
            result(vec![scored], counts(1, 1, 0)),
        )
    };
    assert!(with(&[(2, Some(-1.0)), (3, Some(-2.0))]).is_ok());
    assert!(with(&[(2, Some(-1.0))]).is_err());
    assert!(with(&[(2, Some(-1.0)), (4, Some(-2.0))]).is_err());
    assert!(with(&[(2, Some(-1.0)), (3, None)]).is_err());
    assert!(with(&[(2, Some(1.0)), (3, Some(-2.0))]).is_err());
}

#[test]
fn an_op_whose_probe_failed_must_not_have_run() {
    let reference = PlanExpectation {
        model: Some(model(v1::Backend::Reference)),
        ..expectation(vec![row(1, Work::Fill, None)])
    };
    let result = wire::StepResult {
        backend: v1::Backend::Reference.into(),
        ..result(vec![answer(1, &[])], counts(1, 0, 0))
    };
    let error = AttestedResult::attest(WORKER, &facts(), &reference, result).unwrap_err();
    assert!(matches!(error, Violation::WithdrawnOp { .. }), "{error}");
}

#[test]
fn a_single_op_is_attested_too() {
    let request = wire::RunOpRequest {
        op: "mat_mul".to_owned(),
        ..Default::default()
    };
    let honest = || v1::Provenance {
        backend: v1::Backend::Reference.into(),
        op_counts: vec![v1::OpCount {
            op: "mat_mul".to_owned(),
            count: 1,
        }],
        ..Default::default()
    };
    let attest = |provenance: v1::Provenance, backend: v1::Backend| {
        let request = wire::RunOpRequest {
            backend: backend.into(),
            ..request.clone()
        };
        let response = wire::RunOpResponse {
            outputs: Vec::new(),
            provenance: Some(provenance),
        };
        AttestedOp::attest(WORKER, &facts(), &request, response)
    };
    let any = v1::Backend::Unspecified;
    let attested = attest(honest(), any).unwrap();
    assert_eq!(attested.provenance().backend(), v1::Backend::Reference);
    assert!(attest(honest(), v1::Backend::Reference).is_ok());
    assert!(attest(honest(), v1::Backend::Cpu).is_err());
    assert!(attest(v1::Provenance::default(), any).is_err());

    let mut metal = honest();
    metal.set_backend(v1::Backend::Metal);
    let mut other_op = honest();
    other_op.op_counts[0].op = "softmax".to_owned();
    let mut twice = honest();
    twice.op_counts[0].count = 2;
    let mut never = honest();
    never.op_counts.clear();
    let mut lies = vec![other_op, twice, never];
    if !cfg!(target_os = "macos") {
        lies.push(metal);
    }
    for lie in lies {
        assert!(attest(lie.clone(), any).is_err(), "{lie:?}");
    }
}
