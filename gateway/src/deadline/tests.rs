//! Deadlines before and after the response headers, and what counts as a deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http_body::Body as _;
use proptest::prelude::*;
use tonic::Code;
use velox_proto::error::{Reason, ServiceFault};

use super::*;

/// A body that yields one frame and then nothing, and notes when it is dropped.
struct Silent {
    frames: usize,
    dropped: Arc<AtomicBool>,
}

impl http_body::Body for Silent {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        match self.frames.checked_sub(1) {
            None => Poll::Pending,
            Some(left) => {
                self.frames = left;
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"token")))))
            }
        }
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
    }
}

fn request(timeout: &str) -> Request<Body> {
    let mut request = Request::new(Body::empty());
    let value = timeout.parse().unwrap();
    request.headers_mut().insert(GRPC_TIMEOUT, value);
    request
}

fn status(headers: &HeaderMap) -> Status {
    Status::from_header_map(headers).unwrap()
}

async fn next(body: &mut Body) -> Option<Result<Frame<Bytes>, Status>> {
    std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_with_deadline_exceeded_and_drops_what_it_holds() {
    let dropped = Arc::new(AtomicBool::new(false));
    let watched = Arc::clone(&dropped);
    let mut service = DeadlineLayer.layer(tower::service_fn(move |_request| {
        let dropped = Arc::clone(&watched);
        let body = Body::new(Silent { frames: 1, dropped });
        std::future::ready(Ok::<_, Infallible>(Response::new(body)))
    }));
    let mut body = service.call(request("5S")).await.unwrap().into_body();
    assert!(next(&mut body).await.unwrap().unwrap().is_data());
    assert!(!dropped.load(Ordering::Relaxed));

    let begin = tokio::time::Instant::now();
    let trailers = next(&mut body)
        .await
        .unwrap()
        .unwrap()
        .into_trailers()
        .unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(4));
    assert_eq!(status(&trailers).code(), Code::DeadlineExceeded);
    let fault = ServiceFault::from_status(&status(&trailers));
    assert_eq!(fault.reason, Reason::DeadlineExceeded);
    assert_eq!(fault.metadata["timeout_ms"], "5000");
    assert!(dropped.load(Ordering::Relaxed));
    assert!(next(&mut body).await.is_none());
    assert!(body.is_end_stream());
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_does_not_answer_is_dropped() {
    let mut service = DeadlineLayer.layer(tower::service_fn(|_request| {
        std::future::pending::<Result<Response<Body>, Infallible>>()
    }));
    let response = service.call(request("20m")).await.unwrap();
    assert_eq!(status(response.headers()).code(), Code::DeadlineExceeded);
}

#[tokio::test(start_paused = true)]
async fn a_call_without_deadline_is_left_alone_and_a_bad_one_refused() {
    let mut service = DeadlineLayer.layer(tower::service_fn(|_request| {
        std::future::ready(Ok::<_, Infallible>(Response::new(Body::empty())))
    }));
    let response = service.call(Request::new(Body::empty())).await.unwrap();
    assert!(Status::from_header_map(response.headers()).is_none());
    for bad in ["", "S", "5", "5s", "-5S", "123456789S", "5 S", "1e3m"] {
        let response = service.call(request(bad)).await.unwrap();
        assert_eq!(
            status(response.headers()).code(),
            Code::InvalidArgument,
            "{bad}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_knows_its_deadline() {
    let mut service = DeadlineLayer.layer(tower::service_fn(|_request| async {
        let deadline = current().unwrap();
        assert_eq!(deadline.limit, Duration::from_secs(5));
        assert_eq!(deadline.at, Instant::now() + deadline.limit);
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    service.call(request("5S")).await.unwrap();
    assert_eq!(current(), None);
}

proptest! {
    #[test]
    fn any_header_is_a_timeout_or_an_error(text in "[ -~]{0,12}") {
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_TIMEOUT, text.parse().unwrap());
        if let Ok(limit) = timeout(&headers) {
            prop_assert!(limit.is_some());
            prop_assert!((2..=9).contains(&text.len()));
        }
    }
}
