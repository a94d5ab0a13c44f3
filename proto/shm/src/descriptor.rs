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
/// [`io::ErrorKind::InvalidInput`] for more than [`MAX_DESCRIPTORS`] descriptors or for descriptors without a byte,
/// else what the socket says ([`io::ErrorKind::WouldBlock`] included).
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    if bytes.is_empty() && !descriptors.is_empty() {
        return Err(invalid("descriptors need a byte to travel with"));
    }
    // The space is rounded up and could hold one more.
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(invalid("more than 4 descriptors in one message"));
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(invalid("descriptors do not fit in one message"));
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
/// [`io::ErrorKind::InvalidData`] if descriptors were cut off or `descriptors` would hold more than
/// [`MAX_DESCRIPTORS`]; those that came are closed then, and the stream is of no more use. Else what the socket says.
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

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "passes descriptors")]
    fn a_descriptor_arrives_with_its_first_byte_and_closes_on_exec() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        assert_eq!(send(ours.as_fd(), b"hello", &[writer.as_fd()]).unwrap(), 5);
        drop(writer);
        let (mut buffer, mut received) = ([0; 16], Vec::new());
        assert_eq!(
            receive(theirs.as_fd(), &mut buffer, &mut received).unwrap(),
            5
        );
        assert_eq!(&buffer[..5], b"hello");
        let descriptor = received.pop().unwrap();
        let flags = rustix::io::fcntl_getfd(&descriptor).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        std::fs::File::from(descriptor)
            .write_all(b"through")
            .unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
    }

    #[test]
    #[cfg_attr(miri, ignore = "passes descriptors")]
    fn the_end_of_the_peer_is_no_bytes() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(ours);
        assert_eq!(
            receive(theirs.as_fd(), &mut [0; 16], &mut Vec::new()).unwrap(),
            0
        );
        assert_eq!(
            send(theirs.as_fd(), b"x", &[]).unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "passes descriptors")]
    fn senders_are_told_their_limits() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let five = [ours.as_fd(); MAX_DESCRIPTORS + 1];
        assert_eq!(
            send(ours.as_fd(), b"x", &five).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        assert_eq!(
            send(ours.as_fd(), b"", &five[..1]).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }

    /// Sends without the limit, as a hostile peer would.
    fn send_many(socket: BorrowedFd<'_>, descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        sendmsg(socket, &[IoSlice::new(b"x")], &mut control, SEND_FLAGS).unwrap();
    }

    /// Refused descriptors are closed: the pipe ends when the last writer is gone.
    fn assert_all_closed(mut reader: std::io::PipeReader, writer: std::io::PipeWriter) {
        drop(writer);
        assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "passes descriptors")]
    fn a_flood_in_one_message_is_refused_and_closed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        send_many(ours.as_fd(), &[writer.as_fd(); 32]);
        let mut received = Vec::new();
        let error = receive(theirs.as_fd(), &mut [0; 16], &mut received).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert!(received.is_empty());
        assert_all_closed(reader, writer);
    }

    #[test]
    #[cfg_attr(miri, ignore = "passes descriptors")]
    fn a_flood_over_many_messages_is_refused_and_closed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let mut received = Vec::new();
        for _ in 0..2 {
            send(ours.as_fd(), b"x", &[writer.as_fd(); 2]).unwrap();
            receive(theirs.as_fd(), &mut [0; 1], &mut received).unwrap();
        }
        send(ours.as_fd(), b"x", &[writer.as_fd()]).unwrap();
        let error = receive(theirs.as_fd(), &mut [0; 1], &mut received).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        assert_eq!(received.len(), MAX_DESCRIPTORS);
        drop(received);
        assert_all_closed(reader, writer);
    }
}
