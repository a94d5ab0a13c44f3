//! The gateway's end of the step channel: frames both ways over one socket, descriptors with the offers.
//!
//! The worker writes with blocking calls, so a gateway that waited for room to write without reading could
//! wait for ever: one large plan and one large result would block each other. [`StepChannel::receive`]
//! therefore does both, and is the only place that waits.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use prost::Message as _;
use tokio::io::Interest;
use tokio::net::UnixStream;
use velox_proto::worker::v1 as wire;
use velox_shm::ShmError;
use velox_shm::frame::{FrameDecoder, encode};

/// Bytes read at a time: a decode result of a full batch fits.
const READ_BYTES: usize = 64 * 1024;

/// Why the channel cannot go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum ChannelError {
    /// The peer is gone.
    #[error("step channel is closed")]
    Closed,
    /// The socket failed.
    #[error("step channel failed")]
    Io(#[source] io::Error),
    /// A frame has an impossible length.
    #[error(transparent)]
    Frame(#[from] ShmError),
    /// A frame is no message, or one without content.
    #[error("frame is no message of the contract")]
    Message,
}

impl From<io::Error> for ChannelError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

/// What a worker sends.
pub(super) use wire::worker_frame::Frame as Incoming;

/// What a worker is sent.
pub(super) use wire::gateway_frame::Frame as Outgoing;

/// One socket, one decoder, and what the socket had no room for yet.
#[derive(Debug)]
pub(super) struct StepChannel {
    stream: UnixStream,
    decoder: FrameDecoder,
    /// Bounded by the callers: two plans, one ping, one offer at a time.
    queue: VecDeque<QueuedFrame>,
    buffer: Vec<u8>,
}

#[derive(Debug)]
struct QueuedFrame {
    bytes: Vec<u8>,
    sent: usize,
    /// Travels with the first byte.
    descriptor: Option<OwnedFd>,
}

impl StepChannel {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            decoder: FrameDecoder::new(),
            queue: VecDeque::new(),
            buffer: vec![0; READ_BYTES],
        }
    }

    /// Sends a frame, or as much of it as the socket takes; [`Self::receive`] sends the rest.
    pub(super) fn send(
        &mut self,
        frame: Outgoing,
        descriptor: Option<OwnedFd>,
    ) -> Result<(), ChannelError> {
        let bytes = encode(&wire::GatewayFrame { frame: Some(frame) })?;
        self.queue.push_back(QueuedFrame {
            bytes,
            sent: 0,
            descriptor,
        });
        self.flush()
    }

    /// Waits for the next frame and meanwhile sends what is queued.
    ///
    /// # Cancel safety
    /// Cancel safe: whole and half frames stay in the decoder and in the queue.
    pub(super) async fn receive(&mut self) -> Result<Incoming, ChannelError> {
        loop {
            if let Some(bytes) = self.decoder.next_frame()? {
                let frame =
                    wire::WorkerFrame::decode(bytes).map_err(|_damaged| ChannelError::Message)?;
                return frame.frame.ok_or(ChannelError::Message);
            }
            let interest = if self.queue.is_empty() {
                Interest::READABLE
            } else {
                Interest::READABLE | Interest::WRITABLE
            };
            let ready = self.stream.ready(interest).await?;
            if ready.is_readable() {
                match self.stream.try_read(&mut self.buffer) {
                    Ok(0) => return Err(ChannelError::Closed),
                    Ok(length) => self.decoder.push(&self.buffer[..length]),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if ready.is_writable() {
                self.flush()?;
            }
        }
    }

    fn flush(&mut self) -> Result<(), ChannelError> {
        while let Some(frame) = self.queue.front_mut() {
            let stream = &self.stream;
            let sent = stream.try_io(Interest::WRITABLE, || {
                let descriptors: Vec<_> = frame.descriptor.iter().map(|fd| fd.as_fd()).collect();
                velox_shm::descriptor::send(
                    stream.as_fd(),
                    &frame.bytes[frame.sent..],
                    &descriptors,
                )
            });
            match sent {
                Ok(sent) => {
                    frame.sent += sent;
                    frame.descriptor = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            if frame.sent == frame.bytes.len() {
                self.queue.pop_front();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use velox_proto::limits::MAX_STEP_FRAME_BYTES;

    use super::*;

    fn pair() -> (StepChannel, std::os::unix::net::UnixStream) {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let channel = StepChannel::new(UnixStream::from_std(ours).unwrap());
        (channel, theirs)
    }

    fn pong(nonce: u64) -> Vec<u8> {
        let frame = Some(Incoming::Pong(wire::Pong { nonce }));
        encode(&wire::WorkerFrame { frame }).unwrap()
    }

    #[tokio::test]
    async fn frames_cut_anywhere_arrive_whole_also_when_the_wait_is_given_up_between() {
        let (mut channel, mut theirs) = pair();
        for byte in [pong(1), pong(300)].concat() {
            let early = tokio::time::timeout(Duration::ZERO, channel.receive()).await;
            assert!(!matches!(early, Ok(Err(_))));
            io::Write::write_all(&mut theirs, &[byte]).unwrap();
        }
        assert_eq!(
            channel.receive().await.unwrap(),
            Incoming::Pong(wire::Pong { nonce: 300 })
        );
    }

    #[tokio::test]
    async fn a_large_plan_and_a_large_result_do_not_block_each_other() {
        let (mut channel, mut theirs) = pair();
        let large = || {
            let row = wire::RowResult {
                tokens: vec![wire::SampledToken::default(); 1_000_000],
                ..Default::default()
            };
            wire::StepResult {
                rows: vec![row],
                ..Default::default()
            }
        };
        let worker = std::thread::spawn(move || {
            let frame = Some(Incoming::Result(large()));
            let bytes = encode(&wire::WorkerFrame { frame }).unwrap();
            io::Write::write_all(&mut theirs, &bytes).unwrap();
            let mut header = [0; 4];
            io::Read::read_exact(&mut theirs, &mut header).unwrap();
            let mut plan = vec![0; usize::try_from(u32::from_le_bytes(header)).unwrap()];
            io::Read::read_exact(&mut theirs, &mut plan).unwrap();
            io::Write::write_all(&mut theirs, &pong(5)).unwrap();
            plan.len()
        });
        let plan = wire::StepPlan {
            close_rows: vec![u64::MAX; 200_000],
            ..Default::default()
        };
        channel.send(Outgoing::Plan(plan), None).unwrap();
        assert_eq!(channel.receive().await.unwrap(), Incoming::Result(large()));
        assert!(matches!(
            channel.receive().await.unwrap(),
            Incoming::Pong(_)
        ));
        assert!(worker.join().unwrap() > 1_900_000);
    }

    #[tokio::test]
    async fn impossible_frames_and_the_end_are_errors() {
        let (mut channel, mut theirs) = pair();
        let too_long = u32::try_from(MAX_STEP_FRAME_BYTES + 1).unwrap();
        io::Write::write_all(&mut theirs, &too_long.to_le_bytes()).unwrap();
        let error = channel.receive().await.unwrap_err();
        assert!(matches!(error, ChannelError::Frame(_)), "{error}");

        let (mut channel, mut theirs) = pair();
        io::Write::write_all(&mut theirs, &[1, 0, 0, 0, 0xff]).unwrap();
        let error = channel.receive().await.unwrap_err();
        assert!(matches!(error, ChannelError::Message), "{error}");

        let (mut channel, mut theirs) = pair();
        io::Write::write_all(&mut theirs, &[0, 0, 0, 0]).unwrap();
        let error = channel.receive().await.unwrap_err();
        assert!(matches!(error, ChannelError::Message), "{error}");

        let (mut channel, theirs) = pair();
        drop(theirs);
        let error = channel.receive().await.unwrap_err();
        assert!(matches!(error, ChannelError::Closed), "{error}");
    }
}
