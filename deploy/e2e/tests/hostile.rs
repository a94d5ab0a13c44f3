//! Files, messages and workers that mean no good.

use std::path::Path;

use anyhow::Context as _;
use velox_client::error::ClientError;
use velox_e2e::ask::{
    chat, chatted, generate, generate_ids, message, options, refused_for, seeded, still_works,
    streamed,
};
use velox_e2e::copying::VOCABULARY_TOKENS;
use velox_e2e::gateway::{Gateway, Plan};
use velox_e2e::programs::real_model;
use velox_e2e::snapshot::Snapshot;
use velox_e2e::story::{eventually, story};
use velox_proto::error::{Reason, ServiceFault};
use velox_proto::v1::{
    ChatRequest, GenerateRequest, GenerationOptions, LoadModelRequest, LogitBias, SamplingOptions,
    ScoreRequest, TokenIds, WorkerState, score_request::Input,
};

async fn load(gateway: &Gateway, source: &Path) -> Result<(), ClientError> {
    let request = LoadModelRequest {
        source: source.display().to_string(),
        name: "hostile".to_owned(),
        ..LoadModelRequest::default()
    };
    let mut events = gateway
        .client()
        .models()
        .load_model(request)
        .await?
        .into_inner();
    while let Some(event) = events.message().await? {
        if event.model.is_some() {
            return Ok(());
        }
    }
    Err(ClientError::Truncated)
}

#[test]
fn damaged_model_files_are_refused_and_the_worker_lives() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let worker = gateway.ready_worker().await?;
        let folder = gateway.folder().join("hostile");
        std::fs::create_dir(&folder)?;
        let real = std::fs::read(&model)?;

        let file = |name: &str, bytes: &[u8]| -> anyhow::Result<std::path::PathBuf> {
            let path = folder.join(name);
            std::fs::write(&path, bytes)?;
            Ok(path)
        };
        let mut huge_count = real[..64].to_vec();
        huge_count[8..24].fill(0xff);
        let noise: Vec<u8> = (0..25_000_u32)
            .flat_map(|index| index.wrapping_mul(2_654_435_761).to_le_bytes())
            .collect();
        let mut noisy_header = b"GGUF\x03\0\0\0".to_vec();
        noisy_header.extend_from_slice(&noise);
        let files = [
            file("empty.gguf", b"")?,
            file("noise.gguf", &noise)?,
            file("noisy_header.gguf", &noisy_header)?,
            file("cut_in_header.gguf", &real[..5000])?,
            file("cut_in_weights.gguf", &real[..real.len() - 1_000_000])?,
            file("huge_count.gguf", &huge_count)?,
            truncated_safetensors(&folder)?,
        ];
        for path in &files {
            let fault = refused_for(load(&gateway, path).await, Reason::InvalidModel)
                .with_context(|| path.display().to_string())?;
            assert!(!fault.message.is_empty());
        }
        refused_for(
            load(&gateway, &folder.join("missing.gguf")).await,
            Reason::ModelNotFound,
        )?;
        // A name that is taken is not taken over.
        let taken = LoadModelRequest {
            source: files[0].display().to_string(),
            name: velox_e2e::gateway::MODEL.to_owned(),
            ..LoadModelRequest::default()
        };
        let taken = async {
            let mut events = gateway
                .client()
                .models()
                .load_model(taken)
                .await?
                .into_inner();
            while events.message().await?.is_some() {}
            Ok::<(), ClientError>(())
        };
        refused_for(taken.await, Reason::ModelExists)?;

        let after = gateway.ready_worker().await?;
        assert_eq!((after.pid, after.restarts), (worker.pid, 0));
        still_works(&gateway.client()).await?;
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

/// A folder as the model hub has it, whose weights end early.
fn truncated_safetensors(parent: &Path) -> anyhow::Result<std::path::PathBuf> {
    let folder = parent.join("folder");
    std::fs::create_dir(&folder)?;
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    });
    std::fs::write(folder.join("config.json"), config.to_string())?;
    let tokenizer = serde_json::json!({
        "version": "1.0", "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string())?;
    let header = serde_json::json!({
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [256, 64], "data_offsets": [0, 65536]},
    })
    .to_string();
    let mut weights = u64::try_from(header.len())?.to_le_bytes().to_vec();
    weights.extend_from_slice(header.as_bytes());
    weights.extend_from_slice(&[0; 1000]);
    std::fs::write(folder.join("model.safetensors"), weights)?;
    Ok(folder)
}

#[test]
fn malformed_requests_are_refused_by_field() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let client = gateway.client();
        let sampling = |change: fn(&mut SamplingOptions)| {
            let mut sampling = seeded(1);
            change(&mut sampling);
            GenerateRequest {
                sampling: Some(sampling),
                ..generate("x", 4)
            }
        };
        let generation = |change: fn(&mut GenerationOptions)| {
            let mut generation = options(4);
            change(&mut generation);
            GenerateRequest {
                generation: Some(generation),
                ..generate("x", 4)
            }
        };
        let cases: Vec<(&str, GenerateRequest)> = vec![
            (
                "temperature NaN",
                sampling(|s| s.temperature = Some(f32::NAN)),
            ),
            (
                "temperature negative",
                sampling(|s| s.temperature = Some(-1.0)),
            ),
            (
                "temperature infinite",
                sampling(|s| s.temperature = Some(f32::INFINITY)),
            ),
            ("top_p above 1", sampling(|s| s.top_p = Some(1.5))),
            ("top_p NaN", sampling(|s| s.top_p = Some(f32::NAN))),
            ("min_p negative", sampling(|s| s.min_p = Some(-0.1))),
            (
                "repetition penalty 0",
                sampling(|s| s.repetition_penalty = Some(0.0)),
            ),
            (
                "frequency penalty NaN",
                sampling(|s| s.frequency_penalty = Some(f32::NAN)),
            ),
            (
                "bias NaN",
                sampling(|s| {
                    s.logit_bias = vec![LogitBias {
                        token_id: 1,
                        bias: f32::NAN,
                    }]
                }),
            ),
            (
                "bias outside",
                sampling(|s| {
                    s.logit_bias = vec![LogitBias {
                        token_id: u32::MAX,
                        bias: 1.0,
                    }]
                }),
            ),
            (
                "allowed outside",
                sampling(|s| s.allowed_token_ids = vec![VOCABULARY_TOKENS]),
            ),
            (
                "allowed too long",
                sampling(|s| s.allowed_token_ids = vec![1; 70_000]),
            ),
            ("max_tokens 0", generation(|g| g.max_tokens = Some(0))),
            ("empty stop", generation(|g| g.stop = vec![String::new()])),
            (
                "too many stops",
                generation(|g| g.stop = vec!["x".to_owned(); 10_000]),
            ),
            (
                "huge stop",
                generation(|g| g.stop = vec!["x".repeat(1_000_000)]),
            ),
            (
                "stop token outside",
                generation(|g| g.stop_token_ids = vec![u32::MAX]),
            ),
            (
                "top_logprobs 21",
                generation(|g| (g.return_logprobs, g.top_logprobs) = (true, 21)),
            ),
            ("top_logprobs alone", generation(|g| g.top_logprobs = 1)),
            ("no prompt", GenerateRequest::default()),
            ("empty prompt", generate("", 4)),
            (
                "prompt outside",
                generate_ids(vec![1, VOCABULARY_TOKENS], 4),
            ),
        ];
        for (what, request) in cases {
            let fault = refused_for(streamed(&client, request).await, Reason::InvalidRequest)
                .context(what)?;
            assert!(fault.field.is_some(), "{what}: no field");
        }
        let chats: [(&str, ChatRequest); 2] = [
            (
                "no messages",
                ChatRequest {
                    messages: Vec::new(),
                    ..chat("", 1)
                },
            ),
            (
                "arguments that are no object",
                ChatRequest {
                    template_arguments_json: "[1".to_owned(),
                    ..chat("x", 1)
                },
            ),
        ];
        for (what, request) in chats {
            let refused = chatted(&client, request).await;
            let fault = velox_e2e::ask::refused(refused).context(what)?;
            assert_eq!(
                fault.reason.code(),
                tonic::Code::InvalidArgument,
                "{what}: {fault}"
            );
        }
        let score = ScoreRequest {
            input: Some(Input::TokenIds(TokenIds { ids: vec![1, 2, 3] })),
            first_position: 3,
            ..ScoreRequest::default()
        };
        let status = client
            .inference()
            .score(score)
            .await
            .err()
            .context("position 3 of 3")?;
        assert_eq!(
            ServiceFault::from_status(&status).reason,
            Reason::InvalidRequest
        );

        // A message beyond the limit ends its call, not the connection's others.
        let huge = ChatRequest {
            messages: vec![message("user", &"x".repeat(70 << 20))],
            ..chat("", 1)
        };
        assert!(chatted(&client, huge).await.is_err());
        still_works(&client).await?;
        Snapshot::at_rest(&gateway).await?;
        assert_eq!(gateway.ready_worker().await?.restarts, 0);
        Ok(())
    })
}

#[test]
fn a_worker_that_lies_about_a_result_is_replaced_and_its_lie_never_shown() -> anyhow::Result<()> {
    let lies = [
        "wrong-label",
        "wrong-op-counts",
        "extra-token",
        "missing-token",
        "token-outside",
        "nan-logprob",
        "foreign-row",
        "wrong-sequence",
        "answers-twice",
        "oversized-frame",
        "garbage-frame",
    ];
    for lie in lies {
        story(|| async {
            // The first process lies, its successor does not.
            let gateway = Plan::fake(&format!("{lie},honest"))?.start().await?;
            let liar = gateway.ready_worker().await?;
            let text = "the truth";
            let mut request = generate(text, 50);
            request.generation = Some(GenerationOptions {
                return_logprobs: true,
                ..options(50)
            });
            let answer = streamed(&gateway.client(), request).await.context(lie)?;
            assert_eq!(answer.text, text, "{lie}");
            assert!(
                answer.logprobs.iter().all(|entry| entry.logprob == -0.5),
                "{lie}"
            );
            let successor = gateway.ready_worker().await?;
            assert_ne!(liar.pid, successor.pid, "{lie}");
            assert!(
                successor.last_exit.contains("quarantined"),
                "{lie}: {}",
                successor.last_exit
            );
            Snapshot::at_rest(&gateway).await?;
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_slot_whose_processes_keep_lying_is_given_up() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("wrong-label")?
            .argument("--worker-wait", "5")
            .start()
            .await?;
        let fault = refused_for(
            streamed(&gateway.client(), generate("x", 5)).await,
            Reason::WorkerUnavailable,
        )?;
        assert!(fault.message.contains("quarantined"), "{}", fault.message);
        eventually("the slot to be given up", async || {
            let workers = gateway.workers().await?;
            let all = workers
                .iter()
                .all(|worker| worker.state() == WorkerState::Quarantined);
            Ok(all.then_some(()))
        })
        .await
    })
}

#[test]
fn a_worker_that_lies_about_itself_never_serves() -> anyhow::Result<()> {
    for (lie, why) in [
        ("impossible-backend", "claims"),
        ("wrong-pid", "says that it is process"),
        ("unavailable-backend", "BACKEND_MLX_CPU"),
        ("exits-at-once", "status 3"),
    ] {
        story(|| async {
            // A liar at first only: the gateway gets over it.
            let gateway = Plan::fake(&format!("{lie},honest"))?
                .start()
                .await
                .context(lie)?;
            still_works(&gateway.client()).await?;
            let last_exit = gateway.ready_worker().await?.last_exit;
            assert!(last_exit.contains(why), "{lie}: {last_exit}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_half_frame_and_a_silent_worker_are_recovered_from() -> anyhow::Result<()> {
    for fault in ["half-frame", "silent"] {
        story(|| async {
            let gateway = Plan::fake(&format!("{fault},honest"))?.start().await?;
            let answer = streamed(&gateway.client(), generate("after all", 50)).await?;
            assert_eq!(answer.text, "after all");
            assert_eq!(answer.usage()?.recoveries, 1, "{fault}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_tokenizer_other_than_announced_is_not_used() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("wrong-tokenizer")?
            .argument("--worker-wait", "5")
            .start()
            .await?;
        let refused = streamed(&gateway.client(), generate("x", 2)).await;
        let fault = velox_e2e::ask::refused(refused)?;
        assert!(fault.message.contains("digest"), "{fault}");
        Ok(())
    })
}
