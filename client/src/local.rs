//! Starts a gateway: for one command, or to stay.

use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::endpoint::Endpoint;
use crate::error::ClientError;

/// Name of the gateway's executable, beside ours.
const GATEWAY_PROGRAM: &str = "velox-gateway";

/// Longest line that a gateway may say before it serves.
const MAX_READY_LINE_BYTES: u64 = 64 * 1024;

/// Longest start unless told otherwise: a big model from a slow disk.
const START_LIMIT: Duration = Duration::from_secs(15 * 60);

/// What a gateway gets to end by itself: its default grace and a margin.
const EXIT_LIMIT: Duration = Duration::from_secs(45);

/// Between two looks at a gateway that is ending.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Exit status of a gateway that works and refuses what it was started with, such as a backend that is not there.
const EXIT_REFUSED: i32 = 1;

/// How much of the end of a log is read for its last line.
const LOG_TAIL_BYTES: u64 = 4096;

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
    /// Bits that float weights are quantised to.
    pub quantize_bits: Option<u32>,
    /// Most tokens of prompt and answer; `None` = the model's own limit.
    pub max_context_tokens: Option<u32>,
    /// Where it shall listen; `None` = its defaults.
    pub endpoint: Option<Endpoint>,
    /// File for its log, emptied first; `None` = our standard error.
    pub log_file: Option<PathBuf>,
    /// Longest time until it serves; `None` = 15 minutes.
    pub start_limit: Option<Duration>,
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
    /// [`ClientError::Spawn`], [`ClientError::StartRefused`] or [`ClientError::NotServing`].
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
        match ready(&mut child, options.start_limit.unwrap_or(START_LIMIT)) {
            Ok(endpoint) => Ok(Self {
                endpoint,
                child,
                lifetime,
            }),
            Err(problem) => {
                // It may still be loading something that it will never be asked for.
                let _ = child.kill();
                let status = child.wait().ok();
                let refused = status.and_then(|status| status.code()) == Some(EXIT_REFUSED);
                let explained = explain(problem, status, options);
                Err(if refused {
                    ClientError::StartRefused(explained)
                } else {
                    ClientError::NotServing(explained)
                })
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
            let started = Instant::now();
            while matches!(self.child.try_wait(), Ok(None)) {
                if started.elapsed() >= EXIT_LIMIT {
                    let _ = self.child.kill();
                    let _ = self.child.wait();
                    return;
                }
                std::thread::sleep(POLL_INTERVAL);
            }
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
    option("--bits", options.quantize_bits.map(|bits| bits.to_string()));
    option(
        "--max-context",
        options.max_context_tokens.map(|tokens| tokens.to_string()),
    );
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
    if options.quantize_bits.is_some() {
        command.arg("--quantize");
    }
    use std::os::unix::process::CommandExt as _;
    // An own process group: the terminal's interrupt is for us, who may only want to end one answer.
    command.stdout(Stdio::piped()).process_group(0);
    match lifetime {
        Lifetime::WithUs => command.arg("--exit-with-stdin").stdin(Stdio::piped()),
        Lifetime::Detached => command.stdin(Stdio::null()),
    };
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
    use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
    if let Some(folder) = path.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)?;
        // In somebody else's folder the name may lead to any file, and this one is emptied.
        if std::fs::metadata(folder)?.uid() != rustix::process::getuid().as_raw() {
            return Err(std::io::Error::new(
                std::io::ErrorKind::PermissionDenied,
                format!("{} belongs to another user", folder.display()),
            ));
        }
    }
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)?;
    log.set_len(0)?;
    Ok(log)
}

/// Waits until the gateway says where it listens.
fn ready(child: &mut Child, limit: Duration) -> Result<Endpoint, String> {
    let stdout = child.stdout.take().ok_or("it has no standard output")?;
    let (sender, receiver) = mpsc::sync_channel(1);
    // A read cannot be given up. Whoever gives up kills the gateway, and with it the thread's pipe ends.
    std::thread::spawn(move || {
        let mut line = String::new();
        let mut reader = BufReader::new(stdout.take(MAX_READY_LINE_BYTES));
        // Nobody listens any more after the limit.
        let _ = sender.send(reader.read_line(&mut line).map(|_length| line));
    });
    let line = receiver
        .recv_timeout(limit)
        .map_err(|_late| format!("it did not serve within {limit:?}"))?
        .map_err(|error| error.to_string())?;
    endpoint_of(&line)
}

/// Reads the line with which the gateway says where it listens.
fn endpoint_of(line: &str) -> Result<Endpoint, String> {
    if line.is_empty() {
        return Err("it ended before it served".to_owned());
    }
    let ready: serde_json::Value =
        serde_json::from_str(line).map_err(|_bad| format!("it said {:?}", line.trim_end()))?;
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
        if let Some(line) = last_line(log) {
            text.push_str(&format!(": {line}"));
        }
        text.push_str(&format!("; its log is {}", log.display()));
    }
    text
}

/// Reads the last line of a log, however long the log is.
fn last_line(log: &Path) -> Option<String> {
    let mut file = std::fs::File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))
        .ok()?;
    let mut tail = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut tail).ok()?;
    let tail = String::from_utf8_lossy(&tail);
    let line = tail.lines().rfind(|line| !line.trim().is_empty())?;
    Some(line.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_begins_anew_and_only_its_end_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gateway.log");
        assert_eq!(last_line(&path), None);
        std::fs::write(&path, format!("{}\nthe end\n\n", "x".repeat(100_000))).unwrap();
        assert_eq!(last_line(&path).as_deref(), Some("the end"));
        std::fs::write(&path, "x".repeat(100_000)).unwrap();
        assert_eq!(last_line(&path).map(|line| line.len()), Some(4096));
        drop(open_log(&path).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    }

    #[test]
    fn a_gateway_that_says_nothing_is_given_up() {
        let mut child = Command::new("sleep")
            .arg("1000")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let problem = ready(&mut child, Duration::from_millis(1));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(problem.unwrap_err(), "it did not serve within 1ms");
    }
}
