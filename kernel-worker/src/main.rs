//! `velox-kernel-worker`: started by `velox-gateway`, never by hand.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser as _;
use velox_engine::offer::Offers;
use velox_kernel_worker::config::Config;
use velox_kernel_worker::lifecycle;

fn main() -> ExitCode {
    let config = Config::parse();
    let offers = Offers::of_the_host(&config.why_no_mlx);
    lifecycle::exit_code_of(&lifecycle::run(&config, offers))
}
