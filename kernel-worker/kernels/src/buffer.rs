//! Aligned memory and read-only file maps.
#![expect(
    unsafe_code,
    reason = "mapping a file is unsafe: another process can change it"
)]

use std::collections::TryReserveError;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A whole file, mapped read-only and private.
#[derive(Debug)]
pub struct FileMap {
    map: memmap2::Mmap,
}

impl FileMap {
    /// Maps a file.
    ///
    /// # Errors
    /// What the system says; an empty file cannot be mapped.
    pub fn open(path: &Path) -> io::Result<Arc<Self>> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "file is empty"));
        }
        // SAFETY: the map is private and read-only. Nothing here relies on its bytes staying the same for memory
        // safety: every reader treats them as untrusted numbers. A model file that shrinks while it is mapped ends the
        // process with SIGBUS; the worker is the process that may die (DESIGN section 3), its gateway replaces it.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Arc::new(Self { map }))
    }

    /// Returns the file's bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.map
    }
}

/// A cache line, the unit of [`AlignedBytes`].
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Owned memory that begins on a cache line, so that no vector load of it crosses one.
#[derive(Debug)]
pub struct AlignedBytes {
    lines: Vec<Line>,
    length: usize,
}

impl AlignedBytes {
    /// Allocates zeroed bytes.
    ///
    /// # Errors
    /// What the allocator says.
    pub fn zeroed(length: usize) -> Result<Self, TryReserveError> {
        let count = length.div_ceil(size_of::<Line>());
        let mut lines = Vec::new();
        lines.try_reserve_exact(count)?;
        lines.resize(count, Line([0; 8]));
        Ok(Self { lines, length })
    }

    /// Returns the bytes of the allocation, which is whole lines.
    #[must_use]
    pub fn allocated(&self) -> usize {
        self.lines.capacity() * size_of::<Line>()
    }

    /// Returns the memory as elements; a rest that is no whole element is left out.
    #[must_use]
    pub fn as_elements<T: bytemuck::Pod>(&self) -> &[T] {
        let bytes = &bytemuck::cast_slice(&self.lines)[..whole::<T>(self.length)];
        bytemuck::cast_slice::<u8, T>(bytes)
    }

    /// As [`Self::as_elements`], for writing.
    #[must_use]
    pub fn as_elements_mut<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        let bytes = &mut bytemuck::cast_slice_mut(&mut self.lines)[..whole::<T>(self.length)];
        bytemuck::cast_slice_mut::<u8, T>(bytes)
    }
}

/// Rounds a length down to whole elements.
const fn whole<T>(length: usize) -> usize {
    const { assert!(size_of::<T>() > 0 && align_of::<T>() <= align_of::<Line>()) };
    length - length % size_of::<T>()
}

/// Bytes that a file map or a buffer holds. Cloning shares them.
#[derive(Debug, Clone)]
pub struct ByteSource {
    owner: Owner,
    range: Range<usize>,
}

#[derive(Debug, Clone)]
enum Owner {
    Map(Arc<FileMap>),
    Memory(Arc<[u64]>),
    Aligned(Arc<AlignedBytes>),
}

impl From<AlignedBytes> for ByteSource {
    fn from(bytes: AlignedBytes) -> Self {
        Self {
            range: 0..bytes.length,
            owner: Owner::Aligned(Arc::new(bytes)),
        }
    }
}

impl ByteSource {
    /// Takes a range of a mapped file; `None` if it ends outside.
    #[must_use]
    pub fn mapped(map: &Arc<FileMap>, range: Range<usize>) -> Option<Self> {
        map.as_slice().get(range.clone())?;
        Some(Self {
            owner: Owner::Map(Arc::clone(map)),
            range,
        })
    }

    /// Copies bytes into memory aligned to 8.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut words = vec![0_u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self {
            owner: Owner::Memory(words.into()),
            range: 0..bytes.len(),
        }
    }

    /// Returns the bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        let bytes: &[u8] = match &self.owner {
            Owner::Map(map) => map.as_slice(),
            Owner::Memory(words) => bytemuck::cast_slice(words),
            Owner::Aligned(bytes) => bytes.as_elements(),
        };
        &bytes[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn aligned_memory_becomes_a_source_as_it_is() {
        let mut memory = AlignedBytes::zeroed(5).unwrap();
        memory
            .as_elements_mut::<u8>()
            .copy_from_slice(&[1, 2, 3, 4, 5]);
        let source = ByteSource::from(memory);
        assert_eq!(source.clone().as_slice(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn aligned_memory_is_whole_zeroed_lines() {
        for (length, allocated) in [(0, 0), (1, 64), (64, 64), (65, 128)] {
            let mut memory = AlignedBytes::zeroed(length).unwrap();
            assert_eq!(memory.allocated(), allocated);
            assert_eq!(memory.as_elements::<u8>(), vec![0; length]);
            assert_eq!(memory.as_elements::<u32>().len(), length / 4);
            assert_eq!(memory.as_elements::<u8>().as_ptr().addr() % 64, 0);
            memory.as_elements_mut::<u8>().fill(7);
            assert_eq!(memory.as_elements::<u8>(), vec![7; length]);
        }
        assert!(AlignedBytes::zeroed(usize::MAX).is_err());
    }

    #[test]
    fn ranges_of_a_map_are_checked() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        assert!(FileMap::open(file.path()).is_err());
        file.write_all(b"weights").unwrap();
        let map = FileMap::open(file.path()).unwrap();
        let part = ByteSource::mapped(&map, 2..7).unwrap();
        assert_eq!(part.as_slice(), b"ights");
        assert!(ByteSource::mapped(&map, 2..8).is_none());
        #[expect(clippy::reversed_empty_ranges, reason = "hostile offsets")]
        let reversed = 5..2;
        assert!(ByteSource::mapped(&map, reversed).is_none());
        assert!(FileMap::open(Path::new("no such file")).is_err());
    }

    #[test]
    fn a_copy_keeps_odd_lengths() {
        for length in [0_u8, 1, 7, 8, 9] {
            let bytes: Vec<u8> = (0..length).collect();
            assert_eq!(ByteSource::copy_of(&bytes).as_slice(), bytes);
        }
    }
}
