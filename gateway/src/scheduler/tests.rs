//! The scheduler against scripted workers: every plan is seen, every result is the test's, time is paused.

mod house;

use std::time::Duration;

use house::{House, expected, job, score_job};
use proptest::prelude::*;
use velox_proto::error::{Reason, ServiceError as _};
use velox_proto::v1;

use super::*;
use crate::pool::LossCause;
use crate::response::Scoring;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_queue: 8,
        max_rows: 8,
        kv_budget_bytes: 1 << 20,
        worker_wait: Duration::from_secs(20),
        max_recoveries: 8,
        plan: PlanLimits::default(),
    }
}

fn crash() -> LossCause {
    LossCause::Killed(9)
}

#[tokio::test(start_paused = true)]
async fn a_row_streams_with_one_plan_ahead_and_leaves_nothing_behind() {
    let mut house = House::new(config());
    let worker = house.ready(0).await;
    let mut answer = house.submit(job(&[1, 2, 3], 4)).await;

    let first = house.plan().await;
    assert!(first.plan.prefill.as_ref().unwrap().sample);
    let ahead = house.plan().await;
    assert_eq!(
        ahead.plan.decode[0].token, None,
        "goes on from its own sample"
    );
    house.no_plan().await;
    house.answer(first).await;
    house.answer(ahead).await;

    let end = house.finish(&mut answer).await.unwrap();
    assert_eq!(answer.tokens, expected(&[1, 2, 3], 4));
    assert_eq!(end, RowEnd::Length);
    house.settle().await;
    assert_eq!(house.open_rows(worker), 0);
    assert_eq!(*house.scheduler.load().borrow(), Load::default());
}

#[tokio::test(start_paused = true)]
async fn what_was_computed_past_an_end_is_never_published() {
    let mut house = House::new(config());
    house.ready(0).await;
    let stop = expected(&[5, 6], 3)[2];
    let mut answer = house.submit(house::job_with_end(&[5, 6], 50, stop)).await;
    let end = house.finish(&mut answer).await.unwrap();
    assert_eq!(end, RowEnd::EndToken(stop));
    assert_eq!(answer.tokens, expected(&[5, 6], 3));
    house.settle().await;
    assert_eq!(house.idle_plans(), 1, "one plan closes the row");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_reader_frees_its_row_in_the_queue_in_prefill_and_in_decode() {
    let mut house = House::new(SchedulerConfig {
        max_rows: 1,
        ..config()
    });
    let worker = house.ready(0).await;
    // Prefill: the prompt needs two chunks, the reader leaves during the first.
    let prefilling = house.submit(job(&[7; 600], 4)).await;
    let queued = house.submit(job(&[8], 4)).await;
    let chunk = house.plan().await;
    drop(queued);
    drop(prefilling);
    house.answer(chunk).await;
    house.settle().await;
    assert_eq!(house.open_rows(worker), 0);
    assert_eq!(*house.scheduler.load().borrow(), Load::default());

    // Decode.
    let mut decoding = house.submit(job(&[9], 40)).await;
    house.read(&mut decoding, 3).await;
    drop(decoding);
    house.settle().await;
    assert_eq!(house.open_rows(worker), 0);
    assert_eq!(*house.scheduler.load().borrow(), Load::default());
}

#[tokio::test(start_paused = true)]
async fn overload_is_refused_with_the_depth_of_the_queue() {
    let mut house = House::new(SchedulerConfig {
        max_queue: 2,
        max_rows: 1,
        ..config()
    });
    house.ready(0).await;
    let _running = house.submit(job(&[1], 4)).await;
    let _first = house.submit(job(&[2], 4)).await;
    let _second = house.submit(job(&[3], 4)).await;
    let mut refused = house.submit(job(&[4], 4)).await;
    let error = house.finish(&mut refused).await.unwrap_err();
    assert_eq!(error.reason(), Reason::QueueFull);
    assert_eq!(error.metadata()["queue_depth"], "2");
    assert!(error.retry_delay().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_can_never_fit_is_refused_at_once() {
    let mut house = House::new(SchedulerConfig {
        kv_budget_bytes: 64,
        ..config()
    });
    let mut refused = house.submit(job(&[1; 100], 4)).await;
    let error = house.finish(&mut refused).await.unwrap_err();
    assert_eq!(error.reason(), Reason::OutOfMemory);
}

#[tokio::test(start_paused = true)]
async fn a_lost_worker_costs_a_pause_and_no_token() {
    for lost_after in 0..6 {
        let mut house = House::new(config());
        let first = house.ready(0).await;
        let mut answer = house.submit(job(&[1, 2, 3], 8)).await;
        house.read(&mut answer, lost_after).await;
        house.lose(first, crash()).await;
        house.no_plan().await;
        house.restart(first).await;
        house.finish(&mut answer).await.unwrap();
        assert_eq!(
            answer.tokens,
            expected(&[1, 2, 3], 8),
            "lost after {lost_after}"
        );
        assert_eq!(answer.recoveries, (1, "exact"), "lost after {lost_after}");
        assert!(house.opened().iter().all(|open| open.prompt_tokens == 3));
    }
}

#[tokio::test(start_paused = true)]
async fn any_number_of_tokens_a_plan_gives_the_same_answer() {
    for steps in [1, 2, 5, 32] {
        let mut house = House::new(config());
        house.ready(0).await;
        let options = v1::GenerationOptions {
            tokens_per_plan: Some(steps),
            ..house::options(23, None)
        };
        let mut answer = house
            .submit(house::job_with_options(&[1, 2, 3], options))
            .await;
        let prompt = house.plan().await;
        house.answer(prompt).await;
        let plan = house.plan().await;
        assert_eq!(plan.plan.decode[0].steps, steps.min(22));
        house.answer(plan).await;
        let end = house.finish(&mut answer).await.unwrap();
        assert_eq!(end, RowEnd::Length);
        assert_eq!(answer.tokens, expected(&[1, 2, 3], 23), "{steps} a plan");
        assert_eq!(answer.drafts, (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_stops_pauses_a_row_of_many_tokens_a_plan() {
    let mut house = House::new(config());
    house.ready(0).await;
    let options = v1::GenerationOptions {
        tokens_per_plan: Some(32),
        ..house::options(1900, None)
    };
    let mut slow = house.submit(house::job_with_options(&[1], options)).await;
    house.settle().await;
    assert_eq!(house.scheduler.load().borrow().running, 1, "it waits");
    house.finish(&mut slow).await.unwrap();
    assert_eq!(slow.tokens, expected(&[1], 1900));
}

const ECHO: [u32; 6] = [house::ECHO, 9, 21, 22, 23, 24];

#[tokio::test(start_paused = true)]
async fn drafts_change_nothing_and_each_is_made_of_the_last_result() {
    let mut house = House::new(config());
    let worker = house.ready(0).await;
    let mut answer = house.submit(house::drafting_job(&ECHO, 60, None)).await;
    let (mut plans, mut drafted) = (0, 0);
    while answer.tokens.len() < 60 {
        let sent = house.plan().await;
        house.no_plan().await;
        plans += 1;
        drafted += sent
            .plan
            .decode
            .first()
            .map_or(0, |row| row.draft_token_ids.len());
        house.answer(sent).await;
        house.drain_events(&mut answer);
    }
    assert_eq!(answer.tokens, expected(&ECHO, 60));
    assert!(plans < 30, "{plans} plans for 60 tokens");
    assert_eq!(usize::try_from(answer.drafts.0).unwrap(), drafted);
    // Every plan yields one token that is no guess.
    assert_eq!(answer.drafts.1, 60 - plans);
    assert!(answer.drafts.1 < drafted, "some were wrong");
    house.settle().await;
    assert_eq!(house.open_rows(worker), 0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_with_drafts_ends_where_it_would_without() {
    for length in 1..20 {
        let mut house = House::new(config());
        house.ready(0).await;
        let mut answer = house.submit(house::drafting_job(&ECHO, length, None)).await;
        house.finish(&mut answer).await.unwrap();
        let count = usize::try_from(length).unwrap();
        assert_eq!(answer.tokens, expected(&ECHO, count));
    }
    let all = expected(&ECHO, 60);
    let place = all.iter().position(|&token| token == all[30]).unwrap();
    let mut house = House::new(config());
    house.ready(0).await;
    let job = house::drafting_job(&ECHO, 60, Some(all[30]));
    let mut answer = house.submit(job).await;
    let end = house.finish(&mut answer).await.unwrap();
    assert_eq!(end, RowEnd::EndToken(all[30]));
    assert_eq!(answer.tokens, all[..=place]);
}

#[tokio::test(start_paused = true)]
async fn rows_beside_a_row_with_drafts_are_one_plan_ahead() {
    let mut house = House::new(config());
    house.ready(0).await;
    let mut drafting = house.submit(house::drafting_job(&ECHO, 60, None)).await;
    let mut plain = house.submit(job(&[1, 2, 3], 60)).await;
    let mut ahead_of_it = 0;
    for _ in 0..20 {
        let first = house.plan().await;
        let ahead = house.take();
        if let Some(ahead) = &ahead {
            ahead_of_it += usize::from(first.rows().len() == 2 && ahead.rows().len() == 1);
        }
        house.answer(first).await;
        if let Some(ahead) = ahead {
            house.answer(ahead).await;
        }
        house.drain_events(&mut drafting);
        house.drain_events(&mut plain);
        if drafting.tokens.len() == 60 {
            break;
        }
    }
    assert!(ahead_of_it > 5, "it went ahead {ahead_of_it} times");
    house.finish(&mut drafting).await.unwrap();
    house.finish(&mut plain).await.unwrap();
    assert_eq!(drafting.tokens, expected(&ECHO, 60));
    assert_eq!(plain.tokens, expected(&[1, 2, 3], 60));
}

#[tokio::test(start_paused = true)]
async fn a_worker_lost_while_it_checks_a_draft_costs_no_token() {
    for lost_after in 0..30 {
        let mut house = House::new(config());
        let first = house.ready(0).await;
        let mut answer = house.submit(house::drafting_job(&ECHO, 40, None)).await;
        house.read(&mut answer, lost_after).await;
        house.lose(first, crash()).await;
        house.restart(first).await;
        house.finish(&mut answer).await.unwrap();
        assert_eq!(
            answer.tokens,
            expected(&ECHO, 40),
            "lost after {lost_after}"
        );
        assert_eq!(answer.recoveries, (1, "exact"), "lost after {lost_after}");
        assert!(answer.drafts.1 > 0);
    }
}

#[tokio::test(start_paused = true)]
async fn going_on_with_another_backend_is_called_equivalent() {
    let mut house = House::new(config());
    let first = house.ready(0).await;
    let mut answer = house.submit(job(&[1, 2], 8)).await;
    house.read(&mut answer, 2).await;
    house.lose(first, crash()).await;
    house.ready_on(1, v1::Backend::Reference).await;
    house.finish(&mut answer).await.unwrap();
    assert_eq!(answer.recoveries, (1, "equivalent"));
}

#[tokio::test(start_paused = true)]
async fn a_poisonous_request_ends_alone_and_its_neighbours_live() {
    let mut house = House::new(config());
    let mut worker = house.ready(0).await;
    let mut poison = house.submit(job(&[house::POISON, 1], 8)).await;
    let mut neighbour = house.submit(job(&[4, 5], 8)).await;
    // Whatever contains the poisonous row kills the worker.
    let mut deaths = 0;
    let error = loop {
        match house.step_or_crash(worker).await {
            house::Outcome::Answered => {}
            house::Outcome::Crashed => {
                deaths += 1;
                worker = house.restart(worker).await;
            }
            house::Outcome::Idle => break house.finish(&mut poison).await.unwrap_err(),
        }
    };
    assert_eq!(error.reason(), Reason::PoisonRequest);
    assert_eq!(error.metadata()["next_token_index"], "0");
    assert_eq!(deaths, 4, "once together, three times alone");
    house.finish(&mut neighbour).await.unwrap();
    assert_eq!(neighbour.tokens, expected(&[4, 5], 8));
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_workers_are_killed_from_outside_goes_on() {
    let mut house = House::new(config());
    let mut worker = house.ready(0).await;
    let mut answer = house.submit(job(&[1, 2, 3], 8)).await;
    // Twice three deaths without progress, the first of three while it is under no suspicion; progress between.
    for token in 0..2 {
        house.read(&mut answer, token).await;
        for _ in 0..3 {
            house.lose(worker, crash()).await;
            worker = house.restart(worker).await;
        }
    }
    house.finish(&mut answer).await.unwrap();
    assert_eq!(answer.tokens, expected(&[1, 2, 3], 8));
    assert_eq!(answer.recoveries, (6, "exact"));
}

#[tokio::test(start_paused = true)]
async fn suspects_rerun_one_by_one() {
    let mut house = House::new(config());
    let worker = house.ready(0).await;
    let mut answers = Vec::new();
    for id in 1..4 {
        answers.push(house.submit(job(&[id], 8)).await);
    }
    for answer in &mut answers {
        house.read(answer, 2).await;
    }
    house.lose(worker, crash()).await;
    house.restart(worker).await;
    let mut proven = std::collections::BTreeSet::new();
    while proven.len() < 3 {
        let sent = house.plan().await;
        let rows = sent.rows();
        assert!(
            rows.len() == 1 || rows.iter().all(|row| proven.contains(row)),
            "{rows:?} run together, {proven:?} are proven"
        );
        house.answer(sent).await;
        proven.extend(rows);
    }
    for (id, answer) in (1..4).zip(&mut answers) {
        house.finish(answer).await.unwrap();
        assert_eq!(answer.tokens, expected(&[id], 8));
    }
}

#[tokio::test(start_paused = true)]
async fn a_drained_worker_s_rows_move_without_suspicion() {
    let mut house = House::new(config());
    let first = house.ready(0).await;
    let mut answers = vec![
        house.submit(job(&[1], 8)).await,
        house.submit(job(&[2], 8)).await,
    ];
    for answer in &mut answers {
        house.read(answer, 2).await;
    }
    house.drain(first).await;
    house.ready(1).await;
    for (id, answer) in (1..3).zip(&mut answers) {
        house.finish(answer).await.unwrap();
        assert_eq!(answer.tokens, expected(&[id], 8));
        assert_eq!(answer.recoveries, (1, "exact"));
    }
    assert!(house.most_rows_in_a_plan() == 2, "nobody ran alone");
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_pauses_its_row_and_nobody_else() {
    let mut house = House::new(config());
    house.ready(0).await;
    let mut slow = house.submit(job(&[1], 300)).await;
    let mut fast = house.submit(job(&[2], 300)).await;
    house.finish(&mut fast).await.unwrap();
    assert_eq!(fast.tokens, expected(&[2], 300));
    house.settle().await;
    assert_eq!(house.scheduler.load().borrow().running, 1);
    // Reading again wakes it up.
    house.finish(&mut slow).await.unwrap();
    assert_eq!(slow.tokens, expected(&[1], 300));
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_stopped_holds_a_row_until_its_deadline_or_the_idle_limit() {
    let limit = Duration::from_secs(5);
    let mut house = House::new(config());
    let worker = house.ready(0).await;
    let mut late = crate::deadline::scope(limit, house.submit(job(&[1], 300))).await;
    let mut idle = house.submit(job(&[2], 300)).await;
    house.settle().await;
    assert_eq!(house.open_rows(worker), 2);
    tokio::time::sleep(limit).await;
    house.settle().await;
    assert_eq!(house.open_rows(worker), 1, "nobody polled the late one");
    tokio::time::sleep(READER_IDLE).await;
    house.settle().await;
    assert_eq!(house.open_rows(worker), 0);
    assert_eq!(*house.scheduler.load().borrow(), Load::default());
    let error = house.finish(&mut late).await.unwrap_err();
    assert_eq!(error.reason(), Reason::DeadlineExceeded);
    let error = house.finish(&mut idle).await.unwrap_err();
    assert_eq!(error.reason(), Reason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn without_a_worker_a_request_ends_in_time_and_says_how_far_it_came() {
    let mut house = House::new(config());
    let mut fresh = house.submit(job(&[1], 8)).await;
    let error = house.finish(&mut fresh).await.unwrap_err();
    assert_eq!(error.reason(), Reason::WorkerUnavailable);
    assert!(error.retry_delay().is_some());
    assert!(error.metadata().is_empty());

    let worker = house.ready(0).await;
    let mut started = house.submit(job(&[1], 8)).await;
    house.read(&mut started, 3).await;
    house.lose(worker, crash()).await;
    let error = house.finish(&mut started).await.unwrap_err();
    assert_eq!(error.reason(), Reason::WorkerUnavailable);
    let next: usize = error.metadata()["next_token_index"].parse().unwrap();
    assert_eq!(next, started.tokens.len());
    assert!(error.to_string().contains("signal 9"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_row_that_fails_ends_alone() {
    let mut house = House::new(config());
    let worker = house.ready(0).await;
    let mut bad = house.submit(job(&[house::FAILING], 8)).await;
    let mut good = house.submit(job(&[3], 8)).await;
    let error = house.finish(&mut bad).await.unwrap_err();
    assert_eq!(error.reason(), Reason::NumericError);
    house.finish(&mut good).await.unwrap();
    house.settle().await;
    assert_eq!(house.open_rows(worker), 0);
}

#[tokio::test(start_paused = true)]
async fn a_refused_plan_still_closes_its_rows_later() {
    let mut house = House::new(config());
    let worker = house.ready(0).await;
    let mut answer = house.submit(job(&[1], 300)).await;
    house.read(&mut answer, 3).await;
    house.refuse_one();
    drop(answer);
    house.settle().await;
    let mut next = house.submit(job(&[2], 4)).await;
    house.finish(&mut next).await.unwrap();
    house.settle().await;
    assert_eq!(house.open_rows(worker), 0);
}

#[tokio::test(start_paused = true)]
async fn shutdown_tells_every_reader() {
    let mut house = House::new(config());
    let mut waiting = house.submit(job(&[1], 8)).await;
    house.shutdown.cancel();
    let error = house.finish(&mut waiting).await.unwrap_err();
    assert_eq!(error.reason(), Reason::Draining);
}

#[tokio::test(start_paused = true)]
async fn a_text_is_scored_once_even_if_its_worker_is_lost() {
    let mut house = House::new(config());
    let worker = house.ready_on(0, v1::Backend::Reference).await;
    let tokens: Vec<u32> = (0..1100).map(|position| position % 30).collect();
    let job = score_job(&tokens, 500);
    let scoring = Scoring::new(&job);
    let row = house
        .scheduler
        .submit(job, tracing::Span::none())
        .await
        .unwrap();
    let whole = scoring.whole(row, "none");
    let script = async {
        // The lease is on its way first; then two chunks are scored, the second one twice.
        for _ in 0..2 {
            let sent = house.plan().await;
            house.answer(sent).await;
        }
        house.lose(worker, crash()).await;
        house.restart(worker).await;
        house.settle().await;
    };
    let (response, ()) = tokio::join!(whole, script);
    let response = response.unwrap();
    let positions: Vec<u32> = response
        .positions
        .iter()
        .map(|scored| scored.position)
        .collect();
    assert!(positions.iter().copied().eq(500..1100));
    assert_eq!(response.usage.unwrap().recoveries, 1);
    let provenance = response.provenance.unwrap();
    let spans: Vec<_> = provenance
        .spans
        .iter()
        .map(|span| (span.first_token_index, span.backend()))
        .collect();
    assert_eq!(
        spans,
        [(0, v1::Backend::Reference), (524, v1::Backend::Cpu)],
        "both workers have results in the answer"
    );
    assert_eq!(provenance.backend(), v1::Backend::Reference, "the weakest");
    let logits = response.logits.unwrap();
    assert_eq!(logits.shape, [600, u64::from(house::VOCAB_SIZE)]);
    let Some(v1::tensor::Data::Inline(bytes)) = logits.data else {
        panic!("logits are not inline");
    };
    // The scripted worker writes the position into every logit of its row.
    let width = usize::try_from(house::VOCAB_SIZE).unwrap();
    for (row, position) in bytes.chunks(width * 4).zip(500_u16..) {
        let value = f32::from_le_bytes(row[..4].try_into().unwrap());
        assert_eq!(value, f32::from(position));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever dies whenever, every answer is what an undisturbed worker says, and no two mix.
    #[test]
    fn answers_do_not_depend_on_what_happens_to_workers(
        prompts in prop::collection::vec(1_usize..700, 1..6),
        deaths in prop::collection::vec((0_u32..2, 1_usize..12), 0..6),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut house = House::new(SchedulerConfig { max_rows: 3, max_recoveries: 64, ..config() });
            let mut workers = vec![house.ready(0).await, house.ready(1).await];
            let mut answers = Vec::new();
            for (id, length) in (1_u32..).zip(&prompts) {
                let prompt = vec![id; *length];
                answers.push((house.submit(job(&prompt, 12)).await, prompt));
            }
            for (slot, steps) in deaths {
                for _ in 0..steps {
                    house.step().await;
                    for (answer, _) in &mut answers {
                        house.drain_events(answer);
                    }
                }
                let slot = usize::try_from(slot).unwrap();
                // Stopped on purpose: a second crash without progress would count as poison.
                house.lose(workers[slot], LossCause::Drained).await;
                workers[slot] = house.restart(workers[slot]).await;
            }
            for (answer, prompt) in &mut answers {
                house.finish(answer).await.unwrap();
                assert_eq!(answer.tokens, expected(prompt, 12));
            }
            house.settle().await;
            assert_eq!(*house.scheduler.load().borrow(), Load::default());
            for worker in workers {
                assert_eq!(house.open_rows(worker), 0);
            }
        });
    }
}
