//! `eval`: perplexity over windows of a text, the second half of each scored.

use anyhow::Context as _;
use serde_json::json;
use velox_client::error::ClientError;
use velox_client::trace::traced;
use velox_proto::v1::{
    KvUse, Provenance, ScoreRequest, ScoreResponse, TokenIds, TokenizeRequest, score_request::Input,
};

use crate::args::{EvalArguments, Target};
use crate::cmd::Verdict;
use crate::cmd::render::{backend_name, provenance_json};
use crate::output::{Format, Output};
use crate::session::{Session, WhenNoneRuns};

/// What the windows add up to.
#[derive(Debug, Default)]
struct Total {
    negative_log_likelihood: f64,
    tokens: u64,
    kv: Option<KvUse>,
    provenance: Option<Provenance>,
}

/// Runs the command.
pub(crate) async fn run(
    target: &Target,
    arguments: EvalArguments,
    output: Output,
) -> anyhow::Result<Verdict> {
    let bytes = std::fs::read(&arguments.text)
        .with_context(|| format!("cannot read {}", arguments.text.display()))?;
    let text = String::from_utf8(bytes)
        .with_context(|| format!("{} is not UTF-8", arguments.text.display()))?;
    let session = Session::open(target, WhenNoneRuns::Start, output).await?;
    let ids = tokenize(&session, text).await?;
    let window = usize::try_from(arguments.window)?;
    let most = match arguments.max_windows {
        Some(most) => usize::try_from(most)?,
        None => usize::MAX,
    };
    let windows: Vec<&[u32]> = ids.chunks_exact(window).take(most).collect();
    anyhow::ensure!(
        !windows.is_empty(),
        "the text has {} tokens, a window needs {window}",
        ids.len()
    );
    let bar = output.steps(u64::try_from(windows.len())?, "windows");
    let mut total = Total::default();
    for ids in windows {
        let response = score(&session, ids.to_vec(), arguments.window / 2).await?;
        total.add(response)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    report(&total, output)?;
    Ok(Verdict::Yes)
}

async fn tokenize(session: &Session, text: String) -> anyhow::Result<Vec<u32>> {
    let request = TokenizeRequest {
        model: session.model(),
        text,
        parse_special: false,
        add_bos: false,
    };
    let response = session
        .client
        .inference()
        .tokenize(traced(request, session.deadline()))
        .await
        .map_err(ClientError::from)?;
    Ok(response.into_inner().ids)
}

async fn score(
    session: &Session,
    ids: Vec<u32>,
    first_position: u32,
) -> anyhow::Result<ScoreResponse> {
    let request = ScoreRequest {
        model: session.model(),
        input: Some(Input::TokenIds(TokenIds { ids })),
        first_position,
        policy: session.policy(),
        ..ScoreRequest::default()
    };
    let response = session
        .client
        .inference()
        .score(traced(request, session.deadline()))
        .await
        .map_err(ClientError::from)?;
    Ok(response.into_inner())
}

impl Total {
    fn add(&mut self, response: ScoreResponse) -> anyhow::Result<()> {
        for position in &response.positions {
            if let Some(logprob) = position.next_logprob {
                self.negative_log_likelihood -= f64::from(logprob);
                self.tokens += 1;
            }
        }
        self.kv = Some(response.kv.context("the gateway reported no cache use")?);
        // One label stands for all windows: the weakest, and the wire's numbers grow as backends get weaker.
        self.provenance = self
            .provenance
            .take()
            .into_iter()
            .chain(response.provenance)
            .max_by_key(|provenance| provenance.backend);
        Ok(())
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "token counts are far below 2^53"
    )]
    fn mean(&self) -> f64 {
        self.negative_log_likelihood / self.tokens as f64
    }
}

fn report(total: &Total, output: Output) -> anyhow::Result<()> {
    anyhow::ensure!(total.tokens > 0, "no token was scored");
    let mean = total.mean();
    let kv = total.kv.clone().unwrap_or_default();
    let per_token = |bytes: u64| -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "byte counts are far below 2^53")]
        (kv.tokens > 0).then(|| bytes as f64 / f64::from(kv.tokens))
    };
    let (keys, values) = (per_token(kv.key_bytes), per_token(kv.value_bytes));
    match output.format {
        Format::Json => output.json(&json!({
            "perplexity": mean.exp(),
            "mean_nll": mean,
            "tokens_scored": total.tokens,
            "kv": {
                "method": kv.method,
                "key_bytes_per_token": keys,
                "value_bytes_per_token": values,
            },
            "provenance": provenance_json(total.provenance.as_ref()),
        }))?,
        Format::Text => {
            let provenance = total.provenance.clone().unwrap_or_default();
            output.text(&format!(
                "perplexity {:.4} (mean negative log-likelihood {mean:.6} over {} tokens)\n\
                 cache {}: {:.0} + {:.0} bytes a token (keys + values)\n\
                 {} {} on {}\n",
                mean.exp(),
                total.tokens,
                kv.method,
                keys.unwrap_or_default(),
                values.unwrap_or_default(),
                backend_name(provenance.backend()),
                provenance.kernel,
                provenance.device,
            ))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use velox_proto::v1::Backend;

    use super::*;

    #[test]
    fn the_weakest_label_of_all_windows_stays() {
        let mut total = Total::default();
        for backend in [Backend::Cpu, Backend::Reference, Backend::Metal] {
            let response = ScoreResponse {
                kv: Some(KvUse::default()),
                provenance: Some(Provenance {
                    backend: backend.into(),
                    ..Provenance::default()
                }),
                ..ScoreResponse::default()
            };
            total.add(response).unwrap();
        }
        assert_eq!(total.provenance.unwrap().backend(), Backend::Reference);
    }
}
