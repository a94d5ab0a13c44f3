//! Our Metal kernels, compiled as C++ under the emulation of Metal and compared with oracles.
//!
//! This needs no Mac and no MLX, only a C++ compiler; without one the cases are SKIPPED. What it shows and what it does
//! not is told in `emulation/emulation.h`.
//!
//! * [`program`]: the program made of kernels and emulation. [`machine`]: runs a dispatch in it.
//! * [`oracle`]: what the kernels compute, in plain Rust.
//! * [`faults`]: mistakes that the emulation must catch. [`numbers`]: its half-precision types.
//! * [`codes`], [`transforms`], [`attention`]: the kernels beside their oracles.
#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a failed unwrap fails the test, in helpers too; what is skipped is told"
)]

mod attention;
mod codes;
mod faults;
mod machine;
mod numbers;
mod oracle;
mod program;
mod transforms;

use velox_mlx::metal::{KERNELS, Variant};

/// What the program is made of.
fn variants() -> Vec<Variant> {
    [
        faults::variants(),
        numbers::variants(),
        codes::variants(),
        transforms::variants(),
        attention::variants(),
    ]
    .concat()
}

#[test]
fn no_kernel_is_left_out() {
    let variants = variants();
    for kernel in KERNELS {
        let used = variants.iter().any(|variant| variant.kernel() == *kernel);
        assert!(used, "{}", kernel.name);
    }
}
