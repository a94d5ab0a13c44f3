//! What the commands print.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use anyhow::Context as _;
use serde_json::Value;
use velox_e2e::ask::{generate_ids, streamed};
use velox_e2e::command_line::{answer, call, client, code, has, json, local};
use velox_e2e::gateway::{MODEL, Plan};
use velox_e2e::golden::{self, ALICE_FIRST_WINDOW, ids, tokens};
use velox_e2e::programs::real_model;
use velox_e2e::snapshot::Snapshot;
use velox_e2e::story::story;

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

/// Copies a model and says that its context is shorter: its own is so long that to fill it takes a minute.
fn with_context(model: &Path, tokens: u32, copy: &Path) -> anyhow::Result<()> {
    let key = b"llama.context_length";
    let mut file = std::fs::read(model)?;
    let found = file.windows(key.len()).position(|window| window == key);
    // The value follows its type, which takes four bytes as well.
    let value = found.context("the model names no context")? + key.len() + 4;
    file[value..value + 4].copy_from_slice(&tokens.to_le_bytes());
    Ok(std::fs::write(copy, file)?)
}

#[test]
fn a_prompt_beyond_the_context_is_refused_or_cut_on_request() -> anyhow::Result<()> {
    let Some(model) = real_model() else {
        return Ok(());
    };
    story(|| async move {
        let folder = tempfile::tempdir()?;
        let short = folder.path().join("short.gguf");
        with_context(&model, 2048, &short)?;
        let gateway = Plan::real(&short, "cpu")?.start().await?;
        let long = std::fs::read_to_string(golden::alice_file())?.repeat(3);
        let ids = ids(&json(&call(&gateway, &["tokenize", &long, "--json"])?)?[0]["ids"])?;
        // One position of the context is for the answer.
        let limit = 2047;
        assert!(ids.len() > limit, "{} tokens are not enough", ids.len());

        let refused = call(&gateway, &["generate", &long, "--json"])?;
        assert_eq!(code(&refused), Some(1));
        let said = String::from_utf8(refused.stderr)?;
        let expected = format!("prompt has {} tokens, limit is {limit}", ids.len());
        assert!(said.contains(&expected), "{said}");
        assert!(said.contains("PROMPT_TOO_LONG"), "{said}");
        assert!(refused.stdout.is_empty());

        let options = ["--truncate", "--json", "--token-ids", "--max-tokens", "4"];
        let arguments = [&["generate", &long][..], &options].concat();
        let events = json(&call(&gateway, &arguments)?)?;
        let cut = answer(&events)?;
        let kept = 2044;
        assert_eq!(cut["usage"]["truncated_tokens"], ids.len() - kept);
        assert_eq!(cut["usage"]["prompt_tokens"], kept);
        // The end of the prompt is what remained.
        let rest = ids[ids.len() - kept..].to_vec();
        let whole = streamed(&gateway.client(), generate_ids(rest, 4)).await?;
        assert_eq!(self::ids(&cut["token_ids"])?, whole.token_ids);
        Snapshot::at_rest(&gateway).await?;
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
