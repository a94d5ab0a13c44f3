//! The tensor thread's side of the step channel: blocking reads and writes of frames.

use std::collections::VecDeque;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use prost::Message as _;
use velox_proto::worker::v1::gateway_frame::Frame as FromGateway;
use velox_proto::worker::v1::worker_frame::Frame as ToGateway;
use velox_proto::worker::v1::{GatewayFrame, WorkerFrame};
use velox_shm::{descriptor, frame};

use crate::error::WorkerError;

/// Bytes read at a time: most plans fit.
const READ_BYTES: usize = 64 * 1024;

/// Descriptors that may wait for the frame that announces them.
const MAX_WAITING_DESCRIPTORS: usize = 16;

/// The step channel.
#[derive(Debug)]
pub struct StepChannel {
    socket: UnixStream,
    decoder: frame::FrameDecoder,
    descriptors: VecDeque<OwnedFd>,
    buffer: Vec<u8>,
}

/// What a read found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadState {
    /// Bytes arrived; there may be frames.
    Arrived,
    /// The gateway closed its end.
    Closed,
}

impl StepChannel {
    /// Takes the inherited socket.
    #[must_use]
    pub fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            decoder: frame::FrameDecoder::new(),
            descriptors: VecDeque::new(),
            buffer: vec![0; READ_BYTES],
        }
    }

    /// Returns the descriptor to poll.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads what is there, waiting for the first byte.
    ///
    /// # Errors
    /// [`WorkerError::Channel`], or [`WorkerError::Frame`] for descriptors that no frame announced.
    pub fn read(&mut self) -> Result<ReadState, WorkerError> {
        let mut arrived = Vec::new();
        let count = loop {
            match descriptor::receive(self.socket.as_fd(), &mut self.buffer, &mut arrived) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other.map_err(failed)?,
            }
        };
        self.descriptors.extend(arrived);
        if self.descriptors.len() > MAX_WAITING_DESCRIPTORS {
            return Err(WorkerError::Frame(format!(
                "{} descriptors wait for their frame, limit is {MAX_WAITING_DESCRIPTORS}",
                self.descriptors.len()
            )));
        }
        if count == 0 {
            return Ok(ReadState::Closed);
        }
        self.decoder.push(&self.buffer[..count]);
        Ok(ReadState::Arrived)
    }

    /// Takes the next whole frame.
    ///
    /// # Errors
    /// [`WorkerError::Frame`] if it is too long or undecodable.
    pub fn next_frame(&mut self) -> Result<Option<FromGateway>, WorkerError> {
        let Some(bytes) = self
            .decoder
            .next_frame()
            .map_err(|error| bad_frame(&error))?
        else {
            return Ok(None);
        };
        let decoded = GatewayFrame::decode(bytes).map_err(|error| bad_frame(&error))?;
        decoded
            .frame
            .map(Some)
            .ok_or_else(|| WorkerError::Frame("frame of unknown kind".to_owned()))
    }

    /// Takes the descriptor that came with a segment offer.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }

    /// Writes a frame, waiting until the gateway's buffer takes it.
    ///
    /// # Errors
    /// [`WorkerError::Channel`], or [`WorkerError::Frame`] if it is too long.
    pub fn write(&mut self, frame: ToGateway) -> Result<(), WorkerError> {
        let bytes = frame::encode(&WorkerFrame { frame: Some(frame) })
            .map_err(|error| WorkerError::Frame(error.to_string()))?;
        self.socket.write_all(&bytes).map_err(failed)
    }
}

fn bad_frame(error: &dyn std::error::Error) -> WorkerError {
    WorkerError::Frame(error.to_string())
}

fn failed(source: io::Error) -> WorkerError {
    WorkerError::Channel {
        channel: "step",
        source,
    }
}
