//! A worker may die at any instruction: the answer is the one that an undisturbed run gives.

use anyhow::Context as _;
use rustix::process::Signal;
use tokio::task::JoinSet;
use velox_client::Client;
use velox_e2e::ask::{
    Whole, chat, exactly, first_token, generate, generate_ids, options, refused_for, seeded,
    still_works, streamed, whole,
};
use velox_e2e::copying::{POISON_TOKEN, bytes};
use velox_e2e::gateway::{Gateway, Plan};
use velox_e2e::process::{is_alive, signal};
use velox_e2e::programs::{long_tests, real_model};
use velox_e2e::snapshot::Snapshot;
use velox_e2e::story::{eventually, story};
use velox_proto::error::Reason;
use velox_proto::v1::{
    DrainWorkerRequest, GenerateRequest, GenerationEvent, GenerationOptions, SamplingOptions,
    Worker, WorkerState,
};
use velox_proto::worker::v1::Fault;

/// Tokens of the disturbed answers.
const TOKENS: u32 = 32;

fn request(text: &str, sampling: Option<SamplingOptions>) -> GenerateRequest {
    GenerateRequest {
        sampling,
        ..exactly(text, TOKENS)
    }
}

/// Reads an answer and does something to its worker once `tokens` ids are there.
async fn disturbed(
    client: &Client,
    request: GenerateRequest,
    tokens: usize,
    disturb: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Whole> {
    let mut answer = client.clone().generate(request, None).await?;
    let mut head = GenerationEvent::default();
    while head.token_ids.len() < tokens {
        let event = answer
            .next()
            .await?
            .context("it ended before it could be disturbed")?;
        head.text.push_str(&event.text);
        head.token_ids.extend(event.token_ids);
        anyhow::ensure!(
            event.finish.is_none(),
            "it ended before it could be disturbed"
        );
    }
    disturb().await?;
    let mut rest = whole(answer).await?;
    rest.text.insert_str(0, &head.text);
    rest.token_ids.splice(0..0, head.token_ids);
    Ok(rest)
}

/// Checks that nothing was lost, repeated or changed.
fn same(disturbed: &Whole, undisturbed: &Whole) -> anyhow::Result<()> {
    assert_eq!(disturbed.token_ids, undisturbed.token_ids);
    assert_eq!(disturbed.text, undisturbed.text);
    assert_eq!(disturbed.finish.reason(), undisturbed.finish.reason());
    let (usage, calm) = (disturbed.usage()?, undisturbed.usage()?);
    assert_eq!(usage.prompt_tokens, calm.prompt_tokens);
    assert_eq!(usage.completion_tokens, calm.completion_tokens);
    assert_eq!((calm.recoveries, calm.replay.as_str()), (0, ""));
    Ok(())
}

#[test]
fn a_worker_killed_at_any_token_changes_nothing() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let client = gateway.client();
        let greedy = request("The history of the lighthouse begins", None);
        let drawn = request("The history of the lighthouse begins", Some(seeded(11)));
        let calm = [
            streamed(&client, greedy.clone()).await?,
            streamed(&client, drawn.clone()).await?,
        ];
        let base = Snapshot::at_rest(&gateway).await?;
        let kills: usize = if long_tests() { 50 } else { 8 };
        for kill in 0..kills {
            let (request, calm) = match kill % 2 {
                0 => (greedy.clone(), &calm[0]),
                _ => (drawn.clone(), &calm[1]),
            };
            // Spread over the whole answer, the first token and the one before the last included.
            let tokens = 1 + kill * 11 % (usize::try_from(TOKENS)? - 4);
            let pid = gateway.ready_worker().await?.pid;
            let answer =
                disturbed(&client, request, tokens, async || signal(pid, Signal::KILL)).await?;
            same(&answer, calm)?;
            assert_eq!(
                answer.usage()?.recoveries,
                1,
                "killed after {tokens} tokens"
            );
            assert_eq!(answer.usage()?.replay, "exact");
            let spans = &answer.provenance()?.spans;
            assert_eq!(spans.len(), 2, "{spans:?}");
            assert_ne!(spans[0].worker_id, spans[1].worker_id);
            assert_eq!(spans[0].first_token_index, 0);
            assert!(spans[1].first_token_index >= u64::try_from(tokens)?);
            assert!(!is_alive(pid));
        }
        base.back_to(&gateway).await?;
        let worker = gateway.ready_worker().await?;
        assert_eq!(usize::try_from(worker.restarts)?, kills);
        assert!(
            worker.last_exit.contains("signal 9"),
            "{}",
            worker.last_exit
        );
        Ok(())
    })
}

#[test]
fn rows_that_share_a_dying_worker_all_go_on() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "reference")?.start().await?;
        let client = gateway.client();
        let mut crowd = JoinSet::new();
        let mut answers = Vec::new();
        for index in 0..3 {
            let sampling = (index % 2 == 1).then(|| seeded(index));
            let request = GenerateRequest {
                generation: Some(GenerationOptions {
                    ignore_eos: true,
                    ..options(10)
                }),
                ..request(&format!("Chapter {index}."), sampling)
            };
            let calm = streamed(&client, request.clone()).await?;
            answers.push((client.clone().generate(request, None).await?, calm));
        }
        for (answer, _calm) in &mut answers[..1] {
            first_token(answer).await?;
        }
        signal(gateway.ready_worker().await?.pid, Signal::KILL)?;
        for (index, (answer, calm)) in answers.into_iter().enumerate() {
            crowd.spawn(async move {
                let rest = whole(answer).await?;
                anyhow::ensure!(
                    calm.token_ids.ends_with(&rest.token_ids),
                    "row {index} differs"
                );
                anyhow::ensure!(
                    rest.usage()?.completion_tokens == 10,
                    "row {index} is short"
                );
                Ok(())
            });
        }
        while let Some(one) = crowd.join_next().await {
            one??;
        }
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

#[test]
fn panics_exits_allocation_failures_and_wedges_are_survived() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let client = gateway.client();
        let request = request("In the beginning", Some(seeded(3)));
        let calm = streamed(&client, request.clone()).await?;
        let base = Snapshot::at_rest(&gateway).await?;
        let faults = [Fault::Panic, Fault::Exit, Fault::OutOfMemory, Fault::Wedge];
        for (restarts, fault) in (1..).zip(faults) {
            let worker = gateway.ready_worker().await?;
            gateway.inject(&worker.id, fault, 6).await?;
            let answer = streamed(&client, request.clone()).await?;
            same(&answer, &calm)?;
            assert_eq!(answer.usage()?.recoveries, 1, "{fault:?}");
            let worker = gateway.ready_worker().await?;
            assert_eq!(worker.restarts, restarts);
            let why = match fault {
                Fault::Wedge => "no progress",
                Fault::Panic => "exited",
                _ => "signal",
            };
            assert!(
                worker.last_exit.contains(why),
                "{fault:?}: {}",
                worker.last_exit
            );
        }
        base.back_to(&gateway).await
    })
}

#[test]
fn a_stopped_worker_is_replaced() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "5")
            .start()
            .await?;
        let pid = gateway.ready_worker().await?.pid;
        let text = "stopped in the middle";
        let answer = disturbed(&gateway.client(), generate(text, 99), 4, async || {
            signal(pid, Signal::STOP)
        })
        .await?;
        assert_eq!(answer.text, text);
        assert_eq!(answer.usage()?.recoveries, 1);
        assert!(!is_alive(pid));
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

async fn worker_of(gateway: &Gateway, rows: u32) -> anyhow::Result<Worker> {
    eventually("a worker with rows", async || {
        let mut workers = gateway.workers().await?.into_iter();
        Ok(workers.find(|worker| worker.rows == rows && worker.state() == WorkerState::Ready))
    })
    .await
}

#[test]
fn rows_of_a_lost_or_drained_worker_move_to_another() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .workers(2)
            .environment("VELOX_FAKE_PLAN_MS", "10")
            .start()
            .await?;
        let client = gateway.client();
        gateway.all_ready().await?;
        let text = "a row that has to move elsewhere ".repeat(4);

        let moved = disturbed(&client, generate(&text, 500), 5, async || {
            signal(worker_of(&gateway, 1).await?.pid, Signal::KILL)
        })
        .await?;
        assert_eq!(moved.text, text);
        assert_eq!(moved.usage()?.recoveries, 1);
        let spans = &moved.provenance()?.spans;
        let slot = |index: usize| spans[index].worker_id.split('.').next();
        assert_ne!(slot(0), slot(1), "the other worker was ready: {spans:?}");

        gateway.all_ready().await?;
        let mut drained_pid = 0;
        let drained = disturbed(&client, generate(&text, 500), 5, async || {
            let worker = worker_of(&gateway, 1).await?;
            drained_pid = worker.pid;
            let request = DrainWorkerRequest { id: worker.id };
            let response = client.admin().drain_worker(request).await?.into_inner();
            assert_eq!(response.moved_rows, 1);
            Ok(())
        })
        .await?;
        assert_eq!(drained.text, text);
        assert!(!is_alive(drained_pid));
        let workers = gateway.all_ready().await?;
        assert!(workers.iter().all(|worker| worker.pid != drained_pid));
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

#[test]
fn a_poisonous_request_ends_alone() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("dies-of-poison")?
            .environment("VELOX_FAKE_PLAN_MS", "5")
            .start()
            .await?;
        let client = gateway.client();
        let text = "an innocent bystander ".repeat(20);
        let mut innocent = client.clone().generate(generate(&text, 999), None).await?;
        let head = first_token(&mut innocent).await?;

        let poison = [bytes("poison"), vec![POISON_TOKEN]].concat();
        let poisoned = streamed(&client, generate_ids(poison, 50));
        let (poisoned, rest) = tokio::join!(poisoned, whole(innocent));
        let fault = refused_for(poisoned, Reason::PoisonRequest)?;
        assert_eq!(fault.reason.code(), tonic::Code::Aborted);
        let rest = rest?;
        assert_eq!(head.text + &rest.text, text);
        assert!(rest.usage()?.recoveries >= 1);
        Snapshot::at_rest(&gateway).await?;
        still_works(&client).await
    })
}

#[test]
fn without_a_worker_the_stream_ends_and_says_where() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest,exits-at-once")?
            .environment("VELOX_FAKE_PLAN_MS", "5")
            .argument("--worker-wait", "3")
            .start()
            .await?;
        let client = gateway.client();
        let mut answer = client
            .clone()
            .generate(generate(&"x".repeat(2000), 2001), None)
            .await?;
        let mut sent = first_token(&mut answer).await?.token_ids.len();
        signal(gateway.ready_worker().await?.pid, Signal::KILL)?;
        let ended = loop {
            match answer.next().await {
                Ok(Some(event)) => sent += event.token_ids.len(),
                Ok(None) => anyhow::bail!("it finished without a worker"),
                Err(error) => break Err::<(), _>(error),
            }
        };
        let fault = refused_for(ended, Reason::WorkerUnavailable)?;
        assert_eq!(fault.metadata["next_token_index"], sent.to_string());
        assert!(fault.retry_delay.is_some());
        let chat = client.clone().chat(chat("anybody?", 3), None).await;
        let refused = match chat {
            Ok(answer) => whole(answer).await.map(|_whole| ()),
            Err(error) => Err(error),
        };
        refused_for(refused, Reason::WorkerUnavailable)?;
        Ok(())
    })
}
