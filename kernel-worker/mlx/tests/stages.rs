//! Every stage and block type on MLX's CPU device beside the reference.

use velox_engine::backend::reference::ReferenceBackend;
use velox_engine::probe::ProbeCase;
use velox_kvcache::PageBudget;
use velox_mlx::backend::MlxBackend;
use velox_mlx::ffi::MlxCpuDevice;

#[test]
fn every_probe_comes_out_right() {
    let budget = PageBudget::new(1 << 24);
    let mut backend = MlxBackend::<MlxCpuDevice>::open(&["F32"], budget.clone()).unwrap();
    let mut oracle = ReferenceBackend::new(1, budget);
    let mut wrong = Vec::new();
    for case in ProbeCase::all() {
        match case.run(&mut backend, &mut oracle) {
            Ok(outcome) if outcome.is_right() => {}
            other => wrong.push(format!("{:?} of {}: {other:?}", case.stage, case.dtype())),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
