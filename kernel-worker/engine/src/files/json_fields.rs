//! Typed reading of a configuration's fields.

use serde_json::{Map, Value};

use super::blame::{Blame, excerpt};
use crate::error::EngineError;

/// A JSON object whose errors name file and field. `null` counts as not given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Path of the object in the file, ending in a dot, or empty.
    path: &'a str,
    blame: &'a Blame,
}

impl<'a> Fields<'a> {
    /// Reads an object; `path` is empty or ends in a dot.
    pub(super) fn new(object: &'a Map<String, Value>, path: &'a str, blame: &'a Blame) -> Self {
        Self {
            object,
            path,
            blame,
        }
    }

    /// Returns a field as it is.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// Returns whether a field is there, `null` included.
    pub(super) fn has(&self, name: &str) -> bool {
        self.object.contains_key(name)
    }

    /// Reads an integer that is not negative.
    pub(super) fn size(&self, name: &str) -> Result<Option<usize>, EngineError> {
        self.typed(name, "an integer from 0", |value| {
            usize::try_from(value.as_u64()?).ok()
        })
    }

    /// Reads an integer that must be there.
    pub(super) fn required_size(&self, name: &str) -> Result<usize, EngineError> {
        self.size(name)?.ok_or_else(|| self.missing(name))
    }

    /// Reads a number.
    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, EngineError> {
        self.typed(name, "a number", Value::as_f64)
    }

    /// Reads a number that must be there.
    pub(super) fn required_number(&self, name: &str) -> Result<f64, EngineError> {
        self.number(name)?.ok_or_else(|| self.missing(name))
    }

    /// Reads a bool.
    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, EngineError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// Reads text.
    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, EngineError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// Reads a list of texts.
    pub(super) fn texts(&self, name: &str) -> Result<Option<Vec<&'a str>>, EngineError> {
        self.typed(name, "a list of strings", |value| {
            value.as_array()?.iter().map(Value::as_str).collect()
        })
    }

    /// Reads an object.
    pub(super) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, EngineError> {
        self.typed(name, "an object", Value::as_object)
    }

    /// Reads one token id or a list of them.
    pub(super) fn token_ids(&self, name: &str, vocab_size: u32) -> Result<Vec<u32>, EngineError> {
        let ids = self.typed(
            name,
            "an integer or a list of integers",
            |value| match value {
                Value::Array(ids) => ids.iter().map(Value::as_i64).collect(),
                id => id.as_i64().map(|id| vec![id]),
            },
        )?;
        ids.unwrap_or_default()
            .into_iter()
            .map(|id| {
                u32::try_from(id)
                    .ok()
                    .filter(|id| *id < vocab_size)
                    .ok_or_else(|| {
                        self.blame.invalid(format!(
                            "{} has the token {id}, the model has {vocab_size} tokens",
                            self.name(name)
                        ))
                    })
            })
            .collect()
    }

    /// Refuses a field by name and value.
    pub(super) fn unsupported(&self, name: &str) -> EngineError {
        let value = self.object.get(name).map(Value::to_string);
        self.blame.unsupported(format!(
            "{} {}",
            self.name(name),
            excerpt(&value.unwrap_or_default())
        ))
    }

    /// Reports a field that must be there.
    pub(super) fn missing(&self, name: &str) -> EngineError {
        self.blame
            .invalid(format!("{} is missing", self.name(name)))
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, EngineError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.blame.invalid(format!(
                "{} must be {expected}, it is {}",
                self.name(name),
                excerpt(&value.to_string())
            ))),
        }
    }
}
