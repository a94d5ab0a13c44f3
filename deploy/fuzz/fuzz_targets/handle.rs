//! A tensor handle: refused, or it reaches bytes of one lease and no others, by copies and by views alike.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use prost::Message as _;
use velox_proto::limits::{MAX_SEGMENT_BYTES, SLOT_ALIGNMENT_BYTES as UNIT};
use velox_proto::tensor::{DType, TensorHandle, contiguous_bytes};
use velox_proto::v1;
use velox_shm::{Arena, Lease, PeerSegments, Segment, ShmError};

const SEGMENT: u64 = 7;

/// Units before, of and behind the leases.
const UNITS: u64 = 5;

/// A segment of five units as both sides see it: one lease of the second unit, one of the third and fourth.
struct House {
    peer: PeerSegments,
    leases: [Lease; 2],
}

impl House {
    fn new() -> Result<Self, ShmError> {
        let arena = Arena::new(Segment::create(SEGMENT, UNITS * UNIT)?);
        let mut peer = PeerSegments::new();
        let descriptor = arena.descriptor().try_clone_to_owned();
        let descriptor = descriptor.expect("the process may open files");
        peer.accept(SEGMENT, arena.segment_bytes(), descriptor)?;
        let free = arena.lease(UNIT)?;
        let leases = [arena.lease(UNIT)?, arena.lease(2 * UNIT)?];
        drop(free);
        Ok(Self { peer, leases })
    }

    /// Bytes of the leases, which lie one behind the other from the second unit on.
    fn bytes(&self) -> Vec<u8> {
        self.leases
            .iter()
            .flat_map(|lease| lease.copy_out(lease.byte_len()).expect("leased"))
            .collect()
    }

    /// Uses a handle in every way, all of which must agree.
    fn check(&mut self, handle: &TensorHandle) {
        let Ok(found) = self.peer.read(handle) else {
            assert!(self.peer.write(handle, &[]).is_err());
            assert!(self.peer.view(handle).is_err());
            assert!(self.peer.view_mut(handle).is_err());
            return;
        };
        let end = handle.offset() + handle.byte_len();
        let (lease, limit) = match handle.offset() / UNIT {
            1 => (&self.leases[0], 2 * UNIT),
            2 | 3 => (&self.leases[1], 4 * UNIT),
            unit => panic!("unit {unit} was read, but nobody leased it"),
        };
        assert!(end <= limit);
        let honest = lease.handle(DType::U8, &[1]).expect("leased");
        assert_eq!(
            (handle.segment(), handle.generation()),
            (honest.segment, honest.generation)
        );

        let mut expected = self.bytes();
        let index = |at: u64| usize::try_from(at - UNIT).expect("a few units");
        let range = index(handle.offset())..index(end);
        assert_eq!(found, expected[range.clone()]);
        let view = self.peer.view(handle).expect("was read");
        assert_eq!(view.bytes(), found);
        view.finish().expect("still leased");

        let flipped: Vec<u8> = found.iter().map(|byte| !byte).collect();
        assert!(self.peer.write(handle, &flipped[1..]).is_err());
        self.peer.write(handle, &flipped).expect("was read");
        expected[range.clone()].copy_from_slice(&flipped);
        assert_eq!(self.bytes(), expected);

        let mut view = self.peer.view_mut(handle).expect("was read");
        view.bytes().fill(0x5A);
        view.finish().expect("still leased");
        expected[range].fill(0x5A);
        assert_eq!(self.bytes(), expected);
    }
}

/// The same shape near the truth: what bytes at random hardly ever say.
fn plausible(wire: &v1::TensorHandle) -> v1::TensorHandle {
    let dtype = v1::DType::try_from(wire.dtype.rem_euclid(10)).unwrap_or_default();
    let bytes = DType::try_from(dtype).and_then(|dtype| contiguous_bytes(&wire.shape, dtype));
    v1::TensorHandle {
        segment: SEGMENT,
        generation: wire.generation % 8,
        offset: wire.offset % (UNITS + 1) * UNIT,
        byte_len: bytes.unwrap_or(wire.byte_len),
        dtype: dtype.into(),
        shape: wire.shape.clone(),
        strides: Vec::new(),
    }
}

thread_local!(static HOUSE: RefCell<House> = RefCell::new(House::new().expect("memory to share")));

fuzz_target!(|bytes: &[u8]| {
    let Ok(wire) = v1::TensorHandle::decode(bytes) else {
        return;
    };
    for wire in [plausible(&wire), wire] {
        let Ok(handle) = TensorHandle::try_from(wire.clone()) else {
            continue;
        };
        assert!(handle.offset() + handle.byte_len() <= MAX_SEGMENT_BYTES);
        HOUSE.with_borrow_mut(|house| house.check(&handle));
        assert_eq!(v1::TensorHandle::from(handle), wire);
    }
});
