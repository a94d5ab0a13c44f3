//! Names of the code paths that can produce a result.

/// A backend, ordered from weak to strong as DESIGN section 5 ranks them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BackendLabel {
    /// Naive f32 Rust: the oracle.
    Reference,
    /// MLX on its CPU device.
    MlxCpu,
    /// Our SIMD kernels.
    Cpu,
    /// MLX's CUDA build.
    MlxCuda,
    /// MLX on the Apple GPU.
    Metal,
}

impl BackendLabel {
    /// Every label, strong to weak: the order of `auto`.
    pub const AUTO_ORDER: [Self; 5] = [
        Self::Metal,
        Self::MlxCuda,
        Self::Cpu,
        Self::MlxCpu,
        Self::Reference,
    ];

    /// Returns the label as people and scripts write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Metal => "METAL",
            Self::MlxCuda => "MLX_CUDA",
            Self::Cpu => "CPU",
            Self::MlxCpu => "MLX_CPU",
            Self::Reference => "REFERENCE",
        }
    }
}

impl std::fmt::Display for BackendLabel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}
