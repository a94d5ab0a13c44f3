use std::os::fd::OwnedFd;

use proptest::prelude::*;
use velox_proto::error::{Reason, ServiceError as _};
use velox_proto::tensor::TensorHandle;

use super::*;
use crate::PeerSegments;

const UNIT: u64 = SLOT_ALIGNMENT_BYTES;

fn arena(units: u64) -> Arena {
    Arena::new(Segment::create(42, units * UNIT).unwrap())
}

/// The other side of the same segment, as if its descriptor had travelled.
fn peer(arena: &Arena) -> PeerSegments {
    let fd: OwnedFd = arena.descriptor().try_clone_to_owned().unwrap();
    let mut peer = PeerSegments::new();
    peer.accept(arena.segment_id(), arena.segment_bytes(), fd)
        .unwrap();
    peer
}

fn handle(lease: &Lease, bytes: u64) -> TensorHandle {
    lease
        .handle(DType::U8, &[bytes])
        .unwrap()
        .try_into()
        .unwrap()
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_tensor_goes_there_and_its_answer_comes_back() {
    let arena = arena(4);
    let peer = peer(&arena);
    let mut input = arena.lease(70_001).unwrap_err();
    assert_eq!(input.reason(), Reason::OutOfMemory);
    let mut question = arena.lease(20_001).unwrap();
    let answer = arena.lease(3).unwrap();
    assert_eq!(
        (question.byte_len(), answer.byte_len(), arena.leased_bytes()),
        (20_001, 3, 3 * UNIT)
    );
    let sent: Vec<u8> = (0..20_001_u32)
        .map(|index| index.to_le_bytes()[0])
        .collect();
    question.write(&sent).unwrap();
    assert_eq!(peer.read(&handle(&question, 20_001)).unwrap(), sent);
    assert_eq!(peer.read(&handle(&question, 9)).unwrap(), sent[..9]);
    peer.write(&handle(&answer, 3), &[7, 8, 9]).unwrap();
    assert_eq!(answer.copy_out(3).unwrap(), [7, 8, 9]);
    input = answer.copy_out(4).unwrap_err();
    assert_eq!(input.to_string(), "slot has 3 bytes, 4 were asked for");
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_slot_is_its_leases_only() {
    let arena = arena(2);
    let mut lease = arena.lease(5).unwrap();
    assert!(matches!(
        lease.write(&[0; 6]),
        Err(ShmError::Length {
            limit: 5,
            actual: 6
        })
    ));
    assert!(matches!(
        lease.handle(DType::F32, &[2]),
        Err(ShmError::Length {
            limit: 5,
            actual: 8
        })
    ));
    assert!(matches!(
        lease.handle(DType::F32, &[0]),
        Err(ShmError::Handle(HandleError::Empty))
    ));
    assert!(matches!(
        lease.handle(DType::U8, &[1; 9]),
        Err(ShmError::Handle(HandleError::Rank(9)))
    ));
    assert!(matches!(
        arena.lease(0),
        Err(ShmError::Handle(HandleError::Empty))
    ));
    assert!(matches!(
        arena.lease(u64::MAX),
        Err(ShmError::Exhausted { .. })
    ));
    assert_eq!(arena.leased_bytes(), UNIT);
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_freed_slot_refuses_its_old_handles_also_when_leased_again() {
    let arena = arena(1);
    let peer = peer(&arena);
    let lease = arena.lease(UNIT).unwrap();
    let old = handle(&lease, 8);
    drop(lease);
    assert!(matches!(peer.read(&old), Err(ShmError::Stale)));
    let mut again = arena.lease(UNIT).unwrap();
    again.write(&[1; 8]).unwrap();
    assert!(matches!(peer.read(&old), Err(ShmError::Stale)));
    assert!(matches!(peer.write(&old, &[2; 8]), Err(ShmError::Stale)));
    assert_eq!(again.copy_out(8).unwrap(), [1; 8]);
    assert_eq!(peer.read(&handle(&again, 8)).unwrap(), [1; 8]);
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_peer_that_overwrites_the_header_is_noticed_and_does_no_harm() {
    let arena = arena(2);
    let lease = arena.lease(UNIT).unwrap();
    let fd = arena.descriptor().try_clone_to_owned().unwrap();
    let hostile = Segment::open(42, arena.segment_bytes(), fd).unwrap();
    for word in hostile.generations(0, 2 * UNIT).unwrap() {
        word.store(u64::MAX, std::sync::atomic::Ordering::Relaxed);
    }
    assert!(matches!(lease.copy_out(1), Err(ShmError::Stale)));
    drop(lease);
    let mut whole = arena.lease(2 * UNIT).unwrap();
    whole.write(b"whole again").unwrap();
    assert_eq!(peer(&arena).read(&handle(&whole, 5)).unwrap(), b"whole");
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn leases_of_many_threads_never_mix() {
    let arena = arena(8);
    std::thread::scope(|scope| {
        for mark in 0..4_u8 {
            let arena = arena.clone();
            scope.spawn(move || {
                for _ in 0..100 {
                    let mut lease = arena.lease(2 * UNIT).unwrap();
                    lease.write(&[mark; 1000]).unwrap();
                    assert_eq!(lease.copy_out(1000).unwrap(), [mark; 1000]);
                }
            });
        }
    });
    assert_eq!(arena.leased_bytes(), 0);
    assert!(arena.lease(arena.capacity_bytes()).is_ok());
}

proptest! {
    #![proptest_config(crate::property(64))]

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn every_lease_keeps_its_bytes_and_all_capacity_comes_back(
        steps in prop::collection::vec((1_u64..5 * UNIT, any::<prop::sample::Index>(), 0_u8..3), 1..60),
    ) {
        let arena = arena(16);
        let peer = peer(&arena);
        let mut leases: Vec<(Lease, u8)> = Vec::new();
        let mut stale: Vec<TensorHandle> = Vec::new();
        for (mark, (byte_len, index, action)) in (0_u8..).zip(steps) {
            if action > 0 {
                if let Ok(mut lease) = arena.lease(byte_len) {
                    lease.write(&vec![mark; usize::try_from(byte_len).unwrap()]).unwrap();
                    leases.push((lease, mark));
                }
            } else if !leases.is_empty() {
                let (lease, _) = leases.swap_remove(index.index(leases.len()));
                stale.push(handle(&lease, lease.byte_len()));
            }
        }
        for (lease, mark) in &leases {
            let bytes = peer.read(&handle(lease, lease.byte_len())).unwrap();
            prop_assert!(bytes.iter().all(|byte| byte == mark));
        }
        for handle in stale {
            prop_assert!(matches!(peer.read(&handle), Err(ShmError::Stale)));
        }
        leases.clear();
        prop_assert_eq!(arena.leased_bytes(), 0);
        prop_assert!(arena.lease(arena.capacity_bytes()).is_ok());
    }
}
