//! A peer that is killed in the middle of its work leaves nothing behind.

#![expect(clippy::unwrap_used, reason = "a failed assumption is a failed test")]

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use prost::Message;
use velox_proto::tensor::{DType, TensorHandle};
use velox_proto::v1;
use velox_proto::worker::v1::{Pong, SegmentOffer, SegmentRole};
use velox_shm::frame::{FrameDecoder, encode};
use velox_shm::{Arena, PeerSegments, Segment, descriptor};

const SLOT_BYTES: u64 = 1024 * 1024;
const HALF: usize = 512 * 1024;
const SLOTS: u64 = 4;
const ROLE: &str = "VELOX_SHM_TEST_ROLE";

/// What the child says about its attempt to shrink the segment.
const REFUSED: u64 = 1;

/// One end of a socket pair that speaks frames.
struct Channel<'a> {
    socket: BorrowedFd<'a>,
    decoder: FrameDecoder,
    descriptors: Vec<OwnedFd>,
}

impl<'a> Channel<'a> {
    fn new(socket: BorrowedFd<'a>) -> Self {
        Self {
            socket,
            decoder: FrameDecoder::new(),
            descriptors: Vec::new(),
        }
    }

    fn send<M: Message>(&self, message: &M, descriptors: &[BorrowedFd<'_>]) {
        let frame = encode(message).unwrap();
        assert_eq!(
            descriptor::send(self.socket, &frame, descriptors).unwrap(),
            frame.len()
        );
    }

    fn receive<M: Message + Default>(&mut self) -> M {
        let mut buffer = [0; 4096];
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return M::decode(frame).unwrap();
            }
            let count =
                descriptor::receive(self.socket, &mut buffer, &mut self.descriptors).unwrap();
            assert!(count > 0, "the other side is gone");
            self.decoder.push(&buffer[..count]);
        }
    }
}

/// The worker: does nothing unless it was started by the test below. Standard input is its socket.
#[test]
#[ignore = "runs as the child of the other test"]
fn child() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let socket = std::io::stdin();
    let mut channel = Channel::new(socket.as_fd());
    let offer: SegmentOffer = channel.receive();
    let descriptor = channel.descriptors.pop().unwrap();
    let shrunk = rustix::fs::ftruncate(&descriptor, 0).is_ok();
    let mut segments = PeerSegments::new();
    segments
        .accept(offer.segment, offer.byte_len, descriptor)
        .unwrap();
    channel.send(
        &Pong {
            nonce: if shrunk { 0 } else { REFUSED },
        },
        &[],
    );

    let finished = TensorHandle::try_from(channel.receive::<v1::TensorHandle>()).unwrap();
    let mut tensor = segments.view_mut(&finished).unwrap();
    tensor.bytes()[..HALF].fill(0xAB);
    tensor.finish().unwrap();
    let endless = TensorHandle::try_from(channel.receive::<v1::TensorHandle>()).unwrap();
    channel.send(&Pong::default(), &[]);
    let mut tensor = segments.view_mut(&endless).unwrap();
    for mark in (0..=u8::MAX).cycle() {
        std::hint::black_box(tensor.bytes()).fill(mark);
    }
}

fn spawn(socket: UnixStream) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env(ROLE, "worker")
        .stdin(OwnedFd::from(socket))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Names of shared memory in the file system; the directory exists on Linux only.
fn named_objects() -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> = std::fs::read_dir("/dev/shm")
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.file_name()))
        .filter(|name| name.to_string_lossy().contains("velox"))
        .collect();
    names.sort();
    names
}

/// Open descriptors of this process.
fn open_descriptors() -> usize {
    let directory = if cfg!(target_os = "linux") {
        "/proc/self/fd"
    } else {
        "/dev/fd"
    };
    std::fs::read_dir(directory).unwrap().count()
}

#[test]
#[cfg_attr(miri, ignore = "starts processes")]
fn a_killed_peer_leaves_full_capacity_and_no_trace() {
    let (descriptors, names) = (open_descriptors(), named_objects());
    {
        let arena = Arena::new(Segment::create(1, SLOTS * SLOT_BYTES).unwrap());
        for _ in 0..10 {
            kill_one(&arena);
        }
    }
    assert_eq!(open_descriptors(), descriptors);
    assert_eq!(named_objects(), names);
}

fn kill_one(arena: &Arena) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut child = spawn(theirs);
    let mut channel = Channel::new(ours.as_fd());
    let offer = SegmentOffer {
        segment: arena.segment_id(),
        byte_len: arena.segment_bytes(),
        role: SegmentRole::Tensors.into(),
    };
    channel.send(&offer, &[arena.descriptor()]);
    let shrinking: Pong = channel.receive();
    assert_eq!(shrinking.nonce, REFUSED, "the peer shrank the segment");

    let mut finished = arena.lease(SLOT_BYTES).unwrap();
    finished.write(&vec![0xCD; 2 * HALF]).unwrap();
    let endless = arena.lease(SLOT_BYTES).unwrap();
    let waiting = arena.lease(SLOT_BYTES).unwrap();
    for lease in [&finished, &endless] {
        channel.send(&lease.handle(DType::U8, &[SLOT_BYTES]).unwrap(), &[]);
    }
    let _writing: Pong = channel.receive();
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success());

    // Half of the answer is there, and only now nobody writes any more.
    let bytes = finished.copy_out(SLOT_BYTES).unwrap();
    assert!(bytes[..HALF].iter().all(|&byte| byte == 0xAB));
    assert!(bytes[HALF..].iter().all(|&byte| byte == 0xCD));
    drop((finished, endless, waiting));
    assert_eq!(arena.leased_bytes(), 0);
    assert!(arena.lease(arena.capacity_bytes()).is_ok());
    // End of file is how a gateway that is not the parent would learn of it.
    assert_eq!(
        descriptor::receive(ours.as_fd(), &mut [0; 16], &mut Vec::new()).unwrap(),
        0
    );
}
