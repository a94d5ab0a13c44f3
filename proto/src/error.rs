//! The closed table of reasons and its one mapping to and from gRPC status.
//!
//! Every crate has an own error enum and implements [`ServiceError`]; [`to_status`] is the only function
//! that makes a [`Status`] of it. A client reads it back with [`ServiceFault::from_status`].

use std::collections::HashMap;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// `ErrorInfo.domain` of every status made here.
pub const DOMAIN: &str = "velox";

/// Longest message that travels: trailers are limited to 8 KiB.
const MAX_STATUS_MESSAGE_BYTES: usize = 2048;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal => $code:ident;)+) => {
        /// Why a call was refused or ended, for programs.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Reason { $($(#[doc = $doc])+ $variant,)+ }

        impl Reason {
            /// Every reason, in the order of the table.
            pub const ALL: &'static [Reason] = &[$(Reason::$variant,)+];

            /// Returns the text of `ErrorInfo.reason`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Reason::$variant => $name,)+ }
            }

            /// Returns the gRPC code that the reason travels with.
            #[must_use]
            pub const fn code(self) -> Code {
                match self { $(Reason::$variant => Code::$code,)+ }
            }
        }
    };
}

reasons! {
    /// A field of the request is missing, malformed or out of range.
    InvalidRequest = "INVALID_REQUEST" => InvalidArgument;
    /// The prompt does not fit the model's context.
    PromptTooLong = "PROMPT_TOO_LONG" => InvalidArgument;
    /// The chat template refused the messages or failed.
    TemplateFailed = "TEMPLATE_FAILED" => InvalidArgument;
    /// A tensor handle does not describe memory that its sender may use.
    InvalidHandle = "INVALID_HANDLE" => InvalidArgument;
    /// The model file is damaged, incomplete or of a kind that is not supported.
    InvalidModel = "INVALID_MODEL" => InvalidArgument;
    /// No model of that name is resident, or its file does not exist.
    ModelNotFound = "MODEL_NOT_FOUND" => NotFound;
    /// No worker of that id.
    WorkerNotFound = "WORKER_NOT_FOUND" => NotFound;
    /// The name is taken by another model.
    ModelExists = "MODEL_EXISTS" => AlreadyExists;
    /// The model serves running requests.
    ModelBusy = "MODEL_BUSY" => FailedPrecondition;
    /// No allowed backend can run it.
    BackendUnavailable = "BACKEND_UNAVAILABLE" => FailedPrecondition;
    /// The backend does not have the op, or not for that type.
    OpUnsupported = "OP_UNSUPPORTED" => Unimplemented;
    /// The queue is full.
    QueueFull = "QUEUE_FULL" => ResourceExhausted;
    /// As many models are loaded as may be.
    TooManyModels = "TOO_MANY_MODELS" => ResourceExhausted;
    /// The memory budget does not allow it.
    OutOfMemory = "OUT_OF_MEMORY" => ResourceExhausted;
    /// The caller's deadline passed.
    DeadlineExceeded = "DEADLINE_EXCEEDED" => DeadlineExceeded;
    /// The caller went away.
    Cancelled = "CANCELLED" => Cancelled;
    /// The gateway or its worker is going down.
    Draining = "DRAINING" => Unavailable;
    /// No worker is ready, or it was lost and could not be replaced in time.
    WorkerUnavailable = "WORKER_UNAVAILABLE" => Unavailable;
    /// The request crashed a worker while it was alone on it.
    PoisonRequest = "POISON_REQUEST" => Aborted;
    /// The model produced values that are not numbers.
    NumericError = "NUMERIC_ERROR" => Internal;
    /// The caller may not do this.
    PermissionDenied = "PERMISSION_DENIED" => PermissionDenied;
    /// A fault of ours.
    Internal = "INTERNAL" => Internal;
}

impl Reason {
    /// Returns whether the reason says "no" to what was asked, rather than that something broke: for exit codes.
    #[must_use]
    pub const fn is_refusal(self) -> bool {
        !matches!(
            self,
            Self::Internal | Self::NumericError | Self::WorkerUnavailable | Self::Cancelled
        )
    }
}

impl std::str::FromStr for Reason {
    type Err = UnknownReason;

    fn from_str(name: &str) -> Result<Self, UnknownReason> {
        Self::ALL
            .iter()
            .copied()
            .find(|reason| reason.name() == name)
            .ok_or_else(|| UnknownReason(name.to_owned()))
    }
}

/// A text that is not in the table of reasons.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("reason {0:?} is not in the table")]
pub struct UnknownReason(pub String);

/// An error that can leave a process.
pub trait ServiceError: std::error::Error {
    /// Returns the reason for programs.
    fn reason(&self) -> Reason;

    /// Returns facts for programs: limits, values, ids.
    fn metadata(&self) -> HashMap<String, String> {
        HashMap::new()
    }

    /// Returns the request field at fault, if there is one.
    fn field(&self) -> Option<&str> {
        None
    }

    /// Returns when a retry makes sense, if ever.
    fn retry_delay(&self) -> Option<Duration> {
        None
    }
}

/// Makes the status of an error: the only place where that is done.
#[must_use]
pub fn to_status(error: &dyn ServiceError) -> Status {
    let reason = error.reason();
    let message = clip(with_causes(error));
    let mut details = ErrorDetails::with_error_info(reason.name(), DOMAIN, error.metadata());
    if let Some(field) = error.field() {
        details.add_bad_request_violation(field, message.clone());
    }
    if let Some(delay) = error.retry_delay() {
        details.set_retry_info(Some(delay));
    }
    if reason.code() == Code::FailedPrecondition {
        details.add_precondition_failure_violation(reason.name(), DOMAIN, message.clone());
    }
    Status::with_error_details(reason.code(), message, details)
}

/// The error's text and those of its causes, unless it repeats them itself.
fn with_causes(error: &dyn ServiceError) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message.push_str(": ");
            message.push_str(&text);
        }
        cause = error.source();
    }
    message
}

fn clip(mut message: String) -> String {
    if message.len() > MAX_STATUS_MESSAGE_BYTES {
        let mut end = MAX_STATUS_MESSAGE_BYTES;
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        message.push('…');
    }
    message
}

/// An error as the other side of a channel reads it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ServiceFault {
    /// Reason of the table; a status made elsewhere gets the nearest one.
    pub reason: Reason,
    /// Text for people.
    pub message: String,
    /// Facts for programs.
    pub metadata: HashMap<String, String>,
    /// Request field at fault.
    pub field: Option<String>,
    /// When a retry makes sense.
    pub retry_delay: Option<Duration>,
}

impl ServiceFault {
    /// Makes a fault without details.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            metadata: HashMap::new(),
            field: None,
            retry_delay: None,
        }
    }

    /// Reads a status that arrived from a peer.
    #[must_use]
    pub fn from_status(status: &Status) -> Self {
        let details = status.get_error_details();
        let info = details.error_info();
        let reason = info
            .filter(|info| info.domain == DOMAIN)
            .and_then(|info| info.reason.parse().ok())
            .unwrap_or_else(|| nearest(status.code()));
        Self {
            reason,
            message: status.message().to_owned(),
            metadata: info.map(|info| info.metadata.clone()).unwrap_or_default(),
            field: details
                .bad_request()
                .and_then(|bad| bad.field_violations.first())
                .map(|violation| violation.field.clone()),
            retry_delay: details.retry_info().and_then(|retry| retry.retry_delay),
        }
    }
}

/// Reason for a status that carries none of ours, as tonic itself makes them.
fn nearest(code: Code) -> Reason {
    match code {
        Code::InvalidArgument | Code::OutOfRange => Reason::InvalidRequest,
        Code::NotFound => Reason::ModelNotFound,
        Code::AlreadyExists => Reason::ModelExists,
        Code::FailedPrecondition => Reason::BackendUnavailable,
        Code::Unimplemented => Reason::OpUnsupported,
        Code::ResourceExhausted => Reason::QueueFull,
        Code::DeadlineExceeded => Reason::DeadlineExceeded,
        Code::Cancelled => Reason::Cancelled,
        Code::Unavailable => Reason::WorkerUnavailable,
        Code::Aborted => Reason::PoisonRequest,
        Code::PermissionDenied | Code::Unauthenticated => Reason::PermissionDenied,
        Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => Reason::Internal,
    }
}

impl ServiceError for ServiceFault {
    fn reason(&self) -> Reason {
        self.reason
    }

    fn metadata(&self) -> HashMap<String, String> {
        self.metadata.clone()
    }

    fn field(&self) -> Option<&str> {
        self.field.as_deref()
    }

    fn retry_delay(&self) -> Option<Duration> {
        self.retry_delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_survives_the_way_through_a_status() {
        for &reason in Reason::ALL {
            let fault = ServiceFault {
                reason,
                message: format!("limit is 8, value is {}", reason.name()),
                metadata: HashMap::from([("limit".to_owned(), "8".to_owned())]),
                field: Some("prompt".to_owned()),
                retry_delay: Some(Duration::from_millis(250)),
            };
            let status = to_status(&fault);
            assert_eq!(status.code(), reason.code());
            assert_eq!(ServiceFault::from_status(&status), fault);
        }
    }

    #[test]
    fn a_refusal_is_told_from_a_fault() {
        assert!(Reason::BackendUnavailable.is_refusal());
        assert!(Reason::OpUnsupported.is_refusal());
        assert!(!Reason::Internal.is_refusal());
        assert!(!Reason::WorkerUnavailable.is_refusal());
    }

    #[test]
    fn a_foreign_status_gets_the_nearest_reason() {
        let fault = ServiceFault::from_status(&Status::unavailable("connection refused"));
        assert_eq!(fault.reason, Reason::WorkerUnavailable);
        assert_eq!(fault.message, "connection refused");
    }

    #[test]
    fn the_cause_of_an_error_travels_once() {
        #[derive(Debug, thiserror::Error)]
        enum Unreadable {
            #[error("cannot read model.gguf")]
            Silent(#[source] std::io::Error),
            #[error("cannot read model.gguf: {0}")]
            Telling(#[source] std::io::Error),
        }
        impl ServiceError for Unreadable {
            fn reason(&self) -> Reason {
                Reason::InvalidModel
            }
        }
        let cause = || std::io::Error::other("disk on fire");
        for error in [Unreadable::Silent(cause()), Unreadable::Telling(cause())] {
            assert_eq!(
                to_status(&error).message(),
                "cannot read model.gguf: disk on fire"
            );
        }
    }

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let status = to_status(&ServiceFault::new(Reason::Internal, "ä".repeat(5000)));
        assert!(status.message().len() <= MAX_STATUS_MESSAGE_BYTES + 3);
        assert!(status.message().ends_with('…'));
    }
}
