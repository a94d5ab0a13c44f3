//! Plans of several tokens and checked drafts: the same answer, in fewer passes.

use rustix::process::Signal;
use velox_client::Client;
use velox_e2e::ask::{Whole, exactly, first_token, generate, seeded, streamed, whole};
use velox_e2e::gateway::{Gateway, Plan};
use velox_e2e::process::signal;
use velox_e2e::programs::real_model;
use velox_e2e::snapshot::Snapshot;
use velox_e2e::story::story;
use velox_proto::v1::{GenerateRequest, GenerationOptions, PromptLookup, SamplingOptions};

/// Tokens of each answer.
const TOKENS: u32 = 48;

/// A model goes on with it as it went on so far.
const LITANY: &str = "one two three four five six seven eight nine ten, \
     one two three four five six seven eight nine ten, one two three four five six seven";

fn request(text: &str, sampling: Option<SamplingOptions>) -> GenerateRequest {
    GenerateRequest {
        sampling,
        ..exactly(text, TOKENS)
    }
}

fn with_drafts(request: &GenerateRequest, lookup: PromptLookup) -> GenerateRequest {
    changed(request, |options| options.prompt_lookup = Some(lookup))
}

fn changed(
    request: &GenerateRequest,
    change: impl FnOnce(&mut GenerationOptions),
) -> GenerateRequest {
    let mut changed = request.clone();
    change(changed.generation.get_or_insert_default());
    changed
}

fn requests() -> [GenerateRequest; 3] {
    let penalised = SamplingOptions {
        repetition_penalty: Some(1.05),
        frequency_penalty: Some(0.02),
        ..seeded(7)
    };
    [
        request(LITANY, None),
        request(LITANY, Some(seeded(11))),
        request(LITANY, Some(penalised)),
    ]
}

/// Passes of the whole answer: the head runs once in each that samples.
fn passes(answer: &Whole) -> anyhow::Result<u64> {
    let counts = &answer.provenance()?.op_counts;
    Ok(counts
        .iter()
        .find(|entry| entry.op == "head")
        .map_or(0, |entry| entry.count))
}

async fn check(client: &Client, request: &GenerateRequest) -> anyhow::Result<()> {
    let calm = streamed(client, request.clone()).await?;
    assert_eq!(calm.usage()?.drafted_tokens, 0);
    for tokens in [2, 5, 32] {
        let several = changed(request, |options| options.tokens_per_plan = Some(tokens));
        let several = streamed(client, several).await?;
        assert_eq!(several.token_ids, calm.token_ids, "{tokens} a plan");
        assert_eq!(several.text, calm.text);
        assert_eq!(several.usage()?, calm.usage()?);
    }
    for (ngram, most) in [(None, None), (Some(1), Some(32)), (Some(2), Some(3))] {
        let lookup = PromptLookup {
            ngram_tokens: ngram,
            max_draft_tokens: most,
        };
        let drafted = streamed(client, with_drafts(request, lookup)).await?;
        assert_eq!(drafted.token_ids, calm.token_ids, "{lookup:?}");
        assert_eq!(drafted.text, calm.text);
        let usage = drafted.usage()?;
        assert_eq!(usage.completion_tokens, TOKENS);
        assert!(usage.accepted_draft_tokens > 0, "{usage:?}");
        assert!(usage.accepted_draft_tokens <= usage.drafted_tokens);
        // Every accepted token saved a pass, as the worker counts them.
        let saved = u64::from(usage.accepted_draft_tokens);
        assert_eq!(passes(&drafted)?, u64::from(TOKENS) - saved);
    }
    Ok(())
}

#[test]
fn neither_plans_of_several_tokens_nor_drafts_change_an_answer() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let base = Snapshot::at_rest(&gateway).await?;
        for request in requests() {
            check(&gateway.client(), &request).await?;
        }
        base.back_to(&gateway).await?;
        Ok(())
    })
}

#[test]
fn a_stop_string_in_a_draft_ends_the_answer_where_it_would_without() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let client = gateway.client();
        let stopped = changed(&request(LITANY, None), |options| {
            options.stop = vec!["two three".to_owned()];
        });
        let calm = streamed(&client, stopped.clone()).await?;
        assert_eq!(calm.finish.matched_stop, "two three");
        let several = changed(&stopped, |options| options.tokens_per_plan = Some(32));
        let drafted = with_drafts(&stopped, PromptLookup::default());
        for request in [several, drafted] {
            let answer = streamed(&client, request).await?;
            assert_eq!(answer.text, calm.text);
            assert_eq!(answer.token_ids, calm.token_ids);
            assert_eq!(answer.finish.matched_stop, "two three");
            let usage = answer.usage()?;
            assert_eq!(usage.completion_tokens, calm.usage()?.completion_tokens);
            assert!(usage.accepted_draft_tokens <= usage.completion_tokens);
        }
        Ok(())
    })
}

async fn killed_after(
    gateway: &Gateway,
    request: GenerateRequest,
    tokens: usize,
) -> anyhow::Result<Whole> {
    let mut answer = gateway.client().generate(request, None).await?;
    let mut head = first_token(&mut answer).await?;
    while head.token_ids.len() < tokens && head.finish.is_none() {
        let Some(event) = answer.next().await? else {
            break;
        };
        head.text.push_str(&event.text);
        head.token_ids.extend(event.token_ids);
        head.finish = event.finish;
    }
    anyhow::ensure!(head.finish.is_none(), "it ended before it was disturbed");
    signal(gateway.ready_worker().await?.pid, Signal::KILL)?;
    let mut rest = whole(answer).await?;
    rest.text.insert_str(0, &head.text);
    rest.token_ids.splice(0..0, head.token_ids);
    Ok(rest)
}

#[test]
fn a_worker_killed_while_it_checks_drafts_changes_nothing() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let base = Snapshot::at_rest(&gateway).await?;
        for (request, tokens) in requests().into_iter().zip([1, 9, 20]) {
            let calm = streamed(&gateway.client(), request.clone()).await?;
            let lookup = PromptLookup {
                ngram_tokens: Some(2),
                max_draft_tokens: Some(3),
            };
            let answer = killed_after(&gateway, with_drafts(&request, lookup), tokens).await?;
            assert_eq!(answer.token_ids, calm.token_ids, "killed after {tokens}");
            assert_eq!(answer.text, calm.text);
            let usage = answer.usage()?;
            assert_eq!((usage.recoveries, usage.replay.as_str()), (1, "exact"));
            assert_eq!(usage.completion_tokens, TOKENS);
            assert!(usage.accepted_draft_tokens > 0);
        }
        base.back_to(&gateway).await?;
        Ok(())
    })
}

#[test]
fn drafts_of_a_model_that_copies_its_prompt_are_right() -> anyhow::Result<()> {
    story(|| async move {
        let gateway = Plan::fake("honest")?.start().await?;
        let text = "abcdefghabcdefghabcdefghabcdefgh";
        let plain = generate(text, 100);
        let calm = streamed(&gateway.client(), plain.clone()).await?;
        let drafted = with_drafts(&plain, PromptLookup::default());
        let drafted = streamed(&gateway.client(), drafted).await?;
        assert_eq!(drafted.token_ids, calm.token_ids);
        assert_eq!(drafted.finish.reason(), calm.finish.reason());
        let usage = drafted.usage()?;
        // The end is the one thing that the prompt does not foretell.
        assert!(
            usage.accepted_draft_tokens >= 24,
            "{} of {}",
            usage.accepted_draft_tokens,
            usage.drafted_tokens
        );
        Ok(())
    })
}
