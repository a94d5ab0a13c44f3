//! Handles of a hostile sender: refused or harmless, never a panic, never a name in the text.

#![expect(clippy::unwrap_used, reason = "a failed assumption is a failed test")]

use proptest::prelude::*;
use velox_proto::error::{Reason, ServiceError as _, to_status};
use velox_proto::limits::SLOT_ALIGNMENT_BYTES as UNIT;
use velox_proto::tensor::{DType, TensorHandle};
use velox_proto::v1;
use velox_shm::{Arena, Lease, MAX_PEER_SEGMENTS, PeerSegments, Segment, ShmError};

const SEGMENT: u64 = 918_273_645;

/// The smallest page of any system that runs this.
const PAGE_BYTES: usize = 4096;

/// A segment of four units: the first is free, the second leased with a secret, the third and fourth are one victim.
struct House {
    arena: Arena,
    peer: PeerSegments,
    lease: Lease,
    neighbour: Lease,
}

impl House {
    fn new() -> Self {
        let arena = Arena::new(Segment::create(SEGMENT, 4 * UNIT).unwrap());
        let mut peer = PeerSegments::new();
        accept(&mut peer, &arena, SEGMENT).unwrap();
        let first = arena.lease(UNIT).unwrap();
        let lease = arena.lease(64).unwrap();
        let mut neighbour = arena.lease(2 * UNIT).unwrap();
        neighbour.write(&[0x5A; 64]).unwrap();
        drop(first);
        Self {
            arena,
            peer,
            lease,
            neighbour,
        }
    }

    fn wire(&self) -> v1::TensorHandle {
        self.lease.handle(DType::F32, &[4, 4]).unwrap()
    }

    /// Every way to use a handle must answer the same.
    fn refusal(&mut self, change: impl FnOnce(&mut v1::TensorHandle)) -> ShmError {
        let mut wire = self.wire();
        change(&mut wire);
        let handle = match TensorHandle::try_from(wire) {
            Ok(handle) => handle,
            Err(error) => return error.into(),
        };
        let bytes = vec![0xEE; usize::try_from(handle.byte_len()).unwrap()];
        let error = self.peer.read(&handle).unwrap_err();
        let text = error.to_string();
        assert_eq!(
            self.peer.write(&handle, &bytes).unwrap_err().to_string(),
            text
        );
        assert_eq!(self.peer.view(&handle).unwrap_err().to_string(), text);
        assert_eq!(self.peer.view_mut(&handle).unwrap_err().to_string(), text);
        error
    }
}

fn accept(peer: &mut PeerSegments, arena: &Arena, id: u64) -> Result<(), ShmError> {
    peer.accept(
        id,
        arena.segment_bytes(),
        arena.descriptor().try_clone_to_owned().unwrap(),
    )
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn each_lie_is_refused_for_its_reason() {
    let mut house = House::new();
    assert!(house.peer.read(&house.wire().try_into().unwrap()).is_ok());
    let refusals = [
        house.refusal(|handle| handle.segment += 1),
        house.refusal(|handle| handle.segment = u64::MAX),
        house.refusal(|handle| handle.generation += 1),
        house.refusal(|handle| handle.generation += 2),
        house.refusal(|handle| handle.generation = 0),
        house.refusal(|handle| handle.generation = u64::MAX),
        // A free unit, another's slot, and one that begins behind the data.
        house.refusal(|handle| handle.offset = 0),
        house.refusal(|handle| handle.offset = 2 * UNIT),
        house.refusal(|handle| handle.offset = 4 * UNIT),
        house.refusal(|handle| handle.offset += 8),
        house.refusal(|handle| handle.offset = u64::MAX - UNIT + 1),
        house.refusal(|handle| handle.dtype = 0),
        house.refusal(|handle| handle.dtype = v1::DType::F16.into()),
        house.refusal(|handle| handle.shape = vec![1; 9]),
        house.refusal(|handle| handle.byte_len = 0),
        house.refusal(|handle| handle.strides = vec![u64::MAX, 1]),
        // Right in itself, but the tensor reaches over the end of the slot, or of the segment.
        house.refusal(|handle| resize(handle, UNIT + 4)),
        house.refusal(|handle| resize(handle, 3 * UNIT + 4)),
        house.refusal(|handle| {
            handle.strides = vec![UNIT, 1];
            handle.byte_len = (3 * UNIT + 3 + 1) * 4;
        }),
    ];
    for error in refusals {
        assert_eq!(error.reason(), Reason::InvalidHandle, "{error}");
        let status = to_status(&error);
        assert!(!status.message().contains(&SEGMENT.to_string()), "{error}");
    }
    assert_eq!(house.neighbour.copy_out(64).unwrap(), [0x5A; 64]);
    assert_eq!(house.arena.leased_bytes(), 3 * UNIT);
}

fn resize(handle: &mut v1::TensorHandle, byte_len: u64) {
    handle.byte_len = byte_len;
    handle.shape = vec![byte_len / 4];
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_reader_that_expects_another_type_refuses() {
    let house = House::new();
    let handle = TensorHandle::try_from(house.wire()).unwrap();
    let error = ShmError::from(handle.expect_dtype(DType::U32).unwrap_err());
    assert_eq!(
        error.to_string(),
        "tensor has element type f32, expected u32"
    );
    assert_eq!(error.reason(), Reason::InvalidHandle);
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_strided_tensor_inside_its_slot_is_read_with_its_gaps() {
    let mut house = House::new();
    let bytes: Vec<u8> = (0..64).collect();
    house.lease.write(&bytes).unwrap();
    let mut wire = house.wire();
    wire.shape = vec![2, 2];
    wire.strides = vec![8, 1];
    wire.byte_len = 10 * 4;
    let handle = TensorHandle::try_from(wire).unwrap();
    assert_eq!(house.peer.read(&handle).unwrap(), bytes[..40]);
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_view_notices_that_its_slot_was_taken_away() {
    let House {
        arena,
        mut peer,
        lease,
        neighbour,
    } = House::new();
    let handle = TensorHandle::try_from(lease.handle(DType::U8, &[64]).unwrap()).unwrap();
    let mut output = peer.view_mut(&handle).unwrap();
    output.bytes().fill(1);
    output.finish().unwrap();
    let input = peer.view(&handle).unwrap();
    assert_eq!(input.bytes(), [1; 64]);
    assert!(input.bytes().as_ptr().addr().is_multiple_of(PAGE_BYTES));
    drop(lease);
    assert!(matches!(input.finish(), Err(ShmError::Stale)));
    drop(neighbour);
    assert!(arena.lease(arena.capacity_bytes()).is_ok());
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn offers_are_bounded_and_never_replace_each_other() {
    let arena = Arena::new(Segment::create(0, UNIT).unwrap());
    let mut peer = PeerSegments::new();
    for id in (0..).take(MAX_PEER_SEGMENTS) {
        accept(&mut peer, &arena, id).unwrap();
    }
    assert!(matches!(
        accept(&mut peer, &arena, 0),
        Err(ShmError::SegmentExists)
    ));
    assert!(matches!(
        accept(&mut peer, &arena, 1 << 40),
        Err(ShmError::TooManySegments)
    ));
    let lease = arena.lease(1).unwrap();
    let handle = TensorHandle::try_from(lease.handle(DType::U8, &[1]).unwrap()).unwrap();
    assert!(peer.read(&handle).is_ok());
    let unknown = PeerSegments::new().read(&handle);
    assert!(matches!(unknown, Err(ShmError::UnknownSegment)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn only_the_leased_bytes_can_be_reached(
        segment in prop_oneof![Just(SEGMENT), any::<u64>()],
        generation in prop_oneof![0_u64..8, any::<u64>()],
        offset in prop_oneof![(0_u64..6).prop_map(|unit| unit * UNIT), any::<u64>()],
        dtype in 0_i32..10,
        shape in prop::collection::vec(0_u64..200, 0..4),
        strides in prop_oneof![Just(vec![]), prop::collection::vec(0_u64..10_000, 0..4)],
        byte_len in prop_oneof![1_u64..100_000, any::<u64>()],
        honest: bool,
    ) {
        thread_local!(static HOUSE: House = House::new());
        HOUSE.with(|house| {
            let mut wire = v1::TensorHandle { segment, generation, offset, byte_len, dtype, shape, strides };
            if honest {
                let elements: u64 = wire.shape.iter().product();
                let width = v1::DType::try_from(dtype).ok().and_then(|wire| DType::try_from(wire).ok());
                wire.byte_len = elements * width.map_or(1, DType::size_bytes);
                wire.strides.clear();
            }
            let Ok(handle) = TensorHandle::try_from(wire) else { return Ok(()) };
            match house.peer.read(&handle) {
                Ok(bytes) => {
                    prop_assert_eq!(u64::try_from(bytes.len()).unwrap(), handle.byte_len());
                    // A handle may begin at any unit of its lease.
                    let (end, owner) = match offset / UNIT {
                        1 => (2 * UNIT, &house.lease),
                        2 | 3 => (4 * UNIT, &house.neighbour),
                        _ => return Err(TestCaseError::fail("read memory that nobody leased")),
                    };
                    prop_assert!(offset + handle.byte_len() <= end);
                    prop_assert_eq!(generation, owner.handle(DType::U8, &[1]).unwrap().generation);
                }
                Err(error) => prop_assert_eq!(error.reason(), Reason::InvalidHandle),
            }
            Ok(())
        })?;
    }
}
