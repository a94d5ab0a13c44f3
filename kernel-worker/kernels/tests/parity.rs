//! Every op of `cpu`, on every kernel set of this machine, against the oracle.
//!
//! A set that this machine does not have is named as skipped on standard error; it is never counted as passed.
//! Tolerances are stated in the case that uses them.
#![expect(
    clippy::unwrap_used,
    reason = "a failed unwrap fails the test, in helpers too"
)]

#[path = "parity/attend.rs"]
mod attend;
#[path = "parity/mat_mul.rs"]
mod mat_mul;
#[path = "parity/rows.rs"]
mod rows;
#[path = "parity/support.rs"]
mod support;

use velox_kernels::cpu::CpuKernelSet;

#[test]
fn missing_kernel_sets_are_named() {
    let available: Vec<&str> = CpuKernelSet::available()
        .into_iter()
        .map(CpuKernelSet::name)
        .collect();
    for name in CpuKernelSet::NAMES {
        if !available.contains(&name) {
            eprintln!(
                "SKIPPED: kernel set {name} is not on this machine, its parity was not checked"
            );
        }
        assert_eq!(
            CpuKernelSet::named(name).is_some(),
            available.contains(&name)
        );
    }
    assert_eq!(available.last(), Some(&"portable"));
    assert_eq!(available[0], CpuKernelSet::detect().name());
}
