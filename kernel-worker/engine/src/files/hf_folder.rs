//! Files of a model folder; none may lie outside it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use velox_kernels::buffer::FileMap;

use super::blame::{Blame, excerpt};
use super::map_file;
use crate::error::EngineError;

/// A folder with everything of one model.
#[derive(Debug)]
pub(super) struct Folder {
    root: PathBuf,
    /// Where links of the hub's cache (`snapshots/REVISION/name -> ../../blobs/HASH`) may lead.
    blobs: Option<PathBuf>,
}

impl Folder {
    /// Resolves a folder.
    pub(super) fn open(path: &Path) -> Result<Self, EngineError> {
        let root = path
            .canonicalize()
            .map_err(|source| Blame::of(path).unreadable(source))?;
        let blobs = root
            .parent()
            .filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"))
            .and_then(Path::parent)
            .map(|repository| repository.join("blobs"));
        Ok(Self { root, blobs })
    }

    /// Returns the folder's own name for errors that no single file causes.
    pub(super) fn blame(&self) -> Blame {
        Blame::of(&self.root)
    }

    /// Returns whether there is such a file.
    pub(super) fn has(&self, name: &str) -> bool {
        self.root.join(name).exists()
    }

    /// Maps a file.
    pub(super) fn map(&self, name: &str) -> Result<(Blame, Arc<FileMap>), EngineError> {
        let (_, map) = map_file(&self.locate(name)?)?;
        Ok((Blame::new(name), map))
    }

    /// Reads a small file whole.
    pub(super) fn read(&self, name: &str, limit_bytes: u64) -> Result<Vec<u8>, EngineError> {
        let blame = Blame::new(name);
        let path = self.locate(name)?;
        let unreadable = |source| blame.unreadable(source);
        let kind = std::fs::metadata(&path).map_err(unreadable)?;
        if !kind.is_file() {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
            return Err(unreadable(source));
        }
        let mut bytes = Vec::new();
        File::open(&path)
            .and_then(|file| file.take(limit_bytes + 1).read_to_end(&mut bytes))
            .map_err(unreadable)?;
        if u64::try_from(bytes.len()).is_ok_and(|length| length > limit_bytes) {
            return Err(blame.invalid(format!(
                "has {} bytes, limit is {limit_bytes}",
                kind.len().max(limit_bytes + 1)
            )));
        }
        Ok(bytes)
    }

    /// Reads a JSON file if it is there.
    pub(super) fn json<T: DeserializeOwned>(
        &self,
        name: &str,
        limit_bytes: u64,
    ) -> Result<Option<T>, EngineError> {
        if !self.has(name) {
            return Ok(None);
        }
        let bytes = self.read(name, limit_bytes)?;
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| Blame::new(name).invalid(format!("is not the JSON expected: {error}")))
    }

    /// Resolves a plain file name; links may not lead out of the folder.
    fn locate(&self, name: &str) -> Result<PathBuf, EngineError> {
        let blame = Blame::new(&excerpt(name));
        let plain =
            !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0', ':']);
        if !plain {
            return Err(blame.invalid("must be a plain file name inside the model's folder"));
        }
        let path = self
            .root
            .join(name)
            .canonicalize()
            .map_err(|source| blame.unreadable(source))?;
        let inside = path.starts_with(&self.root)
            || self
                .blobs
                .as_ref()
                .is_some_and(|blobs| path.starts_with(blobs));
        if !inside {
            return Err(blame.invalid("is a link that leads out of the model's folder"));
        }
        Ok(path)
    }
}
