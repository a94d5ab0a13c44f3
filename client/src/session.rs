//! From what was typed to a connected gateway.

use std::time::Duration;

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
    _gateway: Option<LocalGateway>,
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
        let candidates = match &target.endpoint {
            Some(endpoint) => vec![endpoint.clone()],
            None => Endpoint::default_candidates(),
        };
        match Client::connect(&candidates).await {
            Ok(client) => Ok(Self {
                client,
                target: target.clone(),
                _gateway: None,
            }),
            Err(ClientError::NotRunning { .. })
                if when_none_runs == WhenNoneRuns::Start
                    && target.endpoint.is_none()
                    && target.model.is_some() =>
            {
                Self::start(target, output).await
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn start(target: &Target, output: Output) -> anyhow::Result<Self> {
        anyhow::ensure!(
            target.model.is_some(),
            "--local needs a model: give --model PATH or set VELOX_MODEL"
        );
        let folder = std::env::temp_dir();
        let name = format!("velox-local-{}.sock", std::process::id());
        let options = GatewayOptions {
            endpoint: Some(Endpoint::Unix(folder.join(name))),
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
            _gateway: Some(gateway),
        })
    }

    /// Returns the name of the model to ask for: empty = the gateway's default.
    ///
    /// A path names the file that a started gateway loads, so its only model is the default.
    pub(crate) fn model(&self) -> String {
        match &self.target.model {
            Some(model) if self._gateway.is_none() && !model.contains('/') => model.clone(),
            _ => String::new(),
        }
    }

    /// Returns the deadline of each call.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.target
            .timeout
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
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

/// Translates what was typed into a gateway's options.
pub(crate) fn gateway_options(target: &Target) -> GatewayOptions {
    GatewayOptions {
        models: target.model.iter().cloned().collect(),
        workers: target.workers,
        threads: target.threads,
        backend: target.backend.map(|backend| {
            use clap::ValueEnum as _;
            backend
                .to_possible_value()
                .map_or_else(String::new, |value| value.get_name().to_owned())
        }),
        kv: target.kv.clone(),
        endpoint: target.endpoint.clone(),
        log_file: None,
    }
}
