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

use velox_proto::error::Reason;

use crate::args::{Arguments, Command};
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
        Command::Chat(chat) => chat::run(target, chat, output).await,
        Command::Generate(generate) => generate::run(target, generate, output).await,
        Command::Tokenize(tokenize) => tokenize::run(target, tokenize, output).await,
        Command::Eval(eval) => eval::run(target, eval, output).await,
        Command::Models(models) => models::run(target, models, output).await,
        Command::Capabilities => capabilities::run(target, output).await,
        Command::Doctor => doctor::run(target, output).await,
        Command::Up => pool::up(target, output).await,
        Command::Down(down) => pool::down(target, down, output).await,
        Command::Status => pool::status(target, output).await,
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

/// Whether a reason says "no" rather than that something broke.
pub(crate) fn is_negative_answer(reason: Reason) -> bool {
    !matches!(
        reason,
        Reason::Internal | Reason::NumericError | Reason::WorkerUnavailable | Reason::Cancelled
    )
}
