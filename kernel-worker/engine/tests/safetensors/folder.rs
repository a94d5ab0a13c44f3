//! A copy of a fixture's folder that tests change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use velox_engine::error::EngineError;
use velox_engine::files::{self, ModelSource};

/// Tensors of a file by name.
pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// A tensor of a file.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A model folder that vanishes with the value.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    /// Copies the fixture of a family.
    pub(crate) fn of(family: &str) -> Self {
        Self::copy_of("families", family)
    }

    /// Copies a fixture of a kind.
    pub(crate) fn copy_of(kind: &str, name: &str) -> Self {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures")
            .join(kind)
            .join(name);
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

    /// Changes names, types, shapes and bytes of the tensors, which are then written anew in order of their names.
    pub(crate) fn change_tensors(&self, change: impl FnOnce(&mut Tensors)) {
        let bytes = self.read("model.safetensors");
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).unwrap());
        let table: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
        let mut tensors: Tensors = table
            .into_iter()
            .filter(|(name, _)| name != "__metadata__")
            .map(|(name, entry)| {
                let offset = |place: usize| {
                    usize::try_from(entry["data_offsets"][place].as_u64().unwrap()).unwrap()
                };
                let tensor = Tensor {
                    dtype: entry["dtype"].as_str().unwrap().to_owned(),
                    shape: serde_json::from_value(entry["shape"].clone()).unwrap(),
                    bytes: data[offset(0)..offset(1)].to_vec(),
                };
                (name, tensor)
            })
            .collect();
        change(&mut tensors);
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, tensor) in tensors {
            let begin = data.len();
            data.extend(tensor.bytes);
            let entry = json!({
                "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()]
            });
            header.insert(name, entry);
        }
        let header = Value::Object(header).to_string();
        let mut file = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(data);
        self.write("model.safetensors", file);
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
