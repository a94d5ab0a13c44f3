//! The control connection, which tells when it is gone.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tonic::transport::server::Connected;

/// A socket whose owner drops it when the connection has ended: at end of file, also in the middle of a step.
#[derive(Debug)]
pub(super) struct WatchedSocket {
    socket: UnixStream,
    _alive: oneshot::Sender<Infallible>,
}

impl WatchedSocket {
    /// Wraps a socket; the receiver fails when it is dropped.
    pub(super) fn new(socket: UnixStream) -> (Self, oneshot::Receiver<Infallible>) {
        let (alive, gone) = oneshot::channel();
        let watched = Self {
            socket,
            _alive: alive,
        };
        (watched, gone)
    }
}

impl AsyncRead for WatchedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl AsyncWrite for WatchedSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

impl Connected for WatchedSocket {
    type ConnectInfo = <UnixStream as Connected>::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.socket.connect_info()
    }
}
