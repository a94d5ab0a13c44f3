//! Which file an error is about.

use std::path::Path;
use std::sync::Arc;

use crate::error::EngineError;

/// Name of a model file without its folder; makes the errors that carry it.
#[derive(Debug, Clone)]
pub(crate) struct Blame(Arc<str>);

impl Blame {
    /// Names a file.
    pub(crate) fn new(file: &str) -> Self {
        Self(file.into())
    }

    /// Names the last part of a path.
    pub(crate) fn of(path: &Path) -> Self {
        let name = path.file_name().unwrap_or(path.as_os_str());
        Self::new(&name.to_string_lossy())
    }

    /// Returns the name.
    pub(crate) fn file(&self) -> &str {
        &self.0
    }

    /// The file breaks a rule.
    pub(crate) fn invalid(&self, problem: impl Into<String>) -> EngineError {
        EngineError::InvalidModel {
            file: self.0.to_string(),
            problem: problem.into(),
        }
    }

    /// The file asks for something that this engine does not do.
    pub(crate) fn unsupported(&self, what: impl Into<String>) -> EngineError {
        EngineError::UnsupportedModel {
            file: self.0.to_string(),
            what: what.into(),
        }
    }

    /// The system does not hand the file out.
    pub(crate) fn unreadable(&self, source: std::io::Error) -> EngineError {
        EngineError::Unreadable {
            file: self.0.to_string(),
            source,
        }
    }
}

/// Shortens hostile text for an error message.
pub(crate) fn excerpt(text: &str) -> String {
    const LIMIT_CHARACTERS: usize = 80;
    let mut characters = text.chars();
    let mut short: String = characters
        .by_ref()
        .take(LIMIT_CHARACTERS)
        .flat_map(char::escape_debug)
        .collect();
    if characters.next().is_some() {
        short.push_str("...");
    }
    short
}
