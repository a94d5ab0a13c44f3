//! GGUF container: header, metadata and tensor table of a file in memory.
//!
//! ```text
//! "GGUF" | version u32 | tensors u64 | pairs u64 | pairs... | tensor table... | padding | tensor data
//! pair   = key (u64 length, bytes) | type u32 | value
//! tensor = name (u64 length, bytes) | n_dims u32 | dims u64... fastest first | type u32 | offset u64
//! ```
//!
//! Every count is checked against the bytes that are left before anything is allocated for it, and text and arrays
//! stay where they are in the file: memory is a small multiple of the header's own size, whatever it claims.

mod metadata;
mod tensor_type;

use std::collections::BTreeSet;
use std::ops::Range;

use velox_kernels::block::BlockType;

pub use self::metadata::{Array, Metadata, Value};
use super::blame::{Blame, excerpt};
use crate::error::EngineError;

/// First bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";

const MAX_PAIRS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 16;
const MAX_KEY_BYTES: u64 = (1 << 16) - 1;
const MAX_TENSOR_NAME_BYTES: u64 = 64;
const MAX_DIMS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
/// The format asks for a multiple of 8, and kernels read f32 in place.
const MIN_ALIGNMENT: u64 = 8;
const MAX_ALIGNMENT: u64 = 1 << 16;
/// Smallest pair: key length, type, a value of one byte.
const MIN_PAIR_BYTES: u64 = 8 + 4 + 1;
/// Smallest tensor entry: name length, dimension count, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// A tensor of the table, checked against the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry<'a> {
    /// Unique in the file.
    pub name: &'a str,
    /// How its elements are stored.
    pub block_type: BlockType,
    /// Slowest dimension first, 1 to 4 dimensions, none zero.
    pub shape: Vec<usize>,
    /// Where its bytes lie in the file.
    pub range: Range<usize>,
}

/// A parsed header. Borrows the file.
#[derive(Debug)]
pub struct Gguf<'a> {
    metadata: Metadata<'a>,
    tensors: Vec<TensorEntry<'a>>,
    header_bytes: usize,
}

impl<'a> Gguf<'a> {
    /// Parses the header of a whole file and checks that every tensor lies in it.
    ///
    /// # Errors
    /// [`EngineError::InvalidModel`] for what breaks the format, [`EngineError::UnsupportedModel`] for another
    /// version or a tensor type without a kernel; `file` is the name that they carry.
    pub fn parse(file: &str, bytes: &'a [u8]) -> Result<Self, EngineError> {
        let blame = Blame::new(file);
        let mut reader = Reader {
            bytes,
            at: 0,
            blame: &blame,
        };
        if reader.take(4, "magic")? != MAGIC {
            return Err(blame.invalid("does not begin with GGUF"));
        }
        check_version(reader.u32("version")?, &blame)?;
        let tensor_count = reader.u64("tensor count")?;
        let pair_count = reader.u64("metadata count")?;
        reader.check_count("tensor count", tensor_count, MIN_TENSOR_BYTES, MAX_TENSORS)?;
        reader.check_count("metadata count", pair_count, MIN_PAIR_BYTES, MAX_PAIRS)?;

        let mut metadata = Metadata::new(blame.clone());
        for _ in 0..pair_count {
            let key = reader.text("metadata key", MAX_KEY_BYTES)?;
            let value = metadata::read_value(&mut reader, key)?;
            metadata.insert(key, value)?;
        }
        let alignment = read_alignment(&metadata, &blame)?;

        let claims = (0..tensor_count)
            .map(|_| TensorClaim::read(&mut reader))
            .collect::<Result<Vec<_>, _>>()?;
        let header_bytes = reader.at;
        let data_start = to_u64(header_bytes)
            .checked_next_multiple_of(alignment)
            .ok_or_else(|| blame.invalid("start of the tensor data overflows"))?;
        let mut tensors = claims
            .into_iter()
            .map(|claim| claim.locate(data_start, alignment, bytes.len(), &blame))
            .collect::<Result<Vec<_>, _>>()?;
        check_disjoint(&mut tensors, &blame)?;
        Ok(Self {
            metadata,
            tensors,
            header_bytes,
        })
    }

    /// Returns the key-value pairs.
    #[must_use]
    pub fn metadata(&self) -> &Metadata<'a> {
        &self.metadata
    }

    /// Returns the tensors in order of their place in the file.
    #[must_use]
    pub fn tensors(&self) -> &[TensorEntry<'a>] {
        &self.tensors
    }

    /// Returns the length of everything before the tensor data and its padding.
    #[must_use]
    pub fn header_bytes(&self) -> usize {
        self.header_bytes
    }
}

fn check_version(version: u32, blame: &Blame) -> Result<(), EngineError> {
    match version {
        2 | 3 => Ok(()),
        1 => Err(blame.unsupported("GGUF version 1 (32-bit lengths)")),
        _ if matches!(version.swap_bytes(), 1..=3) => {
            Err(blame.unsupported("a big-endian GGUF file"))
        }
        _ => Err(blame.unsupported(format!("GGUF version {version} (known: 2, 3)"))),
    }
}

fn read_alignment(metadata: &Metadata<'_>, blame: &Blame) -> Result<u64, EngineError> {
    let alignment = metadata
        .unsigned("general.alignment")?
        .unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || !(MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(&alignment) {
        return Err(blame.invalid(format!(
            "general.alignment is {alignment}, must be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
        )));
    }
    Ok(alignment)
}

/// Sorts by place and refuses tensors that share bytes or a name.
fn check_disjoint(tensors: &mut [TensorEntry<'_>], blame: &Blame) -> Result<(), EngineError> {
    tensors.sort_by_key(|tensor| tensor.range.start);
    for pair in tensors.windows(2) {
        if let [first, second] = pair
            && first.range.end > second.range.start
        {
            return Err(blame.invalid(format!(
                "tensors {} and {} overlap at byte {}",
                excerpt(first.name),
                excerpt(second.name),
                second.range.start
            )));
        }
    }
    let mut names = BTreeSet::new();
    match tensors.iter().find(|tensor| !names.insert(tensor.name)) {
        Some(twice) => Err(blame.invalid(format!("tensor {} occurs twice", excerpt(twice.name)))),
        None => Ok(()),
    }
}

fn to_u64(length: usize) -> u64 {
    u64::try_from(length).expect("a length in memory fits 64 bits")
}

/// A tensor as the table describes it, before the start of the data is known.
struct TensorClaim<'a> {
    name: &'a str,
    block_type: BlockType,
    shape: Vec<usize>,
    byte_length: u64,
    offset: u64,
}

impl<'a> TensorClaim<'a> {
    fn read(reader: &mut Reader<'a, '_>) -> Result<Self, EngineError> {
        let blame = reader.blame;
        let name = reader.text("tensor name", MAX_TENSOR_NAME_BYTES)?;
        let label = excerpt(name);
        let n_dims = reader.u32("number of dimensions")?;
        if !(1..=MAX_DIMS).contains(&n_dims) {
            return Err(blame.invalid(format!(
                "tensor {label} has {n_dims} dimensions, limit is 1 to {MAX_DIMS}"
            )));
        }
        let overflow = || blame.invalid(format!("size of tensor {label} overflows"));
        let mut shape = Vec::new();
        let mut outer_elements = 1_usize;
        for axis in 0..n_dims {
            let dimension = usize::try_from(reader.u64("dimension")?).map_err(|_| overflow())?;
            if dimension == 0 {
                return Err(blame.invalid(format!("tensor {label} has a dimension of 0")));
            }
            if axis > 0 {
                outer_elements = outer_elements.checked_mul(dimension).ok_or_else(overflow)?;
            }
            shape.push(dimension);
        }
        let columns = *shape.first().expect("at least one dimension was read");
        shape.reverse();
        let block_type = tensor_type::block_type(reader.u32("tensor type")?)
            .map_err(|what| blame.unsupported(format!("tensor {label} of type {what}")))?;
        if !columns.is_multiple_of(block_type.elements()) {
            return Err(blame.invalid(format!(
                "tensor {label} has rows of {columns} elements, no whole number of {} blocks of {}",
                block_type.name(),
                block_type.elements()
            )));
        }
        let byte_length = block_type
            .row_bytes(columns)
            .and_then(|row| row.checked_mul(outer_elements))
            .ok_or_else(overflow)?;
        // Elements overflow later than bytes only for sub-byte types; both must be representable.
        columns.checked_mul(outer_elements).ok_or_else(overflow)?;
        let offset = reader.u64("tensor offset")?;
        Ok(Self {
            name,
            block_type,
            shape,
            byte_length: to_u64(byte_length),
            offset,
        })
    }

    fn locate(
        self,
        data_start: u64,
        alignment: u64,
        file_bytes: usize,
        blame: &Blame,
    ) -> Result<TensorEntry<'a>, EngineError> {
        let label = excerpt(self.name);
        if !self.offset.is_multiple_of(alignment) {
            return Err(blame.invalid(format!(
                "tensor {label} has offset {}, no multiple of the alignment {alignment}",
                self.offset
            )));
        }
        let start = data_start.checked_add(self.offset);
        let end = start.and_then(|start| start.checked_add(self.byte_length));
        let range = start
            .zip(end)
            .and_then(|(start, end)| Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?))
            .filter(|range| range.end <= file_bytes)
            .ok_or_else(|| {
                blame.invalid(format!(
                    "tensor {label} of {} bytes at data offset {} ends outside the file of {file_bytes} bytes",
                    self.byte_length, self.offset
                ))
            })?;
        Ok(TensorEntry {
            name: self.name,
            block_type: self.block_type,
            shape: self.shape,
            range,
        })
    }
}

/// A place in the header.
struct Reader<'a, 'b> {
    bytes: &'a [u8],
    at: usize,
    blame: &'b Blame,
}

impl<'a> Reader<'a, '_> {
    fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, length: usize, what: &str) -> Result<&'a [u8], EngineError> {
        let taken = self
            .bytes
            .get(self.at..)
            .and_then(|rest| rest.get(..length))
            .ok_or_else(|| {
                self.blame.invalid(format!(
                    "{what} at byte {} needs {length} bytes, {} are left",
                    self.at,
                    self.remaining()
                ))
            })?;
        self.at += length;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], EngineError> {
        let taken = self.take(N, what)?;
        Ok(taken.try_into().expect("take returns N bytes"))
    }

    fn u32(&mut self, what: &str) -> Result<u32, EngineError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, EngineError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Length and bytes of a string.
    fn string(&mut self, what: &str, limit: u64) -> Result<&'a [u8], EngineError> {
        let length = self.u64(what)?;
        if length > limit {
            return Err(self.blame.invalid(format!(
                "{what} at byte {} has {length} bytes, limit is {limit}",
                self.at
            )));
        }
        self.check_count(what, length, 1, limit)?;
        let length = usize::try_from(length).expect("checked against the bytes in memory");
        self.take(length, what)
    }

    fn text(&mut self, what: &str, limit: u64) -> Result<&'a str, EngineError> {
        let at = self.at;
        std::str::from_utf8(self.string(what, limit)?).map_err(|_| {
            self.blame
                .invalid(format!("{what} at byte {at} is not UTF-8"))
        })
    }

    /// Refuses a count that the rest of the file cannot hold.
    fn check_count(
        &self,
        what: &str,
        count: u64,
        least_bytes_each: u64,
        limit: u64,
    ) -> Result<(), EngineError> {
        let limit = limit.min(to_u64(self.remaining()) / least_bytes_each);
        if count > limit {
            return Err(self.blame.invalid(format!(
                "{what} is {count}, limit is {limit} with {} bytes left",
                self.remaining()
            )));
        }
        Ok(())
    }
}
