//! A streamed answer.

use std::pin::Pin;

use tokio_stream::{Stream, StreamExt as _};
use tonic::{Status, Streaming};
use velox_proto::v1::{ChatResponse, GenerateResponse, GenerationEvent};

use crate::error::ClientError;

type Events = Pin<Box<dyn Stream<Item = Result<Option<GenerationEvent>, Status>> + Send>>;

/// The events of one answer. Dropping it cancels the request.
pub struct Answer {
    events: Events,
    finished: bool,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Answer")
            .field("finished", &self.finished)
            .finish_non_exhaustive()
    }
}

impl Answer {
    pub(crate) fn of_chat(stream: Streaming<ChatResponse>) -> Self {
        Self {
            events: Box::pin(stream.map(|item| item.map(|item| item.event))),
            finished: false,
        }
    }

    pub(crate) fn of_generate(stream: Streaming<GenerateResponse>) -> Self {
        Self {
            events: Box::pin(stream.map(|item| item.map(|item| item.event))),
            finished: false,
        }
    }

    /// Waits for the next event; `None` after the one that carries `finish`.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the gateway ended the answer, [`ClientError::Truncated`] if it ended without `finish`.
    ///
    /// # Cancel safety
    /// No event is lost when the future is dropped.
    pub async fn next(&mut self) -> Result<Option<GenerationEvent>, ClientError> {
        if self.finished {
            return Ok(None);
        }
        match self.events.next().await {
            None => Err(ClientError::Truncated),
            Some(Err(status)) => Err(status.into()),
            Some(Ok(None)) => Err(ClientError::Contract("an event is empty")),
            Some(Ok(Some(event))) => {
                self.finished = event.finish.is_some();
                Ok(Some(event))
            }
        }
    }
}
