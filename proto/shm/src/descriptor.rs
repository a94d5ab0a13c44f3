//! Descriptors travel beside bytes on a Unix socket (SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most descriptors of one message, and most that a receiver holds unclaimed.
pub const MAX_DESCRIPTORS: usize = 4;

// A peer that is gone is an error to handle, not a signal to die from; Rust ignores SIGPIPE where there is no flag.
#[cfg(target_os = "linux")]
const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL;
#[cfg(not(target_os = "linux"))]
const SEND_FLAGS: SendFlags = SendFlags::empty();

#[cfg(target_os = "linux")]
const RECEIVE_FLAGS: RecvFlags = RecvFlags::CMSG_CLOEXEC;
#[cfg(not(target_os = "linux"))]
const RECEIVE_FLAGS: RecvFlags = RecvFlags::empty();

/// Sends bytes, and descriptors with the first of them.
///
/// Returns how many bytes went; if that is fewer than given, send the rest without descriptors.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for more than [`MAX_DESCRIPTORS`] descriptors or for descriptors without a byte, else what
/// the socket says ([`io::ErrorKind::WouldBlock`] included).
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    if bytes.is_empty() && !descriptors.is_empty() {
        return Err(invalid("descriptors need a byte to travel with"));
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(invalid("more than 4 descriptors in one message"));
    }
    let parts = [IoSlice::new(bytes)];
    Ok(retry_on_intr(|| {
        sendmsg(socket, &parts, &mut control, SEND_FLAGS)
    })?)
}

/// Receives bytes, and appends the descriptors that came with them, closed on exec.
///
/// Returns the number of bytes; 0 means that the peer is gone.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if descriptors were cut off or `descriptors` would hold more than [`MAX_DESCRIPTORS`]; those that came
/// are closed then, and the stream is of no more use. Else what the socket says.
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(buffer)];
    let message = retry_on_intr(|| recvmsg(socket, &mut parts, &mut control, RECEIVE_FLAGS))?;
    let mut received = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            received.extend(rights);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(hostile("descriptors were cut off"));
    }
    if descriptors.len() + received.len() > MAX_DESCRIPTORS {
        return Err(hostile("more than 4 descriptors are waiting"));
    }
    close_on_exec(&received)?;
    descriptors.append(&mut received);
    Ok(message.bytes)
}

#[cfg(target_os = "linux")]
#[expect(
    clippy::unnecessary_wraps,
    reason = "other systems need a call that can fail"
)]
fn close_on_exec(_received: &[OwnedFd]) -> io::Result<()> {
    // CMSG_CLOEXEC has done it, without a gap in which another thread could fork.
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn close_on_exec(received: &[OwnedFd]) -> io::Result<()> {
    for descriptor in received {
        rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::CLOEXEC)?;
    }
    Ok(())
}

fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

fn hostile(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
