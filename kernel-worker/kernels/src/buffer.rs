//! Aligned memory and read-only file maps.
#![expect(
    unsafe_code,
    reason = "mapping a file is unsafe: another process can change it"
)]

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
        };
        &bytes[self.range.clone()]
    }
}
