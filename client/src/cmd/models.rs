//! `models`: list, load, unload.

use serde_json::{Value, json};
use velox_client::error::ClientError;
use velox_client::trace::traced;
use velox_proto::v1::{ListModelsRequest, LoadModelRequest, Model, UnloadModelRequest};

use crate::args::{LoadShape, ModelsCommand, Target};
use crate::cmd::Verdict;
use crate::output::{Format, Output, table};
use crate::session::{Session, WhenNoneRuns};

/// Runs the command.
pub(crate) async fn run(
    target: &Target,
    command: ModelsCommand,
    output: Output,
) -> anyhow::Result<Verdict> {
    let mut target = target.clone();
    let shape = match command {
        // Here it is the model's, not the gateway's.
        ModelsCommand::Load { .. } => std::mem::take(&mut target.load),
        ModelsCommand::List | ModelsCommand::Unload { .. } => LoadShape::default(),
    };
    anyhow::ensure!(
        target.local || target.backend.is_none() || !matches!(command, ModelsCommand::Load { .. }),
        "--backend is for a gateway that starts: its models all run on that one"
    );
    let session = Session::open(&target, WhenNoneRuns::Fail, output).await?;
    match command {
        ModelsCommand::List => show(&list(&session).await?, output)?,
        ModelsCommand::Load { source, name } => {
            let request = LoadModelRequest {
                source,
                name: name.unwrap_or_default(),
                quantize_bits: shape.quantize_bits(),
                max_context_tokens: shape.max_context_tokens(),
            };
            let model = load(&session, request, output).await?;
            show(&[model], output)?;
        }
        ModelsCommand::Unload { name } => {
            session
                .client
                .models()
                .unload_model(traced(UnloadModelRequest { name }, session.deadline()))
                .await
                .map_err(ClientError::from)?;
        }
    }
    Ok(Verdict::Yes)
}

async fn list(session: &Session) -> Result<Vec<Model>, ClientError> {
    let mut models = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListModelsRequest {
            page_size: 0,
            page_token,
        };
        let page = session
            .client
            .models()
            .list_models(traced(request, session.deadline()))
            .await?;
        let page = page.into_inner();
        models.extend(page.models);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(models);
        }
    }
}

async fn load(
    session: &Session,
    request: LoadModelRequest,
    output: Output,
) -> anyhow::Result<Model> {
    let request = traced(request, session.deadline());
    let mut events = session
        .client
        .models()
        .load_model(request)
        .await
        .map_err(ClientError::from)?
        .into_inner();
    let bar = output.progress(0);
    while let Some(event) = events.message().await.map_err(ClientError::from)? {
        bar.set_length(event.total_bytes);
        bar.set_position(event.done_bytes);
        bar.set_message(event.phase.clone());
        if let Some(model) = event.model {
            bar.finish_and_clear();
            return Ok(model);
        }
    }
    Err(ClientError::Truncated.into())
}

fn show(models: &[Model], output: Output) -> std::io::Result<()> {
    match output.format {
        Format::Json => models
            .iter()
            .try_for_each(|model| output.json(&model_json(model))),
        Format::Text => {
            let rows: Vec<Vec<String>> = models
                .iter()
                .map(|model| {
                    vec![
                        format!("{}{}", model.name, if model.is_default { " *" } else { "" }),
                        model.architecture.clone(),
                        model.format.clone(),
                        model.parameters.to_string(),
                        model.weight_bytes.to_string(),
                        model.context_length.to_string(),
                        model.tensor_types.join(","),
                        remarks(model),
                    ]
                })
                .collect();
            let header = [
                "MODEL",
                "FAMILY",
                "FORMAT",
                "PARAMETERS",
                "WEIGHT BYTES",
                "CONTEXT",
                "TYPES",
                "REMARKS",
            ];
            output.text(&table(&header, &rows))
        }
    }
}

/// Says what is not as the file and the policy `auto` would have it.
fn remarks(model: &Model) -> String {
    let mut remarks = Vec::new();
    if !model.quantized_to.is_empty() {
        remarks.push(format!("quantised to {} at load", model.quantized_to));
    }
    if !model.fallback_reason.is_empty() {
        remarks.push(format!("fallback: {}", model.fallback_reason));
    }
    remarks.join("; ")
}

fn model_json(model: &Model) -> Value {
    let kv = model.kv.clone().unwrap_or_default();
    json!({
        "name": model.name,
        "default": model.is_default,
        "architecture": model.architecture,
        "format": model.format,
        "parameters": model.parameters,
        "weight_bytes": model.weight_bytes,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "n_layers": model.n_layers,
        "tensor_types": model.tensor_types,
        "end_tokens": model.end_tokens.iter().map(|token| json!({
            "token_id": token.token_id,
            "text": token.text,
            "source": token.source,
        })).collect::<Vec<_>>(),
        "quantized_to": (!model.quantized_to.is_empty()).then_some(&model.quantized_to),
        "fallback_reason": (!model.fallback_reason.is_empty()).then_some(&model.fallback_reason),
        "has_chat_template": model.has_chat_template,
        "kv": {
            "method": kv.method,
            "page_tokens": kv.page_tokens,
            "key_bytes_per_token": kv.key_bytes_per_token,
            "value_bytes_per_token": kv.value_bytes_per_token,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_says_what_was_done_to_a_model_and_why_it_runs_on_a_weaker_backend() {
        assert_eq!(remarks(&Model::default()), "");
        let model = Model {
            quantized_to: "Q4_1".to_owned(),
            fallback_reason: "CPU: its probe is off".to_owned(),
            ..Model::default()
        };
        assert_eq!(
            remarks(&model),
            "quantised to Q4_1 at load; fallback: CPU: its probe is off"
        );
    }
}
