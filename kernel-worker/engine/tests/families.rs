//! Logits of tiny random models against Hugging Face transformers (made by `make_family_fixtures.py`), and of ones that
//! MLX quantised against numpy (made by `make_affine_fixtures.py`).
//!
//! The first expectation was computed with keys and values rounded to f16, as our cache stores them. What is left is
//! the order of f32 additions, about 1e-5, and where it moves a key over the border between two f16 neighbours, a
//! step of 2^-10 of that key, which every later position sees. Which family has such a key depends on the instruction
//! set: with AVX2 it is `llama-head-dim`, whose logits are within 3e-5 up to position 5 and 4e-4 away, 4e-3 at most,
//! from position 6. Hence the bounds of one family allow for such keys, and the median of all families does not. The
//! second expectation has exact keys and values and bounds what the 16-bit cache costs: its maker saw up to 2e-2.
//! Logits go up to 12.
#![expect(clippy::unwrap_used, reason = "a failed assumption is a failed test")]

#[path = "families/expected.rs"]
mod expected;

use std::path::{Path, PathBuf};

use velox_engine::load::{LoadOptions, load};
use velox_engine::probe::ProbedBackends;
use velox_kernels::label::BackendLabel;

use expected::{AFFINE, Expected, FAMILIES, GGUF_FILES, differences, fixtures, score};

const STORED_FORM_MEAN_TOLERANCE: f32 = 1e-3;
const STORED_FORM_TOLERANCE: f32 = 1e-2;
const MEDIAN_OF_MEANS_TOLERANCE: f32 = 3e-5;
const EXACT_FORM_TOLERANCE: f32 = 3e-2;

/// What `CPU` adds where weights are quantised: it rounds activations to 15 bits. Measured 1.2e-3 and 6.3e-3.
const ROUNDED_MEAN_TOLERANCE: f32 = 3e-3;
const ROUNDED_TOLERANCE: f32 = 1.5e-2;

fn options(backend: BackendLabel) -> LoadOptions {
    LoadOptions {
        backend: Some(backend),
        threads: 1,
        cache_limit_bytes: 64 << 20,
        quantise: None,
        max_context: None,
        probed: ProbedBackends::of_the_host(1),
    }
}

/// Checks models and their families one by one, and that most of them agree to the order of additions.
fn check(models: &[(PathBuf, &str)], backend: BackendLabel) {
    let mut means: Vec<f32> = models
        .iter()
        .map(|(path, family)| {
            let expected = Expected::read(&fixtures("families").join(family));
            let stored_form = (STORED_FORM_MEAN_TOLERANCE, STORED_FORM_TOLERANCE);
            check_within(path, &expected, backend, stored_form)
        })
        .collect();
    means.sort_by(f32::total_cmp);
    let median = means[means.len() / 2];
    assert!(
        median <= MEDIAN_OF_MEANS_TOLERANCE,
        "median of the means {median:.1e} on {backend:?}"
    );
}

/// Returns the larger of the mean differences from the stored form.
fn check_within(
    path: &Path,
    expected: &Expected,
    backend: BackendLabel,
    (mean_tolerance, tolerance): (f32, f32),
) -> f32 {
    let mut largest_mean = 0.0_f32;
    let mut model = load(path, &options(backend), &mut |_| {}).unwrap();
    assert_eq!(model.facts.backend, backend);
    for chunk in [expected.ids.len(), 5] {
        let logits = score(model.runner.as_mut(), &expected.ids, chunk);
        let (mean, largest) = differences(&logits, &expected.stored_form);
        let (_, exact) = differences(&logits, &expected.exact_form);
        let case = format!(
            "{} in chunks of {chunk}: mean {mean:.1e}, largest {largest:.1e} from stored form, {exact:.1e} from exact",
            path.file_name().unwrap().display()
        );
        assert!(mean <= mean_tolerance, "{case}");
        assert!(largest <= tolerance, "{case}");
        assert!(exact <= EXACT_FORM_TOLERANCE, "{case}");
        largest_mean = largest_mean.max(mean);
    }
    largest_mean
}

fn folders() -> Vec<(PathBuf, &'static str)> {
    FAMILIES
        .map(|family| (fixtures("families").join(family), family))
        .into()
}

fn gguf_files() -> Vec<(PathBuf, &'static str)> {
    GGUF_FILES
        .map(|family| (fixtures("families").join(format!("{family}.gguf")), family))
        .into()
}

#[test]
fn every_family_computes_what_transformers_computes() {
    check(&folders(), BackendLabel::Reference);
}

#[test]
fn weights_that_mlx_quantised_compute_the_same() {
    for family in AFFINE {
        let folder = fixtures("affine").join(family);
        let expected = Expected::read(&folder);
        let exact = (STORED_FORM_MEAN_TOLERANCE, STORED_FORM_TOLERANCE);
        check_within(&folder, &expected, BackendLabel::Reference, exact);
        let rounded = (ROUNDED_MEAN_TOLERANCE, ROUNDED_TOLERANCE);
        check_within(&folder, &expected, BackendLabel::Cpu, rounded);
    }
}

#[test]
fn gguf_with_interleaved_rows_computes_the_same() {
    check(&gguf_files(), BackendLabel::Reference);
}

#[test]
fn simd_kernels_compute_the_same() {
    check(&folders(), BackendLabel::Cpu);
    check(&gguf_files(), BackendLabel::Cpu);
}
