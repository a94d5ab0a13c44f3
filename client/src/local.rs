//! Starts a gateway: for one command, or to stay.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::endpoint::Endpoint;
use crate::error::ClientError;

/// Name of the gateway's executable, beside ours.
const GATEWAY_PROGRAM: &str = "velox-gateway";

/// Longest line that a gateway may say before it serves.
const MAX_READY_LINE_BYTES: u64 = 64 * 1024;

/// What a gateway is started with.
#[derive(Debug, Clone, Default)]
pub struct GatewayOptions {
    /// Models to load, `PATH`, `NAME` or `PATH=NAME`.
    pub models: Vec<String>,
    /// Worker processes.
    pub workers: Option<u32>,
    /// Compute threads of each.
    pub threads: Option<u32>,
    /// Backend by its name on the command line.
    pub backend: Option<String>,
    /// KV method.
    pub kv: Option<String>,
    /// Where it shall listen; `None` = its defaults.
    pub endpoint: Option<Endpoint>,
    /// File for its log; `None` = our standard error.
    pub log_file: Option<PathBuf>,
}

/// How long a started gateway lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// Until the handle is dropped, or this process ends for whatever reason.
    WithUs,
    /// Until somebody shuts it down.
    Detached,
}

/// A gateway that serves.
#[derive(Debug)]
pub struct LocalGateway {
    endpoint: Endpoint,
    child: Child,
    lifetime: Lifetime,
}

impl LocalGateway {
    /// Starts a gateway and waits until it serves: a worker has loaded every model. Blocks.
    ///
    /// # Errors
    /// [`ClientError::Spawn`] or [`ClientError::NotServing`].
    pub fn start(options: &GatewayOptions, lifetime: Lifetime) -> Result<Self, ClientError> {
        let program = gateway_program()?;
        let spawn_failed = |source| ClientError::Spawn {
            program: program.display().to_string(),
            source,
        };
        let mut command = Command::new(&program);
        arguments(&mut command, options, lifetime);
        if let Some(log) = &options.log_file {
            command.stderr(Stdio::from(open_log(log).map_err(spawn_failed)?));
        }
        let mut child = command.spawn().map_err(spawn_failed)?;
        match ready_line(&mut child) {
            Ok(endpoint) => Ok(Self {
                endpoint,
                child,
                lifetime,
            }),
            Err(problem) => {
                // It may still be loading something that it will never be asked for.
                let _ = child.kill();
                let status = child.wait().ok();
                Err(ClientError::NotServing(explain(problem, status, options)))
            }
        }
    }

    /// Returns where it listens.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for LocalGateway {
    fn drop(&mut self) {
        if self.lifetime == Lifetime::WithUs {
            // End of file on its standard input makes it drain and exit.
            drop(self.child.stdin.take());
            let _ = self.child.wait();
        }
    }
}

fn arguments(command: &mut Command, options: &GatewayOptions, lifetime: Lifetime) {
    for model in &options.models {
        command.arg("--model").arg(model);
    }
    let mut option = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            command.arg(name).arg(value);
        }
    };
    option("--workers", options.workers.map(|count| count.to_string()));
    option("--threads", options.threads.map(|count| count.to_string()));
    option("--backend", options.backend.clone());
    option("--kv", options.kv.clone());
    match &options.endpoint {
        None => {}
        Some(Endpoint::Unix(path)) => {
            option("--socket", Some(path.display().to_string()));
            option("--listen", Some("none".to_owned()));
        }
        Some(Endpoint::Tcp(address)) => {
            option("--socket", Some("none".to_owned()));
            option("--listen", Some(address.clone()));
        }
    }
    command.stdout(Stdio::piped());
    match lifetime {
        Lifetime::WithUs => {
            command.arg("--exit-with-stdin").stdin(Stdio::piped());
        }
        Lifetime::Detached => {
            use std::os::unix::process::CommandExt as _;
            // An own process group: the terminal's interrupt is not for it.
            command.stdin(Stdio::null()).process_group(0);
        }
    }
}

/// Finds the gateway beside our own executable.
fn gateway_program() -> Result<PathBuf, ClientError> {
    let own = std::env::current_exe().map_err(|source| ClientError::Spawn {
        program: GATEWAY_PROGRAM.to_owned(),
        source,
    })?;
    Ok(own.with_file_name(GATEWAY_PROGRAM))
}

fn open_log(path: &Path) -> std::io::Result<std::fs::File> {
    use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
    if let Some(folder) = path.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)?;
    }
    std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
}

/// Reads the line with which the gateway says where it listens.
fn ready_line(child: &mut Child) -> Result<Endpoint, String> {
    let stdout = child.stdout.take().ok_or("it has no standard output")?;
    let mut line = String::new();
    let mut reader = BufReader::new(std::io::Read::take(stdout, MAX_READY_LINE_BYTES));
    reader
        .read_line(&mut line)
        .map_err(|error| error.to_string())?;
    if line.is_empty() {
        return Err("it ended before it served".to_owned());
    }
    let ready: serde_json::Value =
        serde_json::from_str(&line).map_err(|_bad| format!("it said {:?}", line.trim_end()))?;
    let text = |key: &str| ready.get(key).and_then(|value| value.as_str());
    if let Some(socket) = text("socket") {
        return Ok(Endpoint::Unix(socket.into()));
    }
    let endpoint = text("endpoint").ok_or_else(|| format!("it said {:?}", line.trim_end()))?;
    endpoint
        .parse()
        .map_err(|error: ClientError| error.to_string())
}

fn explain(problem: String, status: Option<ExitStatus>, options: &GatewayOptions) -> String {
    let mut text = problem;
    if let Some(status) = status {
        text.push_str(&format!(" ({status})"));
    }
    if let Some(log) = &options.log_file {
        let tail = std::fs::read_to_string(log).unwrap_or_default();
        if let Some(line) = tail.lines().next_back() {
            text.push_str(&format!(": {line}"));
        }
        text.push_str(&format!("; its log is {}", log.display()));
    }
    text
}
