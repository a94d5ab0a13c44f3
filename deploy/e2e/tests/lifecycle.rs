//! Starts, ends and sudden deaths of the gateway itself.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Stdio;

use anyhow::Context as _;
use rustix::process::Signal;
use velox_e2e::ask::{first_token, generate, refused_for, still_works, streamed, whole};
use velox_e2e::gateway::Plan;
use velox_e2e::process::{self, is_alive, shared_memory_names};
use velox_e2e::programs::{long_tests, program};
use velox_e2e::story::{eventually, story};
use velox_proto::error::Reason;
use velox_proto::v1::ShutdownRequest;

#[test]
fn the_socket_is_private_and_a_second_gateway_is_refused() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let socket = gateway.socket();
        assert_eq!(
            std::fs::metadata(&socket)?.permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(gateway.ready()["socket"].as_str(), socket.to_str());
        assert_eq!(
            gateway.ready()["pid"].as_u64(),
            Some(u64::from(gateway.pid()))
        );

        let second = Plan::fake("honest")?.on_socket(&socket);
        let output = second
            .command()
            .args(["--listen", "none"])
            .stdin(Stdio::null())
            .output()?;
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("another gateway serves"), "{said}");
        assert!(output.stdout.is_empty(), "it said that it serves");
        still_works(&gateway.client()).await
    })
}

#[test]
fn addresses_that_others_can_reach_are_refused() -> anyhow::Result<()> {
    story(|| async {
        for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:50151"] {
            let plan = Plan::bare(program("velox-gateway")?)?;
            let output = plan
                .command()
                .args(["--listen", address])
                .stdin(Stdio::null())
                .output()?;
            assert!(!output.status.success(), "{address}");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(
                said.contains("only loopback addresses are allowed"),
                "{said}"
            );
        }
        Ok(())
    })
}

#[test]
fn a_killed_gateway_takes_its_workers_along_and_the_next_start_works() -> anyhow::Result<()> {
    story(|| async {
        let names = shared_memory_names();
        let rounds = if long_tests() { 20 } else { 3 };
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("gateway.sock");
        for round in 0..rounds {
            let mut gateway = Plan::fake("honest")?
                .workers(2)
                .environment("VELOX_FAKE_PLAN_MS", "2")
                .on_socket(&socket)
                .start()
                .await
                .with_context(|| format!("round {round}: a stale socket is in the way"))?;
            let mut answer = gateway
                .client()
                .generate(generate(&"x".repeat(3000), 3000), None)
                .await?;
            first_token(&mut answer).await?;
            let workers: Vec<u32> = gateway
                .all_ready()
                .await?
                .iter()
                .map(|worker| worker.pid)
                .collect();
            assert_eq!(workers.len(), 2);
            gateway.signal(Signal::KILL)?;
            gateway.ended().await?;
            assert!(whole(answer).await.is_err());
            eventually("the workers to end by themselves", async || {
                Ok((!workers.iter().any(|&pid| is_alive(pid))).then_some(()))
            })
            .await?;
            assert_eq!(shared_memory_names(), names);
        }
        Ok(())
    })
}

#[test]
fn a_terminated_gateway_finishes_what_runs_and_takes_nothing_new() -> anyhow::Result<()> {
    story(|| async {
        let mut gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "10")
            .start()
            .await?;
        let text = "finished in peace ".repeat(6);
        let client = gateway.client();
        let mut answer = client.clone().generate(generate(&text, 999), None).await?;
        let head = first_token(&mut answer).await?;
        let worker = gateway.ready_worker().await?.pid;
        gateway.signal(Signal::TERM)?;
        // It may take a moment until the signal is seen; from then on nothing new is taken.
        let refused = eventually("new requests to be refused", async || {
            let late = streamed(&client, generate("late", 1)).await;
            Ok(late.is_err().then_some(late))
        })
        .await?;
        refused_for(refused, Reason::Draining)?;
        let rest = whole(answer).await?;
        assert_eq!(head.text + &rest.text, text);
        assert!(gateway.ended().await?.success());
        assert!(!is_alive(worker));
        assert!(!gateway.socket().exists());
        Ok(())
    })
}

#[test]
fn a_gateway_ends_with_its_starter_or_when_asked() -> anyhow::Result<()> {
    story(|| async {
        let mut gateway = Plan::fake("honest")?.start().await?;
        let worker = gateway.ready_worker().await?.pid;
        gateway.close_stdin();
        assert!(gateway.ended().await?.success());
        assert!(!is_alive(worker));

        let mut gateway = Plan::fake("honest")?.start().await?;
        let mut answer = gateway
            .client()
            .generate(generate(&"x".repeat(3000), 3000), None)
            .await?;
        first_token(&mut answer).await?;
        // No grace: what runs is cut off with a reason.
        gateway
            .client()
            .admin()
            .shutdown(ShutdownRequest { grace_ms: Some(0) })
            .await?;
        if let Err(error) = whole(answer).await {
            assert!(
                error
                    .reason()
                    .is_some_and(|reason| reason.code() == tonic::Code::Unavailable)
            );
        }
        assert!(gateway.ended().await?.success());
        Ok(())
    })
}

#[test]
fn a_gateway_that_cannot_start_says_why() -> anyhow::Result<()> {
    story(|| async {
        let plan = Plan::bare(program("velox-gateway")?)?.argument("--model", "/nowhere/x.gguf");
        let output = plan
            .command()
            .args(["--listen", "none"])
            .stdin(Stdio::null())
            .output()?;
        assert!(!output.status.success());
        assert!(String::from_utf8_lossy(&output.stderr).contains("/nowhere/x.gguf"));

        // Workers that never become ready end the start, too.
        let plan = Plan::fake("exits-at-once")?;
        let mut child = plan
            .command()
            .args(["--listen", "none"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let pid = child.id();
        let ended = eventually("the start to fail", async || Ok(child.try_wait()?)).await;
        if ended.is_err() {
            process::signal(pid, Signal::KILL)?;
            child.wait()?;
        }
        assert!(!ended?.success());
        Ok(())
    })
}
