//! `velox-kernel-worker-mlx`: the kernel worker with the backends of MLX. Started by `velox-gateway`, never by hand.

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser;
use velox_kernel_worker::config::Config;
use velox_kernel_worker::lifecycle;
use velox_mlx::offers;

/// Kernel worker of Velox with MLX.
#[derive(Debug, Parser)]
#[command(name = "velox-kernel-worker-mlx", version)]
struct Arguments {
    #[command(flatten)]
    config: Config,

    /// Say on standard error why MLX cannot be used here, or exit with 0
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let found = offers::linked();
    if !arguments.check {
        return lifecycle::exit_code_of(&lifecycle::run(&arguments.config, found.offers));
    }
    match found.problem {
        None => ExitCode::SUCCESS,
        Some(problem) => {
            // Nobody is left to tell if even standard error is gone.
            let _ = writeln!(std::io::stderr().lock(), "{problem}");
            ExitCode::FAILURE
        }
    }
}
