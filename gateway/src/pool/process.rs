//! A worker process: spawned with its two channels as standard input and output, always reaped.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStderr, Command};
use tokio_util::task::TaskTracker;

use super::config::PoolConfig;
use super::event::{LossCause, WorkerKey};

/// Longest line of a worker's log that is passed on in one piece.
const MAX_LOG_LINE_BYTES: u64 = 4096;

/// How often it is said that a killed process is still not reaped.
const REAP_WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// Time that the last lines of a log have to arrive after the process ended.
const LOG_LINGER: Duration = Duration::from_millis(200);

/// A child and its process id. Killed and reaped by the runtime if dropped early.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    child: Child,
    pid: u32,
    key: WorkerKey,
    log: Option<tokio::task::JoinHandle<()>>,
}

/// A fresh child and our ends of its channels.
#[derive(Debug)]
pub(super) struct Spawned {
    pub(super) process: WorkerProcess,
    pub(super) control: UnixStream,
    pub(super) step: UnixStream,
}

impl WorkerProcess {
    /// Starts the program. Both socket pairs are closed on exec, so no other child keeps a channel open.
    pub(super) fn spawn(
        config: &PoolConfig,
        key: WorkerKey,
        tracker: &TaskTracker,
    ) -> io::Result<Spawned> {
        let (control, control_of_worker) = channel()?;
        let (step, step_of_worker) = channel()?;
        let program = &config.worker_program;
        let mut command = Command::new(&program.path);
        if let Some(why) = &program.why_no_mlx {
            command.arg("--why-no-mlx").arg(why);
        }
        if let Some(threads) = config.threads_per_worker {
            command.arg("--threads").arg(threads.to_string());
        }
        if let Some(limit) = config.cache_limit_bytes {
            command.arg("--cache-limit-bytes").arg(limit.to_string());
        }
        let mut child = command
            .stdin(Stdio::from(control_of_worker))
            .stdout(Stdio::from(step_of_worker))
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let pid = child
            .id()
            .ok_or_else(|| io::Error::other("the process has no id"))?;
        let log = child
            .stderr
            .take()
            .map(|stderr| tracker.spawn(pass_on_log(stderr, key)));
        let process = Self {
            child,
            pid,
            key,
            log,
        };
        Ok(Spawned {
            process,
            control,
            step,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until the process ends, and reaps it.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn exited(&mut self) -> LossCause {
        match self.child.wait().await {
            Ok(status) => cause_of(status),
            Err(error) => {
                tracing::error!(worker = %self.key, %error, "process cannot be waited for");
                LossCause::ChannelClosed
            }
        }
    }

    /// Waits for a process that should end by itself, for at most `grace`; else kills it. Reaped on return.
    /// Returns how it ended, unless it had to be killed.
    pub(super) async fn end_by_itself(&mut self, grace: Duration) -> Option<LossCause> {
        if let Ok(cause) = tokio::time::timeout(grace, self.exited()).await {
            self.finish_log().await;
            return Some(cause);
        }
        self.kill().await;
        None
    }

    /// Asks the process to end and kills it after `grace`. Reaped on return.
    pub(super) async fn terminate(&mut self, grace: Duration) {
        self.signal(Signal::TERM);
        let _how = self.end_by_itself(grace).await;
    }

    /// Kills the process, also a stopped one. Reaped on return.
    pub(super) async fn kill(&mut self) {
        self.signal(Signal::KILL);
        // Its memory must not be given to anybody else before it is really gone, so this waits without an
        // end, and says so. Only a process stuck in the kernel takes longer than an instant.
        while tokio::time::timeout(REAP_WARNING_INTERVAL, self.exited())
            .await
            .is_err()
        {
            tracing::error!(worker = %self.key, pid = self.pid, "killed process is not gone yet");
        }
        self.finish_log().await;
    }

    /// A child that was not reaped keeps its id, so the signal cannot reach a stranger.
    fn signal(&self, signal: Signal) {
        let unreaped = self
            .child
            .id()
            .and_then(|pid| i32::try_from(pid).ok())
            .and_then(Pid::from_raw);
        if let Some(pid) = unreaped
            && let Err(error) = kill_process(pid, signal)
        {
            tracing::error!(worker = %self.key, %error, "signal could not be sent");
        }
    }

    /// Lets the last lines arrive. A grandchild could hold the pipe open for ever, hence the limit.
    async fn finish_log(&mut self) {
        if let Some(mut log) = self.log.take()
            && tokio::time::timeout(LOG_LINGER, &mut log).await.is_err()
        {
            log.abort();
        }
    }
}

/// Makes a socket pair: our end does not block, the worker's does.
fn channel() -> io::Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = StdUnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((UnixStream::from_std(ours)?, theirs.into()))
}

fn cause_of(status: ExitStatus) -> LossCause {
    match (status.code(), status.signal()) {
        (Some(code), _) => LossCause::Exited(code),
        (None, Some(signal)) => LossCause::Killed(signal),
        (None, None) => LossCause::ChannelClosed,
    }
}

/// Passes a worker's log on, line by line; an endless line comes in pieces.
async fn pass_on_log(stderr: ChildStderr, key: WorkerKey) {
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut limited = (&mut reader).take(MAX_LOG_LINE_BYTES);
        match limited.read_until(b'\n', &mut line).await {
            Ok(length) if length > 0 => {
                let text = String::from_utf8_lossy(&line);
                tracing::info!(target: "velox_kernel_worker", worker = %key, "{}", text.trim_end());
            }
            Ok(_) | Err(_) => return,
        }
    }
}
