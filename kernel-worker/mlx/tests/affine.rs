//! Matrices that MLX quantised, on MLX's CPU device: it takes their words as they are.

use velox_engine::backend::reference::ReferenceBackend;
use velox_engine::probe::ProbeCase;
use velox_kernels::affine::StoredType;
use velox_kvcache::PageBudget;
use velox_mlx::backend::MlxBackend;
use velox_mlx::ffi::MlxCpuDevice;

/// The order of additions in f32, relative to its largest output.
const STAGE_TOLERANCE: f64 = 1e-5;
/// What a case of quantised matrices tolerates, relative to its largest output.
const CASE_TOLERANCE: f64 = 2e-2;

#[test]
fn every_layout_multiplies_as_the_reference_does() {
    let budget = PageBudget::new(1 << 24);
    let mut backend = MlxBackend::<MlxCpuDevice>::open(&["F32"], budget.clone()).unwrap();
    let mut oracle = ReferenceBackend::new(1, budget);
    let mut compared = 0;
    for case in ProbeCase::all() {
        let Some(StoredType::Affine(_)) = case.matrices else {
            continue;
        };
        let outcome = case.run(&mut backend, &mut oracle).unwrap();
        let relative = outcome.max_error / outcome.tolerance * CASE_TOLERANCE;
        assert!(
            relative <= STAGE_TOLERANCE,
            "{:?} of {}: {relative:.1e}",
            case.stage,
            case.dtype()
        );
        compared += 1;
    }
    assert_eq!(compared, 18 * 5, "six widths, three groups, five stages");
}
