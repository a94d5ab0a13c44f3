//! Header of a safetensors file in memory.
//!
//! ```text
//! header length u64 | header: JSON object | tensor data
//! name -> {"dtype": "F32", "shape": [out, in], "data_offsets": [begin, end]}   offsets from the start of the data
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use velox_kernels::block::BlockType;

use super::blame::{Blame, excerpt};
use super::tensors::ElementType;
use crate::error::EngineError;

const LENGTH_BYTES: usize = 8;
/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const MAX_TENSORS: usize = 1 << 16;
const MAX_DIMENSIONS: usize = 8;

/// A tensor of the header, checked against the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// Unique in the file.
    pub name: String,
    /// How its elements are stored.
    pub element_type: ElementType,
    /// Slowest dimension first, none zero; empty for a scalar.
    pub shape: Vec<usize>,
    /// Where its bytes lie in the file.
    pub range: Range<usize>,
}

/// A parsed header.
#[derive(Debug)]
pub struct Safetensors {
    tensors: Vec<TensorEntry>,
    header_bytes: usize,
}

impl Safetensors {
    /// Parses the header of a whole file; the tensors must cover the data without overlap or hole.
    ///
    /// # Errors
    /// [`EngineError::InvalidModel`] for what breaks the format, [`EngineError::UnsupportedModel`] for another
    /// element type than F32, F16, BF16 and U32; `file` is the name that they carry.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, EngineError> {
        let blame = Blame::new(file);
        let header_bytes = header_end(bytes, &blame)?;
        let (header, data) = bytes.split_at(header_bytes);
        let header: Header = serde_json::from_slice(&header[LENGTH_BYTES..])
            .map_err(|error| blame.invalid(format!("header is no tensor table: {error}")))?;
        let mut tensors = header
            .0
            .into_iter()
            .map(|(name, raw)| locate(name, &raw, header_bytes, &blame))
            .collect::<Result<Vec<_>, _>>()?;
        tensors.sort_by_key(|tensor| tensor.range.start);
        check_cover(&tensors, header_bytes, data.len(), &blame)?;
        Ok(Self {
            tensors,
            header_bytes,
        })
    }

    /// Returns the tensors in order of their place in the file.
    #[must_use]
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// Returns the length of everything before the tensor data.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.header_bytes
    }
}

fn header_end(bytes: &[u8], blame: &Blame) -> Result<usize, EngineError> {
    let (length, rest) = bytes.split_first_chunk::<LENGTH_BYTES>().ok_or_else(|| {
        blame.invalid(format!("has {} bytes, at least 8 are needed", bytes.len()))
    })?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(blame.invalid(format!(
            "header has {length} bytes, limit is {MAX_HEADER_BYTES}"
        )));
    }
    usize::try_from(length)
        .ok()
        .filter(|length| *length <= rest.len())
        .map(|length| LENGTH_BYTES + length)
        .ok_or_else(|| {
            blame.invalid(format!(
                "header has {length} bytes, {} are left in the file",
                rest.len()
            ))
        })
}

fn locate(
    name: String,
    raw: &RawTensor,
    header_bytes: usize,
    blame: &Blame,
) -> Result<TensorEntry, EngineError> {
    let label = excerpt(&name);
    let element_type = match raw.dtype.as_str() {
        "F32" => ElementType::Blocks(BlockType::F32),
        "F16" => ElementType::Blocks(BlockType::F16),
        "BF16" => ElementType::Blocks(BlockType::Bf16),
        "U32" => ElementType::U32,
        other => {
            return Err(blame.unsupported(format!("tensor {label} of type {}", excerpt(other))));
        }
    };
    if raw.shape.len() > MAX_DIMENSIONS {
        return Err(blame.invalid(format!(
            "tensor {label} has {} dimensions, limit is {MAX_DIMENSIONS}",
            raw.shape.len()
        )));
    }
    if raw.shape.contains(&0) {
        return Err(blame.invalid(format!("tensor {label} has a dimension of 0")));
    }
    let overflow = || blame.invalid(format!("size of tensor {label} overflows"));
    let expected = raw
        .shape
        .iter()
        .try_fold(element_type.bytes(), |bytes, dimension| {
            bytes.checked_mul(*dimension)
        })
        .ok_or_else(overflow)?;
    let [begin, end] = raw.data_offsets;
    if end.checked_sub(begin) != Some(expected) {
        return Err(blame.invalid(format!(
            "tensor {label} has data_offsets [{begin}, {end}], its shape needs {expected} bytes"
        )));
    }
    let start = header_bytes.checked_add(begin).ok_or_else(overflow)?;
    let end = header_bytes.checked_add(end).ok_or_else(overflow)?;
    // No alignment is asked for: MLX writes headers of any length, and kernels read elements in place as bytes.
    Ok(TensorEntry {
        name,
        element_type,
        shape: raw.shape.clone(),
        range: start..end,
    })
}

/// Each tensor must begin where the one before ends, and the last one end with the file.
fn check_cover(
    tensors: &[TensorEntry],
    header_bytes: usize,
    data_bytes: usize,
    blame: &Blame,
) -> Result<(), EngineError> {
    let mut end = header_bytes;
    for tensor in tensors {
        let label = excerpt(&tensor.name);
        if tensor.range.start != end {
            let what = if tensor.range.start < end {
                "overlaps the one before"
            } else {
                "leaves a hole before it"
            };
            return Err(blame.invalid(format!(
                "tensor {label} begins at data offset {}, the one before ends at {}: it {what}",
                tensor.range.start - header_bytes,
                end - header_bytes
            )));
        }
        end = tensor.range.end;
    }
    if end - header_bytes != data_bytes {
        return Err(blame.invalid(format!(
            "tensors need {} bytes of data, the file has {data_bytes}",
            end - header_bytes
        )));
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

/// The JSON object; unlike a plain map it refuses a name that occurs twice.
struct Header(BTreeMap<String, RawTensor>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut tensors = BTreeMap::new();
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            let duplicate = if name == "__metadata__" {
                // Free text of the tool that wrote the file; only its form is checked.
                metadata
                    .replace(map.next_value::<BTreeMap<String, String>>()?)
                    .is_some()
            } else {
                let tensor = map.next_value::<RawTensor>()?;
                tensors.insert(name.clone(), tensor).is_some()
            };
            if duplicate {
                return Err(A::Error::custom(format!("{} occurs twice", excerpt(&name))));
            }
            if tensors.len() > MAX_TENSORS {
                return Err(A::Error::custom(format!(
                    "more tensors than the limit of {MAX_TENSORS}"
                )));
            }
        }
        Ok(Header(tensors))
    }
}
