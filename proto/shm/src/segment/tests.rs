use std::os::fd::OwnedFd;

use super::*;

const UNIT: u64 = SLOT_ALIGNMENT_BYTES;

fn duplicate(segment: &Segment) -> OwnedFd {
    segment.descriptor().try_clone_to_owned().unwrap()
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn both_sides_see_the_same_words() {
    let ours = Segment::create(1, 100).unwrap();
    let theirs = Segment::open(1, ours.byte_len(), duplicate(&ours)).unwrap();
    assert_eq!(
        (theirs.byte_len(), theirs.layout()),
        (2 * UNIT, ours.layout())
    );
    ours.data(0, 8).unwrap()[0].store(77, Ordering::Relaxed);
    assert_eq!(theirs.data(0, 8).unwrap()[0].load(Ordering::Relaxed), 77);
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn an_announcement_that_does_not_fit_is_refused() {
    let segment = Segment::create(1, 4 * UNIT).unwrap();
    let open = |byte_len| Segment::open(1, byte_len, duplicate(&segment)).unwrap_err();
    assert!(matches!(open(0), ShmError::SegmentSize(0)));
    assert!(matches!(open(u64::MAX), ShmError::SegmentSize(_)));
    assert!(matches!(
        open(segment.byte_len() - UNIT),
        ShmError::NotASegment(_)
    ));
    assert!(matches!(
        open(segment.byte_len() - 1),
        ShmError::NotASegment(_)
    ));
    assert!(matches!(
        open(segment.byte_len() + UNIT),
        ShmError::NotASegment(_)
    ));
    assert!(matches!(open(MAX_SEGMENT_BYTES), ShmError::NotASegment(_)));
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn a_header_that_lies_is_refused() {
    let segment = Segment::create(1, 4 * UNIT).unwrap();
    let refused = |index, value| {
        let good = segment.header(index).unwrap();
        segment.set_header(index, value);
        let result = Segment::open(1, segment.byte_len(), duplicate(&segment));
        segment.set_header(index, good);
        assert!(Segment::open(1, segment.byte_len(), duplicate(&segment)).is_ok());
        result.unwrap_err()
    };
    assert!(matches!(refused(MAGIC_WORD, 0), ShmError::NotASegment(_)));
    assert!(matches!(
        refused(VERSION_WORD, VERSION + 1),
        ShmError::NotASegment(_)
    ));
    assert!(matches!(
        refused(DATA_BYTES_WORD, 0),
        ShmError::SegmentSize(0)
    ));
    assert!(matches!(
        refused(DATA_BYTES_WORD, u64::MAX),
        ShmError::SegmentSize(_)
    ));
    for units in [3, 5] {
        assert!(matches!(
            refused(DATA_BYTES_WORD, units * UNIT),
            ShmError::NotASegment(_)
        ));
    }
}

#[test]
#[cfg_attr(miri, ignore = "maps memory")]
fn no_text_names_a_segment() {
    let segment = Segment::create(987_654_321, UNIT).unwrap();
    let error = Segment::open(987_654_321, 8 * UNIT, duplicate(&segment)).unwrap_err();
    for text in [
        format!("{segment:?}"),
        format!("{error:?}"),
        error.to_string(),
    ] {
        assert!(
            !text.contains("987654321") && !text.contains("velox-"),
            "{text}"
        );
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    /// A memfd with the header of a segment of `data_bytes`, made by other code than ours.
    fn foreign(data_bytes: u64, file_bytes: u64) -> File {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("foreign", flags).unwrap());
        file.set_len(file_bytes).unwrap();
        let header: Vec<u8> = [MAGIC, VERSION, data_bytes]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        file.write_all_at(&header, 0).unwrap();
        file
    }

    const ALL: SealFlags = SealFlags::SHRINK
        .union(SealFlags::GROW)
        .union(SealFlags::SEAL);

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn a_size_that_the_system_rounded_up_is_accepted_and_not_trusted() {
        let announced = Layout::new(UNIT).unwrap().byte_len();
        let file = foreign(UNIT, announced + UNIT);
        fcntl_add_seals(&file, ALL).unwrap();
        let segment = Segment::open(1, announced, file.into()).unwrap();
        assert_eq!(segment.byte_len(), announced);
        assert!(segment.data(0, UNIT).is_ok());
        assert!(matches!(
            segment.data(0, UNIT + 1),
            Err(ShmError::OutOfRange { .. })
        ));
        assert!(matches!(
            segment.data(UNIT, 1),
            Err(ShmError::OutOfRange { .. })
        ));
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn an_object_that_could_shrink_is_refused() {
        let byte_len = Layout::new(UNIT).unwrap().byte_len();
        for seals in [
            SealFlags::empty(),
            SealFlags::SHRINK,
            SealFlags::GROW | SealFlags::SEAL,
        ] {
            let file = foreign(UNIT, byte_len);
            fcntl_add_seals(&file, seals).unwrap();
            assert!(matches!(
                Segment::open(1, byte_len, file.into()),
                Err(ShmError::NotASegment(_))
            ));
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(byte_len).unwrap();
        assert!(matches!(
            Segment::open(1, byte_len, file.into()),
            Err(ShmError::NotASegment(_))
        ));
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn nobody_can_change_the_size() {
        let segment = Segment::create(1, 4 * UNIT).unwrap();
        for size in [0, UNIT, segment.byte_len() - 1, segment.byte_len() + UNIT] {
            assert!(ftruncate(segment.descriptor(), size).is_err());
        }
    }
}
