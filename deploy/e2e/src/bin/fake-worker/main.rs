//! A worker for the tests: it copies its prompt, and lies or fails as it is told.
//!
//! It speaks the worker protocol, so the gateway cannot tell it from a real one by anything but its evidence.
//! Its model answers with the tokens of the prompt, one by one, and then with the end token: whatever turns up in
//! the wrong stream is seen at once, and a test can script any sequence of tokens by sending it as the prompt.

#![forbid(unsafe_code)]

mod behaviour;
mod control;
mod copy_model;
mod step_channel;
mod vocabulary;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use anyhow::Context as _;
use tokio::sync::oneshot;

use behaviour::{Behaviour, Mode};

/// How a worker that does not want to live ends.
const UNWILLING: u8 = 3;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            use std::io::Write as _;
            // Nobody is left to tell if even standard error is gone.
            let _ = writeln!(std::io::stderr().lock(), "velox-fake-worker: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    let behaviour = Behaviour::from_environment()?;
    if behaviour.mode == Mode::ExitsAtOnce {
        return Ok(ExitCode::from(UNWILLING));
    }
    let control = inherited(std::io::stdin().as_fd())?;
    let step = inherited(std::io::stdout().as_fd())?;
    let (sender, ended) = oneshot::channel();
    let for_steps = behaviour.clone();
    // Not joined: when the gateway is gone the process ends in the middle of whatever it does.
    std::thread::Builder::new()
        .name("tensor".to_owned())
        .spawn(move || {
            let _ = sender.send(step_channel::serve(step, &for_steps));
        })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        tokio::select! {
            served = control::serve(control, behaviour) => served,
            ended = ended => ended.context("the tensor thread panicked")?,
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Takes over an inherited descriptor as a socket; the standard handle keeps its own copy.
fn inherited(descriptor: BorrowedFd<'_>) -> anyhow::Result<UnixStream> {
    let socket = UnixStream::from(descriptor.try_clone_to_owned()?);
    socket
        .peer_addr()
        .context("a standard stream is not the gateway's socket")?;
    Ok(socket)
}
