//! What happens between tokens and text, with a worker whose tokens the test chooses.

use anyhow::Context as _;
use velox_e2e::ask::{
    chat, chatted, first_token, generate, generate_ids, message, options, refused_for, still_works,
    streamed, whole,
};
use velox_e2e::copying::{END_TOKEN, bytes, piece};
use velox_e2e::gateway::Plan;
use velox_e2e::snapshot::Snapshot;
use velox_e2e::story::{eventually, story};
use velox_proto::error::Reason;
use velox_proto::v1::{ChatRequest, FinishReason, GenerationOptions};

/// Ways to cut `text` into the tokens that the vocabulary has.
fn splits(text: &str) -> Vec<Vec<u32>> {
    if text.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for length in (1..=text.len()).filter(|&length| text.is_char_boundary(length)) {
        let (head, tail) = text.split_at(length);
        let id = match bytes(head).as_slice() {
            [byte] => Some(*byte),
            _ => piece(head),
        };
        if let Some(id) = id {
            all.extend(
                splits(tail)
                    .into_iter()
                    .map(|rest| [vec![id], rest].concat()),
            );
        }
    }
    all
}

#[test]
fn a_stop_string_is_found_wherever_the_tokens_are_cut() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let client = gateway.client();
        // Text, stop strings, what remains, which one matched.
        let cases: [(&str, &[&str], &str, &str); 7] = [
            ("xabcdy", &["abc"], "x", "abc"),
            ("xabcdy", &["ab", "abc"], "x", "ab"),
            ("xabcdy", &["abx", "bcd"], "xa", "bcd"),
            ("stopx", &["stop"], "", "stop"),
            ("ststop.", &["stop"], "st", "stop"),
            ("abab", &["abc", "zz"], "abab", ""),
            ("hello the stop", &[" the stop"], "hello", " the stop"),
        ];
        for (text, stops, rest, matched) in cases {
            for ids in splits(text) {
                let mut request = generate_ids(ids.clone(), 64);
                request.generation = Some(GenerationOptions {
                    stop: stops.iter().map(|&stop| stop.to_owned()).collect(),
                    ..options(64)
                });
                let answer = streamed(&client, request).await?;
                let reason = answer.finish.reason();
                assert_eq!(
                    (answer.text.as_str(), answer.finish.matched_stop.as_str()),
                    (rest, matched),
                    "{ids:?} {stops:?}"
                );
                let expected = if matched.is_empty() {
                    FinishReason::StopToken
                } else {
                    FinishReason::StopString
                };
                assert_eq!(reason, expected);
                let counted = usize::try_from(answer.usage()?.completion_tokens)?;
                assert_eq!(
                    counted,
                    answer.token_ids.len(),
                    "what was computed too much is not billed"
                );
            }
        }
        // The worker was told to stop, too.
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

#[test]
fn characters_are_never_cut() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        for text in ["grüße 日本 👩‍👩‍👧", "שלום", "é"] {
            let mut answer = gateway
                .client()
                .generate(generate_ids(bytes(text), 99), None)
                .await?;
            let mut read = String::new();
            while let Some(event) = answer.next().await? {
                assert!(!event.text.contains('\u{fffd}'), "{:?}", event.text);
                read.push_str(&event.text);
            }
            assert_eq!(read, text);
        }
        // An answer that ends inside a character has no half of it.
        let cut = streamed(&gateway.client(), generate_ids(bytes("a日"), 2)).await?;
        assert_eq!(cut.finish.reason(), FinishReason::MaxTokens);
        assert_eq!(cut.text, "a\u{fffd}");
        Ok(())
    })
}

#[test]
fn end_tokens_end_unless_told_otherwise() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let client = gateway.client();
        let ids = [bytes("one"), vec![END_TOKEN], bytes("two")].concat();
        let ends = streamed(&client, generate_ids(ids.clone(), 64)).await?;
        assert_eq!(ends.text, "one");
        assert_eq!(ends.finish.matched_stop_token_id, Some(END_TOKEN));

        let mut request = generate_ids(ids.clone(), 7);
        request.generation = Some(GenerationOptions {
            ignore_eos: true,
            ..options(7)
        });
        let goes_on = streamed(&client, request).await?;
        assert_eq!(goes_on.text, "onetwo");
        assert_eq!(goes_on.finish.reason(), FinishReason::MaxTokens);

        let mut request = generate_ids(ids, 64);
        request.generation = Some(GenerationOptions {
            stop_token_ids: bytes("e"),
            ..options(64)
        });
        let own = streamed(&client, request).await?;
        assert_eq!(
            (own.text.as_str(), own.finish.matched_stop_token_id),
            ("on", Some(101))
        );

        let model = client
            .models()
            .list_models(velox_proto::v1::ListModelsRequest::default())
            .await?;
        let model = model.into_inner().models.pop().context("no model")?;
        assert_eq!(model.end_tokens[0].token_id, END_TOKEN);
        assert_eq!(model.end_tokens[0].source, "velox-fake-worker");
        Ok(())
    })
}

#[test]
fn the_context_is_a_limit_for_prompts_and_for_answers() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_CONTEXT", "32")
            .start()
            .await?;
        let client = gateway.client();
        let long = "0123456789".repeat(4);
        let fault = refused_for(
            streamed(&client, generate(&long, 4)).await,
            Reason::PromptTooLong,
        )?;
        assert_eq!(fault.metadata["prompt_tokens"], "40");
        assert_eq!(fault.metadata["limit_tokens"], "31");

        let mut request = generate(&long, 4);
        request.generation = Some(GenerationOptions {
            truncate_prompt: true,
            ..options(4)
        });
        let cut = streamed(&client, request).await?;
        // The answer has its room.
        assert_eq!(cut.usage()?.truncated_tokens, 12);
        assert_eq!(cut.usage()?.prompt_tokens, 28);
        // The beginning is gone: the copy begins with what remained.
        assert_eq!(cut.text, "2345");
        assert_eq!(cut.finish.reason(), FinishReason::MaxTokens);

        let mut endless = generate("0123456789012345678901234", 999);
        endless.generation = Some(GenerationOptions {
            ignore_eos: true,
            ..options(999)
        });
        let full = streamed(&client, endless).await?;
        assert_eq!(full.finish.reason(), FinishReason::MaxContext);
        assert_eq!(full.usage()?.completion_tokens, 32 - 25);
        Ok(())
    })
}

#[test]
fn a_template_that_refuses_gives_its_own_words() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let client = gateway.client();
        let request = ChatRequest {
            messages: vec![message("forbidden", "x")],
            ..chat("", 4)
        };
        let fault = refused_for(chatted(&client, request).await, Reason::TemplateFailed)?;
        assert!(
            fault
                .message
                .contains("the role forbidden is not allowed here"),
            "{fault}"
        );

        // Markup in a prompt that no template made stays text.
        let tricky = streamed(&client, generate("<|end|>", 200)).await?;
        assert_eq!(tricky.text, "<|end|>");
        still_works(&client).await
    })
}

#[test]
fn a_reader_that_stops_reading_pauses_only_itself() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_CONTEXT", "10000")
            .start()
            .await?;
        let text = "x".repeat(4000);
        let mut slow = gateway
            .connect()
            .await?
            .generate(generate(&text, 4001), None)
            .await?;
        let first = first_token(&mut slow).await?;
        for _ in 0..20 {
            still_works(&gateway.client()).await?;
        }
        let rest = whole(slow).await?;
        assert_eq!(first.text.len() + rest.text.len(), 4000);
        eventually("the gateway to be idle", async || {
            Ok((gateway.pool().await?.running == 0).then_some(()))
        })
        .await
    })
}
