//! `doctor`: is this installation whole, and what would make it better.

use std::path::Path;

use serde_json::json;
use velox_client::error::ClientError;

use crate::args::Target;
use crate::cmd::Verdict;
use crate::cmd::capabilities::fetch;
use crate::cmd::render::backend_name;
use crate::output::{Format, Output};
use crate::session::{Session, WhenNoneRuns};

/// Executables that belong beside ours.
const PROGRAMS: [&str; 2] = ["velox-gateway", "velox-kernel-worker"];

/// One thing that was looked at.
struct Finding {
    check: String,
    good: bool,
    advice: String,
}

/// Runs the command.
pub(crate) async fn run(target: &Target, output: Output) -> anyhow::Result<Verdict> {
    let mut findings = programs()?;
    findings.push(model(target));
    match Session::open(target, WhenNoneRuns::Fail, output).await {
        Ok(session) => findings.extend(backends(&session).await?),
        Err(error) => match error.downcast_ref::<ClientError>() {
            Some(ClientError::NotRunning { .. }) => findings.push(Finding {
                check: "gateway".to_owned(),
                good: false,
                advice: "none runs: velox-client up --model PATH".to_owned(),
            }),
            _ => return Err(error),
        },
    }
    for finding in &findings {
        match output.format {
            Format::Json => output.json(&json!({
                "check": finding.check,
                "ok": finding.good,
                "advice": finding.advice,
            }))?,
            Format::Text => output.text(&format!(
                "{} {}{}{}\n",
                if finding.good { "ok     " } else { "missing" },
                finding.check,
                if finding.advice.is_empty() { "" } else { ": " },
                finding.advice
            ))?,
        }
    }
    let whole = findings
        .iter()
        .all(|finding| finding.good || finding.check.starts_with("backend"));
    Ok(if whole { Verdict::Yes } else { Verdict::No })
}

fn programs() -> anyhow::Result<Vec<Finding>> {
    let own = std::env::current_exe()?;
    let findings = PROGRAMS.iter().map(|&name| {
        let path = own.with_file_name(name);
        let good = path.is_file();
        Finding {
            check: name.to_owned(),
            good,
            advice: if good {
                String::new()
            } else {
                format!("must lie beside velox-client, at {}", path.display())
            },
        }
    });
    Ok(findings.collect())
}

fn model(target: &Target) -> Finding {
    let check = "default model".to_owned();
    match target.model() {
        None => Finding {
            check,
            good: false,
            advice: "set VELOX_MODEL to a GGUF file; deploy/get-model fetches a small one"
                .to_owned(),
        },
        Some(path) if path.contains('/') && !Path::new(path).exists() => Finding {
            check,
            good: false,
            advice: format!("{path} does not exist"),
        },
        Some(path) => Finding {
            check,
            good: true,
            advice: path.to_owned(),
        },
    }
}

/// Says beside a reason what to do about it, where something can be done.
fn with_remedy(reason: &str) -> String {
    let remedy = if reason.contains("is not installed") {
        "; build it: cargo --config \"$(deploy/mlx-linux)\" build --release --package velox-mlx --features mlx"
    } else if reason.contains("libmlx") {
        "; deploy/mlx-linux puts MLX where the worker looks for it"
    } else {
        ""
    };
    format!("{reason}{remedy}")
}

/// What each worker's probes found, with the reason where a backend is missing.
async fn backends(session: &Session) -> anyhow::Result<Vec<Finding>> {
    let capabilities = fetch(session).await?;
    let findings = capabilities.workers.iter().flat_map(|worker| {
        worker.backends.iter().map(move |backend| Finding {
            check: format!(
                "backend {} on {}",
                backend_name(backend.backend()),
                worker.id
            ),
            good: backend.available,
            advice: if backend.available {
                format!("{} ({})", backend.device, backend.kernel)
            } else {
                with_remedy(&backend.reason)
            },
        })
    });
    Ok(findings.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_mended_has_a_remedy() {
        let missing = "velox-kernel-worker-mlx is not installed beside the gateway";
        assert!(with_remedy(missing).contains("--features mlx"));
        let unloaded = "velox-kernel-worker-mlx: libmlx.so: cannot open shared object file";
        assert!(with_remedy(unloaded).contains("deploy/mlx-linux"));
        let elsewhere = "Metal exists on macOS only";
        assert_eq!(with_remedy(elsewhere), elsewhere);
    }
}
