//! Step messages to engine plans and back: the only place that knows both.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use velox_engine::backend::{Stage, StageCounts};
use velox_engine::files::Quantisation;
use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    DecodeRow, LogitsWanted, OpenRow, PrefillChunk, PrefillGoal, RowId, RowOutcome, SampledToken,
    ScorePart, ScoredPosition, StepOutcome, StepPlan,
};
use velox_kernels::label::BackendLabel;
use velox_proto::limits::{
    MAX_DECODE_STEPS, MAX_DRAFT_TOKENS, MAX_PLAN_ROWS, MAX_TOKEN_LIST, MAX_TOP_LOGPROBS,
};
use velox_proto::op::OpId;
use velox_proto::tensor::{DType, TensorHandle};
use velox_proto::v1;
use velox_proto::worker::v1 as wire;
use velox_shm::PeerSegments;

use crate::error::{WorkerError, engine_reason};

/// A plan for one model, and where its logits go.
#[derive(Debug)]
pub struct ValidPlan {
    /// What the engine runs.
    pub plan: StepPlan,
    /// Model of the rows it opens; `None` if it opens none.
    pub model: Option<String>,
    /// Destination of each scored row's logits.
    pub logits: HashMap<RowId, TensorHandle>,
}

/// Returns the wire form of a label.
#[must_use]
pub fn wire_backend(label: BackendLabel) -> v1::Backend {
    match label {
        BackendLabel::Metal => v1::Backend::Metal,
        BackendLabel::MlxCuda => v1::Backend::MlxCuda,
        BackendLabel::Cpu => v1::Backend::Cpu,
        BackendLabel::MlxCpu => v1::Backend::MlxCpu,
        BackendLabel::Reference => v1::Backend::Reference,
    }
}

/// Returns the label of the wire form; unspecified = the strongest available.
///
/// # Errors
/// [`WorkerError::Invalid`] for a number that is not in the table.
pub fn label_of(field: &'static str, backend: i32) -> Result<Option<BackendLabel>, WorkerError> {
    let backend = v1::Backend::try_from(backend).map_err(|_unknown| WorkerError::Invalid {
        field,
        problem: format!("backend {backend} is not in the table"),
    })?;
    Ok(match backend {
        v1::Backend::Unspecified => None,
        v1::Backend::Metal => Some(BackendLabel::Metal),
        v1::Backend::MlxCuda => Some(BackendLabel::MlxCuda),
        v1::Backend::Cpu => Some(BackendLabel::Cpu),
        v1::Backend::MlxCpu => Some(BackendLabel::MlxCpu),
        v1::Backend::Reference => Some(BackendLabel::Reference),
    })
}

/// Returns the op that a stage is counted as.
#[must_use]
pub const fn op_of(stage: Stage) -> OpId {
    match stage {
        Stage::Embed => OpId::Embed,
        Stage::NormProject => OpId::NormProject,
        Stage::Rope => OpId::Rope,
        Stage::AppendAttend => OpId::AppendAttend,
        Stage::OutputProject => OpId::OutputProject,
        Stage::GatedMlp => OpId::GatedMlp,
        Stage::Head => OpId::Head,
        Stage::Sample => OpId::Sample,
    }
}

/// Reads a plan; token chunks in shared memory are copied out.
///
/// # Errors
/// [`WorkerError::Invalid`] for a broken contract, or why a handle was refused.
pub fn plan(wire: wire::StepPlan, memory: &PeerSegments) -> Result<ValidPlan, WorkerError> {
    bounded("decode", wire.decode.len(), MAX_PLAN_ROWS)?;
    bounded("open_rows", wire.open_rows.len(), MAX_PLAN_ROWS)?;
    let model = wire.open_rows.first().map(|row| row.model.clone());
    if wire
        .open_rows
        .iter()
        .any(|row| Some(&row.model) != model.as_ref())
    {
        return Err(WorkerError::Invalid {
            field: "open_rows",
            problem: "rows of one plan name different models".to_owned(),
        });
    }
    let mut logits = HashMap::new();
    let prefill = wire
        .prefill
        .map(|chunk| prefill(chunk, memory, &mut logits))
        .transpose()?;
    Ok(ValidPlan {
        model,
        logits,
        plan: StepPlan {
            close_rows: wire.close_rows.into_iter().map(RowId).collect(),
            open_rows: wire
                .open_rows
                .into_iter()
                .map(open_row)
                .collect::<Result<_, _>>()?,
            prefill,
            decode: wire
                .decode
                .into_iter()
                .map(decode_row)
                .collect::<Result<_, _>>()?,
        },
    })
}

fn prefill(
    wire: wire::PrefillChunk,
    memory: &PeerSegments,
    logits: &mut HashMap<RowId, TensorHandle>,
) -> Result<PrefillChunk, WorkerError> {
    let row = RowId(wire.row);
    let token_ids = match wire.token_handle {
        None => wire.token_ids,
        Some(handle) => {
            let handle = TensorHandle::try_from(handle)?;
            handle.expect_dtype(DType::U32)?;
            let bytes = memory.read(&handle)?;
            bytes
                .chunks_exact(4)
                .map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]]))
                .collect()
        }
    };
    let goal = match (wire.score, wire.sample) {
        (Some(_), true) => {
            return Err(WorkerError::Invalid {
                field: "prefill",
                problem: "a chunk is either sampled or scored".to_owned(),
            });
        }
        (None, true) => PrefillGoal::Sample,
        (None, false) => PrefillGoal::Fill,
        (Some(score), false) => {
            let wanted = match score.logits {
                None => LogitsWanted::No,
                Some(handle) => {
                    let handle = TensorHandle::try_from(handle)?;
                    handle.expect_dtype(DType::F32)?;
                    logits.insert(row, handle);
                    LogitsWanted::Yes
                }
            };
            PrefillGoal::Score(ScorePart {
                first_position: size(score.first_position),
                top_n: top("score.top_n", score.top_n)?,
                next_token: score.next_token,
                logits: wanted,
            })
        }
    };
    Ok(PrefillChunk {
        row,
        start: size(wire.start),
        token_ids,
        goal,
    })
}

fn open_row(wire: wire::OpenRow) -> Result<OpenRow, WorkerError> {
    let sampling = wire.sampling.ok_or_else(|| WorkerError::Invalid {
        field: "open_rows.sampling",
        problem: "missing".to_owned(),
    })?;
    Ok(OpenRow {
        row: RowId(wire.row),
        capacity_tokens: size(wire.capacity_tokens),
        prompt_tokens: size(wire.prompt_tokens),
        sampling: sampling_parameters(sampling)?,
        end_token_ids: wire.end_token_ids,
        top_logprobs: wire
            .top_logprobs
            .map(|n| top("open_rows.top_logprobs", n))
            .transpose()?,
    })
}

fn sampling_parameters(wire: wire::Sampling) -> Result<SamplingParameters, WorkerError> {
    bounded(
        "sampling.bias_token_ids",
        wire.bias_token_ids.len(),
        MAX_TOKEN_LIST,
    )?;
    bounded(
        "sampling.allowed_token_ids",
        wire.allowed_token_ids.len(),
        MAX_TOKEN_LIST,
    )?;
    if wire.bias_token_ids.len() != wire.biases.len() {
        return Err(WorkerError::Invalid {
            field: "sampling.biases",
            problem: format!(
                "{} biases for {} tokens",
                wire.biases.len(),
                wire.bias_token_ids.len()
            ),
        });
    }
    Ok(SamplingParameters {
        temperature: wire.temperature,
        top_k: size(wire.top_k),
        top_p: wire.top_p,
        min_p: wire.min_p,
        seed: wire.seed,
        repetition_penalty: wire.repetition_penalty,
        frequency_penalty: wire.frequency_penalty,
        presence_penalty: wire.presence_penalty,
        penalty_window_tokens: size(wire.penalty_window_tokens),
        bias: wire.bias_token_ids.into_iter().zip(wire.biases).collect(),
        allowed: wire.allowed_token_ids,
    })
}

fn decode_row(wire: wire::DecodeRow) -> Result<DecodeRow, WorkerError> {
    if wire.steps == 0 || wire.steps > MAX_DECODE_STEPS {
        return Err(WorkerError::Invalid {
            field: "decode.steps",
            problem: format!("is {}, must be 1 to {MAX_DECODE_STEPS}", wire.steps),
        });
    }
    bounded(
        "decode.draft_token_ids",
        wire.draft_token_ids.len(),
        size(MAX_DRAFT_TOKENS),
    )?;
    Ok(DecodeRow {
        row: RowId(wire.row),
        token: wire.token,
        steps: size(wire.steps),
        draft: wire.draft_token_ids,
    })
}

fn top(field: &'static str, count: u32) -> Result<usize, WorkerError> {
    if count > MAX_TOP_LOGPROBS {
        return Err(WorkerError::Invalid {
            field,
            problem: format!("is {count}, limit is {MAX_TOP_LOGPROBS}"),
        });
    }
    Ok(size(count))
}

fn bounded(field: &'static str, length: usize, limit: usize) -> Result<(), WorkerError> {
    if length > limit {
        return Err(WorkerError::Invalid {
            field,
            problem: format!("has {length} entries, limit is {limit}"),
        });
    }
    Ok(())
}

/// A u32 as a size: no target of ours has a smaller pointer.
fn size(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Writes an outcome; logits were stored before.
#[must_use]
pub fn result(sequence: u64, outcome: StepOutcome, compute_us: u64) -> wire::StepResult {
    wire::StepResult {
        sequence,
        backend: wire_backend(outcome.label).into(),
        sampler: wire_backend(outcome.sampler).into(),
        op_counts: op_counts(&outcome.stages),
        compute_us,
        rows: outcome.rows.into_iter().map(row_result).collect(),
    }
}

/// Answers a plan that only closed rows: nothing ran, so nothing is labelled.
#[must_use]
pub fn nothing_ran(sequence: u64) -> wire::StepResult {
    wire::StepResult {
        sequence,
        ..wire::StepResult::default()
    }
}

/// Answers a plan that was refused as a whole: each of its rows failed for the same reason.
#[must_use]
pub fn refused(sequence: u64, rows: &[u64], error: &WorkerError) -> wire::StepResult {
    use velox_proto::error::ServiceError as _;
    wire::StepResult {
        sequence,
        rows: rows
            .iter()
            .map(|&row| wire::RowResult {
                row,
                error: Some(wire::RowError {
                    reason: error.reason().name().to_owned(),
                    message: error.to_string(),
                }),
                ..wire::RowResult::default()
            })
            .collect(),
        ..wire::StepResult::default()
    }
}

fn op_counts(stages: &StageCounts) -> Vec<v1::OpCount> {
    Stage::ALL
        .iter()
        .map(|&stage| v1::OpCount {
            op: op_of(stage).name().to_owned(),
            count: stages.count(stage),
        })
        .collect()
}

fn row_result(row: RowOutcome) -> wire::RowResult {
    let mut result = wire::RowResult {
        row: row.row.0,
        key_bytes: row.key_bytes,
        value_bytes: row.value_bytes,
        ..wire::RowResult::default()
    };
    match row.result {
        Ok(output) => {
            result.tokens = output.tokens.into_iter().map(sampled).collect();
            result.scores = output.scores.into_iter().map(scored).collect();
        }
        Err(error) => {
            result.error = Some(wire::RowError {
                reason: engine_reason(&error).name().to_owned(),
                message: error.to_string(),
            });
        }
    }
    result
}

fn sampled(token: SampledToken) -> wire::SampledToken {
    wire::SampledToken {
        token_id: token.token_id,
        logprob: token.logprob,
        top: token.top.into_iter().map(alternative).collect(),
    }
}

fn scored(position: ScoredPosition) -> wire::ScoredToken {
    wire::ScoredToken {
        // Positions are below a row's capacity, which arrived as u32.
        position: u32::try_from(position.position).unwrap_or(u32::MAX),
        next_logprob: position.next_logprob,
        top: position.top.into_iter().map(alternative).collect(),
    }
}

fn alternative(alternative: velox_engine::step::Alternative) -> wire::Alternative {
    wire::Alternative {
        token_id: alternative.token_id,
        logprob: alternative.logprob,
    }
}

/// Checks how a model is to be loaded.
pub(crate) fn load_shape(
    request: &wire::LoadModelRequest,
) -> Result<(Option<Quantisation>, Option<NonZeroUsize>), WorkerError> {
    let quantise = request.quantize_bits.map(|bits| {
        Quantisation::of_bits(bits).ok_or_else(|| WorkerError::Invalid {
            field: "quantize_bits",
            problem: format!("is {bits}, supported are 4, 5 and 8"),
        })
    });
    let max_context = request.max_context_tokens.map(|tokens| {
        usize::try_from(tokens)
            .ok()
            .and_then(NonZeroUsize::new)
            .filter(|tokens| tokens.get() > 1)
            .ok_or_else(|| WorkerError::Invalid {
                field: "max_context_tokens",
                problem: format!("is {tokens}, a prompt and its answer need at least 2"),
            })
    });
    Ok((quantise.transpose()?, max_context.transpose()?))
}
