//! The pool against real processes: this executable, started under another name, is the worker.
//!
//! The test harness of Rust prints to standard output, which is a worker's step channel, so this target has its
//! own: it runs the stories one after the other and takes a part of a name as a filter.

#![expect(
    clippy::unwrap_used,
    reason = "a test: clippy knows them by the attribute that this harness does not need"
)]

mod fake;
mod house;
mod stories;

use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args();
    let program = arguments.next().unwrap_or_default();
    if let Some(manner) = fake::Manner::of_program(&program) {
        return fake::run(manner);
    }
    let filters: Vec<String> = arguments
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    let mut failed = 0;
    for (name, story) in stories::ALL {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter.as_str())) {
            continue;
        }
        let passed = std::panic::catch_unwind(story).is_ok();
        failed += u32::from(!passed);
        let verdict = if passed { "ok" } else { "FAILED" };
        // Nobody to tell if standard error is gone.
        let _gone = writeln!(std::io::stderr().lock(), "story {name} ... {verdict}");
    }
    ExitCode::from(u8::from(failed > 0))
}
