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
        source: Source::OwnSample,
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
            draft: 0,
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

/// A row with a draft.
fn drafting(id: u64, left: u32, tokens: u32) -> RowView {
    RowView {
        goal: Goal::Generate { left, steps: 4 },
        source: Source::Draft { tokens },
        ..row(id)
    }
}

/// Rows, with their steps and drafts.
fn planned(rows: &[RowView], uncollected: usize) -> Vec<(u64, u32, u32)> {
    let decision = decide(rows, state(uncollected), &PlanLimits::default());
    let decode = decision.decode.iter();
    decode
        .map(|row| (row.row.0, row.steps, row.draft))
        .collect()
}

#[test]
fn drafts_fit_what_is_left_and_the_plan() {
    let patient = |id| RowView {
        goal: Goal::Generate { left: 9, steps: 4 },
        ..row(id)
    };
    for (name, rows, expected) in [
        ("a draft", vec![drafting(1, 90, 8)], vec![(1, 1, 8)]),
        (
            "one token more comes back",
            vec![drafting(1, 5, 8)],
            vec![(1, 1, 4)],
        ),
        (
            "no room for a guess",
            vec![drafting(1, 1, 8)],
            vec![(1, 1, 0)],
        ),
        (
            "without a guess as any row",
            vec![drafting(1, 90, 0)],
            vec![(1, 4, 0)],
        ),
        (
            "several steps would keep a draft waiting",
            vec![patient(1), drafting(2, 90, 8)],
            vec![(1, 1, 0), (2, 1, 8)],
        ),
        (
            "drafts share what a plan may hold",
            vec![
                drafting(1, 90, 32),
                drafting(2, 90, 20),
                drafting(3, 90, 32),
            ],
            vec![(1, 1, 32), (2, 1, 20), (3, 1, 12)],
        ),
    ] {
        assert_eq!(planned(&rows, 0), expected, "{name}");
    }
}

#[test]
fn a_draft_waits_for_its_result_and_holds_up_nobody_else() {
    let flying = |view: RowView| RowView {
        in_flight: 1,
        ..view
    };
    let of_other_model = |view: RowView| RowView {
        model: ModelIndex(1),
        ..view
    };
    let unread = RowView {
        reader: Reader::Behind,
        ..flying(drafting(1, 90, 8))
    };
    for (name, rows, expected) in [
        (
            "its result is not in",
            vec![flying(drafting(1, 90, 8))],
            vec![],
        ),
        (
            "others are one plan ahead",
            vec![flying(drafting(1, 90, 8)), flying(row(2))],
            vec![(2, 1, 0)],
        ),
        (
            "rows with drafts go together",
            vec![flying(drafting(1, 90, 8)), drafting(2, 90, 8)],
            vec![],
        ),
        (
            "an unread one is awaited, too: its result comes all the same",
            vec![unread, drafting(2, 90, 8)],
            vec![],
        ),
        (
            "of each model apart",
            vec![
                flying(drafting(1, 90, 8)),
                of_other_model(drafting(2, 90, 8)),
            ],
            vec![(2, 1, 8)],
        ),
    ] {
        assert_eq!(planned(&rows, 1), expected, "{name}");
    }
    // Chunks of its prompt need no result.
    let filling = RowView {
        unfed: 600,
        in_flight: 1,
        ..drafting(1, 90, 0)
    };
    let decision = decide(&[filling], state(1), &PlanLimits::default());
    assert!(decision.prefill.is_some());
    assert_eq!(planned(&[filling, drafting(2, 90, 3)], 1), [(2, 1, 3)]);
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
        0_u8..32,
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
            source: if flags & 16 == 0 {
                Source::OwnSample
            } else {
                Source::Draft { tokens: steps * 9 }
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
            let Source::Draft { tokens } = row.source else {
                prop_assert_eq!(decode.draft, 0);
                continue;
            };
            prop_assert_eq!(row.in_flight, 0);
            prop_assert!(decode.draft <= tokens && decode.draft < left);
            prop_assert!(decode.draft == 0 || decision.decode.iter().all(|other| other.steps == 1));
        }
        let drafted: u32 = decision.decode.iter().map(|decode| decode.draft).sum();
        prop_assert!(drafted <= limits.draft_tokens);
        // Work conserving: without suspects a worker with a free place never idles beside a row that could run; rows
        // with drafts may wait for others of them, whose results are on their way.
        let runnable = rows.iter().any(RowView::is_runnable);
        let suspects = rows.iter().any(|row| row.company == Company::Alone);
        let awaited = rows.iter().any(RowView::awaits_result);
        if runnable && !suspects && !awaited && uncollected < limits.uncollected_plans {
            prop_assert!(!decision.is_empty());
        }
    }
}
