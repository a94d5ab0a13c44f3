//! The process: configuration, telemetry, the app, and the reasons to end.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use velox_gateway::app::App;
use velox_gateway::config::{Arguments, Config};
use velox_gateway::error::GatewayError;
use velox_gateway::telemetry::Telemetry;
use velox_proto::error::ServiceError;

/// Exit status for a negative answer, as everywhere in Velox: the gateway works and cannot serve what it was asked to.
const EXIT_REFUSED: u8 = 1;

/// Exit status for an error, as everywhere in Velox.
const EXIT_ERROR: u8 = 2;

/// Time for blocking work that still runs when everything else has ended.
const BLOCKING_GRACE: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let Err(error) = run(&arguments) else {
        return ExitCode::SUCCESS;
    };
    let refusal = error
        .downcast_ref::<GatewayError>()
        .map(ServiceError::reason)
        .filter(|reason| reason.is_refusal());
    let (reason, status) = match refusal {
        Some(reason) => (format!(" ({})", reason.name()), EXIT_REFUSED),
        None => (String::new(), EXIT_ERROR),
    };
    // Nobody is left to tell if standard error is gone.
    let _closed = writeln!(std::io::stderr().lock(), "velox-gateway: {error:#}{reason}");
    ExitCode::from(status)
}

/// Runs the gateway, and leaves behind what cannot be interrupted, such as work on a long text.
fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let outcome = runtime.block_on(async {
        let telemetry = Telemetry::start(arguments)?;
        let outcome = serve(arguments).await;
        telemetry.end().await;
        outcome
    });
    runtime.shutdown_timeout(BLOCKING_GRACE);
    outcome
}

async fn serve(arguments: &Arguments) -> anyhow::Result<()> {
    let config = Config::try_from(arguments)?;
    let grace = config.grace;
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    let stdin_ended = CancellationToken::new();
    if arguments.exit_with_stdin {
        watch_stdin(stdin_ended.clone());
    }
    let app = App::start(config).await?;
    let asked = async {
        tokio::select! {
            _ = terminate.recv() => grace,
            _ = interrupt.recv() => grace,
            () = stdin_ended.cancelled() => grace,
            grace = app.closing() => grace,
        }
    };
    let serving = async {
        tokio::select! {
            () = app.ready() => announce(&app)?,
            error = app.failure() => return Err(error.into()),
        }
        std::future::pending().await
    };
    let outcome = tokio::select! {
        grace = asked => Ok(grace),
        failed = serving => failed,
    };
    tokio::select! {
        () = app.shutdown(outcome.as_ref().copied().unwrap_or_default()) => {}
        // A second signal means now.
        _ = terminate.recv() => app.abort().await,
        _ = interrupt.recv() => app.abort().await,
    }
    outcome.map(|_grace| ())
}

/// Tells whoever started us where we serve: one JSON object on one line.
fn announce(app: &App) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", app.announcement()).context("writing to standard output")?;
    stdout.flush().context("writing to standard output")
}

/// Waits for the end of standard input on a thread of its own: a read there cannot be cancelled.
fn watch_stdin(ended: CancellationToken) {
    std::thread::spawn(move || {
        let _ended = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        ended.cancel();
    });
}
