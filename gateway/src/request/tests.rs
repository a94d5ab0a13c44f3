//! What is accepted, what is refused and with which words.

use proptest::prelude::*;
use velox_proto::error::{Reason, ServiceError as _};

use super::*;

fn model() -> ModelLimits {
    ModelLimits {
        name: "tiny".into(),
        fingerprint: "".into(),
        context_length: 100,
        vocab_size: 50,
        kv: KvGeometry {
            page_tokens: 16,
            key_bytes_per_token: 2,
            value_bytes_per_token: 2,
            ..KvGeometry::default()
        },
        end_token_ids: vec![2, 3],
        backends: vec![Backend::Cpu],
        missing: "METAL: not on this operating system".to_owned(),
    }
}

fn generate(prompt: Vec<u32>, parts: GenerationParts) -> Result<ValidRequest, GatewayError> {
    ValidRequest::generate(&model(), prompt, parts, Delivery::Stream, 77)
}

fn options(generation: v1::GenerationOptions) -> GenerationParts {
    GenerationParts {
        generation: Some(generation),
        ..GenerationParts::default()
    }
}

fn work(request: &ValidRequest) -> &Generate {
    match request.job.work() {
        Work::Generate(generate) => generate,
        Work::Score(_) => panic!("not a generation"),
    }
}

#[test]
fn defaults_are_those_of_the_contract() {
    let request = generate(vec![1; 10], GenerationParts::default()).unwrap();
    let generate = work(&request);
    // 512 does not fit behind 10 of 100 positions.
    assert_eq!(
        (generate.max_tokens, generate.limit),
        (90, LengthLimit::Context)
    );
    assert_eq!(generate.end_token_ids, BTreeSet::from([2, 3]));
    assert_eq!(generate.sampling.temperature, 0.0);
    assert_eq!(generate.sampling.top_p, 1.0);
    assert_eq!(generate.sampling.repetition_penalty, 1.0);
    assert_eq!(generate.sampling.penalty_window_tokens, 64);
    assert_eq!(request.presentation.seed, 77);
    assert_eq!(request.job.capacity_tokens(), 100);
    assert_eq!(request.job.kv_bytes(), 112 * 4);
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_with_both_numbers() {
    let error = generate(vec![1; 100], GenerationParts::default()).unwrap_err();
    assert_eq!(error.reason(), Reason::PromptTooLong);
    let metadata = error.metadata();
    assert_eq!(metadata["prompt_tokens"], "100");
    assert_eq!(metadata["limit_tokens"], "99");
    assert!(generate(vec![1; 99], GenerationParts::default()).is_ok());
}

#[test]
fn truncation_happens_on_request_only_and_is_reported() {
    let parts = options(v1::GenerationOptions {
        truncate_prompt: true,
        max_tokens: Some(7),
        ..v1::GenerationOptions::default()
    });
    let prompt: Vec<u32> = (0..130).map(|id| id % 50).collect();
    let request = generate(prompt.clone(), parts).unwrap();
    // The answer gets the room that it asks for,
    assert_eq!(request.presentation.truncated_tokens, 37);
    assert_eq!(request.job.prompt(), &prompt[37..]);
    assert_eq!(work(&request).max_tokens, 7);
    // at most half of the context.
    let parts = options(v1::GenerationOptions {
        truncate_prompt: true,
        ..v1::GenerationOptions::default()
    });
    let request = generate(prompt.clone(), parts.clone()).unwrap();
    assert_eq!(request.job.prompt(), &prompt[80..]);
    assert_eq!(work(&request).max_tokens, 50);
    // What fits is not cut to make room.
    let request = generate(prompt[..99].to_vec(), parts).unwrap();
    assert_eq!(request.presentation.truncated_tokens, 0);
    assert_eq!(work(&request).max_tokens, 1);
}

#[test]
fn the_first_tokens_of_a_truncated_prompt_may_stay() {
    let asked = |truncate_prompt, sink_tokens| {
        let parts = options(v1::GenerationOptions {
            truncate_prompt,
            truncation_sink_tokens: Some(sink_tokens),
            max_tokens: Some(1),
            ..v1::GenerationOptions::default()
        });
        generate((0..130).map(|id| id % 50).collect(), parts)
    };
    let prompt: Vec<u32> = (0..130).map(|id| id % 50).collect();
    let request = asked(true, 4).unwrap();
    assert_eq!(request.presentation.truncated_tokens, 31);
    assert_eq!(request.job.prompt(), [&prompt[..4], &prompt[35..]].concat());
    assert!(asked(true, 98).is_ok());
    let refused = asked(true, 99).unwrap_err().to_string();
    assert!(
        refused.contains("is 99") && refused.contains("has 99 tokens"),
        "{refused}"
    );
    let refused = asked(false, 4).unwrap_err().to_string();
    assert!(refused.contains("needs truncate_prompt"), "{refused}");
}

#[test]
fn ignore_eos_keeps_the_caller_s_own_stop_tokens() {
    let request = generate(
        vec![1],
        options(v1::GenerationOptions {
            ignore_eos: true,
            stop_token_ids: vec![9],
            max_tokens: Some(5),
            ..v1::GenerationOptions::default()
        }),
    )
    .unwrap();
    assert_eq!(work(&request).end_token_ids, BTreeSet::from([9]));
    assert_eq!(work(&request).limit, LengthLimit::MaxTokens);
}

#[test]
fn several_steps_need_a_patient_reader_without_stop_strings() {
    let steps = |delivery, stop: Vec<String>| {
        let parts = options(v1::GenerationOptions {
            stop,
            ..v1::GenerationOptions::default()
        });
        let request = ValidRequest::generate(&model(), vec![1], parts, delivery, 0).unwrap();
        work(&request).steps
    };
    assert_eq!(steps(Delivery::Whole, vec![]), UNWATCHED_STEPS);
    assert_eq!(steps(Delivery::Whole, vec!["x".into()]), 1);
    assert_eq!(steps(Delivery::Stream, vec![]), 1);
    let parts = options(v1::GenerationOptions {
        prompt_lookup: Some(v1::PromptLookup::default()),
        ..v1::GenerationOptions::default()
    });
    let drafting = ValidRequest::generate(&model(), vec![1], parts, Delivery::Whole, 0).unwrap();
    assert_eq!(work(&drafting).steps, 1);
}

#[test]
fn a_caller_may_choose_the_tokens_of_a_plan() {
    let asked = |tokens_per_plan, delivery| {
        let parts = options(v1::GenerationOptions {
            tokens_per_plan: Some(tokens_per_plan),
            stop: vec!["x".into()],
            ..v1::GenerationOptions::default()
        });
        ValidRequest::generate(&model(), vec![1], parts, delivery, 0)
    };
    for delivery in [Delivery::Stream, Delivery::Whole] {
        for steps in [1, 7, 32] {
            assert_eq!(work(&asked(steps, delivery).unwrap()).steps, steps);
        }
        let error = asked(33, delivery).unwrap_err();
        assert_eq!(error.field(), Some("generation.tokens_per_plan"));
        assert_eq!(error.to_string(), "tokens_per_plan is 33, must be 1 to 32");
        assert!(asked(0, delivery).is_err());
    }
}

#[test]
fn a_prompt_lookup_has_defaults_and_limits() {
    let asked = |ngram_tokens, max_draft_tokens| {
        let lookup = v1::PromptLookup {
            ngram_tokens,
            max_draft_tokens,
        };
        generate(
            vec![1],
            options(v1::GenerationOptions {
                prompt_lookup: Some(lookup),
                ..v1::GenerationOptions::default()
            }),
        )
        .map(|request| work(&request).prompt_lookup)
    };
    let lookup = |ngram_tokens, max_draft_tokens| {
        Some(PromptLookup {
            ngram_tokens,
            max_draft_tokens,
        })
    };
    assert_eq!(asked(None, None).unwrap(), lookup(3, 8));
    assert_eq!(asked(Some(8), Some(32)).unwrap(), lookup(8, 32));
    for (ngram, draft, problem) in [
        (Some(0), None, "ngram_tokens is 0, must be 1 to 8"),
        (Some(9), None, "ngram_tokens is 9, must be 1 to 8"),
        (None, Some(0), "max_draft_tokens is 0, must be 1 to 32"),
        (None, Some(33), "max_draft_tokens is 33, must be 1 to 32"),
    ] {
        assert_eq!(asked(ngram, draft).unwrap_err().to_string(), problem);
    }
    let none = generate(vec![1], GenerationParts::default()).unwrap();
    assert_eq!(work(&none).prompt_lookup, None);
}

#[test]
fn wrong_fields_are_named() {
    let generation = |change: fn(&mut v1::GenerationOptions)| {
        let mut wire = v1::GenerationOptions::default();
        change(&mut wire);
        generate(vec![1], options(wire))
    };
    let sampling = |change: fn(&mut v1::SamplingOptions)| {
        let mut wire = v1::SamplingOptions::default();
        change(&mut wire);
        generate(
            vec![1],
            GenerationParts {
                sampling: Some(wire),
                ..GenerationParts::default()
            },
        )
    };
    let cases = [
        (generate(vec![], GenerationParts::default()), "prompt"),
        (generate(vec![50], GenerationParts::default()), "prompt"),
        (
            generation(|o| o.max_tokens = Some(0)),
            "generation.max_tokens",
        ),
        (
            generation(|o| o.stop = vec![String::new()]),
            "generation.stop",
        ),
        (
            generation(|o| o.stop = vec!["x".repeat(1025)]),
            "generation.stop",
        ),
        (
            generation(|o| o.stop = vec!["x".into(); 17]),
            "generation.stop",
        ),
        (
            generation(|o| o.stop_token_ids = vec![50]),
            "generation.stop_token_ids",
        ),
        (
            generation(|o| o.top_logprobs = 1),
            "generation.top_logprobs",
        ),
        (
            generation(|o| (o.return_logprobs, o.top_logprobs) = (true, 21)),
            "generation.top_logprobs",
        ),
        (
            sampling(|o| o.temperature = Some(f32::NAN)),
            "sampling.temperature",
        ),
        (
            sampling(|o| o.temperature = Some(-0.1)),
            "sampling.temperature",
        ),
        (
            sampling(|o| o.temperature = Some(f32::INFINITY)),
            "sampling.temperature",
        ),
        (sampling(|o| o.top_p = Some(0.0)), "sampling.top_p"),
        (sampling(|o| o.top_p = Some(1.1)), "sampling.top_p"),
        (sampling(|o| o.min_p = Some(-1.0)), "sampling.min_p"),
        (
            sampling(|o| o.repetition_penalty = Some(0.0)),
            "sampling.repetition_penalty",
        ),
        (
            sampling(|o| o.frequency_penalty = Some(f32::NEG_INFINITY)),
            "sampling.frequency_penalty",
        ),
        (
            sampling(|o| o.presence_penalty = Some(101.0)),
            "sampling.presence_penalty",
        ),
        (
            sampling(|o| o.allowed_token_ids = vec![50]),
            "sampling.allowed_token_ids",
        ),
        (
            sampling(|o| {
                o.logit_bias = vec![v1::LogitBias {
                    token_id: 1,
                    bias: f32::NAN,
                }]
            }),
            "sampling.logit_bias",
        ),
    ];
    for (result, field) in cases {
        let error = result.unwrap_err();
        assert_eq!(error.field(), Some(field), "{error}");
        assert_eq!(error.reason(), Reason::InvalidRequest, "{error}");
    }
}

#[test]
fn a_backend_that_is_missing_is_an_error_unless_fallback_is_allowed() {
    let policy = |on_missing: v1::OnMissing| GenerationParts {
        policy: Some(v1::BackendPolicy {
            allowed: vec![Backend::Metal.into()],
            on_missing: on_missing.into(),
        }),
        ..GenerationParts::default()
    };
    let error = generate(vec![1], policy(v1::OnMissing::Error)).unwrap_err();
    assert_eq!(error.reason(), Reason::BackendUnavailable);
    assert!(
        error.to_string().contains("not on this operating system"),
        "{error}"
    );
    assert!(generate(vec![1], policy(v1::OnMissing::Fallback)).is_ok());
}

#[test]
fn a_score_request_is_bounded_by_context_and_message() {
    let score = |tokens: usize, change: fn(&mut v1::ScoreRequest)| {
        let mut request = v1::ScoreRequest::default();
        change(&mut request);
        let large = ModelLimits {
            vocab_size: 1 << 24,
            ..model()
        };
        Job::score(&large, vec![1; tokens], &request)
    };
    assert!(score(100, |_| ()).is_ok());
    assert_eq!(
        score(101, |_| ()).unwrap_err().reason(),
        Reason::PromptTooLong
    );
    assert_eq!(
        score(5, |r| r.first_position = 5).unwrap_err().field(),
        Some("first_position")
    );
    assert_eq!(
        score(5, |r| r.top_n = 21).unwrap_err().field(),
        Some("top_n")
    );
    assert_eq!(
        score(1, |r| r.return_logits = true).unwrap_err().field(),
        Some("return_logits")
    );
}

proptest! {
    #[test]
    fn whatever_is_accepted_fits_the_context(
        length in 0_usize..220, max_tokens in prop::option::of(0_u32..300), truncate: bool,
    ) {
        let parts = options(v1::GenerationOptions {
            max_tokens, truncate_prompt: truncate, ..v1::GenerationOptions::default()
        });
        if let Ok(request) = generate(vec![1; length], parts) {
            let prompt = request.job.prompt().len();
            let max_tokens = work(&request).max_tokens;
            prop_assert!(max_tokens >= 1 && prompt >= 1);
            prop_assert!(prompt + usize::try_from(max_tokens).unwrap() <= 100);
            let truncated = usize::try_from(request.presentation.truncated_tokens).unwrap();
            prop_assert_eq!(prompt + truncated, length);
        } else {
            prop_assert!(length == 0 || max_tokens == Some(0) || (length > 99 && !truncate));
        }
    }
}
