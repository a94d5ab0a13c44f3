//! A request that nobody waits for any more is gone, wherever it was.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use tokio::task::JoinSet;
use velox_client::Client;
use velox_e2e::ask::{
    chat, first_token, generate, options, refused, refused_for, still_works, streamed, whole,
};
use velox_e2e::gateway::{Gateway, Plan};
use velox_e2e::programs::{long_tests, program, real_model};
use velox_e2e::snapshot::Snapshot;
use velox_e2e::story::{eventually, story};
use velox_proto::error::Reason;
use velox_proto::v1::{GenerateRequest, GenerationOptions};

/// A continuation that does not end by itself.
fn endless(text: &str) -> GenerateRequest {
    let mut request = generate(text, 3000);
    request.generation = Some(GenerationOptions {
        ignore_eos: true,
        ..options(3000)
    });
    request
}

async fn running(gateway: &Gateway, rows: u32) -> anyhow::Result<()> {
    eventually("a row to run", async || {
        Ok((gateway.pool().await?.running == rows).then_some(()))
    })
    .await
}

async fn waiting(gateway: &Gateway, rows: u32) -> anyhow::Result<()> {
    eventually("a row to wait", async || {
        Ok((gateway.pool().await?.waiting == rows).then_some(()))
    })
    .await
}

#[test]
fn a_cancelled_row_leaves_the_queue_the_prefill_and_the_decode() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?
            .argument("--max-rows", "1")
            .start()
            .await?;
        let client = gateway.client();
        still_works(&client).await?;
        let base = Snapshot::at_rest(&gateway).await?;

        // In decode, with another one in the queue: cancelling the queued one first, then the running one.
        let mut decoding = client
            .clone()
            .generate(endless("Once upon a time"), None)
            .await?;
        first_token(&mut decoding).await?;
        let queued = client
            .clone()
            .generate(endless("In the queue"), None)
            .await?;
        waiting(&gateway, 1).await?;
        drop(queued);
        waiting(&gateway, 0).await?;
        assert_eq!(gateway.pool().await?.running, 1);
        drop(decoding);
        base.back_to(&gateway).await?;

        // In prefill: the prompt has many chunks, the row is there before its first token.
        let long = "All work and no play makes Jack a dull boy. ".repeat(150);
        let prefilling = client.clone().generate(endless(&long), None).await?;
        running(&gateway, 1).await?;
        drop(prefilling);
        base.back_to(&gateway).await?;
        still_works(&client).await
    })
}

#[test]
fn an_answer_does_not_depend_on_those_that_were_cancelled() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let client = gateway.client();
        let request = || generate("The lighthouse keeper climbed the stairs and", 12);
        let fresh = streamed(&client, request()).await?.token_ids;
        for step in 1..=8 {
            // The same prompt, one that it begins with, and one that goes on from it, each cancelled midway.
            for text in [
                "The lighthouse keeper climbed the stairs and",
                "The lighthouse keeper",
                "The lighthouse keeper climbed the stairs and saw",
            ] {
                let mut answer = client.clone().generate(endless(text), None).await?;
                for _ in 0..step {
                    first_token(&mut answer).await?;
                }
            }
            let again = streamed(&client, request()).await?.token_ids;
            assert_eq!(again, fresh, "after cancels at step {step}");
        }
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

#[test]
fn a_lost_connection_cancels_everything_on_it() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "5")
            .start()
            .await?;
        still_works(&gateway.client()).await?;
        let base = Snapshot::at_rest(&gateway).await?;
        let other = gateway.connect().await?;
        let mut answers = Vec::new();
        for _ in 0..5 {
            let mut answer = other.clone().generate(endless("lost"), None).await?;
            first_token(&mut answer).await?;
            answers.push(answer);
        }
        running(&gateway, 5).await?;
        drop((other, answers));
        base.back_to(&gateway).await?;
        still_works(&gateway.client()).await
    })
}

#[test]
fn a_killed_client_leaves_nothing_behind() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "5")
            .start()
            .await?;
        still_works(&gateway.client()).await?;
        let base = Snapshot::at_rest(&gateway).await?;
        for _ in 0..3 {
            let mut client = Command::new(program("velox-client")?)
                .args([
                    "--endpoint",
                    &gateway.endpoint().to_string(),
                    "generate",
                    "victim",
                ])
                .args(["--ignore-eos", "--max-tokens", "3000"])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()?;
            running(&gateway, 1).await?;
            // SIGKILL: it has no chance to say goodbye.
            client.kill()?;
            client.wait()?;
            base.back_to(&gateway).await?;
        }
        still_works(&gateway.client()).await
    })
}

#[test]
fn a_deadline_ends_the_call_as_such_and_frees_the_row() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "20")
            .argument("--max-rows", "1")
            .start()
            .await?;
        let client = gateway.client();
        still_works(&client).await?;
        let base = Snapshot::at_rest(&gateway).await?;

        // Streaming when it strikes.
        let deadline = Some(Duration::from_millis(600));
        let mut streaming = client.clone().generate(endless("x"), deadline).await?;
        first_token(&mut streaming).await?;
        // Another one is in the queue then.
        let mut other = client.clone();
        let queued = async {
            let waits = other.generate(endless("y"), Some(Duration::from_millis(300)));
            whole(waits.await?).await
        };
        let (streamed, queued) = tokio::join!(whole(streaming), queued);
        for ended in [streamed, queued] {
            let fault = refused_for(ended, Reason::DeadlineExceeded)?;
            assert_eq!(fault.reason.code(), tonic::Code::DeadlineExceeded);
        }
        base.back_to(&gateway).await?;
        still_works(&client).await
    })
}

#[test]
fn a_full_queue_refuses_and_says_when_to_come_back() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "20")
            .argument("--max-rows", "1")
            .argument("--max-queue", "2")
            .start()
            .await?;
        let client = gateway.client();
        let mut runs = client.clone().generate(endless("runs"), None).await?;
        first_token(&mut runs).await?;
        let first = client.clone().generate(endless("waits"), None).await?;
        let second = client.clone().generate(endless("waits, too"), None).await?;
        waiting(&gateway, 2).await?;
        let third =
            async { whole(client.clone().generate(endless("too many"), None).await?).await };
        let fault = refused_for(third.await, Reason::QueueFull)?;
        assert_eq!(fault.reason.code(), tonic::Code::ResourceExhausted);
        assert!(fault.retry_delay.is_some());
        assert_eq!(
            (
                &*fault.metadata["queue_depth"],
                &*fault.metadata["queue_limit"]
            ),
            ("2", "2")
        );
        drop((runs, first, second));
        Snapshot::at_rest(&gateway).await?;
        still_works(&client).await
    })
}

#[test]
fn hundreds_of_cancels_at_random_points_leak_nothing() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "1")
            .start()
            .await?;
        still_works(&gateway.client()).await?;
        let base = Snapshot::at_rest(&gateway).await?;
        let cancels: u64 = if long_tests() { 2000 } else { 200 };
        let mut seed = 1_u64;
        let mut crowd = JoinSet::new();
        for _ in 0..cancels {
            seed = next_random(seed);
            let (events, by_connection) = (seed % 5, seed.is_multiple_of(7));
            let client = if by_connection {
                gateway.connect().await?
            } else {
                gateway.client()
            };
            crowd.spawn(cancelled_after(client, events));
            if crowd.len() >= 16 {
                crowd.join_next().await.context("nobody is there")???;
            }
        }
        while let Some(left) = crowd.join_next().await {
            left??;
        }
        base.back_to(&gateway).await?;
        assert_eq!(gateway.ready_worker().await?.restarts, 0);
        still_works(&gateway.client()).await
    })
}

/// Leaves after some events, or while the request is on its way.
async fn cancelled_after(client: Client, events: u64) -> anyhow::Result<()> {
    let mut client = client;
    if events == 0 {
        let early = client.chat(chat("gone before the answer", 500), None);
        let _ = tokio::time::timeout(Duration::from_millis(1), early).await;
        return Ok(());
    }
    let mut answer = client.generate(endless("0123456789"), None).await?;
    for _ in 1..events {
        if answer.next().await?.is_none() {
            return Ok(());
        }
    }
    Ok(())
}

fn next_random(seed: u64) -> u64 {
    seed.wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407)
        >> 1
}

#[test]
fn a_deadline_that_already_passed_is_not_an_answer() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let mut client = gateway.client();
        let late = async {
            let answer = client.generate(generate("late", 5), Some(Duration::from_millis(1)));
            whole(answer.await?).await
        };
        // It may just be in time on a fast machine; if not, the reason is the deadline.
        if let Ok(fault) = refused(late.await) {
            assert_eq!(fault.reason, Reason::DeadlineExceeded);
        }
        Snapshot::at_rest(&gateway).await?;
        still_works(&gateway.client()).await
    })
}
