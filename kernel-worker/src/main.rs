//! `velox-kernel-worker`: started by `velox-gateway`, never by hand.

#![forbid(unsafe_code)]

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;
use velox_engine::offer::Offers;
use velox_kernel_worker::config::Config;
use velox_kernel_worker::lifecycle;

fn main() -> ExitCode {
    let config = Config::parse();
    match lifecycle::run(&config, Offers::of_the_host(&config.why_no_mlx)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut text = format!("velox-kernel-worker: {error}");
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                text.push_str(&format!(": {cause}"));
                source = cause.source();
            }
            // Nobody is left to tell if even standard error is gone.
            let _ = writeln!(std::io::stderr().lock(), "{text}");
            ExitCode::from(2)
        }
    }
}
