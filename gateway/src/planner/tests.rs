//! The planner as a table, and what holds for any rows.

use proptest::prelude::*;

use super::*;

/// Name, rows, plans without an answer, and the decision.
type Case = (
    &'static str,
    Vec<RowView>,
    usize,
    Option<Chunk>,
    Vec<Decode>,
);

fn row(id: u64) -> RowView {
    RowView {
        id: RowId(id),
        model: ModelIndex(0),
        position: 10,
        unfed: 0,
        goal: Goal::Generate { left: 9, steps: 1 },
        company: Company::Any,
        reader: Reader::Ready,
        in_flight: 0,
    }
}

fn prompt(id: u64, unfed: u32) -> RowView {
    RowView {
        unfed,
        position: 0,
        ..row(id)
    }
}

fn chunk(id: u64, tokens: u32, last: bool) -> Option<Chunk> {
    Some(Chunk {
        row: RowId(id),
        start: 0,
        tokens,
        last,
    })
}

fn state(uncollected: usize) -> WorkerState {
    WorkerState {
        uncollected,
        ..WorkerState::default()
    }
}

fn decode(ids: &[u64]) -> Vec<Decode> {
    ids.iter()
        .map(|&id| Decode {
            row: RowId(id),
            steps: 1,
        })
        .collect()
}

#[test]
fn the_table() {
    let behind = |view: RowView| RowView {
        reader: Reader::Behind,
        ..view
    };
    let alone = |view: RowView| RowView {
        company: Company::Alone,
        ..view
    };
    let flying = |view: RowView| RowView {
        in_flight: 1,
        ..view
    };
    let done = RowView {
        goal: Goal::Generate { left: 0, steps: 1 },
        ..row(7)
    };
    let scored = RowView {
        goal: Goal::Score,
        ..row(8)
    };
    let cases: Vec<Case> = vec![
        ("nothing to do", vec![], 0, None, vec![]),
        (
            "every row decodes",
            vec![row(1), row(2)],
            0,
            None,
            decode(&[1, 2]),
        ),
        (
            "one plan ahead",
            vec![flying(row(1))],
            1,
            None,
            decode(&[1]),
        ),
        ("not two ahead", vec![row(1)], 2, None, vec![]),
        (
            "a lone prompt takes a large chunk",
            vec![prompt(1, 600)],
            0,
            chunk(1, 512, false),
            vec![],
        ),
        (
            "a prompt beside a stream takes a small one",
            vec![row(1), prompt(2, 600)],
            0,
            chunk(2, 256, false),
            decode(&[1]),
        ),
        (
            "one prompt at a time, the oldest",
            vec![prompt(1, 9), prompt(2, 9)],
            0,
            chunk(1, 9, true),
            vec![],
        ),
        (
            "a slow reader pauses its row only",
            vec![behind(row(1)), row(2)],
            0,
            None,
            decode(&[2]),
        ),
        (
            "a slow reader pauses its prompt only",
            vec![behind(prompt(1, 9)), prompt(2, 9)],
            0,
            chunk(2, 9, true),
            vec![],
        ),
        (
            "no token beyond the limit",
            vec![done, scored],
            0,
            None,
            vec![],
        ),
        (
            "a suspect runs alone",
            vec![row(1), alone(prompt(2, 9))],
            0,
            chunk(2, 9, true),
            vec![],
        ),
        (
            "a suspect waits for plans in flight",
            vec![flying(row(1)), alone(prompt(2, 9))],
            1,
            None,
            vec![],
        ),
        (
            "suspects run one by one",
            vec![alone(row(1)), alone(row(2))],
            0,
            None,
            decode(&[1]),
        ),
        (
            "a suspect may have its own plan in flight",
            vec![row(1), alone(flying(row(2)))],
            1,
            None,
            decode(&[2]),
        ),
        (
            "nobody joins a suspect in flight",
            vec![row(1), behind(alone(flying(row(2))))],
            1,
            None,
            vec![],
        ),
        (
            "a suspect that nobody reads holds up nobody",
            vec![row(1), behind(alone(row(2)))],
            0,
            None,
            decode(&[1]),
        ),
    ];
    for (name, rows, uncollected, prefill, decode) in cases {
        let decision = decide(&rows, state(uncollected), &PlanLimits::default());
        assert_eq!(decision, Decision { prefill, decode }, "{name}");
    }
}

#[test]
fn several_steps_only_when_they_keep_nobody_waiting() {
    let patient = |id, left| RowView {
        goal: Goal::Generate { left, steps: 4 },
        ..row(id)
    };
    let steps = |rows: &[RowView]| -> Vec<u32> {
        decide(rows, state(0), &PlanLimits::default())
            .decode
            .iter()
            .map(|row| row.steps)
            .collect()
    };
    assert_eq!(steps(&[patient(1, 9), patient(2, 3)]), [4, 3]);
    assert_eq!(steps(&[patient(1, 9), row(2)]), [1, 1]);
    assert_eq!(steps(&[patient(1, 9), prompt(2, 5)]), [1]);
}

#[test]
fn models_take_turns() {
    let of = |model, id| RowView {
        model: ModelIndex(model),
        ..row(id)
    };
    let rows = [of(1, 1), of(0, 2), of(1, 3)];
    let after = |last| {
        let worker = WorkerState {
            uncollected: 1,
            last_model: ModelIndex(last),
        };
        decide(&rows, worker, &PlanLimits::default()).decode
    };
    assert_eq!(after(0), decode(&[1, 3]));
    assert_eq!(after(1), decode(&[2]));
    assert_eq!(after(7), decode(&[2]));
}

fn any_row() -> impl Strategy<Value = RowView> {
    (
        0_u32..2000,
        0_u32..2000,
        0_u32..6,
        0_u32..6,
        0_u8..16,
        0_usize..3,
    )
        .prop_map(|(position, unfed, left, steps, flags, in_flight)| RowView {
            id: RowId(0),
            model: ModelIndex(u32::from(flags) % 2),
            position,
            unfed: if flags & 1 == 0 { 0 } else { unfed },
            goal: if flags & 2 == 0 {
                Goal::Generate { left, steps }
            } else {
                Goal::Score
            },
            company: if flags & 12 == 4 {
                Company::Alone
            } else {
                Company::Any
            },
            reader: if flags & 8 == 0 {
                Reader::Ready
            } else {
                Reader::Behind
            },
            in_flight,
        })
}

proptest! {
    #[test]
    fn plans_are_within_limits_and_waste_nothing(
        mut rows in prop::collection::vec(any_row(), 0..12), uncollected in 0_usize..3,
    ) {
        for (id, row) in (0_u64..).zip(&mut rows) {
            row.id = RowId(id);
        }
        let limits = PlanLimits::default();
        let decision = decide(&rows, state(uncollected), &limits);
        let view = |id: RowId| rows.iter().find(|row| row.id == id).unwrap();
        let planned: Vec<RowId> = decision.decode.iter().map(|row| row.row)
            .chain(decision.prefill.map(|chunk| chunk.row)).collect();
        prop_assert!(planned.iter().all(|&id| view(id).reader == Reader::Ready));
        prop_assert!(planned.iter().all(|&id| view(id).model == view(planned[0]).model));
        prop_assert!(planned.is_empty() || uncollected < limits.uncollected_plans);
        if planned.iter().any(|&id| view(id).company == Company::Alone) {
            prop_assert_eq!(planned.len(), 1);
            prop_assert!(rows.iter().all(|row| row.id == planned[0] || row.in_flight == 0));
        }
        if let Some(chunk) = decision.prefill {
            let row = view(chunk.row);
            prop_assert_eq!(chunk.start, row.position);
            prop_assert!(chunk.tokens >= 1 && chunk.tokens <= row.unfed.min(limits.sole_chunk_tokens));
            prop_assert_eq!(chunk.last, chunk.tokens == row.unfed);
            prop_assert!(decision.decode.is_empty() || chunk.tokens <= limits.shared_chunk_tokens);
        }
        for decode in &decision.decode {
            let row = view(decode.row);
            prop_assert_eq!(row.unfed, 0);
            let Goal::Generate { left, .. } = row.goal else { panic!("a scored row decodes") };
            prop_assert!(decode.steps >= 1 && decode.steps <= left);
        }
        // Work conserving: without suspects a worker with a free place never idles beside a row that could run.
        let runnable = rows.iter().any(RowView::is_runnable);
        let suspects = rows.iter().any(|row| row.company == Company::Alone);
        if runnable && !suspects && uncollected < limits.uncollected_plans {
            prop_assert!(!decision.is_empty());
        }
    }
}
