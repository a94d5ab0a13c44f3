//! Starts a W3C trace at the client.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

use tonic::metadata::MetadataValue;
use velox_proto::trace::{TRACEPARENT, TraceContext};

/// A number that the process cannot predict; trace ids need uniqueness, not secrecy.
fn random() -> u64 {
    // Each RandomState has fresh keys from the system.
    RandomState::new().build_hasher().finish() | 1
}

/// Makes a call with its own trace and an optional deadline.
#[must_use]
pub fn traced<T>(message: T, deadline: Option<Duration>) -> tonic::Request<T> {
    let context = TraceContext {
        trace_id: (u128::from(random()) << 64) | u128::from(random()),
        parent_id: random(),
        flags: 1,
    };
    let mut request = tonic::Request::new(message);
    if let Ok(value) = MetadataValue::try_from(context.to_string()) {
        request.metadata_mut().insert(TRACEPARENT, value);
    }
    if let Some(deadline) = deadline {
        request.set_timeout(deadline);
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_starts_its_own_trace() {
        let parse = |request: tonic::Request<()>| -> TraceContext {
            request
                .metadata()
                .get(TRACEPARENT)
                .unwrap()
                .to_str()
                .unwrap()
                .parse()
                .unwrap()
        };
        let (first, second) = (parse(traced((), None)), parse(traced((), None)));
        assert_ne!(first.trace_id, second.trace_id);
    }
}
