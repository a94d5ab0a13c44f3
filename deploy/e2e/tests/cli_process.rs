//! The command line as a process: exit codes, pipes, signals, and gateways that it starts.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Output, Stdio};

use anyhow::Context as _;
use serde_json::Value;
use velox_e2e::command_line::{answer, call, client, code, has, json};
use velox_e2e::gateway::{Gateway, Plan};
use velox_e2e::process::{self, is_alive};
use velox_e2e::programs::real_model;
use velox_e2e::snapshot::Snapshot;
use velox_e2e::story::{eventually, story};

/// Variable by which the processes of one call are found.
const MARK: &str = "VELOX_E2E_MARK";

/// Makes a call whose answer is still being written when something happens to it.
fn endless(gateway: &Gateway) -> anyhow::Result<Command> {
    let mut command = client()?;
    command
        .args(["--endpoint", &gateway.endpoint().to_string()])
        .args(["generate", "a long text", "--ignore-eos"])
        .args(["--max-tokens", "3000"])
        .stdout(Stdio::piped());
    Ok(command)
}

#[test]
fn up_status_and_down() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let folder = tempfile::tempdir()?;
        let endpoint = format!("unix:{}", folder.path().join("gateway.sock").display());
        let run = |arguments: &[&OsStr]| -> anyhow::Result<Output> {
            let mut command = client()?;
            // The log of a gateway that stays lies in the runtime folder.
            command
                .env("XDG_RUNTIME_DIR", folder.path())
                .args(["--endpoint", &endpoint]);
            Ok(command.args(arguments).output()?)
        };
        let word = OsStr::new;
        assert_eq!(code(&run(&[word("status")])?), Some(1), "none runs");
        assert_eq!(code(&run(&[word("down")])?), Some(1), "none runs");

        let up = [
            word("up"),
            word("--model"),
            model.as_os_str(),
            word("--workers"),
            word("2"),
        ];
        let up = [&up[..], &[word("--threads"), word("1"), word("--json")]].concat();
        let started = json(&run(&up)?)?;
        let pid = u32::try_from(started[0]["pid"].as_u64().context("no pid")?)?;
        assert_eq!(started[0]["endpoint"], endpoint.as_str());
        // From here on somebody has to stop it.
        let checked = async {
            assert_eq!(code(&run(&up)?), Some(1), "one serves there already");
            // A gateway serves as soon as one worker does; the other one follows.
            let status = eventually("both workers to be ready", async || {
                let status = json(&run(&[word("status"), word("--json")])?)?.swap_remove(0);
                let workers = status["workers"].as_array().context("no workers")?;
                let all = workers.iter().all(|worker| worker["state"] == "ready");
                Ok((workers.len() == 2 && all).then_some(status))
            })
            .await?;
            assert_eq!(status["endpoint"], endpoint.as_str());
            assert_eq!(status["gateway"]["pid"], pid);
            has(&status, &["running", "waiting", "kv_bytes", "shm_bytes"])?;
            for worker in status["workers"].as_array().context("no workers")? {
                has(
                    worker,
                    &["id", "pid", "state", "restarts", "backend", "model"],
                )?;
            }
            let generate = ["generate", "x", "--max-tokens", "2", "--json"].map(word);
            answer(&json(&run(&generate)?)?)?;
            anyhow::Ok(())
        }
        .await;
        let down = run(&[word("down")])?;
        checked?;
        assert_eq!(
            code(&down),
            Some(0),
            "{}",
            String::from_utf8_lossy(&down.stderr)
        );
        assert!(!is_alive(pid));
        assert_eq!(code(&run(&[word("status")])?), Some(1));
        Ok(())
    })
}

#[test]
fn exit_codes_tell_answers_from_errors() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        assert_eq!(
            code(&call(&gateway, &["generate", "x", "--max-tokens", "1"])?),
            Some(0)
        );
        let refused = call(&gateway, &["--model", "nobody", "generate", "x"])?;
        assert_eq!(code(&refused), Some(1));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("MODEL_NOT_FOUND"));
        assert!(refused.stdout.is_empty());
        assert_eq!(
            code(&call(&gateway, &["--backend", "metal", "generate", "x"])?),
            Some(1)
        );
        assert_eq!(
            code(&call(&gateway, &["generate"])?),
            Some(2),
            "the prompt is missing"
        );
        assert_eq!(
            code(&call(&gateway, &["eval", "--text", "/nowhere"])?),
            Some(2)
        );
        // A path is not "whatever is the default", and what only a new gateway heeds is not ignored.
        let other = call(
            &gateway,
            &["--model", "/nowhere/other.gguf", "generate", "x"],
        )?;
        assert_eq!(code(&other), Some(1));
        assert!(String::from_utf8_lossy(&other.stderr).contains("MODEL_NOT_FOUND"));
        for option in ["--threads", "--workers", "--kv"] {
            let ignored = call(&gateway, &[option, "1", "generate", "x"])?;
            assert_eq!(code(&ignored), Some(2));
            assert!(String::from_utf8_lossy(&ignored.stderr).contains(option));
        }
        let nobody = client()?
            .args(["--endpoint", "unix:/nowhere/x.sock", "generate", "x"])
            .output()?;
        assert_eq!(code(&nobody), Some(2));
        let no_model = client()?.args(["--local", "generate", "x"]).output()?;
        assert_eq!(code(&no_model), Some(2));
        Ok(())
    })
}

#[test]
fn a_refusal_is_a_negative_answer_whoever_starts_the_gateway() -> anyhow::Result<()> {
    story(|| async {
        let folder = tempfile::tempdir()?;
        let damaged = folder.path().join("damaged.gguf");
        std::fs::write(&damaged, b"GGUF")?;
        let damaged = damaged.to_str().context("the path is text")?;
        let endpoint = format!("unix:{}", folder.path().join("gateway.sock").display());
        let mut cases = vec![
            ("/nowhere/x.gguf".to_owned(), "cpu", "MODEL_NOT_FOUND"),
            (damaged.to_owned(), "cpu", "INVALID_MODEL"),
        ];
        if let Some(model) = real_model() {
            let model = model.to_str().context("the path is text")?;
            cases.push((model.to_owned(), "metal", "BACKEND_UNAVAILABLE"));
        }
        for (model, backend, reason) in cases {
            for starts in [
                &["--local", "generate", "x"][..],
                &["--endpoint", &endpoint, "up"],
            ] {
                let refused = client()?
                    .env("XDG_RUNTIME_DIR", folder.path())
                    .args(["--model", &model, "--backend", backend, "--threads", "1"])
                    .args(starts)
                    .output()?;
                let said = String::from_utf8(refused.stderr)?;
                assert_eq!(refused.status.code(), Some(1), "{reason}: {said}");
                assert!(said.contains(reason), "{reason}: {said}");
                assert!(refused.stdout.is_empty());
            }
        }
        // Where nobody can listen is no answer to what was asked.
        let broken = client()?
            .args(["--endpoint", "unix:/dev/null/x.sock", "up"])
            .args(["--model", damaged])
            .output()?;
        assert_eq!(code(&broken), Some(2));
        Ok(())
    })
}

#[test]
fn a_reader_that_has_enough_is_no_error() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "5")
            .start()
            .await?;
        let mut child = client()?
            .args(["--endpoint", &gateway.endpoint().to_string()])
            .args([
                "generate",
                "a long text",
                "--ignore-eos",
                "--max-tokens",
                "3000",
            ])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut first = [0];
        child
            .stdout
            .take()
            .context("no output")?
            .read_exact(&mut first)?;
        // The pipe is closed here; the next write fails.
        let status = eventually("the client to end", async || Ok(child.try_wait()?)).await?;
        assert!(status.success(), "{status}");
        let mut said = String::new();
        child
            .stderr
            .take()
            .context("no errors")?
            .read_to_string(&mut said)?;
        assert_eq!(said, "");
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

#[test]
fn an_interrupted_answer_is_a_negative_one() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "5")
            .start()
            .await?;
        let mut child = client()?
            .args(["--endpoint", &gateway.endpoint().to_string()])
            .args([
                "generate",
                "a long text",
                "--ignore-eos",
                "--max-tokens",
                "3000",
            ])
            .stdout(Stdio::piped())
            .spawn()?;
        let mut output = child.stdout.take().context("no output")?;
        output.read_exact(&mut [0])?;
        process::signal(child.id(), rustix::process::Signal::INT)?;
        let mut rest = String::new();
        output.read_to_string(&mut rest)?;
        assert_eq!(child.wait()?.code(), Some(1));
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

#[test]
fn an_interrupted_answer_says_so_to_scripts() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "5")
            .start()
            .await?;
        let mut child = endless(&gateway)?.arg("--json").spawn()?;
        let mut output = BufReader::new(child.stdout.take().context("no output")?);
        let mut first = String::new();
        output.read_line(&mut first)?;
        process::signal(child.id(), rustix::process::Signal::INT)?;
        let mut rest = String::new();
        output.read_to_string(&mut rest)?;
        assert_eq!(child.wait()?.code(), Some(1));
        let mut text = String::new();
        let events = format!("{first}{rest}");
        let events: Vec<Value> = events
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()?;
        let (last, deltas) = events.split_last().context("no events")?;
        for delta in deltas {
            text.push_str(delta["text"].as_str().context("no text")?);
        }
        assert_eq!(last["event"], "interrupted");
        assert_eq!(last["text"], text);
        Ok(())
    })
}

#[test]
fn a_chat_without_a_terminal_can_be_interrupted_between_answers() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let mut child = client()?
            .args(["--endpoint", &gateway.endpoint().to_string()])
            .args(["chat", "--json"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        // Stays open: the chat waits for the next line.
        let mut input = child.stdin.take().context("no input")?;
        input.write_all(b"first\n")?;
        let mut output = BufReader::new(child.stdout.take().context("no output")?).lines();
        let answered = output.any(|line| line.is_ok_and(|line| line.contains("\"done\"")));
        assert!(answered);
        process::signal(child.id(), rustix::process::Signal::INT)?;
        let status = eventually("the chat to end", async || Ok(child.try_wait()?)).await?;
        assert_eq!(status.code(), Some(1));
        Ok(())
    })
}

#[test]
fn a_gateway_that_dies_is_a_lost_connection() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?
            .environment("VELOX_FAKE_PLAN_MS", "5")
            .start()
            .await?;
        let mut child = endless(&gateway)?.stderr(Stdio::piped()).spawn()?;
        let mut output = child.stdout.take().context("no output")?;
        output.read_exact(&mut [0])?;
        gateway.signal(rustix::process::Signal::KILL)?;
        output.read_to_string(&mut String::new())?;
        let ended = child.wait_with_output()?;
        assert_eq!(code(&ended), Some(2));
        let said = String::from_utf8(ended.stderr)?;
        assert!(
            said.contains("the connection to the gateway was lost"),
            "{said}"
        );
        assert!(!said.contains("INTERNAL"), "{said}");
        Ok(())
    })
}

#[test]
fn completions_name_the_commands() -> anyhow::Result<()> {
    story(|| async {
        for shell in ["bash", "zsh", "fish"] {
            let output = client()?.args(["completions", shell]).output()?;
            assert!(output.status.success());
            let script = String::from_utf8(output.stdout)?;
            for command in ["chat", "capabilities", "doctor"] {
                assert!(script.contains(command), "{shell}: {command}");
            }
        }
        Ok(())
    })
}

#[test]
fn a_local_chat_leaves_nothing_running() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let folder = tempfile::tempdir()?;
        // Whatever a call starts inherits its environment.
        let mark = format!("{}", std::process::id());
        let mut command = client()?;
        command.env(MARK, &mark).env("TMPDIR", folder.path()).args([
            "--local",
            "--workers",
            "2",
            "--threads",
            "1",
            "--model",
        ]);
        command
            .arg(&model)
            .args(["chat", "What is the capital of France?", "--json"]);
        let events = json(&command.args(["--max-tokens", "20"]).output()?)?;
        assert!(
            answer(&events)?["text"]
                .as_str()
                .context("no text")?
                .contains("Paris")
        );
        if let Some(left) = process::with_variable(MARK, &mark) {
            assert!(left.is_empty(), "{left:?} are left");
        }
        let left: Vec<_> = std::fs::read_dir(folder.path())?.collect();
        assert!(left.is_empty(), "{left:?} are left");
        Ok(())
    })
}
