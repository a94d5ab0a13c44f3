//! Where things lie in a segment: arithmetic only.
//!
//! ```text
//! word 0       1         2            3..8       8..8+units      (padding)      header_bytes
//! +-------+---------+------------+----------+---------------+------------+------------------------+
//! | magic | version | data bytes | reserved | generations   |            | data: units of 16 KiB  |
//! +-------+---------+------------+----------+---------------+------------+------------------------+
//! ```
//!
//! Both parts are multiples of 16 KiB, so no system rounds the size up, and offsets in the data are page offsets.

use velox_proto::limits::{MAX_SEGMENT_BYTES, SLOT_ALIGNMENT_BYTES};

use crate::error::ShmError;

/// First word of every segment: the text "VELOXSHM".
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"VELOXSHM");

/// Version of this layout.
pub(crate) const VERSION: u64 = 1;

/// Bytes of one atomic word.
pub(crate) const WORD_BYTES: u64 = 8;

/// Words before the generations.
const FIXED_WORDS: u64 = 8;

/// Index of the word that holds [`MAGIC`].
pub(crate) const MAGIC_WORD: usize = 0;

/// Index of the word that holds [`VERSION`].
pub(crate) const VERSION_WORD: usize = 1;

/// Index of the word that holds the bytes of data.
pub(crate) const DATA_BYTES_WORD: usize = 2;

/// Sizes of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    units: u64,
    header_bytes: u64,
}

/// Range of indices.
pub(crate) type Range = std::ops::Range<usize>;

impl Layout {
    /// Lays out at least `data_bytes` of data.
    pub(crate) fn new(data_bytes: u64) -> Result<Self, ShmError> {
        if data_bytes == 0 || data_bytes > MAX_SEGMENT_BYTES {
            return Err(ShmError::SegmentSize(data_bytes));
        }
        let units = units_of(data_bytes);
        let header_bytes = units_of((FIXED_WORDS + units) * WORD_BYTES) * SLOT_ALIGNMENT_BYTES;
        Ok(Self {
            units,
            header_bytes,
        })
    }

    /// Number of 16 KiB units of data.
    pub(crate) fn units(self) -> u64 {
        self.units
    }

    /// Bytes of data.
    pub(crate) fn data_bytes(self) -> u64 {
        self.units * SLOT_ALIGNMENT_BYTES
    }

    /// Bytes of header and data.
    pub(crate) fn byte_len(self) -> u64 {
        self.header_bytes + self.data_bytes()
    }

    /// Indices of the words that hold the generations of a range of data.
    pub(crate) fn generation_words(self, offset: u64, byte_len: u64) -> Result<Range, ShmError> {
        self.check(offset, byte_len)?;
        let first = FIXED_WORDS + offset / SLOT_ALIGNMENT_BYTES;
        to_range(first, units_of(byte_len))
    }

    /// Indices of the words that hold a range of data; the last one may be only partly part of it.
    pub(crate) fn data_words(self, offset: u64, byte_len: u64) -> Result<Range, ShmError> {
        self.check(offset, byte_len)?;
        let first = (self.header_bytes + offset) / WORD_BYTES;
        to_range(first, byte_len.div_ceil(WORD_BYTES))
    }

    /// A range must begin a unit and end inside the data.
    fn check(self, offset: u64, byte_len: u64) -> Result<(), ShmError> {
        if !offset.is_multiple_of(SLOT_ALIGNMENT_BYTES) {
            return Err(velox_proto::tensor::HandleError::Misaligned(offset).into());
        }
        let limit = self.data_bytes();
        let end = offset.saturating_add(byte_len);
        if end > limit {
            return Err(ShmError::OutOfRange { end, limit });
        }
        Ok(())
    }
}

/// Number of units that hold so many bytes.
pub(crate) fn units_of(bytes: u64) -> u64 {
    bytes.div_ceil(SLOT_ALIGNMENT_BYTES)
}

fn to_range(first: u64, count: u64) -> Result<Range, ShmError> {
    let start = to_index(first)?;
    Ok(start..start + to_index(count)?)
}

/// Converts a checked size; fails only where addresses have 32 bits.
pub(crate) fn to_index(value: u64) -> Result<usize, ShmError> {
    usize::try_from(value).map_err(|_too_large| ShmError::SegmentSize(value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn impossible_sizes_are_refused() {
        assert!(matches!(Layout::new(0), Err(ShmError::SegmentSize(0))));
        assert!(Layout::new(MAX_SEGMENT_BYTES).is_ok());
        assert!(matches!(
            Layout::new(MAX_SEGMENT_BYTES + 1),
            Err(ShmError::SegmentSize(_))
        ));
        assert!(matches!(
            Layout::new(u64::MAX),
            Err(ShmError::SegmentSize(_))
        ));
    }

    #[test]
    fn the_last_unit_is_in_range_and_the_next_is_not() {
        let layout = Layout::new(3 * SLOT_ALIGNMENT_BYTES).unwrap();
        let last = 2 * SLOT_ALIGNMENT_BYTES;
        assert!(layout.data_words(last, SLOT_ALIGNMENT_BYTES).is_ok());
        assert!(matches!(
            layout.data_words(last, SLOT_ALIGNMENT_BYTES + 1),
            Err(ShmError::OutOfRange { .. })
        ));
        assert!(matches!(layout.data_words(8, 8), Err(ShmError::Handle(_))));
        let beyond = u64::MAX - SLOT_ALIGNMENT_BYTES + 1;
        assert!(matches!(
            layout.data_words(beyond, u64::MAX),
            Err(ShmError::OutOfRange { .. })
        ));
    }

    proptest! {
        #![proptest_config(crate::property(512))]

        #[test]
        fn generations_never_reach_the_data_and_data_never_leaves_the_segment(
            data_bytes in 1..=MAX_SEGMENT_BYTES, offset: u64,
            unit in 0_u64..300_000, byte_len in 1_u64..MAX_SEGMENT_BYTES,
        ) {
            let layout = Layout::new(data_bytes).unwrap();
            prop_assert!(layout.data_bytes() >= data_bytes);
            prop_assert!(layout.byte_len().is_multiple_of(SLOT_ALIGNMENT_BYTES));
            let all = layout.generation_words(0, layout.data_bytes()).unwrap();
            prop_assert!(u64::try_from(all.end).unwrap() * WORD_BYTES <= layout.header_bytes);
            for offset in [offset, unit * SLOT_ALIGNMENT_BYTES] {
                if let Ok(words) = layout.data_words(offset, byte_len) {
                    prop_assert!(u64::try_from(words.start).unwrap() * WORD_BYTES >= layout.header_bytes);
                    prop_assert!(u64::try_from(words.end).unwrap() * WORD_BYTES <= layout.byte_len());
                    prop_assert!(layout.generation_words(offset, byte_len).unwrap().end <= all.end);
                }
            }
        }
    }
}
