//! From the inherited channels to the last plan.

use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use velox_engine::offer::Offers;

use crate::command;
use crate::config::Config;
use crate::control::{ControlService, serve};
use crate::error::WorkerError;
use crate::facts::worker_facts;
use crate::probe;
use crate::step_channel::StepChannel;
use crate::tensor_thread::{Ending, TensorThread};

/// Runs with the backends that this executable has, until the gateway is gone, SIGTERM arrived or a channel failed.
///
/// # Errors
/// [`WorkerError`] by what failed; the end of the gateway is no error.
pub fn run(config: &Config, offers: Offers) -> Result<(), WorkerError> {
    start_log(config);
    let control = inherited("standard input", std::io::stdin().as_fd())?;
    let step = inherited("standard output", std::io::stdout().as_fd())?;
    control
        .set_nonblocking(true)
        .map_err(|source| WorkerError::Channel {
            channel: "control",
            source,
        })?;
    let probes = probe::run(config.compute_threads(), offers);
    let facts = worker_facts(config, &probes);

    let (commands, receiver) = command::channel()?;
    let commands = Arc::new(commands);
    let stop = Arc::new(AtomicBool::new(false));
    let (ended_sender, ended) = oneshot::channel();
    let thread_config = config.clone();
    let thread_stop = Arc::clone(&stop);
    // Not joined: when the gateway is gone the process ends in the middle of whatever it computes, as it should.
    std::thread::Builder::new()
        .name("tensor".to_owned())
        .spawn(move || {
            // Made here: models and device streams never leave their thread.
            let thread = TensorThread::new(
                thread_config,
                probes.probed,
                StepChannel::new(step),
                receiver,
                thread_stop,
            );
            // If the thread panics the sender is dropped, which `ended` reports.
            let _ = ended_sender.send(thread.run());
        })
        .map_err(|source| WorkerError::Channel {
            channel: "tensor thread",
            source,
        })?;

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| WorkerError::Channel {
            channel: "control",
            source,
        })?;
    runtime.block_on(async {
        let mut terminate =
            signal(SignalKind::terminate()).map_err(|source| WorkerError::Channel {
                channel: "signal",
                source,
            })?;
        let service = ControlService::new(facts, Arc::clone(&commands));
        let mut ended = ended;
        let served = serve(control, service);
        tokio::pin!(served);
        tokio::select! {
            result = &mut served => result,
            result = &mut ended => finished(result),
            _ = terminate.recv() => {
                // SYNC POINT: pairs with the load in TensorThread::run; the wake-up makes it look.
                stop.store(true, Ordering::Release);
                commands.wake();
                tokio::select! {
                    result = &mut served => result,
                    result = &mut ended => finished(result),
                }
            }
        }
    })
}

/// Reports how a process ended, for people, and to whoever started it.
#[must_use]
pub fn exit_code_of(ended: &Result<(), WorkerError>) -> ExitCode {
    let Err(error) = ended else {
        return ExitCode::SUCCESS;
    };
    let mut text = format!("kernel worker: {error}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    // Nobody is left to tell if even standard error is gone.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
    ExitCode::from(2)
}

fn finished(
    ended: Result<Result<Ending, WorkerError>, oneshot::error::RecvError>,
) -> Result<(), WorkerError> {
    match ended {
        Ok(Ok(Ending::GatewayGone | Ending::Stopped)) => Ok(()),
        Ok(Err(error)) => Err(error),
        Err(_dropped) => Err(WorkerError::TensorThread("it panicked")),
    }
}

/// Takes over an inherited descriptor as a socket; the standard handle keeps its own copy.
fn inherited(
    channel: &'static str,
    descriptor: std::os::fd::BorrowedFd<'_>,
) -> Result<UnixStream, WorkerError> {
    let not_spawned = |source| WorkerError::NotSpawned { channel, source };
    let socket = UnixStream::from(descriptor.try_clone_to_owned().map_err(not_spawned)?);
    socket.peer_addr().map_err(not_spawned)?;
    Ok(socket)
}

fn start_log(config: &Config) {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_new(&config.log).unwrap_or_else(|_bad| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
}
