//! A gateway under test.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tonic::transport::Channel;
use velox_client::Client;
use velox_client::endpoint::Endpoint;
use velox_proto::v1::{GetPoolRequest, GetPoolResponse, Worker, WorkerState};
use velox_proto::worker::v1::fault_service_client::FaultServiceClient;
use velox_proto::worker::v1::{Fault, InjectFaultRequest};

use crate::process;
use crate::programs::program;
use crate::story::{eventually, keep_log};

/// Longest start: loading a model and probing every op on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(180);

/// Name that the first model is served under.
pub const MODEL: &str = "under-test";

/// How to start a gateway.
#[derive(Debug)]
pub struct Plan {
    program: PathBuf,
    arguments: Vec<OsString>,
    environment: Vec<(String, OsString)>,
    folder: TempDir,
    socket: PathBuf,
}

impl Plan {
    /// Plans a gateway with one real worker, the plain one, that computes with one thread on the given backend.
    ///
    /// # Errors
    /// If a program is missing.
    pub fn real(model: &Path, backend: &str) -> anyhow::Result<Self> {
        Self::real_with(model, backend, &program("velox-kernel-worker")?)
    }

    /// The same with another executable of the worker.
    ///
    /// # Errors
    /// If a program is missing.
    pub fn real_with(model: &Path, backend: &str, worker: &Path) -> anyhow::Result<Self> {
        Ok(Self::real_choosing(model, backend)?.argument("--worker-program", worker))
    }

    /// The same with the executable that the gateway chooses.
    ///
    /// # Errors
    /// If a program is missing.
    pub fn real_choosing(model: &Path, backend: &str) -> anyhow::Result<Self> {
        let mut source = model.as_os_str().to_owned();
        source.push(format!("={MODEL}"));
        let plan = Self::bare(program("velox-gateway")?)?;
        Ok(plan
            .argument("--model", source)
            .argument("--backend", backend)
            .argument("--threads", "1"))
    }

    /// Plans a gateway with one worker of the given mode; see the `Behaviour` of `velox-fake-worker`.
    ///
    /// # Errors
    /// If a program is missing.
    pub fn fake(modes: &str) -> anyhow::Result<Self> {
        let fake = program("velox-fake-worker")?;
        let plan = Self::bare(program("velox-gateway")?)?;
        let model = plan.folder.path().join("fake.gguf");
        std::fs::write(&model, b"GGUF")?;
        let state = plan.folder.path().join("processes");
        std::fs::create_dir(&state)?;
        let mut source = model.into_os_string();
        source.push(format!("={MODEL}"));
        Ok(plan
            .argument("--worker-program", fake)
            .argument("--model", source)
            .environment("VELOX_FAKE", modes)
            .environment("VELOX_FAKE_STATE", state))
    }

    /// Plans a gateway without a model, worker or options.
    ///
    /// # Errors
    /// If there is no temporary folder.
    pub fn bare(program: PathBuf) -> anyhow::Result<Self> {
        // The system's folder: the path of a socket may not be long.
        let folder = tempfile::Builder::new().prefix("velox-e2e-").tempdir()?;
        Ok(Self {
            program,
            arguments: Vec::new(),
            environment: Vec::new(),
            socket: folder.path().join("gateway.sock"),
            folder,
        })
    }

    /// Sets the number of workers.
    #[must_use]
    pub fn workers(self, count: u32) -> Self {
        self.argument("--workers", count.to_string())
    }

    /// Adds an option with its value.
    #[must_use]
    pub fn argument(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.arguments.extend([name.into(), value.into()]);
        self
    }

    /// Sets a variable of the gateway and its workers.
    #[must_use]
    pub fn environment(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Lets it listen on the socket of another gateway.
    #[must_use]
    pub fn on_socket(mut self, socket: &Path) -> Self {
        socket.clone_into(&mut self.socket);
        self
    }

    /// Makes the command without its end-of-input rule and standard streams.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .arg("--socket")
            .arg(&self.socket)
            // What the person who runs the tests serves is not under test.
            .env_remove("VELOX_MODEL")
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Starts it and waits until it serves.
    ///
    /// # Errors
    /// If it ends before, or takes too long; its log is shown with the story.
    pub async fn start(self) -> anyhow::Result<Gateway> {
        let log = self.folder.path().join("gateway.log");
        let mut command = self.command();
        command
            .args(["--listen", "none", "--exit-with-stdin"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(
                std::fs::File::options()
                    .create(true)
                    .append(true)
                    .open(&log)?,
            );
        let mut child = command
            .spawn()
            .with_context(|| self.program.display().to_string())?;
        let stdout = child.stdout.take().context("no standard output")?;
        let stdin = child.stdin.take();
        let mut started = Started { child, stdin, log };
        let line = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            BufReader::new(stdout)
                .read_line(&mut line)
                .map(|_length| line)
        });
        let line = tokio::time::timeout(START_LIMIT, line)
            .await
            .context("it does not serve")???;
        if line.is_empty() {
            let status = started.child.wait()?;
            anyhow::bail!("the gateway ended before it served: {status}");
        }
        let ready: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
        let endpoint = Endpoint::Unix(self.socket.clone());
        let client = Client::connect(std::slice::from_ref(&endpoint)).await?;
        Ok(Gateway {
            started,
            client,
            endpoint,
            ready,
            folder: self.folder,
        })
    }
}

/// A child that is killed with everything that it started, whatever happens.
#[derive(Debug)]
struct Started {
    child: Child,
    stdin: Option<ChildStdin>,
    log: PathBuf,
}

impl Drop for Started {
    fn drop(&mut self) {
        let children = process::children(self.child.id()).unwrap_or_default();
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in children {
            // A worker ends by itself when its gateway is gone; one that was stopped cannot.
            let _ = process::signal(pid, Signal::KILL);
        }
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        keep_log(&format!("log of gateway {}", self.child.id()), &text);
    }
}

/// A gateway that serves on a Unix socket of its own.
#[derive(Debug)]
pub struct Gateway {
    // Dropped in this order: the folder goes after the process that uses it.
    started: Started,
    client: Client,
    endpoint: Endpoint,
    ready: Value,
    folder: TempDir,
}

impl Gateway {
    /// Returns the one connection that a test has by default.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Opens a connection of its own.
    ///
    /// # Errors
    /// If the gateway does not answer.
    pub async fn connect(&self) -> anyhow::Result<Client> {
        Ok(Client::connect(std::slice::from_ref(&self.endpoint)).await?)
    }

    /// Returns a channel for services that the client library does not know.
    #[must_use]
    pub fn channel(&self) -> Channel {
        self.client.channel()
    }

    /// Returns where it listens.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the path of its socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        match &self.endpoint {
            Endpoint::Unix(path) => path.clone(),
            Endpoint::Tcp(_) => PathBuf::new(),
        }
    }

    /// Returns its folder; it is removed with the gateway.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the line that it said when it began to serve.
    #[must_use]
    pub fn ready(&self) -> &Value {
        &self.ready
    }

    /// Returns its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.started.child.id()
    }

    /// Returns its log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.started.log).unwrap_or_default()
    }

    /// Asks what it is doing.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn pool(&self) -> anyhow::Result<GetPoolResponse> {
        Ok(self
            .client
            .admin()
            .get_pool(GetPoolRequest {})
            .await?
            .into_inner())
    }

    /// Returns the workers.
    ///
    /// # Errors
    /// If it does not answer.
    pub async fn workers(&self) -> anyhow::Result<Vec<Worker>> {
        Ok(self.pool().await?.workers)
    }

    /// Returns the first worker, once it is ready.
    ///
    /// # Errors
    /// If it does not become ready.
    pub async fn ready_worker(&self) -> anyhow::Result<Worker> {
        eventually("a worker to be ready", async || {
            let workers = self.workers().await?;
            Ok(workers
                .into_iter()
                .find(|worker| worker.state() == WorkerState::Ready))
        })
        .await
    }

    /// Waits until every worker is ready.
    ///
    /// # Errors
    /// If one does not become ready.
    pub async fn all_ready(&self) -> anyhow::Result<Vec<Worker>> {
        eventually("all workers to be ready", async || {
            let workers = self.workers().await?;
            let all = workers
                .iter()
                .all(|worker| worker.state() == WorkerState::Ready);
            Ok(all.then_some(workers))
        })
        .await
    }

    /// Arms a fault in a worker.
    ///
    /// # Errors
    /// If the gateway was built without the hooks.
    pub async fn inject(&self, worker: &str, fault: Fault, after_plans: u32) -> anyhow::Result<()> {
        let request = InjectFaultRequest {
            fault: fault.into(),
            after_plans,
            worker_id: worker.to_owned(),
        };
        FaultServiceClient::new(self.channel())
            .inject_fault(request)
            .await
            .context("programs are built without fault-hooks")?;
        Ok(())
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// If it is gone.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        process::signal(self.pid(), signal)
    }

    /// Closes its standard input.
    pub fn close_stdin(&mut self) {
        drop(self.started.stdin.take());
    }

    /// Waits until it ended.
    ///
    /// # Errors
    /// If it does not end.
    pub async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        let child = &mut self.started.child;
        eventually("the gateway to end", async || Ok(child.try_wait()?)).await
    }
}
