use super::*;

const MIB: u64 = 1024 * 1024;

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_segment_that_came_back_is_used_again() {
    let pool = SegmentPool::new(16 * MIB);
    let first = pool.acquire(MIB).unwrap();
    let second = pool.acquire(MIB).unwrap();
    assert_ne!(first.segment_id(), second.segment_id());
    let created = pool.created_bytes();
    let id = first.segment_id();
    drop(first);
    assert_eq!(pool.acquire(MIB / 2).unwrap().segment_id(), id);
    assert_eq!(pool.created_bytes(), created);
    assert!(pool.next_id() > second.segment_id());
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_segment_with_a_lease_left_is_not_given_to_another() {
    let pool = SegmentPool::new(16 * MIB);
    let arena = pool.acquire(MIB).unwrap();
    let id = arena.segment_id();
    let lease = arena.lease(100).unwrap();
    drop(arena);
    assert!(pool.leased_bytes() > 0);
    let other = pool.acquire(MIB).unwrap();
    assert_ne!(other.segment_id(), id);
    drop(lease);
    assert_eq!(pool.leased_bytes(), 0);
    assert_eq!(pool.acquire(MIB).unwrap().segment_id(), id);
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn the_limit_holds_and_idle_segments_make_room() {
    let pool = SegmentPool::new(4 * MIB);
    let small = pool.acquire(MIB).unwrap();
    let error = pool.acquire(4 * MIB).unwrap_err();
    assert!(
        matches!(error, ShmError::Exhausted { limit, .. } if limit == 4 * MIB),
        "{error}"
    );
    drop(small);
    let large = pool.acquire(3 * MIB).unwrap();
    assert!(pool.created_bytes() <= 4 * MIB);
    assert!(large.lease(3 * MIB).is_ok());
    assert!(matches!(pool.acquire(0), Err(ShmError::SegmentSize(0))));
    assert!(matches!(
        pool.acquire(u64::MAX),
        Err(ShmError::SegmentSize(_))
    ));
}
