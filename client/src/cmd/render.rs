//! Shows a streamed answer and what it cost.

use std::future::Future;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use velox_client::answer::Answer;
use velox_client::error::ClientError;
use velox_proto::v1::{Backend, Finish, FinishReason, GenerationEvent, Provenance};

use crate::args::Sampling;
use crate::interrupt::Interrupt;
use crate::output::{Format, Output};

/// At most 100 events a second: several tokens may share one.
const EVENT_INTERVAL: Duration = Duration::from_millis(10);

/// How an answer ended on this side.
#[derive(Debug)]
pub(crate) enum Ending {
    /// With its last event; the whole text.
    Finished(String),
    /// The user interrupted it; the text so far.
    Interrupted(String),
}

/// What is waiting for the next event.
#[derive(Debug, Default)]
struct Pending {
    text: String,
    token_ids: Vec<u32>,
}

/// Waits for an answer and shows it until it ends, or the user presses Ctrl-C.
pub(crate) async fn show(
    asked: impl Future<Output = Result<Answer, ClientError>>,
    interrupt: &mut Interrupt,
    output: Output,
) -> anyhow::Result<Ending> {
    let Some(answer) = interrupt.or(asked).await else {
        interrupted("", output)?;
        return Ok(Ending::Interrupted(String::new()));
    };
    let mut answer = answer?;
    let mut whole = String::new();
    let mut token_ids = Vec::new();
    let mut pending = Pending::default();
    let mut next_flush = Instant::now();
    loop {
        tokio::select! {
            event = answer.next() => {
                let event = event?.ok_or(ClientError::Truncated)?;
                whole.push_str(&event.text);
                token_ids.extend_from_slice(&event.token_ids);
                let finish = collect(&mut pending, event);
                if finish.is_some() || Instant::now() >= next_flush {
                    flush(&mut pending, output)?;
                    next_flush = Instant::now() + EVENT_INTERVAL;
                }
                if let Some(finish) = finish {
                    end(&finish, &whole, &token_ids, output)?;
                    return Ok(Ending::Finished(whole));
                }
            }
            () = tokio::time::sleep_until(next_flush), if !pending.text.is_empty() => {
                flush(&mut pending, output)?;
                next_flush = Instant::now() + EVENT_INTERVAL;
            }
            () = interrupt.came() => {
                flush(&mut pending, output)?;
                interrupted(&whole, output)?;
                return Ok(Ending::Interrupted(whole));
            }
        }
    }
}

/// Ends the events of an answer that the user did not wait for; people know what they did.
pub(crate) fn interrupted(text: &str, output: Output) -> std::io::Result<()> {
    match output.format {
        Format::Text => Ok(()),
        Format::Json => output.json(&json!({"event": "interrupted", "text": text})),
    }
}

fn collect(pending: &mut Pending, event: GenerationEvent) -> Option<Finish> {
    pending.text.push_str(&event.text);
    pending.token_ids.extend(event.token_ids);
    event.finish
}

fn flush(pending: &mut Pending, output: Output) -> std::io::Result<()> {
    let Pending { text, token_ids } = std::mem::take(pending);
    if text.is_empty() && token_ids.is_empty() {
        return Ok(());
    }
    match output.format {
        Format::Text => output.text(&text),
        Format::Json => {
            let mut event = json!({"event": "delta", "text": text});
            if !token_ids.is_empty() {
                event["token_ids"] = json!(token_ids);
            }
            output.json(&event)
        }
    }
}

fn end(finish: &Finish, text: &str, token_ids: &[u32], output: Output) -> std::io::Result<()> {
    match output.format {
        Format::Text => {
            output.text("\n")?;
            output.note(&summary(finish));
            Ok(())
        }
        Format::Json => {
            let mut done = finish_json(finish);
            done["text"] = json!(text);
            if !token_ids.is_empty() {
                done["token_ids"] = json!(token_ids);
            }
            output.json(&done)
        }
    }
}

fn finish_json(finish: &Finish) -> Value {
    let usage = finish.usage.clone().unwrap_or_default();
    let timings = finish.timings.unwrap_or_default();
    json!({
        "event": "done",
        "text": "",
        "finish_reason": reason_name(finish.reason()),
        "matched_stop": finish.matched_stop,
        "model": finish.model,
        "seed": finish.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "recoveries": usage.recoveries,
            "truncated_tokens": usage.truncated_tokens,
            "replay": usage.replay,
            "drafted_tokens": usage.drafted_tokens,
            "accepted_draft_tokens": usage.accepted_draft_tokens,
        },
        "timings": {
            "queue_ms": timings.queue_ms,
            "prefill_ms": timings.prefill_ms,
            "decode_ms": timings.decode_ms,
            "decode_tokens_per_s": timings.decode_tokens_per_s,
        },
        "provenance": provenance_json(finish.provenance.as_ref()),
    })
}

/// Provenance as scripts read it; `null` where there is none.
pub(crate) fn provenance_json(provenance: Option<&Provenance>) -> Value {
    provenance.map_or(Value::Null, |provenance| {
        json!({
            "backend": backend_label(provenance.backend()),
            "device": provenance.device,
            "kernel": provenance.kernel,
            "fallback_reason": provenance.fallback_reason,
            "sampler": backend_label(provenance.sampler()),
            "spans": provenance.spans.iter().map(|span| json!({
                "first_token_index": span.first_token_index,
                "backend": backend_label(span.backend()),
                "device": span.device,
                "kernel": span.kernel,
                "worker_id": span.worker_id,
            })).collect::<Vec<_>>(),
        })
    })
}

fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Unspecified => "unspecified",
        FinishReason::StopToken => "stop_token",
        FinishReason::StopString => "stop_string",
        FinishReason::MaxTokens => "max_tokens",
        FinishReason::MaxContext => "max_context",
    }
}

/// Label as scripts read it: `null` where nothing was measured.
pub(crate) fn backend_label(backend: Backend) -> Value {
    match backend {
        Backend::Unspecified => Value::Null,
        known => json!(backend_name(known)),
    }
}

/// Label as people read it.
pub(crate) fn backend_name(backend: Backend) -> &'static str {
    match backend {
        Backend::Unspecified => "-",
        Backend::Metal => "METAL",
        Backend::MlxCuda => "MLX_CUDA",
        Backend::Cpu => "CPU",
        Backend::MlxCpu => "MLX_CPU",
        Backend::Reference => "REFERENCE",
    }
}

/// One line for people: label, counts, speed.
fn summary(finish: &Finish) -> String {
    let usage = finish.usage.clone().unwrap_or_default();
    let timings = finish.timings.unwrap_or_default();
    let provenance = finish.provenance.clone().unwrap_or_default();
    let speed = timings
        .decode_tokens_per_s
        .map_or_else(String::new, |speed| format!(", {speed:.1} tokens/s"));
    let mut text = format!(
        "[{}: {} {} on {}: {} prompt tokens in {:.0} ms, {} tokens in {:.0} ms{speed}, {}]",
        finish.model,
        backend_name(provenance.backend()),
        provenance.kernel,
        provenance.device,
        usage.prompt_tokens,
        timings.prefill_ms,
        usage.completion_tokens,
        timings.decode_ms,
        reason_name(finish.reason()),
    );
    if !provenance.fallback_reason.is_empty() {
        text.push_str(&format!("\n[fallback: {}]", provenance.fallback_reason));
    }
    if usage.recoveries > 0 {
        text.push_str(&format!(
            "\n[recovered {} times from a lost worker]",
            usage.recoveries
        ));
    }
    if usage.drafted_tokens > 0 {
        text.push_str(&format!(
            "\n[{} of {} drafted tokens accepted]",
            usage.accepted_draft_tokens, usage.drafted_tokens
        ));
    }
    if usage.truncated_tokens > 0 {
        text.push_str(&format!(
            "\n[dropped {} prompt tokens]",
            usage.truncated_tokens
        ));
    }
    text
}

/// The wire form of sampling flags.
pub(crate) fn sampling_options(sampling: &Sampling) -> velox_proto::v1::SamplingOptions {
    velox_proto::v1::SamplingOptions {
        temperature: Some(sampling.temp),
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        seed: sampling.seed,
        repetition_penalty: sampling.repetition_penalty,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        ..velox_proto::v1::SamplingOptions::default()
    }
}

/// The wire form of the flags that end an answer.
pub(crate) fn generation_options(sampling: &Sampling) -> velox_proto::v1::GenerationOptions {
    velox_proto::v1::GenerationOptions {
        max_tokens: sampling.max_tokens,
        stop: sampling.stop.clone(),
        ignore_eos: sampling.ignore_eos,
        return_token_ids: sampling.token_ids,
        truncate_prompt: sampling.truncate,
        truncation_sink_tokens: sampling.sink_tokens,
        tokens_per_plan: sampling.tokens_per_eval,
        prompt_lookup: sampling.ngram.then_some(velox_proto::v1::PromptLookup {
            ngram_tokens: Some(sampling.ngram_n),
            max_draft_tokens: Some(sampling.ngram_k),
        }),
        ..velox_proto::v1::GenerationOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_measured_is_null() {
        assert_eq!(backend_label(Backend::Unspecified), Value::Null);
        assert_eq!(backend_label(Backend::MlxCpu), "MLX_CPU");
        let json = provenance_json(Some(&Provenance::default()));
        assert_eq!(json["sampler"], Value::Null);
        assert_eq!(json["backend"], Value::Null);
    }

    #[test]
    fn people_read_which_model_answered() {
        let finish = Finish {
            model: "tiny".to_owned(),
            ..Finish::default()
        };
        assert!(
            summary(&finish).starts_with("[tiny: "),
            "{}",
            summary(&finish)
        );
    }
}
