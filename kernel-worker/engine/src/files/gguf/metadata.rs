//! Key-value pairs of a GGUF header.

use std::collections::BTreeMap;

use super::Reader;
use crate::error::EngineError;
use crate::files::blame::{Blame, excerpt};

const MAX_NESTING: usize = 64;

/// A value. Text and arrays borrow the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// u8 to u64.
    Unsigned(u64),
    /// i8 to i64.
    Signed(i64),
    /// f32 and f64.
    Float(f64),
    /// One byte, 0 or 1.
    Bool(bool),
    /// Bytes that should be UTF-8; checked when they are read as text.
    Text(&'a [u8]),
    /// Elements of one type.
    Array(Array<'a>),
}

impl Value<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an unsigned integer",
            Self::Signed(_) => "a signed integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::Text(_) => "a string",
            Self::Array(array) => array.element.array_name(),
        }
    }
}

/// An array whose elements were walked once when the header was parsed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    count: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Splits the body of an array of strings.
    fn strings(self) -> impl Iterator<Item = &'a [u8]> {
        let mut rest = self.bytes;
        std::iter::from_fn(move || {
            let (length, after) = rest.split_first_chunk::<8>()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            let (text, after) = after.split_at_checked(length)?;
            rest = after;
            Some(text)
        })
    }

    fn scalars(self) -> Option<impl Iterator<Item = Value<'a>>> {
        let size = self.element.scalar_bytes()?;
        Some(
            self.bytes
                .chunks_exact(size)
                .filter_map(move |bytes| scalar(self.element, bytes)),
        )
    }
}

/// Pairs by key.
#[derive(Debug)]
pub struct Metadata<'a> {
    pairs: BTreeMap<&'a str, Value<'a>>,
    blame: Blame,
}

impl<'a> Metadata<'a> {
    pub(super) fn new(blame: Blame) -> Self {
        Self {
            pairs: BTreeMap::new(),
            blame,
        }
    }

    pub(super) fn insert(&mut self, key: &'a str, value: Value<'a>) -> Result<(), EngineError> {
        if key.is_empty() {
            return Err(self.blame.invalid("a metadata key is empty"));
        }
        match self.pairs.insert(key, value) {
            None => Ok(()),
            Some(_) => Err(self
                .blame
                .invalid(format!("metadata key {} occurs twice", excerpt(key)))),
        }
    }

    /// Returns every key, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.pairs.keys().copied()
    }

    /// Returns a value as it is.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        self.pairs.get(key).copied()
    }

    /// Reads an integer that is not negative.
    ///
    /// # Errors
    /// [`EngineError::InvalidModel`] if the value is something else.
    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, EngineError> {
        self.typed(key, "an unsigned integer", as_unsigned)
    }

    /// Reads a float.
    ///
    /// # Errors
    /// As [`Metadata::unsigned`].
    pub fn float(&self, key: &str) -> Result<Option<f64>, EngineError> {
        self.typed(key, "a finite float", |value| match value {
            Value::Float(value) if value.is_finite() => Some(value),
            _ => None,
        })
    }

    /// Reads a bool.
    ///
    /// # Errors
    /// As [`Metadata::unsigned`].
    pub fn bool(&self, key: &str) -> Result<Option<bool>, EngineError> {
        self.typed(key, "a bool", |value| match value {
            Value::Bool(value) => Some(value),
            _ => None,
        })
    }

    /// Reads text.
    ///
    /// # Errors
    /// As [`Metadata::unsigned`].
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, EngineError> {
        self.typed(key, "a UTF-8 string", |value| match value {
            Value::Text(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        })
    }

    /// Reads an array of at most `limit` texts.
    ///
    /// # Errors
    /// As [`Metadata::unsigned`], or if it is longer.
    pub fn texts(&self, key: &str, limit: usize) -> Result<Option<Vec<String>>, EngineError> {
        let array = self.array(key, "an array of strings", |array| {
            (array.element == ValueType::Text).then_some(array)
        })?;
        let Some(array) = array else {
            return Ok(None);
        };
        if array.len() > limit {
            return Err(self.blame.invalid(format!(
                "{key} has {} entries, limit is {limit}",
                array.len()
            )));
        }
        array
            .strings()
            .enumerate()
            .map(|(index, bytes)| {
                std::str::from_utf8(bytes)
                    .map(str::to_owned)
                    .map_err(|_| self.blame.invalid(format!("{key}[{index}] is not UTF-8")))
            })
            .collect::<Result<Vec<_>, _>>()
            .map(Some)
    }

    /// Reads an array of `length` integers that are not negative.
    ///
    /// # Errors
    /// As [`Metadata::unsigned`], or if it has another length.
    pub fn unsigned_array(
        &self,
        key: &str,
        length: usize,
    ) -> Result<Option<Vec<u64>>, EngineError> {
        self.check_length(key, length)?;
        self.array(key, "an array of unsigned integers", |array| {
            array.scalars()?.map(as_unsigned).collect()
        })
    }

    /// Reads an array of `length` floats.
    ///
    /// # Errors
    /// As [`Metadata::unsigned`], or if it has another length.
    pub fn float_array(&self, key: &str, length: usize) -> Result<Option<Vec<f64>>, EngineError> {
        self.check_length(key, length)?;
        self.array(key, "an array of floats", |array| {
            array
                .scalars()?
                .map(|value| match value {
                    Value::Float(value) => Some(value),
                    _ => None,
                })
                .collect()
        })
    }

    /// Lengths are checked before elements are collected, which take more room here than in the file.
    fn check_length(&self, key: &str, length: usize) -> Result<(), EngineError> {
        match self.get(key) {
            Some(Value::Array(array)) if array.len() != length => Err(self.blame.invalid(format!(
                "{key} has {} entries, must have {length}",
                array.len()
            ))),
            _ => Ok(()),
        }
    }

    fn array<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(Array<'a>) -> Option<T>,
    ) -> Result<Option<T>, EngineError> {
        self.typed(key, expected, |value| match value {
            Value::Array(array) => read(array),
            _ => None,
        })
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, EngineError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.blame.invalid(format!(
                "{} must be {expected}, it is {}",
                excerpt(key),
                value.kind()
            ))),
        }
    }
}

fn as_unsigned(value: Value<'_>) -> Option<u64> {
    match value {
        Value::Unsigned(value) => Some(value),
        Value::Signed(value) => u64::try_from(value).ok(),
        _ => None,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn of(number: u32) -> Option<Self> {
        const BY_NUMBER: [ValueType; 13] = [
            ValueType::U8,
            ValueType::I8,
            ValueType::U16,
            ValueType::I16,
            ValueType::U32,
            ValueType::I32,
            ValueType::F32,
            ValueType::Bool,
            ValueType::Text,
            ValueType::Array,
            ValueType::U64,
            ValueType::I64,
            ValueType::F64,
        ];
        BY_NUMBER.get(usize::try_from(number).ok()?).copied()
    }

    fn scalar_bytes(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::Array => None,
        }
    }

    /// Fewest bytes of one element: a string is at least its length, an array its type and count.
    fn least_bytes(self) -> u64 {
        match self {
            Self::Text => 8,
            Self::Array => 12,
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    fn array_name(self) -> &'static str {
        match self {
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => "an array of unsigned integers",
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => "an array of signed integers",
            Self::F32 | Self::F64 => "an array of floats",
            Self::Bool => "an array of bools",
            Self::Text => "an array of strings",
            Self::Array => "an array of arrays",
        }
    }
}

/// Reads type and value of a pair.
pub(super) fn read_value<'a>(
    reader: &mut Reader<'a, '_>,
    key: &str,
) -> Result<Value<'a>, EngineError> {
    let kind = read_type(reader, key)?;
    match kind {
        ValueType::Text => Ok(Value::Text(reader.string(key, u64::MAX)?)),
        ValueType::Array => read_array(reader, key, 1).map(Value::Array),
        _ => read_scalar(reader, kind, key),
    }
}

fn read_type(reader: &mut Reader<'_, '_>, key: &str) -> Result<ValueType, EngineError> {
    let number = reader.u32(key)?;
    ValueType::of(number).ok_or_else(|| {
        reader.blame.invalid(format!(
            "{} has value type {number}, limit is 12",
            excerpt(key)
        ))
    })
}

fn read_scalar<'a>(
    reader: &mut Reader<'a, '_>,
    kind: ValueType,
    key: &str,
) -> Result<Value<'a>, EngineError> {
    let length = kind
        .scalar_bytes()
        .expect("the caller handles text and arrays");
    let bytes = reader.take(length, key)?;
    scalar(kind, bytes).ok_or_else(|| {
        reader
            .blame
            .invalid(format!("{} is a bool that is not 0 or 1", excerpt(key)))
    })
}

/// Walks an array once, so that later readers cannot meet a broken element.
fn read_array<'a>(
    reader: &mut Reader<'a, '_>,
    key: &str,
    nesting: usize,
) -> Result<Array<'a>, EngineError> {
    if nesting > MAX_NESTING {
        return Err(reader.blame.invalid(format!(
            "{} nests arrays deeper than the limit of {MAX_NESTING}",
            excerpt(key)
        )));
    }
    let element = read_type(reader, key)?;
    let count = reader.u64(key)?;
    reader.check_count(
        &format!("length of array {}", excerpt(key)),
        count,
        element.least_bytes(),
        u64::MAX,
    )?;
    let count = usize::try_from(count).expect("checked against the bytes in memory");
    let start = reader.at;
    match element {
        ValueType::Text => {
            for _ in 0..count {
                reader.string(key, u64::MAX)?;
            }
        }
        ValueType::Array => {
            for _ in 0..count {
                read_array(reader, key, nesting + 1)?;
            }
        }
        _ => {
            let size = element
                .scalar_bytes()
                .expect("text and arrays are handled above");
            reader.take(count * size, key)?;
        }
    }
    Ok(Array {
        element,
        count,
        bytes: &reader.bytes[start..reader.at],
    })
}

/// Decodes little-endian bytes of the type's own length; `None` for a bool that is not 0 or 1.
fn scalar(kind: ValueType, bytes: &[u8]) -> Option<Value<'static>> {
    Some(match kind {
        ValueType::U8 => Value::Unsigned(u8::from_le_bytes(bytes.try_into().ok()?).into()),
        ValueType::I8 => Value::Signed(i8::from_le_bytes(bytes.try_into().ok()?).into()),
        ValueType::U16 => Value::Unsigned(u16::from_le_bytes(bytes.try_into().ok()?).into()),
        ValueType::I16 => Value::Signed(i16::from_le_bytes(bytes.try_into().ok()?).into()),
        ValueType::U32 => Value::Unsigned(u32::from_le_bytes(bytes.try_into().ok()?).into()),
        ValueType::I32 => Value::Signed(i32::from_le_bytes(bytes.try_into().ok()?).into()),
        ValueType::F32 => Value::Float(f32::from_le_bytes(bytes.try_into().ok()?).into()),
        ValueType::U64 => Value::Unsigned(u64::from_le_bytes(bytes.try_into().ok()?)),
        ValueType::I64 => Value::Signed(i64::from_le_bytes(bytes.try_into().ok()?)),
        ValueType::F64 => Value::Float(f64::from_le_bytes(bytes.try_into().ok()?)),
        ValueType::Bool => match bytes {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            _ => return None,
        },
        ValueType::Text | ValueType::Array => return None,
    })
}
