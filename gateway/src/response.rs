//! From what a row yields to what a reader sees: text, stops, usage, timings and which code ran.
//!
//! Streamed and whole answers share [`Generation`]; a whole answer is a stream put together.

mod account;
mod scoring;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio_stream::Stream;
use velox_proto::v1::{self, FinishReason, GenerationEvent};
use velox_proto::worker::v1 as wire;

use crate::error::GatewayError;
use crate::request::{LengthLimit, Presentation};
use crate::scheduler::{RowEnd, RowEvent, RowHandle, Step};
use crate::text::{Detokenizer, SpecialTokens, StopMatcher, Tokenizer};

pub use account::Account;
pub use scoring::Scoring;

/// Whether the answer begins a text of its own or goes on behind the prompt's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// A turn of a conversation.
    Fresh,
    /// The rest of the prompt's text.
    Continuing,
}

/// An answer in the making. Dropping it cancels the row.
#[derive(Debug)]
pub struct Generation {
    /// `None` after the end.
    row: Option<RowHandle>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    presentation: Presentation,
    limit: LengthLimit,
    account: Account,
    /// What was not sent yet.
    pending: GenerationEvent,
    /// Why the row failed, until what was pending is out.
    failed: Option<GatewayError>,
}

impl Generation {
    /// Begins with a row that was just submitted.
    #[must_use]
    pub fn new(
        row: RowHandle,
        tokenizer: Arc<Tokenizer>,
        opening: Opening,
        presentation: Presentation,
        limit: LengthLimit,
    ) -> Self {
        let detokenizer = match opening {
            Opening::Fresh => Detokenizer::new(tokenizer, SpecialTokens::Hide),
            Opening::Continuing => Detokenizer::continuing(tokenizer, SpecialTokens::Hide),
        };
        Self {
            row: Some(row),
            detokenizer,
            stops: StopMatcher::new(presentation.stop.clone()),
            presentation,
            limit,
            account: Account::begin(),
            pending: GenerationEvent::default(),
            failed: None,
        }
    }

    /// Waits for the end and returns the whole answer as one event.
    ///
    /// # Errors
    /// The row's error.
    pub async fn whole(mut self) -> Result<GenerationEvent, GatewayError> {
        let mut answer = GenerationEvent::default();
        loop {
            let next = std::future::poll_fn(|context| Pin::new(&mut self).poll_next(context));
            let Some(event) = next.await else {
                return Err(GatewayError::Internal("an answer ended without its end"));
            };
            let event = event?;
            answer.text.push_str(&event.text);
            answer.token_ids.extend(event.token_ids);
            answer.logprobs.extend(event.logprobs);
            if event.finish.is_some() {
                answer.finish = event.finish;
                return Ok(answer);
            }
        }
    }

    /// Takes an event; returns whether it was the last.
    fn take(&mut self, event: RowEvent) -> Result<bool, GatewayError> {
        match event {
            RowEvent::Started(at) => {
                self.account.started(at);
                Ok(false)
            }
            RowEvent::Failed(error) => Err(error),
            RowEvent::Step(step) => Ok(self.take_step(*step)),
        }
    }

    fn take_step(&mut self, step: Step) -> bool {
        self.account.step(&step);
        let last = step.tokens.len().checked_sub(1);
        for (index, token) in step.tokens.into_iter().enumerate() {
            let id = token.token_id;
            self.account.token(step.at);
            if index < step.accepted_drafts {
                self.account.accepted_draft();
            }
            self.note(token);
            // The token that ends the answer is counted and has no text.
            if let Some(RowEnd::EndToken(end)) = step.end
                && Some(index) == last
            {
                self.finish(FinishReason::StopToken, None, Some(end));
                return true;
            }
            let text = self.detokenizer.push(id);
            let pushed = self.stops.push(&text);
            self.pending.text.push_str(&pushed.emit);
            if let Some(stop) = pushed.matched {
                self.finish(FinishReason::StopString, Some(stop), None);
                return true;
            }
        }
        if step.end.is_none() {
            return false;
        }
        let reason = match self.limit {
            LengthLimit::MaxTokens => FinishReason::MaxTokens,
            LengthLimit::Context => FinishReason::MaxContext,
        };
        self.finish(reason, None, None);
        true
    }

    fn note(&mut self, token: wire::SampledToken) {
        if self.presentation.token_ids {
            self.pending.token_ids.push(token.token_id);
        }
        if self.presentation.logprobs {
            self.pending.logprobs.push(v1::TokenLogprob {
                token_id: token.token_id,
                logprob: token.logprob.unwrap_or(f32::NEG_INFINITY),
                top: token.top.iter().map(alternative).collect(),
            });
        }
    }

    /// Moves text that was held back to what goes out next; returns the stop that it completes, if any.
    fn release(&mut self) -> Option<usize> {
        let rest = self.detokenizer.finish();
        let pushed = self.stops.push(&rest);
        self.pending.text.push_str(&pushed.emit);
        if pushed.matched.is_none() {
            self.pending.text.push_str(&self.stops.finish());
        }
        pushed.matched
    }

    fn finish(&mut self, reason: FinishReason, stop: Option<usize>, end_token: Option<u32>) {
        let mut reason = reason;
        let mut stop = stop;
        if stop.is_none() {
            // What was held back goes out now, unless the rest of a character completes a stop.
            stop = self.release();
            if stop.is_some() {
                reason = FinishReason::StopString;
            }
        }
        let matched_stop = stop.and_then(|index| self.presentation.stop.get(index).cloned());
        self.pending.finish = Some(v1::Finish {
            reason: reason.into(),
            matched_stop: matched_stop.unwrap_or_default(),
            matched_stop_token_id: end_token.filter(|_id| reason == FinishReason::StopToken),
            usage: Some(v1::Usage {
                truncated_tokens: self.presentation.truncated_tokens,
                ..self.account.usage(self.presentation.prompt_tokens)
            }),
            timings: Some(self.account.timings()),
            provenance: Some(self.account.provenance()),
            seed: self.presentation.seed,
            model: self.presentation.model.to_string(),
        });
    }
}

impl Stream for Generation {
    type Item = Result<GenerationEvent, GatewayError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        // Everything that is there goes out together: a reader that is slow gets fewer, larger events. The row's
        // channel is bounded, and so is this loop.
        loop {
            let Some(row) = &mut this.row else {
                return Poll::Ready(this.failed.take().map(Err));
            };
            let event = match row.poll_next(context) {
                Poll::Pending if this.pending.text.is_empty() => return Poll::Pending,
                Poll::Pending => return Poll::Ready(Some(Ok(std::mem::take(&mut this.pending)))),
                Poll::Ready(event) => event.ok_or(GatewayError::Draining),
            };
            match event.and_then(|event| this.take(event)) {
                Ok(false) => {}
                Ok(true) => {
                    this.row = None;
                    return Poll::Ready(Some(Ok(std::mem::take(&mut this.pending))));
                }
                Err(error) => {
                    this.row = None;
                    // `next_token_index` counts every token that arrived here: all of their text goes out first.
                    this.release();
                    let rest = std::mem::take(&mut this.pending);
                    if rest == GenerationEvent::default() {
                        return Poll::Ready(Some(Err(error)));
                    }
                    this.failed = Some(error);
                    return Poll::Ready(Some(Ok(rest)));
                }
            }
        }
    }
}

fn alternative(wire: &wire::Alternative) -> v1::TopLogprob {
    v1::TopLogprob {
        token_id: wire.token_id,
        logprob: wire.logprob,
    }
}

#[cfg(test)]
mod tests;
