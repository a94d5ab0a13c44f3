//! The real model, if it is there.

use std::path::{Path, PathBuf};

use velox_engine::error::EngineError;
use velox_engine::load::{LoadOptions, LoadedModel, load};
use velox_engine::probe::ProbedBackends;
use velox_kernels::label::BackendLabel;

/// Returns the path in `VELOX_TEST_MODEL`, or says loudly that the test is skipped.
pub(crate) fn model_path(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("VELOX_TEST_MODEL").map(PathBuf::from);
    if path.is_none() {
        eprintln!("SKIPPED: {test}: VELOX_TEST_MODEL names no model file");
    }
    path
}

/// Loads the model for a backend, or says loudly that the test is skipped because the backend is missing.
pub(crate) fn load_model(
    test: &str,
    path: &Path,
    backend: BackendLabel,
    threads: usize,
) -> Option<LoadedModel> {
    let options = LoadOptions {
        backend: Some(backend),
        threads,
        cache_limit_bytes: 1 << 30,
        quantise: None,
        max_context: None,
        probed: ProbedBackends::of_the_host(threads),
    };
    match load(path, &options, &mut |_| {}) {
        Ok(model) => {
            assert_eq!(model.facts.backend, backend);
            Some(model)
        }
        Err(EngineError::BackendUnavailable { backend, reason }) => {
            eprintln!("SKIPPED: {test}: {backend} is not available here: {reason}");
            None
        }
        Err(error) => panic!("{}: {error}", path.display()),
    }
}
