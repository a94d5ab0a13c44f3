//! From prompt to streamed answer, with the real model through all processes.

use anyhow::Context as _;
use velox_e2e::ask::{
    self, chat, chatted, generate, generate_ids, policy, refused_for, seeded, streamed, whole_of,
};
use velox_e2e::gateway::{MODEL, Plan};
use velox_e2e::golden::{CPU_MARGIN, REFERENCE_MARGIN, greedy_runs, ids, tokens};
use velox_e2e::programs::real_model;
use velox_e2e::story::story;
use velox_proto::error::Reason;
use velox_proto::v1::{
    Backend, ChatCompleteRequest, DetokenizeRequest, FinishReason, GenerateCompleteRequest,
    GenerateRequest, GenerationOptions, OnMissing, ScoreRequest, TokenIds, TokenizeRequest,
    score_request::Input,
};

/// What the default model is asked first.
const CAPITAL: &str = "What is the capital of France?";

#[test]
fn the_reference_backend_gives_the_golden_answer_with_complete_evidence() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "reference")?.start().await?;
        let golden = greedy_runs()?.into_iter().find(|run| run.user == CAPITAL);
        let golden = golden.context("the golden prompt is gone")?;
        assert_eq!(golden.certain(REFERENCE_MARGIN), golden.greedy_ids);

        let answer = chatted(&gateway.client(), chat(CAPITAL, 32)).await?;
        assert_eq!(answer.token_ids, golden.greedy_ids);
        assert_eq!(answer.text, "The capital of France is Paris.");

        let finish = &answer.finish;
        assert_eq!(finish.reason(), FinishReason::StopToken);
        assert_eq!(finish.matched_stop_token_id, Some(2));
        assert_eq!(finish.model, MODEL);
        let usage = answer.usage()?;
        assert_eq!(
            usize::try_from(usage.prompt_tokens)?,
            golden.prompt_ids.len()
        );
        assert_eq!(
            usize::try_from(usage.completion_tokens)?,
            golden.greedy_ids.len()
        );
        assert_eq!((usage.recoveries, usage.truncated_tokens), (0, 0));

        let timings = answer.timings()?;
        assert!(timings.queue_ms >= 0.0 && timings.prefill_ms > 0.0 && timings.decode_ms > 0.0);
        assert!(
            timings
                .decode_tokens_per_s
                .context("eight tokens have a speed")?
                > 0.0
        );

        let provenance = answer.provenance()?;
        assert_eq!(provenance.backend(), Backend::Reference);
        assert_eq!(provenance.sampler(), Backend::Reference);
        assert!(!provenance.device.is_empty() && !provenance.kernel.is_empty());
        assert_eq!(provenance.fallback_reason, "");
        assert_eq!(provenance.spans.len(), 1);
        let count = |op: &str| provenance.op_counts.iter().find(|entry| entry.op == op);
        // One pass for the prompt, one for each further token, and perhaps one that was in flight at the end.
        let passes = count("embed").context("embed was not counted")?.count;
        assert!((8..=9).contains(&passes), "{passes} passes");
        assert_eq!(
            count("gated_mlp")
                .context("gated_mlp was not counted")?
                .count,
            passes * 30
        );
        Ok(())
    })
}

#[test]
fn the_cpu_backend_follows_the_golden_answers_where_they_are_certain() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let mut compared = 0;
        for run in greedy_runs()? {
            let certain = run.certain(CPU_MARGIN);
            let request = chat(&run.user, u32::try_from(certain.len().max(1))?);
            let answer = chatted(&gateway.client(), request).await?;
            let prompt_tokens = usize::try_from(answer.usage()?.prompt_tokens)?;
            assert_eq!(prompt_tokens, run.prompt_ids.len());
            assert_eq!(answer.provenance()?.backend(), Backend::Cpu);
            assert!(
                answer.token_ids.starts_with(certain),
                "{}: {answer:?}",
                run.user
            );
            compared += certain.len();
        }
        assert!(compared >= 90, "only {compared} tokens were certain");
        Ok(())
    })
}

#[test]
fn streamed_and_whole_answers_are_the_same_and_seeds_repeat() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let client = gateway.client();

        let mut request = chat("Name three colours.", 24);
        request.sampling = Some(seeded(7));
        let first = chatted(&client, request.clone()).await?;
        let again = chatted(&client, request.clone()).await?;
        let unary = client
            .inference()
            .chat_complete(ChatCompleteRequest {
                request: Some(request.clone()),
            })
            .await?;
        let unary = whole_of(unary.into_inner().event)?;
        for other in [&again, &unary] {
            assert_eq!(
                (&first.text, &first.token_ids),
                (&other.text, &other.token_ids)
            );
            assert_eq!(first.finish.reason(), other.finish.reason());
            assert_eq!(first.usage()?, other.usage()?);
        }
        assert!(first.events > 1, "the answer was not streamed");
        assert_eq!(first.finish.seed, 7);

        request.sampling = Some(seeded(8));
        let other_seed = chatted(&client, request).await?;
        assert_ne!(first.token_ids, other_seed.token_ids);

        // A seed that the gateway chose is reported and repeats the answer.
        let mut free = generate("Once upon a time", 12);
        free.sampling = Some(seeded(0));
        if let Some(sampling) = &mut free.sampling {
            sampling.seed = None;
        }
        let chosen = streamed(&client, free.clone()).await?;
        if let Some(sampling) = &mut free.sampling {
            sampling.seed = Some(chosen.finish.seed);
        }
        let request = GenerateCompleteRequest {
            request: Some(free),
        };
        let repeated = client.inference().generate_complete(request).await?;
        let repeated = whole_of(repeated.into_inner().event)?;
        assert_eq!(chosen.token_ids, repeated.token_ids);
        assert_eq!(chosen.text, repeated.text);
        assert_eq!(chosen.finish.reason(), FinishReason::MaxTokens);
        assert_eq!(chosen.usage()?.completion_tokens, 12);
        Ok(())
    })
}

#[test]
fn ids_and_logprobs_come_on_request_only() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let mut request = generate("The sky is", 6);
        request.generation = Some(GenerationOptions {
            max_tokens: Some(6),
            ..GenerationOptions::default()
        });
        let plain = streamed(&gateway.client(), request.clone()).await?;
        assert!(plain.token_ids.is_empty() && plain.logprobs.is_empty());

        request.generation = Some(GenerationOptions {
            return_logprobs: true,
            top_logprobs: 3,
            ..ask::options(6)
        });
        let full = streamed(&gateway.client(), request).await?;
        assert_eq!(full.text, plain.text);
        assert_eq!((full.token_ids.len(), full.logprobs.len()), (6, 6));
        for (id, logprob) in full.token_ids.iter().zip(&full.logprobs) {
            assert_eq!(*id, logprob.token_id);
            // Greedy: the chosen token is the best alternative.
            assert_eq!(logprob.top.len(), 3);
            assert_eq!(logprob.top[0].token_id, *id);
            assert_eq!(logprob.top[0].logprob, logprob.logprob);
            assert!(logprob.top.is_sorted_by(|a, b| a.logprob >= b.logprob));
        }
        Ok(())
    })
}

#[test]
fn text_becomes_golden_tokens_and_back() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let mut inference = gateway.client().inference();
        for line in tokens()? {
            let text = line["text"].as_str().context("no text")?;
            for (field, parse_special) in [("plain", false), ("with_special", true)] {
                let request = TokenizeRequest {
                    text: text.to_owned(),
                    parse_special,
                    ..TokenizeRequest::default()
                };
                let tokenized = inference.tokenize(request).await?.into_inner().ids;
                assert_eq!(tokenized, ids(&line[field])?, "{text:?}");
            }
            let request = DetokenizeRequest {
                ids: ids(&line["plain"])?,
                ..Default::default()
            };
            assert_eq!(inference.detokenize(request).await?.into_inner().text, text);
        }
        Ok(())
    })
}

#[test]
fn scores_are_those_of_generation() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let client = gateway.client();
        let prompt = greedy_runs()?.swap_remove(0).prompt_ids;
        let mut request = generate_ids(prompt.clone(), 5);
        request.generation = Some(GenerationOptions {
            return_logprobs: true,
            ..ask::options(5)
        });
        let answer = streamed(&client, request).await?;

        let first_position = u32::try_from(prompt.len() - 1)?;
        let text = [prompt, answer.token_ids.clone()].concat();
        let last = text.len() - 1;
        let request = ScoreRequest {
            input: Some(Input::TokenIds(TokenIds { ids: text })),
            first_position,
            top_n: 2,
            return_logits: true,
            ..ScoreRequest::default()
        };
        let scored = client.inference().score(request).await?.into_inner();
        assert_eq!(scored.positions.len(), 6);
        for (position, generated) in scored.positions.iter().zip(&answer.logprobs) {
            assert_eq!(position.top[0].token_id, generated.token_id);
            // Chunked and batched differently, and still the very same number.
            assert_eq!(position.next_logprob, Some(generated.logprob));
        }
        let end = scored.positions.last().context("no positions")?;
        assert_eq!(
            (usize::try_from(end.position)?, end.next_logprob),
            (last, None)
        );
        let logits = scored.logits.context("logits were asked for")?;
        assert_eq!(logits.shape[0], 6);
        assert_eq!(
            scored.provenance.context("no provenance")?.backend(),
            Backend::Cpu
        );
        let kv = scored.kv.context("no cache use")?;
        assert!(kv.key_bytes > 0 && kv.value_bytes > 0 && usize::try_from(kv.tokens)? > last);
        Ok(())
    })
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_both_numbers() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let client = gateway.client();
        let context = client
            .models()
            .get_model(velox_proto::v1::GetModelRequest::default())
            .await?;
        let context = context
            .into_inner()
            .model
            .context("no model")?
            .context_length;
        let ids = vec![253; usize::try_from(context + 1)?];

        let fault = refused_for(
            streamed(&client, generate_ids(ids, 4)).await,
            Reason::PromptTooLong,
        )?;
        assert_eq!(fault.metadata["prompt_tokens"], (context + 1).to_string());
        assert_eq!(fault.metadata["limit_tokens"], (context - 1).to_string());
        assert!(
            fault.message.contains(&(context + 1).to_string()),
            "{}",
            fault.message
        );
        Ok(())
    })
}

#[test]
fn models_and_policies_that_cannot_be_served_are_refused() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let client = gateway.client();
        let unknown = GenerateRequest {
            model: "nobody".to_owned(),
            ..generate("x", 1)
        };
        let fault = refused_for(streamed(&client, unknown).await, Reason::ModelNotFound)?;
        assert_eq!(fault.metadata["model"], "nobody");

        let absent = if cfg!(target_os = "macos") {
            Backend::MlxCuda
        } else {
            Backend::Metal
        };
        let strict = GenerateRequest {
            policy: Some(policy(&[absent], OnMissing::Error)),
            ..generate("x", 1)
        };
        let fault = refused_for(streamed(&client, strict).await, Reason::BackendUnavailable)?;
        assert_eq!(fault.reason.code(), tonic::Code::FailedPrecondition);
        let name = absent.as_str_name().trim_start_matches("BACKEND_");
        assert!(fault.message.contains(name), "{}", fault.message);

        let lenient = GenerateRequest {
            policy: Some(policy(&[absent], OnMissing::Fallback)),
            ..generate("x", 1)
        };
        let answer = streamed(&client, lenient).await?;
        assert_eq!(answer.provenance()?.backend(), Backend::Cpu);
        let why = &answer.provenance()?.fallback_reason;
        assert!(why.contains(name), "{why:?}");

        let named = GenerateRequest {
            model: MODEL.to_owned(),
            policy: Some(policy(&[Backend::Cpu], OnMissing::Error)),
            ..generate("x", 1)
        };
        assert_eq!(
            streamed(&client, named)
                .await?
                .provenance()?
                .fallback_reason,
            ""
        );
        Ok(())
    })
}
