//! `capabilities`: what was probed.

use serde_json::{Value, json};
use velox_client::error::ClientError;
use velox_client::trace::traced;
use velox_proto::v1::{
    GetCapabilitiesRequest, GetCapabilitiesResponse, OpCapability, WorkerCapabilities,
};

use crate::args::Target;
use crate::cmd::Verdict;
use crate::cmd::render::backend_name;
use crate::output::{Format, Output, table};
use crate::session::{Session, WhenNoneRuns};

/// Runs the command.
pub(crate) async fn run(target: &Target, output: Output) -> anyhow::Result<Verdict> {
    let session = Session::open(target, WhenNoneRuns::Fail, output).await?;
    let capabilities = fetch(&session).await?;
    match output.format {
        Format::Json => output.json(&capabilities_json(&capabilities))?,
        Format::Text => output.text(&text(&capabilities))?,
    }
    Ok(Verdict::Yes)
}

/// Asks the gateway.
pub(crate) async fn fetch(session: &Session) -> Result<GetCapabilitiesResponse, ClientError> {
    let request = traced(GetCapabilitiesRequest {}, session.deadline());
    Ok(session
        .client
        .capabilities()
        .get_capabilities(request)
        .await?
        .into_inner())
}

fn text(capabilities: &GetCapabilitiesResponse) -> String {
    let gateway = capabilities.gateway.clone().unwrap_or_default();
    let mut text = format!(
        "gateway {} ({} {}), protocol {}\n",
        gateway.build, gateway.os, gateway.arch, capabilities.protocol
    );
    for worker in &capabilities.workers {
        text.push_str(&format!(
            "\nworker {}: {} on {}, kernels {}\n",
            worker.id, worker.build, worker.device, worker.kernel
        ));
        let rows: Vec<Vec<String>> = worker
            .backends
            .iter()
            .map(|backend| {
                vec![
                    backend_name(backend.backend()).to_owned(),
                    if backend.available { "yes" } else { "no" }.to_owned(),
                    backend.kernel.clone(),
                    backend.reason.clone(),
                ]
            })
            .collect();
        text.push_str(&table(&["BACKEND", "AVAILABLE", "KERNEL", "REASON"], &rows));
        text.push('\n');
        text.push_str(&table(
            &["OP", "BACKEND", "TYPES", "MAX ERROR", "WITHDRAWN"],
            &ops(worker),
        ));
    }
    text
}

/// Joins names with commas, those that differ in their group alone with strokes: `MLX_AFFINE_4_G32/64/128`.
fn folded(names: &[&str]) -> String {
    let mut folded = String::new();
    let mut open = None;
    for name in names {
        let group = name.rsplit_once("_G");
        match group {
            Some((stem, size)) if open == Some(stem) => {
                folded.push('/');
                folded.push_str(size);
            }
            _ => {
                if !folded.is_empty() {
                    folded.push(',');
                }
                folded.push_str(name);
            }
        }
        open = group.map(|(stem, _)| stem);
    }
    folded
}

/// One row per op and backend: a table that a person wants to read; `--json` has every type apart.
fn ops(worker: &WorkerCapabilities) -> Vec<Vec<String>> {
    let mut groups: Vec<(&str, i32, Vec<&OpCapability>)> = Vec::new();
    for op in &worker.ops {
        match groups
            .iter_mut()
            .find(|(name, backend, _)| *name == op.op && *backend == op.backend)
        {
            Some((_, _, members)) => members.push(op),
            None => groups.push((&op.op, op.backend, vec![op])),
        }
    }
    groups
        .into_iter()
        .map(|(name, _, members)| {
            let names: Vec<&str> = members
                .iter()
                .filter(|op| op.available)
                .map(|op| op.dtype.as_str())
                .collect();
            let worst = members
                .iter()
                .filter_map(|op| op.max_error)
                .fold(None, |worst, error| {
                    Some(worst.map_or(error, |worst: f64| worst.max(error)))
                });
            let withdrawn: Vec<String> = members
                .iter()
                .filter(|op| !op.available)
                .map(|op| format!("{}: {}", op.dtype, op.reason))
                .collect();
            vec![
                name.to_owned(),
                members
                    .first()
                    .map_or("", |op| backend_name(op.backend()))
                    .to_owned(),
                folded(&names),
                worst.map_or_else(|| "-".to_owned(), |error| format!("{error:.2e}")),
                withdrawn.join("; "),
            ]
        })
        .collect()
}

fn capabilities_json(capabilities: &GetCapabilitiesResponse) -> Value {
    let gateway = capabilities.gateway.clone().unwrap_or_default();
    json!({
        "protocol": capabilities.protocol,
        "gateway": {
            "build": gateway.build,
            "pid": gateway.pid,
            "os": gateway.os,
            "arch": gateway.arch,
            "max_queued_requests": gateway.max_queued_requests,
            "max_message_bytes": gateway.max_message_bytes,
        },
        "workers": capabilities.workers.iter().map(worker_json).collect::<Vec<_>>(),
    })
}

fn worker_json(worker: &WorkerCapabilities) -> Value {
    json!({
        "id": worker.id,
        "pid": worker.pid,
        "build": worker.build,
        "device": worker.device,
        "kernel": worker.kernel,
        "batch_invariant": worker.batch_invariant,
        "backends": worker.backends.iter().map(|backend| json!({
            "backend": backend_name(backend.backend()),
            "available": backend.available,
            "reason": backend.reason,
            "device": backend.device,
            "kernel": backend.kernel,
            "batch_invariant": backend.batch_invariant,
        })).collect::<Vec<_>>(),
        "ops": worker.ops.iter().map(|op| json!({
            "op": op.op,
            "dtype": op.dtype,
            "backend": backend_name(op.backend()),
            "available": op.available,
            "reason": op.reason,
            "max_error": op.max_error,
            "probe_us": op.probe_us,
        })).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_a_width_share_a_name() {
        let names = ["F32", "A_4_G32", "A_4_G64", "A_8_G32", "Q8_0", "A_8_G64"];
        assert_eq!(folded(&names), "F32,A_4_G32/64,A_8_G32,Q8_0,A_8_G64");
        assert_eq!(folded(&[]), "");
    }
}
