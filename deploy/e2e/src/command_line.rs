//! Calls of `velox-client`, as scripts make them.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::Context as _;
use serde_json::Value;

use crate::gateway::Gateway;
use crate::programs::program;

/// Makes a call that sees nothing of the machine that the tests run on.
///
/// # Errors
/// If the program is missing.
pub fn client() -> anyhow::Result<Command> {
    let mut command = Command::new(program("velox-client")?);
    command.env_remove("VELOX_MODEL").stdin(Stdio::null());
    Ok(command)
}

/// Calls a gateway that runs.
///
/// # Errors
/// If the program cannot be started.
pub fn call(gateway: &Gateway, arguments: &[&str]) -> anyhow::Result<Output> {
    let endpoint = gateway.endpoint().to_string();
    Ok(client()?
        .args(["--endpoint", &endpoint])
        .args(arguments)
        .output()?)
}

/// Calls with a gateway of its own.
///
/// # Errors
/// If the program cannot be started.
pub fn local(model: &Path, arguments: &[&str]) -> anyhow::Result<Output> {
    let mut command = client()?;
    command
        .args(["--local", "--threads", "1", "--model"])
        .arg(model)
        .args(arguments);
    Ok(command.output()?)
}

/// Reads the JSON lines of a call that succeeded.
///
/// # Errors
/// If it did not, or printed something else.
pub fn json(output: &Output) -> anyhow::Result<Vec<Value>> {
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{}: {said}", output.status);
    let text = std::str::from_utf8(&output.stdout)?;
    text.lines()
        .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()))
        .collect()
}

/// Returns the exit code; `None` after a signal.
#[must_use]
pub fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

/// Checks that an object has fields.
///
/// # Errors
/// If one is missing.
pub fn has(object: &Value, fields: &[&str]) -> anyhow::Result<()> {
    for field in fields {
        anyhow::ensure!(
            object.get(field).is_some(),
            "{field} is missing in {object}"
        );
    }
    Ok(())
}

/// Checks the events of a streamed answer and returns the last.
///
/// # Errors
/// If they are not those of the command-line contract.
pub fn answer(events: &[Value]) -> anyhow::Result<&Value> {
    let (done, deltas) = events.split_last().context("no events")?;
    anyhow::ensure!(done["event"] == "done", "the last event is {done}");
    let mut text = String::new();
    for delta in deltas {
        anyhow::ensure!(delta["event"] == "delta", "an early event is {delta}");
        text.push_str(delta["text"].as_str().context("a delta has no text")?);
    }
    anyhow::ensure!(
        done["text"] == text,
        "the deltas say {text:?}, the end says {done}"
    );
    has(done, &["finish_reason", "usage", "timings", "provenance"])?;
    for (part, fields) in [
        (
            "usage",
            [
                "prompt_tokens",
                "cached_tokens",
                "completion_tokens",
                "recoveries",
            ],
        ),
        (
            "timings",
            ["queue_ms", "prefill_ms", "decode_ms", "decode_tokens_per_s"],
        ),
        (
            "provenance",
            ["backend", "device", "kernel", "fallback_reason"],
        ),
    ] {
        has(&done[part], &fields)?;
    }
    Ok(done)
}
