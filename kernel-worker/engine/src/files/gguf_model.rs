//! A model from one GGUF file or its shards.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use velox_kernels::buffer::{ByteSource, FileMap};

use super::assemble::{Bias, GGUF, Head, Optional, assemble};
use super::blame::Blame;
use super::fingerprint::Fingerprint;
use super::gguf::Gguf;
use super::gguf_spec::{SpecReader, TensorFacts};
use super::tensors::{ElementType, StoredTensor, TensorSet};
use super::{ModelSource, gguf_vocabulary, map_file};
use crate::error::EngineError;
use crate::load::LoadProgress;

const ROPE_DIVISORS: &str = "rope_freqs.weight";
const MAX_SHARDS: u32 = 1024;

/// Opens a GGUF model; any shard of a split one will do.
pub(super) fn open(
    path: &Path,
    report: &mut dyn FnMut(LoadProgress),
) -> Result<ModelSource, EngineError> {
    let files = shard_paths(path)
        .iter()
        .map(|path| map_file(path))
        .collect::<Result<Vec<_>, _>>()?;
    let shards = files
        .iter()
        .map(|(blame, map)| {
            Gguf::parse(blame.file(), map.as_slice()).map(|gguf| Shard { blame, map, gguf })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let first = shards.first().expect("a path has at least one shard");
    check_shards(&shards)?;

    let mut set = TensorSet::new(first.blame.clone());
    let mut fingerprint = Fingerprint::default();
    for shard in &shards {
        shard.add_to(&mut set, &mut fingerprint)?;
    }
    let total_bytes = set.bytes();
    let mut progress = |phase, done_bytes| {
        report(LoadProgress {
            phase,
            done_bytes,
            total_bytes,
        });
    };
    progress("check", 0);

    let metadata = first.gguf.metadata();
    let reader = SpecReader::new(metadata, first.blame)?;
    let frequency_divisors = set
        .contains(ROPE_DIVISORS)
        .then(|| set.vector(ROPE_DIVISORS, reader.head_dim()? / 2))
        .transpose()?;
    let spec = reader.spec(&TensorFacts {
        vocab_size: set.rows(GGUF.embedding)?,
        frequency_divisors,
    })?;
    let vocab_size = u32::try_from(spec.vocab_size).expect("the spec's limits fit 32 bits");
    let tokenizer = gguf_vocabulary::read(metadata, vocab_size, first.blame)?;
    // GGUF says by presence alone whether a projection has a bias and whether the head is tied.
    let tensors = assemble(
        &mut set,
        &spec,
        &GGUF,
        Optional {
            qkv_bias: Bias::AsStored,
            output_bias: Bias::AsStored,
            mlp_bias: Bias::AsStored,
            head: Head::AsStored,
        },
    )?;
    progress("map", set.taken_bytes());
    let totals = set.finish()?;
    Ok(ModelSource {
        spec,
        tensors,
        tokenizer,
        format: "gguf",
        parameters: totals.parameters,
        weight_bytes: totals.weight_bytes,
        tensor_types: totals.tensor_types.into_iter().collect(),
        fingerprint: fingerprint.finish(),
    })
}

struct Shard<'a> {
    blame: &'a Blame,
    map: &'a Arc<FileMap>,
    gguf: Gguf<'a>,
}

impl Shard<'_> {
    fn add_to(
        &self,
        set: &mut TensorSet,
        fingerprint: &mut Fingerprint,
    ) -> Result<(), EngineError> {
        let bytes = self.map.as_slice();
        let (header, data) = bytes.split_at(self.gguf.header_bytes());
        fingerprint.add_all(header);
        fingerprint.add_samples(data);
        for entry in self.gguf.tensors() {
            let tensor = StoredTensor {
                element_type: ElementType::Blocks(entry.block_type),
                shape: entry.shape.clone(),
                bytes: bytes_of(self.map, entry.range.clone()),
                blame: self.blame.clone(),
            };
            set.insert(entry.name, tensor)?;
        }
        Ok(())
    }
}

fn bytes_of(map: &Arc<FileMap>, range: Range<usize>) -> ByteSource {
    ByteSource::mapped(map, range).expect("the parser checked the range against the file")
}

/// The shards of `name-00002-of-00003.gguf` in order, or the file itself.
fn shard_paths(path: &Path) -> Vec<PathBuf> {
    path.file_name()
        .and_then(|name| name.to_str())
        .and_then(shard_name)
        .map_or_else(
            || vec![path.to_owned()],
            |(stem, count)| {
                (1..=count)
                    .map(|number| {
                        path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf"))
                    })
                    .collect()
            },
        )
}

/// Splits `stem-00002-of-00003.gguf` into stem and count.
fn shard_name(name: &str) -> Option<(&str, u32)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five_digits =
        |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if !five_digits(number) || !five_digits(count) {
        return None;
    }
    let number: u32 = number.parse().ok()?;
    let count: u32 = count.parse().ok()?;
    (1..=count)
        .contains(&number)
        .then_some((stem, count))
        .filter(|(_, count)| *count <= MAX_SHARDS)
}

/// Refuses shards whose keys disagree with their names, or a lone shard under another name.
fn check_shards(shards: &[Shard<'_>]) -> Result<(), EngineError> {
    let total: usize = shards.iter().map(|shard| shard.gguf.tensors().len()).sum();
    for (index, shard) in shards.iter().enumerate() {
        let metadata = shard.gguf.metadata();
        let expectations = [
            ("split.count", shards.len(), 1),
            ("split.no", index, 0),
            ("split.tensors.count", total, total),
        ];
        for (key, expected, unless_given) in expectations {
            let found = metadata.unsigned(key)?;
            let found = match found {
                Some(found) => usize::try_from(found).unwrap_or(usize::MAX),
                None => unless_given,
            };
            // A model of one file may say so with a count of 0 or 1.
            let agrees =
                found == expected || (key == "split.count" && shards.len() == 1 && found == 0);
            if !agrees {
                return Err(shard
                    .blame
                    .invalid(format!("{key} is {found}, the files found say {expected}")));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_need_five_digits_and_a_number_in_range() {
        assert_eq!(shard_name("m-00002-of-00003.gguf"), Some(("m", 3)));
        assert_eq!(shard_name("a-b-00001-of-00001.gguf"), Some(("a-b", 1)));
        for other in [
            "m.gguf",
            "m-1-of-3.gguf",
            "m-00000-of-00003.gguf",
            "m-00004-of-00003.gguf",
            "m-00001-of-99999.gguf",
            "m-00001-of-00003.bin",
            "m-+0001-of-00003.gguf",
        ] {
            assert_eq!(shard_name(other), None, "{other}");
        }
    }

    #[test]
    fn any_shard_finds_all_of_them() {
        let paths = shard_paths(Path::new("folder/m-00002-of-00002.gguf"));
        assert_eq!(
            paths,
            [
                Path::new("folder/m-00001-of-00002.gguf"),
                Path::new("folder/m-00002-of-00002.gguf")
            ]
        );
    }
}
