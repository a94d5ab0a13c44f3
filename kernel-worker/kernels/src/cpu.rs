//! SIMD kernels, chosen by probing.
