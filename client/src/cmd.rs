//! One file per command.

mod capabilities;
mod chat;
mod doctor;
mod eval;
mod generate;
mod models;
mod pool;
mod render;
mod tokenize;

use std::future::Future;

use crate::args::{Arguments, Command};
use crate::interrupt::Interrupt;
use crate::output::{Format, Output};

/// Answer of a command as an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// 0.
    Yes,
    /// 1: unhealthy, refused.
    No,
}

/// Runs what was typed.
pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<Verdict> {
    let output = Output {
        format: if arguments.json {
            Format::Json
        } else {
            Format::Text
        },
    };
    let target = &arguments.target;
    match arguments.command {
        // These two show what they have when they are interrupted.
        Command::Chat(chat) => chat::run(target, chat, output).await,
        Command::Generate(generate) => generate::run(target, generate, output).await,
        Command::Tokenize(tokenize) => whole(tokenize::run(target, tokenize, output), output).await,
        Command::Eval(eval) => whole(eval::run(target, eval, output), output).await,
        Command::Models(models) => whole(models::run(target, models, output), output).await,
        Command::Capabilities => whole(capabilities::run(target, output), output).await,
        Command::Doctor => whole(doctor::run(target, output), output).await,
        Command::Up => whole(pool::up(target, output), output).await,
        Command::Down(down) => whole(pool::down(target, down, output), output).await,
        Command::Status => whole(pool::status(target, output), output).await,
        Command::Completions { shell } => {
            use clap::CommandFactory as _;
            let mut script = Vec::new();
            clap_complete::generate(
                shell,
                &mut Arguments::command(),
                "velox-client",
                &mut script,
            );
            output.text(&String::from_utf8_lossy(&script))?;
            Ok(Verdict::Yes)
        }
    }
}

/// Runs a command that shows nothing before its end, unless the user presses Ctrl-C.
async fn whole(
    command: impl Future<Output = anyhow::Result<Verdict>>,
    output: Output,
) -> anyhow::Result<Verdict> {
    match Interrupt::listen()?.or(command).await {
        Some(verdict) => verdict,
        None => {
            render::interrupted("", output)?;
            Ok(Verdict::No)
        }
    }
}
