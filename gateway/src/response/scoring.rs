//! A text that is scored chunk by chunk.

use bytes::BytesMut;
use velox_proto::v1;

use super::{Account, alternative};
use crate::error::GatewayError;
use crate::request::{Job, Work};
use crate::scheduler::{RowEvent, RowHandle, Step};

/// Gathers the chunks of one score request. A chunk that a second worker computed again is taken once.
#[derive(Debug)]
pub struct Scoring {
    tokens: Vec<u32>,
    logits_width: Option<u32>,
    account: Account,
    positions: Vec<v1::ScoredPosition>,
    first_position: u32,
    logits: BytesMut,
}

impl Scoring {
    /// Begins with a job that is about to be submitted.
    #[must_use]
    pub fn new(job: &Job) -> Self {
        let (first_position, logits_width) = match job.work() {
            Work::Score(score) => (score.first_position, score.logits_width),
            Work::Generate(_) => (0, None),
        };
        Self {
            tokens: job.prompt().to_vec(),
            logits_width,
            account: Account::begin(),
            positions: Vec::new(),
            first_position,
            logits: BytesMut::new(),
        }
    }

    /// Waits for the last chunk; `method` names the cache.
    ///
    /// # Errors
    /// The row's error.
    pub async fn whole(
        mut self,
        mut row: RowHandle,
        method: &str,
    ) -> Result<v1::ScoreResponse, GatewayError> {
        loop {
            match row.next().await.ok_or(GatewayError::Draining)? {
                RowEvent::Started(at) => self.account.started(at),
                RowEvent::Failed(error) => return Err(error),
                RowEvent::Step(step) => {
                    let is_last = step.end.is_some();
                    self.take(*step)?;
                    if is_last {
                        return self.finish(method);
                    }
                }
            }
        }
    }

    fn take(&mut self, step: Step) -> Result<(), GatewayError> {
        self.account.step(&step);
        let next = self.next_position();
        let begin = step.scores.first().map_or(next, |score| score.position);
        if let (Some(width), Some(logits)) = (self.logits_width, step.logits) {
            let row_bytes = index(width).saturating_mul(size_of::<f32>());
            let known = index(next.saturating_sub(begin)).saturating_mul(row_bytes);
            self.logits
                .extend_from_slice(logits.get(known..).unwrap_or_default());
        }
        for score in step.scores {
            if score.position < next {
                continue;
            }
            self.account.scored();
            let token_id = self.tokens.get(index(score.position)).copied();
            self.positions.push(v1::ScoredPosition {
                position: score.position,
                token_id: token_id.ok_or(GatewayError::Internal("a position was made up"))?,
                next_logprob: score.next_logprob,
                top: score.top.iter().map(alternative).collect(),
            });
        }
        Ok(())
    }

    fn next_position(&self) -> u32 {
        self.positions
            .last()
            .map_or(self.first_position, |last| last.position.saturating_add(1))
    }

    fn finish(self, method: &str) -> Result<v1::ScoreResponse, GatewayError> {
        let prompt_tokens = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        let rows = prompt_tokens.saturating_sub(self.first_position);
        let logits = match self.logits_width {
            None => None,
            Some(width) => {
                let expected = index(rows) * index(width) * size_of::<f32>();
                if self.logits.len() != expected {
                    return Err(GatewayError::Internal("logits are not complete"));
                }
                Some(v1::Tensor {
                    dtype: v1::DType::F32.into(),
                    shape: vec![u64::from(rows), u64::from(width)],
                    data: Some(v1::tensor::Data::Inline(self.logits.freeze())),
                })
            }
        };
        let (key_bytes, value_bytes) = self.account.kv_bytes();
        Ok(v1::ScoreResponse {
            positions: self.positions,
            logits,
            provenance: Some(self.account.provenance()),
            usage: Some(self.account.usage(prompt_tokens)),
            timings: Some(self.account.timings()),
            kv: Some(v1::KvUse {
                method: method.to_owned(),
                key_bytes,
                value_bytes,
                tokens: prompt_tokens,
            }),
        })
    }
}

fn index(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
