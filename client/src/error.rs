//! What can go wrong between a program and its gateway.

use velox_proto::error::{Reason, ServiceFault};

/// Why a call gave no result.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The text is no endpoint.
    #[error("{text:?} is no endpoint; use unix:PATH, or http://HOST:PORT")]
    InvalidEndpoint {
        /// What was given.
        text: String,
    },
    /// Nobody answers.
    #[error("no gateway answers at {}", .tried.join(" or "))]
    NotRunning {
        /// Endpoints tried.
        tried: Vec<String>,
        /// Why the last one failed.
        #[source]
        source: Option<tonic::transport::Error>,
    },
    /// A program that should start did not.
    #[error("cannot start {program}")]
    Spawn {
        /// Path of the program.
        program: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// A started gateway ended, or said something else than that it serves.
    #[error("the gateway did not start: {0}")]
    NotServing(String),
    /// A started gateway refused what it was started with; it said why where its log goes.
    #[error("the gateway refused to start: {0}")]
    StartRefused(String),
    /// The gateway refused or ended the call.
    #[error("{} ({})", .0.message, .0.reason.name())]
    Refused(Box<ServiceFault>),
    /// The gateway died, or something between it and us did: the transport ended the call, not the gateway.
    #[error("the connection to the gateway was lost")]
    ConnectionLost(#[source] Box<tonic::Status>),
    /// The stream ended before its last event.
    #[error("the answer ended without a finish event")]
    Truncated,
    /// The gateway sent something that breaks the contract.
    #[error("the gateway broke the contract: {0}")]
    Contract(&'static str),
}

impl ClientError {
    /// Returns the gateway's reason, if it gave one.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Refused(fault) => Some(fault.reason),
            _ => None,
        }
    }

    /// Returns whether this is a negative answer rather than an error: the gateway works and said no.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::StartRefused(_) => true,
            Self::Refused(fault) => fault.reason.is_refusal(),
            _ => false,
        }
    }
}

impl From<tonic::Status> for ClientError {
    fn from(status: tonic::Status) -> Self {
        let mut fault = ServiceFault::from_status(&status);
        if expired_here(&status) {
            fault.reason = Reason::DeadlineExceeded;
        } else if made_by_transport(&status) {
            return Self::ConnectionLost(Box::new(status));
        }
        Self::Refused(Box::new(fault))
    }
}

/// Whether our own timer ended the call before the gateway's answer was here: the transport calls that "cancelled".
fn expired_here(status: &tonic::Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<tonic::TimeoutExpired>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Whether the status never was on the wire: only those that are made on this side have a cause.
fn made_by_transport(status: &tonic::Status) -> bool {
    std::error::Error::source(status).is_some() && status.details().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_transport_is_not_the_gateways_answer() {
        let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let lost = ClientError::from(tonic::Status::from_error(Box::new(broken)));
        assert!(matches!(lost, ClientError::ConnectionLost(_)), "{lost}");
        assert_eq!(lost.reason(), None);
        let said = ClientError::from(tonic::Status::internal("the gateway says so"));
        assert_eq!(said.reason(), Some(Reason::Internal));
    }

    #[test]
    fn a_deadline_that_passed_on_our_side_is_a_deadline() {
        let here = tonic::Status::from_error(Box::new(tonic::TimeoutExpired(())));
        assert_eq!(here.code(), tonic::Code::Cancelled);
        assert_eq!(
            ClientError::from(here).reason(),
            Some(Reason::DeadlineExceeded)
        );
        let there = tonic::Status::cancelled("somebody else");
        assert_eq!(ClientError::from(there).reason(), Some(Reason::Cancelled));
    }
}
