//! The caller's deadline over the whole call, streams included.
//!
//! tonic's own timer answers CANCELLED and stops counting at the response headers. This layer answers
//! DEADLINE_EXCEEDED whenever the time is over and drops what the handler or its stream holds, which frees the row.
//! tonic's timer sits outside of ours and polls us first, so ours wins by firing a moment earlier.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tower::{Layer, Service};
use velox_proto::error::to_status;

use crate::error::GatewayError;

/// Name of the header.
const GRPC_TIMEOUT: &str = "grpc-timeout";

/// How much earlier than tonic's timer ours fires: its resolution.
const HEAD_START: Duration = Duration::from_millis(1);

/// Most digits of a `grpc-timeout`.
const MAX_DIGITS: usize = 8;

/// When a call must be over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallDeadline {
    /// The moment.
    pub(crate) at: Instant,
    /// What the caller allowed.
    pub(crate) limit: Duration,
}

tokio::task_local! {
    /// The deadline of the call whose handler runs. A body that nobody polls, because its reader has stopped, cannot
    /// look at its timer: what the call holds elsewhere must know the deadline by itself.
    static CALL: Option<CallDeadline>;
}

/// Returns the deadline of the call whose handler runs.
pub(crate) fn current() -> Option<CallDeadline> {
    CALL.try_with(|deadline| *deadline).ok().flatten()
}

/// Runs a handler with a deadline that [`current`] returns; a limit beyond all time is none.
pub(crate) fn scope<F: Future>(limit: Duration, handler: F) -> impl Future<Output = F::Output> {
    let at = Instant::now().checked_add(limit);
    CALL.scope(at.map(|at| CallDeadline { at, limit }), handler)
}

/// Adds [`Deadline`] to a service.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeadlineLayer;

impl<S> Layer<S> for DeadlineLayer {
    type Service = Deadline<S>;

    fn layer(&self, inner: S) -> Deadline<S> {
        Deadline { inner }
    }
}

/// A service whose calls end at their deadline.
#[derive(Debug, Clone)]
pub struct Deadline<S> {
    inner: S,
}

impl<S> Service<Request<Body>> for Deadline<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let limit = match timeout(request.headers()) {
            Ok(None) => return Box::pin(self.inner.call(request)),
            Ok(Some(limit)) => limit,
            Err(error) => {
                let response = to_status(&error).into_http();
                return Box::pin(std::future::ready(Ok(response)));
            }
        };
        let mut timer = Box::pin(tokio::time::sleep(limit.saturating_sub(HEAD_START)));
        let handled = scope(limit, self.inner.call(request));
        Box::pin(async move {
            tokio::select! {
                biased;
                () = &mut timer => Ok(expired(limit).into_http()),
                response = handled => {
                    let response = response?;
                    Ok(response.map(|body| Body::new(DeadlineBody { inner: Some(body), timer, limit })))
                }
            }
        })
    }
}

/// A response body that ends with DEADLINE_EXCEEDED when the time is over.
struct DeadlineBody {
    /// `None` after the end.
    inner: Option<Body>,
    timer: Pin<Box<Sleep>>,
    limit: Duration,
}

impl http_body::Body for DeadlineBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let Some(inner) = &mut this.inner else {
            return Poll::Ready(None);
        };
        if this.timer.as_mut().poll(context).is_ready() {
            this.inner = None;
            return Poll::Ready(Some(expired_trailers(this.limit).map(Frame::trailers)));
        }
        let frame = std::task::ready!(Pin::new(inner).poll_frame(context));
        if frame
            .as_ref()
            .is_none_or(|frame| frame.as_ref().map_or(true, Frame::is_trailers))
        {
            this.inner = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

fn expired(limit: Duration) -> Status {
    to_status(&GatewayError::DeadlineExceeded(limit))
}

fn expired_trailers(limit: Duration) -> Result<HeaderMap, Status> {
    let mut trailers = HeaderMap::new();
    expired(limit).add_header(&mut trailers)?;
    Ok(trailers)
}

/// Reads the header; a value that is no timeout is refused rather than ignored.
fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, GatewayError> {
    let Some(value) = headers.get(GRPC_TIMEOUT) else {
        return Ok(None);
    };
    let refused =
        || GatewayError::invalid(GRPC_TIMEOUT, "grpc-timeout is not 1 to 8 digits and a unit");
    let text = value.to_str().map_err(|_not_ascii| refused())?;
    let unit = text.chars().next_back().ok_or_else(refused)?;
    let digits = text.strip_suffix(unit).unwrap_or_default();
    if digits.is_empty()
        || digits.len() > MAX_DIGITS
        || !digits.bytes().all(|byte| byte.is_ascii_digit())
    {
        return Err(refused());
    }
    let amount: u64 = digits.parse().map_err(|_not_a_number| refused())?;
    let limit = match unit {
        'H' => Duration::from_secs(amount.saturating_mul(3600)),
        'M' => Duration::from_secs(amount.saturating_mul(60)),
        'S' => Duration::from_secs(amount),
        'm' => Duration::from_millis(amount),
        'u' => Duration::from_micros(amount),
        'n' => Duration::from_nanos(amount),
        _ => return Err(refused()),
    };
    Ok(Some(limit))
}

#[cfg(test)]
mod tests;
