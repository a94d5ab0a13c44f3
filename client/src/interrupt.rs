//! Ctrl-C, from the first wait of a command to its last.

use std::future::Future;

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listens for the interrupt signal; one that comes while nobody waits is kept.
#[derive(Debug)]
pub(crate) struct Interrupt(Signal);

impl Interrupt {
    /// Starts to listen: from here on the signal does not end the process by itself.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let signal = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
        Ok(Self(signal))
    }

    /// Waits for the signal.
    ///
    /// # Cancel safety
    /// No signal is lost when the future is dropped.
    pub(crate) async fn came(&mut self) {
        if self.0.recv().await.is_none() {
            // The runtime ends; there is nothing left to interrupt.
            std::future::pending().await
        }
    }

    /// Drives a future to its end; `None` if the signal came first.
    pub(crate) async fn or<F: Future>(&mut self, future: F) -> Option<F::Output> {
        tokio::select! {
            output = future => Some(output),
            () = self.came() => None,
        }
    }
}
