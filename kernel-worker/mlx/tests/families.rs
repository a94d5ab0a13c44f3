//! Logits of tiny random models of every family against Hugging Face transformers, and of ones that MLX quantised
//! against numpy, on every device of MLX.
//!
//! Where caches and activations are f32 what is left is the order of additions. A GPU computes and stores keys and values
//! in the type of the checkpoint, bf16: a relative step of 2^-8 at each op, and logits go up to 12.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a failed assumption is a failed test, and it says what it measured"
)]

mod devices;
#[path = "../../engine/tests/families/expected.rs"]
mod expected;

use std::path::Path;

use velox_engine::files;
use velox_engine::load::assemble;
use velox_kvcache::PageBudget;
use velox_mlx::backend::MlxBackend;
use velox_mlx::ffi::{HalfPrecision, MlxDevice};

use devices::on_every_device;
use expected::{AFFINE, Expected, FAMILIES, GGUF_FILES, differences, fixtures, score};

/// Mean and largest difference of a logit.
struct Tolerance {
    mean: f32,
    largest: f32,
}

fn tolerance<D: MlxDevice>() -> Tolerance {
    match D::HALF_PRECISION {
        HalfPrecision::Slow => Tolerance {
            mean: 1e-5,
            largest: 2e-4,
        },
        HalfPrecision::Fast => Tolerance {
            mean: 0.1,
            largest: 1.0,
        },
    }
}

on_every_device!(
    every_family_computes_what_transformers_computes,
    gguf_with_interleaved_rows_computes_the_same,
    weights_that_mlx_quantised_compute_the_same,
);

fn check<D: MlxDevice>(path: &Path, folder: &Path) {
    let expected = Expected::read(folder);
    let source = files::open(path, &mut |_| {}).unwrap();
    let budget = PageBudget::new(1 << 24);
    let backend = MlxBackend::<D>::open(&source.tensor_types, budget).unwrap();
    let mut model = assemble(source, backend, &mut |_| {}).unwrap();
    assert_eq!(model.facts.backend, D::LABEL);
    let bound = tolerance::<D>();
    for chunk in [expected.ids.len(), 5] {
        let logits = score(model.runner.as_mut(), &expected.ids, chunk);
        let form = match D::HALF_PRECISION {
            HalfPrecision::Slow => &expected.exact_form,
            HalfPrecision::Fast => &expected.stored_form,
        };
        let (mean, largest) = differences(&logits, form);
        let case = format!(
            "{} on {} in chunks of {chunk}: mean {mean:.1e}, largest {largest:.1e}",
            path.file_name().unwrap().display(),
            D::LABEL
        );
        eprintln!("{case}");
        assert!(mean <= bound.mean && largest <= bound.largest, "{case}");
    }
}

fn every_family_computes_what_transformers_computes<D: MlxDevice>() {
    for family in FAMILIES {
        let folder = fixtures("families").join(family);
        check::<D>(&folder, &folder);
    }
}

fn gguf_with_interleaved_rows_computes_the_same<D: MlxDevice>() {
    for family in GGUF_FILES {
        let path = fixtures("families").join(format!("{family}.gguf"));
        check::<D>(&path, &fixtures("families").join(family));
    }
}

fn weights_that_mlx_quantised_compute_the_same<D: MlxDevice>() {
    for family in AFFINE {
        let folder = fixtures("affine").join(family);
        check::<D>(&folder, &folder);
    }
}
