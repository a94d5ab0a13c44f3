//! What the control service asks of the tensor thread.

use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use tokio::sync::oneshot;
use velox_proto::worker::v1;

use crate::error::WorkerError;

/// Commands that wait for the tensor thread; more are refused.
pub const MAX_WAITING_COMMANDS: usize = 16;

/// Where a command's answer goes.
pub type Reply<T> = oneshot::Sender<Result<T, WorkerError>>;

/// An event of loading; the last one has facts or is an error.
pub type LoadEvent = Result<v1::LoadModelResponse, WorkerError>;

/// One piece of work for the tensor thread.
#[derive(Debug)]
pub enum Command {
    /// Opens a model.
    Load {
        /// What and how.
        request: v1::LoadModelRequest,
        /// Progress, then facts or an error. Progress leaves one place free, so that the last event always fits.
        events: tokio::sync::mpsc::Sender<LoadEvent>,
    },
    /// Closes a model.
    Unload {
        /// Its name.
        name: String,
        /// When done.
        reply: Reply<()>,
    },
    /// Encoded tokenizer description of a model.
    Tokenizer {
        /// Which model, and where to write it.
        request: v1::GetTokenizerRequest,
        /// The bytes, unless they went to shared memory, and their length and sha256.
        reply: Reply<TokenizerBytes>,
    },
    /// Runs one op.
    RunOp {
        /// Op and tensors.
        request: v1::RunOpRequest,
        /// Outputs.
        reply: Reply<v1::RunOpResponse>,
    },
    /// Refuses plans from now on.
    Drain {
        /// Rows still open.
        reply: Reply<usize>,
    },
    /// Breaks something; see `fault`.
    #[cfg(feature = "fault-hooks")]
    Fault {
        /// What and when.
        request: v1::InjectFaultRequest,
        /// When armed.
        reply: Reply<()>,
    },
}

/// A tokenizer description on its way.
#[derive(Debug)]
pub struct TokenizerBytes {
    /// The encoded message; empty when it was written to the request's destination.
    pub inline: bytes::Bytes,
    /// Whole length.
    pub total_bytes: u64,
    /// In hex.
    pub sha256: String,
}

/// Sends commands and wakes the tensor thread out of its poll.
#[derive(Debug)]
pub struct CommandSender {
    commands: mpsc::SyncSender<Command>,
    wake: UnixStream,
}

/// Receives commands on the tensor thread.
#[derive(Debug)]
pub struct CommandReceiver {
    /// The queue; read after `wake` became readable.
    pub commands: mpsc::Receiver<Command>,
    /// One byte per wake-up.
    pub wake: UnixStream,
}

/// Makes both ends.
///
/// # Errors
/// [`WorkerError::Channel`] if the system has no descriptors left.
pub fn channel() -> Result<(CommandSender, CommandReceiver), WorkerError> {
    let failed = |source| WorkerError::Channel {
        channel: "wake",
        source,
    };
    let (sender, receiver) = mpsc::sync_channel(MAX_WAITING_COMMANDS);
    let (wake_sender, wake_receiver) = UnixStream::pair().map_err(failed)?;
    wake_sender.set_nonblocking(true).map_err(failed)?;
    wake_receiver.set_nonblocking(true).map_err(failed)?;
    Ok((
        CommandSender {
            commands: sender,
            wake: wake_sender,
        },
        CommandReceiver {
            commands: receiver,
            wake: wake_receiver,
        },
    ))
}

impl CommandSender {
    /// Queues a command without waiting.
    ///
    /// # Errors
    /// [`WorkerError::TensorThread`] if the queue is full or its reader is gone.
    pub fn send(&self, command: Command) -> Result<(), WorkerError> {
        self.commands
            .try_send(command)
            .map_err(|refused| match refused {
                mpsc::TrySendError::Full(_) => {
                    WorkerError::TensorThread("its command queue is full")
                }
                mpsc::TrySendError::Disconnected(_) => WorkerError::TensorThread("it is gone"),
            })?;
        self.wake();
        Ok(())
    }

    /// Wakes the tensor thread, so that it looks at its queue and flags.
    pub fn wake(&self) {
        use std::io::Write as _;
        // A full socket means that a wake-up is already on its way.
        let _ = (&self.wake).write(&[1]);
    }
}
