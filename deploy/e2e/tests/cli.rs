//! The command line, as scripts see it.

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::Context as _;
use serde_json::Value;
use velox_e2e::gateway::{Gateway, MODEL, Plan};
use velox_e2e::golden::{self, ALICE_FIRST_WINDOW, ids, tokens};
use velox_e2e::process::{self, is_alive};
use velox_e2e::programs::{program, real_model};
use velox_e2e::snapshot::Snapshot;
use velox_e2e::story::{eventually, story};

/// Variable by which the processes of one call are found.
const MARK: &str = "VELOX_E2E_MARK";

/// Makes a call that sees nothing of the machine that the tests run on.
fn client() -> anyhow::Result<Command> {
    let mut command = Command::new(program("velox-client")?);
    command.env_remove("VELOX_MODEL").stdin(Stdio::null());
    Ok(command)
}

/// Calls a gateway that runs.
fn call(gateway: &Gateway, arguments: &[&str]) -> anyhow::Result<Output> {
    let endpoint = gateway.endpoint().to_string();
    Ok(client()?
        .args(["--endpoint", &endpoint])
        .args(arguments)
        .output()?)
}

/// Calls with a gateway of its own.
fn local(model: &Path, arguments: &[&str]) -> anyhow::Result<Output> {
    let mut command = client()?;
    command
        .args(["--local", "--threads", "1", "--model"])
        .arg(model)
        .args(arguments);
    Ok(command.output()?)
}

/// Reads the JSON lines of a call that succeeded.
fn json(output: &Output) -> anyhow::Result<Vec<Value>> {
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{}: {said}", output.status);
    let text = std::str::from_utf8(&output.stdout)?;
    text.lines()
        .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()))
        .collect()
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

/// Checks that an object has fields.
fn has(object: &Value, fields: &[&str]) -> anyhow::Result<()> {
    for field in fields {
        anyhow::ensure!(
            object.get(field).is_some(),
            "{field} is missing in {object}"
        );
    }
    Ok(())
}

/// Checks the events of a streamed answer and returns the last.
fn answer(events: &[Value]) -> anyhow::Result<&Value> {
    let (done, deltas) = events.split_last().context("no events")?;
    assert_eq!(done["event"], "done");
    let mut text = String::new();
    for delta in deltas {
        assert_eq!(delta["event"], "delta");
        text.push_str(delta["text"].as_str().context("a delta has text")?);
    }
    assert_eq!(done["text"].as_str(), Some(text.as_str()));
    has(done, &["finish_reason", "usage", "timings", "provenance"])?;
    has(
        &done["usage"],
        &[
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "recoveries",
        ],
    )?;
    has(
        &done["timings"],
        &["queue_ms", "prefill_ms", "decode_ms", "decode_tokens_per_s"],
    )?;
    has(
        &done["provenance"],
        &["backend", "device", "kernel", "fallback_reason"],
    )?;
    Ok(done)
}

#[test]
fn chat_and_generate_print_events_or_text() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let events = json(&call(
            &gateway,
            &["chat", "Say hello.", "--max-tokens", "8", "--json"],
        )?)?;
        let done = answer(&events)?;
        assert_eq!(done["provenance"]["backend"], "CPU");
        assert_eq!(done["provenance"]["fallback_reason"], "");
        assert!(done.get("token_ids").is_none());

        let arguments = [
            "generate",
            "The sea",
            "--max-tokens",
            "5",
            "--json",
            "--token-ids",
            "--seed",
            "4",
        ];
        let events = json(&call(&gateway, &arguments)?)?;
        let done = answer(&events)?;
        assert_eq!(ids(&done["token_ids"])?.len(), 5);
        assert_eq!(done["finish_reason"], "max_tokens");

        // For people: the text on standard output, what it cost on standard error.
        let plain = call(&gateway, &["generate", "The sea", "--max-tokens", "5"])?;
        assert_eq!(
            String::from_utf8(plain.stdout)?,
            format!("{}\n", done["text"].as_str().context("text")?)
        );
        let said = String::from_utf8(plain.stderr)?;
        assert!(said.contains("CPU") && said.contains("tokens/s"), "{said}");
        Snapshot::at_rest(&gateway).await?;
        Ok(())
    })
}

#[test]
fn tokenize_gives_the_golden_ids() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let file = golden::tokens_file();
        let file = file.to_str().context("a path of this repository is text")?;
        for (field, arguments) in [
            ("plain", vec!["tokenize", "--jsonl", file, "--json"]),
            (
                "with_special",
                vec!["tokenize", "--jsonl", file, "--json", "--special"],
            ),
        ] {
            let printed = json(&call(&gateway, &arguments)?)?;
            let expected = tokens()?;
            assert_eq!(printed.len(), expected.len());
            for (printed, expected) in printed.iter().zip(&expected) {
                assert_eq!(printed["ids"], expected[field], "{}", expected["text"]);
            }
        }
        let one = json(&call(&gateway, &["tokenize", "Hello world", "--json"])?)?;
        assert_eq!(ids(&one[0]["ids"])?, [19556, 905]);
        Ok(())
    })
}

#[test]
fn eval_gives_the_golden_perplexity_with_a_gateway_of_its_own() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let text = golden::alice_file();
        let text = text.to_str().context("a path of this repository is text")?;
        let arguments = [
            "eval",
            "--text",
            text,
            "--window",
            "512",
            "--max-windows",
            "1",
            "--json",
        ];
        let [cpu] = &json(&local(
            &model,
            &[&arguments[..], &["--backend", "cpu"]].concat(),
        )?)?[..] else {
            anyhow::bail!("one object was expected");
        };
        assert_eq!(cpu["tokens_scored"], 255);
        assert_eq!(cpu["provenance"]["backend"], "CPU");
        let perplexity = cpu["perplexity"].as_f64().context("no perplexity")?;
        let difference = (perplexity / ALICE_FIRST_WINDOW - 1.0).abs();
        assert!(
            difference < 0.01,
            "perplexity {perplexity} is off by {difference}"
        );
        assert!(
            (cpu["mean_nll"].as_f64().context("no mean")?.exp() / perplexity - 1.0).abs() < 1e-9
        );
        has(
            &cpu["kv"],
            &["method", "key_bytes_per_token", "value_bytes_per_token"],
        )?;
        // 16 bit: 30 layers of 3 heads of 64 elements, and no more than the rest of a page above.
        let bytes = cpu["kv"]["key_bytes_per_token"]
            .as_f64()
            .context("no bytes")?;
        assert!(
            (11520.0..12000.0).contains(&bytes),
            "{bytes} bytes of keys a token"
        );
        Ok(())
    })
}

#[test]
fn models_capabilities_and_doctor_describe_what_runs() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let gateway = Plan::real(&model, "cpu")?.start().await?;
        let models = json(&call(&gateway, &["models", "list", "--json"])?)?;
        assert_eq!(models.len(), 1);
        assert_eq!(models[0]["name"], MODEL);
        assert_eq!(models[0]["default"], true);
        assert_eq!(models[0]["architecture"], "llama");
        assert_eq!(models[0]["end_tokens"][0]["token_id"], 2);

        let source = model.to_str().context("the model's path is text")?;
        let loaded = json(&call(
            &gateway,
            &["models", "load", source, "--name", "twin", "--json"],
        )?)?;
        assert_eq!(loaded[0]["name"], "twin");
        assert_eq!(
            json(&call(&gateway, &["models", "list", "--json"])?)?.len(),
            2
        );
        let twin = call(
            &gateway,
            &[
                "--model",
                "twin",
                "generate",
                "x",
                "--max-tokens",
                "1",
                "--json",
            ],
        )?;
        assert_eq!(answer(&json(&twin)?)?["model"], "twin");
        assert!(
            call(&gateway, &["models", "unload", "twin"])?
                .status
                .success()
        );
        assert_eq!(
            code(&call(&gateway, &["models", "unload", "twin"])?),
            Some(1)
        );

        let [table] = &json(&call(&gateway, &["capabilities", "--json"])?)?[..] else {
            anyhow::bail!("one object was expected");
        };
        assert_eq!(table["protocol"], "velox.v1");
        let worker = &table["workers"][0];
        has(worker, &["id", "pid", "device", "backends", "ops"])?;
        let backends = worker["backends"].as_array().context("no backends")?;
        for name in ["CPU", "REFERENCE"] {
            let found = backends.iter().find(|entry| entry["backend"] == name);
            assert_eq!(found.context(name)?["available"], true, "{name}");
        }
        for missing in backends.iter().filter(|entry| entry["available"] == false) {
            assert_ne!(missing["reason"], "", "{missing}");
        }
        let ops = worker["ops"].as_array().context("no ops")?;
        assert!(ops.len() > 20, "only {} ops were probed", ops.len());
        for op in ops {
            has(
                op,
                &["op", "dtype", "backend", "available", "reason", "max_error"],
            )?;
        }

        let doctor = call(&gateway, &["--model", source, "doctor", "--json"])?;
        let findings = json(&doctor)?;
        assert!(
            findings
                .iter()
                .any(|finding| finding["check"] == "velox-gateway")
        );
        assert!(findings.iter().all(|finding| finding.get("ok").is_some()));
        Ok(())
    })
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
        let checked = (|| -> anyhow::Result<()> {
            assert_eq!(code(&run(&up)?), Some(1), "one serves there already");
            let [status] = &json(&run(&[word("status"), word("--json")])?)?[..] else {
                anyhow::bail!("one object was expected");
            };
            assert_eq!(status["endpoint"], endpoint.as_str());
            assert_eq!(status["gateway"]["pid"], pid);
            has(status, &["running", "waiting", "kv_bytes", "shm_bytes"])?;
            let workers = status["workers"].as_array().context("no workers")?;
            assert_eq!(workers.len(), 2);
            for worker in workers {
                has(
                    worker,
                    &["id", "pid", "state", "restarts", "backend", "model"],
                )?;
                assert_eq!(worker["state"], "ready");
            }
            let generate = ["generate", "x", "--max-tokens", "2", "--json"].map(word);
            answer(&json(&run(&generate)?)?)?;
            Ok(())
        })();
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
fn a_conversation_is_read_from_standard_input() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let mut child = client()?
            .args([
                "--endpoint",
                &gateway.endpoint().to_string(),
                "chat",
                "--json",
            ])
            .args(["--system", "be brief"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take().context("no input")?;
        input.write_all(b"first\n\nsecond\n/clear\nthird\n")?;
        drop(input);
        let output = child.wait_with_output()?;
        let events = json(&output)?;
        let turns: Vec<&Value> = events
            .iter()
            .filter(|event| event["event"] == "done")
            .collect();
        assert_eq!(turns.len(), 3);
        let prompt = |turn: usize| turns[turn]["usage"]["prompt_tokens"].as_u64();
        assert!(prompt(1) > prompt(0), "the second turn contains the first");
        assert_eq!(prompt(2), prompt(0), "cleared: as long as the first turn");
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
        // Whatever a call starts inherits its environment.
        let mark = format!("{}", std::process::id());
        let mut command = client()?;
        command
            .env(MARK, &mark)
            .args(["--local", "--workers", "2", "--threads", "1", "--model"]);
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
        Ok(())
    })
}
