//! Many requests at once: nobody sees anybody else's text, and company changes nothing.

use std::time::Duration;

use anyhow::Context as _;
use tokio::task::JoinSet;
use velox_client::Client;
use velox_e2e::ask::{chat, first_token, generate, seeded, still_works, streamed, whole_of};
use velox_e2e::gateway::Plan;
use velox_e2e::programs::{long_tests, real_model};
use velox_e2e::snapshot::Snapshot;
use velox_e2e::story::story;
use velox_proto::v1::{
    ChatCompleteRequest, GenerateCompleteRequest, GenerateRequest, ScoreRequest, TokenizeRequest,
    score_request::Input,
};

#[test]
fn sixty_four_streams_never_mix_their_markers() -> anyhow::Result<()> {
    story(|| async {
        // Fewer rows than streams, so that some wait, on two workers.
        let gateway = Plan::fake("honest")?
            .workers(2)
            .argument("--max-rows", "24")
            .start()
            .await?;
        gateway.all_ready().await?;
        still_works(&gateway.client()).await?;
        let base = Snapshot::at_rest(&gateway).await?;
        let mut crowd = JoinSet::new();
        for index in 0..64 {
            let client = gateway.client();
            crowd.spawn(async move {
                // Of different lengths, so that rows join and leave all the time.
                let text = format!("<marker {index}>").repeat(1 + index % 13);
                let answer = streamed(&client, generate(&text, 2000)).await?;
                anyhow::ensure!(answer.text == text, "stream {index} got {:?}", answer.text);
                Ok(())
            });
        }
        while let Some(one) = crowd.join_next().await {
            one??;
        }
        base.back_to(&gateway).await
    })
}

#[test]
fn real_streams_in_company_equal_their_solo_runs() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let request = |index: u64| {
            let mut request = generate(&format!("Story number {index}: Once there was a"), 16);
            if index % 2 == 1 {
                request.sampling = Some(seeded(index));
            }
            request
        };
        let mut alone = Vec::new();
        for index in 0..16 {
            alone.push(streamed(&gateway.client(), request(index)).await?.token_ids);
        }
        let mut crowd = JoinSet::new();
        for index in 0..16 {
            let client = gateway.client();
            let request = request(index);
            crowd.spawn(async move {
                let answer = streamed(&client, request).await?;
                anyhow::Ok((index, answer.token_ids))
            });
        }
        while let Some(one) = crowd.join_next().await {
            let (index, ids) = one??;
            assert_eq!(ids, alone[usize::try_from(index)?], "stream {index}");
        }
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

#[test]
fn a_mix_of_calls_keeps_the_gateway_alive() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "1")
            .start()
            .await?;
        still_works(&gateway.client()).await?;
        let base = Snapshot::at_rest(&gateway).await?;
        let rounds: u64 = if long_tests() { 600 } else { 60 };
        let mut crowd = JoinSet::new();
        for round in 0..rounds {
            crowd.spawn(one_of_many(gateway.client(), round));
            if round % 10 == 0 {
                // The probe is a real request, not a ping.
                still_works(&gateway.client()).await?;
            }
            if crowd.len() >= 20 {
                crowd.join_next().await.context("nobody is there")???;
            }
        }
        while let Some(one) = crowd.join_next().await {
            one??;
        }
        base.back_to(&gateway).await?;
        assert_eq!(gateway.ready_worker().await?.restarts, 0);
        Ok(())
    })
}

/// One call of a kind that the round decides.
async fn one_of_many(client: Client, round: u64) -> anyhow::Result<()> {
    let text = format!("round {round}, ").repeat(1 + usize::try_from(round % 4)?);
    let inference = || client.inference();
    match round % 6 {
        0 => {
            let answer = streamed(&client, generate(&text, 500)).await?;
            anyhow::ensure!(answer.text == text, "stream got {:?}", answer.text);
        }
        1 => {
            let request = GenerateCompleteRequest {
                request: Some(generate(&text, 500)),
            };
            let answer = inference().generate_complete(request).await?.into_inner();
            anyhow::ensure!(
                whole_of(answer.event)?.text == text,
                "unary got something else"
            );
        }
        2 => {
            let request = ChatCompleteRequest {
                request: Some(chat(&text, 500)),
            };
            let answer = whole_of(inference().chat_complete(request).await?.into_inner().event)?;
            // The copy of a rendered chat ends where the user's turn ends.
            anyhow::ensure!(
                answer.text == format!("user\n{text}"),
                "chat got {:?}",
                answer.text
            );
        }
        3 => {
            let endless = GenerateRequest {
                ..generate(&text, 500)
            };
            let mut answer = client.clone().generate(endless, None).await?;
            first_token(&mut answer).await?;
        }
        4 => {
            let request = ScoreRequest {
                input: Some(Input::Text(text.clone())),
                ..Default::default()
            };
            let scored = inference().score(request).await?.into_inner();
            anyhow::ensure!(scored.positions.len() == text.len(), "a byte is a token");
        }
        _ => {
            let request = TokenizeRequest {
                text: text.clone(),
                ..Default::default()
            };
            let late = tokio::time::timeout(Duration::from_secs(60), async {
                inference().tokenize(request).await
            });
            anyhow::ensure!(
                late.await??.into_inner().ids.len() == text.len(),
                "a byte is a token"
            );
        }
    }
    Ok(())
}
