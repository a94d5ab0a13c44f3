//! A model from a Hugging Face folder: config.json, tokenizer files and safetensors, whole or sharded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use velox_kernels::buffer::{ByteSource, FileMap};

use super::assemble::{HUGGING_FACE, assemble};
use super::blame::{Blame, excerpt};
use super::fingerprint::Fingerprint;
use super::hf_folder::Folder;
use super::safetensors::Safetensors;
use super::tensors::{StoredTensor, TensorSet};
use super::{ModelSource, Vocabulary, hf_config, hf_tokenizer};
use crate::error::EngineError;
use crate::load::LoadProgress;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const MAX_CONFIG_BYTES: u64 = 1 << 20;
const MAX_INDEX_BYTES: u64 = 16 << 20;
const MAX_SHARDS: usize = 1024;
/// Buffers of old checkpoints that the configuration already determines.
const REDUNDANT_SUFFIX: &str = ".rotary_emb.inv_freq";

/// Opens a folder.
pub(super) fn open(
    path: &Path,
    report: &mut dyn FnMut(LoadProgress),
) -> Result<ModelSource, EngineError> {
    let folder = Folder::open(path)?;
    let config_bytes = folder.read(CONFIG, MAX_CONFIG_BYTES)?;
    let config = hf_config::parse(CONFIG, &config_bytes)?;
    let vocab_size = u32::try_from(config.spec.vocab_size).expect("the spec's limits fit 32 bits");
    let tokenizer = hf_tokenizer::read(&folder, &config.object, vocab_size)?;

    let mut fingerprint = Fingerprint::default();
    fingerprint.add_all(&config_bytes);
    if let Vocabulary::HuggingFaceJson(json) = &tokenizer.vocabulary {
        fingerprint.add_all(json);
    }
    let mut set = read_weights(&folder, &mut fingerprint)?.with_affine(config.affine);
    let total_bytes = set.bytes();
    let mut progress = |phase, done_bytes| {
        report(LoadProgress {
            phase,
            done_bytes,
            total_bytes,
        });
    };
    progress("check", 0);
    let tensors = assemble(&mut set, &config.spec, &HUGGING_FACE, config.optional)?;
    progress("map", set.taken_bytes());
    let totals = set.finish()?;
    Ok(ModelSource {
        spec: config.spec,
        tensors,
        tokenizer,
        format: "safetensors",
        parameters: totals.parameters,
        weight_bytes: totals.weight_bytes,
        tensor_types: totals.tensor_types.into_iter().collect(),
        fingerprint: fingerprint.finish(),
    })
}

fn read_weights(folder: &Folder, fingerprint: &mut Fingerprint) -> Result<TensorSet, EngineError> {
    let mut weights = Weights {
        set: TensorSet::new(folder.blame()),
        fingerprint,
    };
    if folder.has(WEIGHTS) {
        weights.add_file(folder, WEIGHTS, None)?;
        return Ok(weights.set);
    }
    let Some(index) = folder.json::<Index>(INDEX, MAX_INDEX_BYTES)? else {
        return Err(folder
            .blame()
            .invalid(format!("has neither {WEIGHTS} nor {INDEX}")));
    };
    let files: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
    if files.len() > MAX_SHARDS {
        return Err(Blame::new(INDEX).invalid(format!(
            "names {} files, limit is {MAX_SHARDS}",
            files.len()
        )));
    }
    for file in files {
        weights.add_file(folder, file, Some(&index))?;
    }
    match index
        .weight_map
        .keys()
        .find(|name| !name.ends_with(REDUNDANT_SUFFIX) && !weights.set.contains(name))
    {
        None => Ok(weights.set),
        Some(name) => {
            Err(Blame::new(INDEX)
                .invalid(format!("tensor {} is in none of the files", excerpt(name))))
        }
    }
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    /// File by tensor name.
    weight_map: BTreeMap<String, String>,
}

struct Weights<'a> {
    set: TensorSet,
    fingerprint: &'a mut Fingerprint,
}

impl Weights<'_> {
    fn add_file(
        &mut self,
        folder: &Folder,
        file: &str,
        index: Option<&Index>,
    ) -> Result<(), EngineError> {
        let (blame, map) = folder.map(file)?;
        let bytes = map.as_slice();
        let parsed = Safetensors::parse(blame.file(), bytes)?;
        let (header, data) = bytes.split_at(parsed.header_bytes());
        self.fingerprint.add_all(header);
        self.fingerprint.add_samples(data);
        for entry in parsed.tensors() {
            if entry.name.ends_with(REDUNDANT_SUFFIX) {
                continue;
            }
            if let Some(index) = index {
                check_index(index, &entry.name, &blame)?;
            }
            let tensor = StoredTensor {
                element_type: entry.element_type,
                shape: entry.shape.clone(),
                bytes: bytes_of(&map, entry.range.clone()),
                blame: blame.clone(),
            };
            self.set.insert(&entry.name, tensor)?;
        }
        Ok(())
    }
}

fn bytes_of(map: &Arc<FileMap>, range: std::ops::Range<usize>) -> ByteSource {
    ByteSource::mapped(map, range).expect("the parser checked the range against the file")
}

fn check_index(index: &Index, name: &str, blame: &Blame) -> Result<(), EngineError> {
    match index.weight_map.get(name) {
        Some(file) if file == blame.file() => Ok(()),
        Some(file) => Err(blame.invalid(format!(
            "tensor {} should be in {} as {INDEX} says",
            excerpt(name),
            excerpt(file)
        ))),
        None => Err(blame.invalid(format!("tensor {} is not in {INDEX}", excerpt(name)))),
    }
}
