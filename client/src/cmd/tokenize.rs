//! `tokenize`: text to ids, one JSON object per input.

use std::io::{BufRead as _, BufReader};

use anyhow::Context as _;
use serde_json::json;
use velox_client::error::ClientError;
use velox_client::trace::traced;
use velox_proto::v1::TokenizeRequest;

use crate::args::{Target, TokenizeArguments};
use crate::cmd::Verdict;
use crate::output::{Format, Output};
use crate::session::{Session, WhenNoneRuns};

/// Runs the command.
pub(crate) async fn run(
    target: &Target,
    arguments: TokenizeArguments,
    output: Output,
) -> anyhow::Result<Verdict> {
    let session = Session::open(target, WhenNoneRuns::Start, output).await?;
    match (&arguments.text, &arguments.jsonl) {
        (Some(text), _) => one(&session, text.clone(), arguments.special, output).await?,
        (None, Some(path)) => {
            let file = std::fs::File::open(path)
                .with_context(|| format!("cannot open {}", path.display()))?;
            for (index, line) in BufReader::new(file).lines().enumerate() {
                let line = line.with_context(|| format!("cannot read {}", path.display()))?;
                let object: serde_json::Value = serde_json::from_str(&line)
                    .with_context(|| format!("line {} is no JSON", index + 1))?;
                let text = object
                    .get("text")
                    .and_then(|text| text.as_str())
                    .with_context(|| format!("line {} has no \"text\"", index + 1))?;
                one(&session, text.to_owned(), arguments.special, output).await?;
            }
        }
        (None, None) => {}
    }
    Ok(Verdict::Yes)
}

async fn one(
    session: &Session,
    text: String,
    parse_special: bool,
    output: Output,
) -> anyhow::Result<()> {
    let request = TokenizeRequest {
        model: session.model(),
        text,
        parse_special,
        add_bos: false,
    };
    let response = session
        .client
        .inference()
        .tokenize(traced(request, session.deadline()))
        .await
        .map_err(ClientError::from)?;
    let ids = response.into_inner().ids;
    match output.format {
        Format::Json => output.json(&json!({ "ids": ids }))?,
        Format::Text => {
            let words: Vec<String> = ids.iter().map(ToString::to_string).collect();
            output.text(&format!("{}\n", words.join(" ")))?;
        }
    }
    Ok(())
}
