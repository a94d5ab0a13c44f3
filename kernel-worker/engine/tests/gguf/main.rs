//! The GGUF reader against broken, hostile and unusual files.
#![expect(clippy::unwrap_used, reason = "a failed assumption is a failed test")]

mod hostile;
mod model;
mod mutated;
mod writer;

use velox_engine::error::EngineError;
use velox_engine::files::{self, ModelSource};

use crate::writer::{File, OnDisk};

fn open(file: &File) -> Result<ModelSource, EngineError> {
    files::open(&OnDisk::new(&file.bytes()).path(), &mut |_| {})
}

/// A tiny model with one thing changed, and words that its refusal must contain.
type Case = (&'static str, fn(&mut File), &'static [&'static str]);

/// Every case must be refused with a text that names the file and says what is wrong.
fn assert_refused(cases: &[Case]) {
    for (title, change, words) in cases {
        let mut file = File::tiny();
        change(&mut file);
        let error = open(&file).expect_err(title).to_string();
        assert!(error.starts_with("model.gguf: "), "{title}: {error}");
        for word in *words {
            assert!(
                error.contains(word),
                "{title}: \"{error}\" lacks \"{word}\""
            );
        }
    }
}
