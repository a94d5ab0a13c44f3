//! `up`, `down` and `status`: the gateway as a whole.

use std::time::Duration;

use serde_json::{Value, json};
use velox_client::Client;
use velox_client::endpoint::{Endpoint, default_socket};
use velox_client::error::ClientError;
use velox_client::local::{GatewayOptions, Lifetime, LocalGateway};
use velox_client::trace::traced;
use velox_proto::v1::{GetPoolRequest, GetPoolResponse, ShutdownRequest, WorkerState};

use crate::args::{DownArguments, Target};
use crate::cmd::Verdict;
use crate::cmd::render::{backend_label, backend_name};
use crate::output::{Format, Output, table};
use crate::session::{Session, WhenNoneRuns, gateway_options};

/// Between two looks at a gateway that is going down.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What a gateway gets beyond its grace before `down` gives up.
const EXIT_MARGIN: Duration = Duration::from_secs(15);

/// Starts a gateway that stays.
pub(crate) async fn up(target: &Target, output: Output) -> anyhow::Result<Verdict> {
    anyhow::ensure!(
        !target.local,
        "up starts a gateway that stays; --local contradicts it"
    );
    anyhow::ensure!(
        target.model().is_some(),
        "give --model PATH or set VELOX_MODEL"
    );
    let endpoint = match &target.endpoint {
        Some(endpoint) => endpoint.clone(),
        None => Endpoint::Unix(default_socket()),
    };
    if let Ok(client) = Client::connect(std::slice::from_ref(&endpoint)).await {
        output.note(&format!(
            "a gateway already serves at {}",
            client.endpoint()
        ));
        return Ok(Verdict::No);
    }
    let options = GatewayOptions {
        log_file: Some(endpoint.log_file()),
        ..gateway_options(target)
    };
    let spinner = output.spinner("loading".to_owned());
    let gateway =
        tokio::task::spawn_blocking(move || LocalGateway::start(&options, Lifetime::Detached))
            .await??;
    spinner.finish_and_clear();
    match output.format {
        Format::Json => output.json(&json!({
            "endpoint": gateway.endpoint().to_string(),
            "pid": gateway.pid(),
        }))?,
        Format::Text => output.text(&format!(
            "gateway {} serves at {}\n",
            gateway.pid(),
            gateway.endpoint()
        ))?,
    }
    Ok(Verdict::Yes)
}

/// Stops a gateway and waits until it is gone.
pub(crate) async fn down(
    target: &Target,
    arguments: DownArguments,
    output: Output,
) -> anyhow::Result<Verdict> {
    let session = match Session::open(target, WhenNoneRuns::Fail, output).await {
        Ok(session) => session,
        Err(error) if is_not_running(&error) => {
            output.note("no gateway runs");
            return Ok(Verdict::No);
        }
        Err(error) => return Err(error),
    };
    let pid = pool(&session).await?.gateway_pid;
    let request = ShutdownRequest {
        grace_ms: Some(arguments.grace.saturating_mul(1000)),
    };
    session
        .client
        .admin()
        .shutdown(traced(request, session.deadline()))
        .await
        .map_err(ClientError::from)?;
    drop(session);
    let patience = Duration::from_secs(u64::from(arguments.grace)) + EXIT_MARGIN;
    let gone = tokio::time::timeout(patience, async {
        while is_alive(pid) {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    });
    if gone.await.is_err() {
        anyhow::bail!(
            "gateway {pid} is still there after {} s",
            patience.as_secs()
        );
    }
    output.note(&format!("gateway {pid} is gone"));
    Ok(Verdict::Yes)
}

fn is_not_running(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<ClientError>(),
        Some(ClientError::NotRunning { .. })
    )
}

fn is_alive(pid: u32) -> bool {
    i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw)
        .is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
}

/// Shows what the gateway is doing.
pub(crate) async fn status(target: &Target, output: Output) -> anyhow::Result<Verdict> {
    let session = match Session::open(target, WhenNoneRuns::Fail, output).await {
        Ok(session) => session,
        Err(error) if is_not_running(&error) => {
            output.note(&format!("{error:#}"));
            return Ok(Verdict::No);
        }
        Err(error) => return Err(error),
    };
    let pool = pool(&session).await?;
    match output.format {
        Format::Json => output.json(&pool_json(&session, &pool))?,
        Format::Text => output.text(&text(&session, &pool))?,
    }
    let ready = pool
        .workers
        .iter()
        .any(|worker| worker.state() == WorkerState::Ready);
    Ok(if ready { Verdict::Yes } else { Verdict::No })
}

/// Asks the gateway.
pub(crate) async fn pool(session: &Session) -> Result<GetPoolResponse, ClientError> {
    let request = traced(GetPoolRequest {}, session.deadline());
    Ok(session.client.admin().get_pool(request).await?.into_inner())
}

fn state_name(state: WorkerState) -> &'static str {
    match state {
        WorkerState::Unspecified => "unknown",
        WorkerState::Starting => "starting",
        WorkerState::Loading => "loading",
        WorkerState::Ready => "ready",
        WorkerState::Draining => "draining",
        WorkerState::Backoff => "backoff",
        WorkerState::Quarantined => "quarantined",
        WorkerState::Stopped => "stopped",
    }
}

fn text(session: &Session, pool: &GetPoolResponse) -> String {
    let mut text = format!(
        "gateway {} at {}: {} running, {} waiting, cache {} bytes, shared memory {} bytes leased\n",
        pool.gateway_pid,
        session.client.endpoint(),
        pool.running,
        pool.waiting,
        pool.kv_bytes,
        pool.shm_leased_bytes,
    );
    let rows: Vec<Vec<String>> = pool
        .workers
        .iter()
        .map(|worker| {
            vec![
                worker.id.clone(),
                worker.pid.to_string(),
                state_name(worker.state()).to_owned(),
                worker.restarts.to_string(),
                backend_name(worker.backend()).to_owned(),
                worker.model.clone(),
                worker.last_exit.clone(),
            ]
        })
        .collect();
    let header = [
        "WORKER",
        "PID",
        "STATE",
        "RESTARTS",
        "BACKEND",
        "MODEL",
        "LAST EXIT",
    ];
    text.push_str(&table(&header, &rows));
    text
}

fn pool_json(session: &Session, pool: &GetPoolResponse) -> Value {
    json!({
        "endpoint": session.client.endpoint().to_string(),
        "gateway": {"pid": pool.gateway_pid},
        "workers": pool.workers.iter().map(|worker| json!({
            "id": worker.id,
            "pid": worker.pid,
            "state": state_name(worker.state()),
            "restarts": worker.restarts,
            "backend": backend_label(worker.backend()),
            "model": worker.model,
            "last_exit": worker.last_exit,
            "rows": worker.rows,
        })).collect::<Vec<_>>(),
        "running": pool.running,
        "waiting": pool.waiting,
        "kv_bytes": pool.kv_bytes,
        "shm_bytes": pool.shm_leased_bytes,
        "shm_segment_bytes": pool.shm_segment_bytes,
        "default_model": pool.default_model,
    })
}
