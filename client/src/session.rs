//! From what was typed to a connected gateway.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tempfile::TempDir;
use velox_client::Client;
use velox_client::endpoint::Endpoint;
use velox_client::error::ClientError;
use velox_client::local::{GatewayOptions, Lifetime, LocalGateway};
use velox_proto::v1;

use crate::args::{BackendChoice, Target};
use crate::output::Output;

/// A connection, and the gateway that was started for it, if any.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) client: Client,
    target: Target,
    // Stops the gateway when the command is over.
    gateway: Option<Started>,
}

/// A gateway for one command. Fields drop in this order: its folder goes after it.
#[derive(Debug)]
struct Started {
    _gateway: LocalGateway,
    _folder: TempDir,
}

/// Whether a command may start a gateway when none runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhenNoneRuns {
    Start,
    Fail,
}

impl Session {
    /// Connects as the target says.
    pub(crate) async fn open(
        target: &Target,
        when_none_runs: WhenNoneRuns,
        output: Output,
    ) -> anyhow::Result<Self> {
        if target.local {
            return Self::start(target, output).await;
        }
        let may_start = when_none_runs == WhenNoneRuns::Start
            && target.endpoint.is_none()
            && target.model().is_some();
        if !may_start {
            refuse_start_options(target)?;
        }
        let candidates = match &target.endpoint {
            Some(endpoint) => vec![endpoint.clone()],
            None => Endpoint::default_candidates(),
        };
        match Client::connect(&candidates).await {
            Ok(client) => {
                refuse_start_options(target)?;
                Ok(Self {
                    client,
                    target: target.clone(),
                    gateway: None,
                })
            }
            Err(ClientError::NotRunning { .. }) if may_start => Self::start(target, output).await,
            Err(error) => Err(error.into()),
        }
    }

    async fn start(target: &Target, output: Output) -> anyhow::Result<Self> {
        anyhow::ensure!(
            target.model().is_some(),
            "--local needs a model: give --model PATH or set VELOX_MODEL"
        );
        // Nobody else may enter it, and what the gateway leaves in it goes with it.
        let folder = tempfile::Builder::new()
            .prefix("velox-local-")
            .tempdir()
            .context("cannot make a folder for the gateway's socket")?;
        let options = GatewayOptions {
            endpoint: Some(Endpoint::Unix(folder.path().join("gateway.sock"))),
            ..gateway_options(target)
        };
        let spinner = output.spinner("starting a gateway".to_owned());
        let gateway =
            tokio::task::spawn_blocking(move || LocalGateway::start(&options, Lifetime::WithUs))
                .await??;
        spinner.finish_and_clear();
        let client = Client::connect(std::slice::from_ref(gateway.endpoint())).await?;
        Ok(Self {
            client,
            target: target.clone(),
            gateway: Some(Started {
                _gateway: gateway,
                _folder: folder,
            }),
        })
    }

    /// Returns the name of the model to ask for: empty = the gateway's default.
    ///
    /// The only model of a gateway that was started for this command is its default.
    pub(crate) fn model(&self) -> String {
        match self.target.model() {
            Some(model) if self.gateway.is_none() => served_name(model),
            _ => String::new(),
        }
    }

    /// Returns the deadline of each call.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.target.timeout
    }

    /// Returns the policy of each request: a named backend is the only one allowed.
    pub(crate) fn policy(&self) -> Option<v1::BackendPolicy> {
        let backend = match self.target.backend? {
            BackendChoice::Auto => return None,
            BackendChoice::Metal => v1::Backend::Metal,
            BackendChoice::MlxCpu => v1::Backend::MlxCpu,
            BackendChoice::MlxCuda => v1::Backend::MlxCuda,
            BackendChoice::Cpu => v1::Backend::Cpu,
            BackendChoice::Reference => v1::Backend::Reference,
        };
        Some(v1::BackendPolicy {
            allowed: vec![backend.into()],
            on_missing: v1::OnMissing::Error.into(),
        })
    }
}

/// Refuses what only a started gateway would heed.
fn refuse_start_options(target: &Target) -> anyhow::Result<()> {
    for (option, given) in [
        ("--workers", target.workers.is_some()),
        ("--threads", target.threads.is_some()),
        ("--kv", target.kv.is_some()),
        ("--quantize", target.load.quantize),
        ("--max-context", target.load.max_context.is_some()),
    ] {
        anyhow::ensure!(
            !given,
            "{option} is for a gateway that starts, and this command starts none; give it to up, or with --local"
        );
    }
    Ok(())
}

/// Returns the name under which a gateway that was given this text as its model serves it.
fn served_name(text: &str) -> String {
    let path = Path::new(text);
    match text.rsplit_once('=') {
        // A path may contain the sign itself.
        Some((_, name)) if !name.is_empty() && !path.exists() => return name.to_owned(),
        _ => {}
    }
    if !text.contains('/') && !path.exists() {
        return text.to_owned();
    }
    let absolute = std::path::absolute(path).unwrap_or_else(|_empty| path.to_owned());
    // What is not on this machine can only be told by its ending: folders are named after versions, such as "1.7B".
    let is_file = absolute.is_file() || absolute.extension().is_some_and(|end| end == "gguf");
    let name = if is_file {
        absolute.file_stem()
    } else {
        absolute.file_name()
    };
    name.map_or_else(
        || text.to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}

/// Translates what was typed into a gateway's options.
pub(crate) fn gateway_options(target: &Target) -> GatewayOptions {
    GatewayOptions {
        models: target.model().map(str::to_owned).into_iter().collect(),
        workers: target.workers,
        threads: target.threads,
        backend: target.backend.map(|backend| {
            use clap::ValueEnum as _;
            backend
                .to_possible_value()
                .map_or_else(String::new, |value| value.get_name().to_owned())
        }),
        kv: target.kv.clone(),
        quantize_bits: target.load.quantize_bits(),
        max_context_tokens: target.load.max_context_tokens(),
        endpoint: target.endpoint.clone(),
        log_file: None,
        start_limit: target.timeout,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_asked_for_by_the_name_that_a_gateway_gives_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("Tiny-1.5B.Q4_1.gguf");
        std::fs::write(&file, b"GGUF").unwrap();
        let directory = folder.path().join("Qwen3-0.6B");
        std::fs::create_dir(&directory).unwrap();
        let odd = folder.path().join("a=b.gguf");
        std::fs::write(&odd, b"GGUF").unwrap();
        for (path, name) in [
            (&file, "Tiny-1.5B.Q4_1"),
            (&directory, "Qwen3-0.6B"),
            (&odd, "a=b"),
        ] {
            assert_eq!(served_name(path.to_str().unwrap()), name);
        }
        assert_eq!(served_name(&format!("{}=twin", file.display())), "twin");
        assert_eq!(served_name("/nowhere/x.gguf"), "x");
        assert_eq!(served_name("/nowhere/Qwen3-0.6B/"), "Qwen3-0.6B");
        assert_eq!(served_name("twin"), "twin");
        assert_eq!(served_name("Llama-3.2"), "Llama-3.2");
    }
}
