//! A copy of a fixture's folder that tests change.

use std::path::{Path, PathBuf};

use serde_json::Value;
use velox_engine::error::EngineError;
use velox_engine::files::{self, ModelSource};

/// A model folder that vanishes with the value.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    /// Copies the fixture of a family.
    pub(crate) fn of(family: &str) -> Self {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/families")
            .join(family);
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "tokenizer.json", "model.safetensors"] {
            std::fs::copy(fixture.join(name), folder.path().join(name)).unwrap();
        }
        Self(folder)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), content).unwrap();
    }

    pub(crate) fn remove(&self, name: &str) {
        std::fs::remove_file(self.path(name)).unwrap();
    }

    /// Changes config.json.
    pub(crate) fn configure(&self, change: impl FnOnce(&mut Value)) {
        let mut config = serde_json::from_slice(&self.read("config.json")).unwrap();
        change(&mut config);
        self.write("config.json", config.to_string());
    }

    pub(crate) fn open(&self) -> Result<ModelSource, EngineError> {
        files::open(self.0.path(), &mut |_| {})
    }

    pub(crate) fn error(&self) -> String {
        self.open()
            .expect_err("the folder must be refused")
            .to_string()
    }
}
