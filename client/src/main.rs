//! `velox-client`: errors to exit codes. 0 success, 1 a negative answer, 2 an error; a broken pipe is success.

#![forbid(unsafe_code)]

mod args;
mod cmd;
mod interrupt;
mod output;
mod session;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use velox_client::error::ClientError;

fn main() -> ExitCode {
    let arguments = args::Arguments::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return report(&error.into()),
    };
    let outcome = runtime.block_on(cmd::run(arguments));
    // A thread may still wait for a line or for a gateway that nobody wants any more.
    runtime.shutdown_background();
    match outcome {
        Ok(cmd::Verdict::Yes) => ExitCode::SUCCESS,
        Ok(cmd::Verdict::No) => ExitCode::from(1),
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    })
}

/// Tells people what failed; a refusal by the gateway is a negative answer.
fn report(error: &anyhow::Error) -> ExitCode {
    let known = error.downcast_ref::<ClientError>();
    let text = match known {
        // What the transport says about it is for programs.
        Some(ClientError::ConnectionLost(_)) => format!("{error}"),
        _ => format!("{error:#}"),
    };
    // Nobody is left to tell if standard error is gone.
    let _ = writeln!(std::io::stderr().lock(), "velox-client: {text}");
    let refused = known.is_some_and(ClientError::is_refusal);
    ExitCode::from(if refused { 1 } else { 2 })
}
