//! An anonymous shared mapping, owned by the gateway or opened by its peer.

#![expect(unsafe_code, reason = "mapped memory becomes a slice of atomics here")]

use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::fstat;
use velox_proto::limits::{MAX_SEGMENT_BYTES, SLOT_ALIGNMENT_BYTES};

use crate::error::ShmError;
use crate::layout::{
    DATA_BYTES_WORD, Layout, MAGIC, MAGIC_WORD, VERSION, VERSION_WORD, WORD_BYTES, to_index,
};

#[cfg(target_os = "linux")]
mod linux;
#[cfg(any(not(target_os = "linux"), test))]
mod name;
#[cfg(any(not(target_os = "linux"), test))]
mod posix;

#[cfg(target_os = "linux")]
use self::linux as object;
#[cfg(not(target_os = "linux"))]
use self::posix as object;

/// Anonymous memory that two processes map; unmapped and closed on drop.
///
/// The descriptor is kept as long as the mapping: on macOS the object dies with its last descriptor or
/// mapping, also while it is on its way to the peer.
pub struct Segment {
    map: MmapRaw,
    descriptor: OwnedFd,
    id: u64,
    layout: Layout,
}

impl Segment {
    /// Creates a segment with room for at least `data_bytes` and touches all of its pages.
    ///
    /// # Errors
    /// [`ShmError::SegmentSize`] or [`ShmError::System`].
    pub fn create(id: u64, data_bytes: u64) -> Result<Self, ShmError> {
        let layout = Layout::new(data_bytes)?;
        let descriptor = object::create(layout.byte_len())?;
        let map = map(&descriptor, layout.byte_len())?;
        let segment = Self {
            map,
            descriptor,
            id,
            layout,
        };
        // Linux has allocated and mapped every page by now; elsewhere this does it. All words are 0 already.
        let page_words = to_index(SLOT_ALIGNMENT_BYTES / WORD_BYTES)?;
        for word in segment.words().iter().step_by(page_words) {
            // Relaxed: nobody else has the segment yet.
            word.store(0, Ordering::Relaxed);
        }
        segment.set_header(DATA_BYTES_WORD, layout.data_bytes());
        segment.set_header(VERSION_WORD, VERSION);
        segment.set_header(MAGIC_WORD, MAGIC);
        Ok(segment)
    }

    /// Maps a segment that the peer created and announced with `byte_len`.
    ///
    /// The object may be larger (systems round sizes up); only the announced length is mapped and trusted.
    ///
    /// # Errors
    /// [`ShmError::NotASegment`] if the descriptor is not what was announced or could shrink under us,
    /// [`ShmError::SegmentSize`] or [`ShmError::System`].
    pub fn open(id: u64, byte_len: u64, descriptor: OwnedFd) -> Result<Self, ShmError> {
        let largest = Layout::new(MAX_SEGMENT_BYTES)?.byte_len();
        let smallest = Layout::new(1)?.byte_len();
        if byte_len < smallest || byte_len > largest {
            return Err(ShmError::SegmentSize(byte_len));
        }
        if !byte_len.is_multiple_of(SLOT_ALIGNMENT_BYTES) {
            return Err(ShmError::NotASegment("its length is no multiple of 16 KiB"));
        }
        object::check(&descriptor)?;
        let status = fstat(&descriptor).map_err(ShmError::system("inspection"))?;
        if u64::try_from(status.st_size).unwrap_or(0) < byte_len {
            return Err(ShmError::NotASegment("it is smaller than announced"));
        }
        let map = map(&descriptor, byte_len)?;
        // The layout is needed to read the header and the header to know the layout: the smallest is always there.
        let mut segment = Self {
            map,
            descriptor,
            id,
            layout: Layout::new(1)?,
        };
        if segment.header(MAGIC_WORD) != Some(MAGIC) {
            return Err(ShmError::NotASegment("its header has another magic number"));
        }
        if segment.header(VERSION_WORD) != Some(VERSION) {
            return Err(ShmError::NotASegment("its header has another version"));
        }
        // Read once: the peer may change it later, our copy decides.
        let layout = Layout::new(segment.header(DATA_BYTES_WORD).unwrap_or_default())?;
        if layout.byte_len() != byte_len {
            return Err(ShmError::NotASegment("its header has another size"));
        }
        segment.layout = layout;
        Ok(segment)
    }

    /// Returns the descriptor, to be sent to the peer.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Returns the number that handles use.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the length of header and data, as announced in an offer.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.layout.byte_len()
    }

    /// Returns where things lie.
    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the generations of a range of data.
    pub(crate) fn generations(&self, offset: u64, len: u64) -> Result<&[AtomicU64], ShmError> {
        let range = self.layout.generation_words(offset, len)?;
        self.words().get(range).ok_or(ShmError::Stale)
    }

    /// Returns the words of a range of data; the last one may be only partly part of it.
    pub(crate) fn data(&self, offset: u64, len: u64) -> Result<&[AtomicU64], ShmError> {
        let range = self.layout.data_words(offset, len)?;
        self.words().get(range).ok_or(ShmError::Stale)
    }

    fn header(&self, index: usize) -> Option<u64> {
        // Relaxed: the offer's frame, sent after the header was written, orders the two.
        self.words()
            .get(index)
            .map(|word| word.load(Ordering::Relaxed))
    }

    fn set_header(&self, index: usize, value: u64) {
        if let Some(word) = self.words().get(index) {
            // Relaxed: see `header`.
            word.store(value, Ordering::Relaxed);
        }
    }

    /// All words of the mapping.
    fn words(&self) -> &[AtomicU64] {
        let count = self.map.len() / size_of::<AtomicU64>();
        // SAFETY:
        // * valid: `map` is a live shared read-write mapping of `map.len()` bytes, unmapped only when `self` is
        //   dropped, which the returned lifetime forbids; its pages cannot vanish, because `object` made (or `check`
        //   verified) an object that cannot shrink and `open` compared its size with the mapping's;
        // * aligned: a mapping begins on a page, an `AtomicU64` needs 8 bytes;
        // * initialised: the system filled the pages, and every bit pattern is an `AtomicU64`;
        // * aliasing: `AtomicU64` allows changes behind a shared reference, by this process and by the peer, whose
        //   accesses are atomic too or follow a hand-over (see `view`).
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), count) }
    }
}

impl fmt::Debug for Segment {
    /// Shows sizes only: numbers and addresses stay inside.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Segment")
            .field("byte_len", &self.byte_len())
            .finish_non_exhaustive()
    }
}

/// Maps exactly `byte_len` bytes, with page tables filled where the system can do that.
fn map(descriptor: &OwnedFd, byte_len: u64) -> Result<MmapRaw, ShmError> {
    MmapOptions::new()
        .len(to_index(byte_len)?)
        .populate()
        .map_raw(descriptor)
        .map_err(ShmError::system("mapping"))
}

#[cfg(test)]
mod tests;
