//! The worker with MLX: what it says it computed with, its death, and what happens where its library is missing.

use std::path::PathBuf;

use rustix::process::Signal;
use velox_e2e::ask::{Whole, chat, chatted, first_token, policy, refused_for, whole};
use velox_e2e::gateway::{Gateway, Plan};
use velox_e2e::process::signal;
use velox_e2e::programs::{optional_program, real_model};
use velox_e2e::story::story;
use velox_proto::error::Reason;
use velox_proto::v1::{
    Backend, BackendCapability, ChatRequest, GetCapabilitiesRequest, OnMissing, WorkerCapabilities,
};

/// Tokens of an answer: this device is slow on Linux.
const TOKENS: u32 = 8;

/// Returns the model if the worker with MLX was built, or says loudly that the test is skipped.
fn model_and_worker() -> Option<(PathBuf, PathBuf)> {
    let worker = optional_program("velox-kernel-worker-mlx")?;
    Some((real_model()?, worker))
}

fn question() -> ChatRequest {
    chat("What is the capital of France?", TOKENS)
}

async fn answer(gateway: &Gateway) -> anyhow::Result<Whole> {
    Ok(chatted(&gateway.client(), question()).await?)
}

async fn capabilities(gateway: &Gateway) -> anyhow::Result<WorkerCapabilities> {
    let request = GetCapabilitiesRequest {};
    let client = gateway.client();
    let table = client.capabilities().get_capabilities(request).await?;
    let mut workers = table.into_inner().workers;
    anyhow::ensure!(workers.len() == 1, "{} workers", workers.len());
    Ok(workers.remove(0))
}

fn of(worker: &WorkerCapabilities, backend: Backend) -> BackendCapability {
    let mut found = worker
        .backends
        .iter()
        .filter(|one| one.backend() == backend);
    found.next().cloned().unwrap_or_default()
}

#[test]
fn an_answer_of_mlx_says_so_and_survives_its_worker() -> anyhow::Result<()> {
    let Some((model, worker)) = model_and_worker() else {
        return Ok(());
    };
    story(|| async move {
        let on_cpu = Plan::real(&model, "cpu")?.start().await?;
        let expected = answer(&on_cpu).await?;
        assert_eq!(expected.provenance()?.backend(), Backend::Cpu);
        let gateway = Plan::real_with(&model, "mlx-cpu", &worker)?.start().await?;
        let calm = answer(&gateway).await?;
        assert_eq!(calm.text, expected.text);
        let provenance = calm.provenance()?;
        assert_eq!(provenance.backend(), Backend::MlxCpu);
        // Where nothing but the next token is wanted, the device draws it.
        assert_eq!(provenance.sampler(), Backend::MlxCpu);
        assert!(provenance.kernel.starts_with("mlx "), "{provenance:?}");
        assert_eq!(provenance.fallback_reason, "");

        let mut stream = gateway.client().chat(question(), None).await?;
        let head = first_token(&mut stream).await?;
        signal(gateway.ready_worker().await?.pid, Signal::KILL)?;
        let rest = whole(stream).await?;
        assert_eq!(format!("{}{}", head.text, rest.text), calm.text);
        let usage = rest.usage()?;
        assert_eq!((usage.recoveries, usage.replay.as_str()), (1, "equivalent"));
        Ok(())
    })
}

#[test]
fn the_table_tells_what_the_worker_with_mlx_can_do() -> anyhow::Result<()> {
    let Some((model, worker)) = model_and_worker() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real_with(&model, "auto", &worker)?.start().await?;
        let found = capabilities(&gateway).await?;
        let mlx_cpu = of(&found, Backend::MlxCpu);
        assert!(mlx_cpu.available, "{mlx_cpu:?}");
        assert!(of(&found, Backend::Cpu).batch_invariant);
        assert!(
            found
                .ops
                .iter()
                .any(|op| op.backend() == Backend::MlxCpu && op.max_error > Some(0.0))
        );
        if cfg!(target_os = "linux") {
            let metal = of(&found, Backend::Metal);
            assert!(!metal.available);
            assert_eq!(metal.reason, "Metal exists on macOS only");
            // The stronger of what is there.
            assert_eq!(
                answer(&gateway).await?.provenance()?.backend(),
                Backend::Cpu
            );
            let metal_only = ChatRequest {
                policy: Some(policy(&[Backend::Metal], OnMissing::Error)),
                ..question()
            };
            let refused = chatted(&gateway.client(), metal_only).await;
            refused_for(refused, Reason::BackendUnavailable)?;
        }
        Ok(())
    })
}

#[test]
fn where_the_library_cannot_be_loaded_the_plain_worker_says_why() -> anyhow::Result<()> {
    let Some((model, _)) = model_and_worker() else {
        return Ok(());
    };
    if !cfg!(target_os = "linux") {
        return Ok(());
    }
    story(|| async move {
        // The loader prefers this folder to the one that is written in the executable.
        let broken = tempfile::tempdir()?;
        std::fs::write(broken.path().join("libmlx.so"), b"no library")?;
        let plan = Plan::real_choosing(&model, "auto")?;
        let gateway = plan
            .environment("LD_LIBRARY_PATH", broken.path())
            .start()
            .await?;
        let found = capabilities(&gateway).await?;
        let mlx_cpu = of(&found, Backend::MlxCpu);
        assert!(!mlx_cpu.available);
        assert!(
            mlx_cpu.reason.contains("velox-kernel-worker-mlx"),
            "{mlx_cpu:?}"
        );
        assert!(mlx_cpu.reason.contains("libmlx.so"), "{mlx_cpu:?}");
        assert_eq!(
            answer(&gateway).await?.provenance()?.backend(),
            Backend::Cpu
        );
        Ok(())
    })
}
