//! What the gateway passes on the command line.

use std::num::NonZeroUsize;

use clap::Parser;

/// What caches may allocate when the gateway says nothing: a flat amount, not derived from this machine's memory.
const DEFAULT_CACHE_LIMIT_BYTES: u64 = 4 * 1024 * 1024 * 1024;

/// Kernel worker of Velox. Spawned by velox-gateway with its channels as standard input and output.
#[derive(Debug, Clone, Parser)]
#[command(name = "velox-kernel-worker", version)]
pub struct Config {
    /// Compute threads; default: one per core
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: Option<u32>,

    /// Bytes that all KV caches may allocate together
    #[arg(long, value_name = "BYTES", default_value_t = DEFAULT_CACHE_LIMIT_BYTES)]
    pub cache_limit_bytes: u64,

    /// What capabilities say of the backends of MLX; the gateway passes what it learned when it tried the other worker
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "this worker was built without MLX",
        hide = true
    )]
    pub why_no_mlx: String,

    /// Log filter, for example "info" or "velox_kernel_worker=debug"
    #[arg(long, value_name = "FILTER", env = "VELOX_LOG", default_value = "warn")]
    pub log: String,
}

impl Config {
    /// Returns the compute threads to use.
    #[must_use]
    pub fn compute_threads(&self) -> NonZeroUsize {
        self.threads
            .and_then(|threads| NonZeroUsize::new(usize::try_from(threads).ok()?))
            .or_else(|| std::thread::available_parallelism().ok())
            .unwrap_or(NonZeroUsize::MIN)
    }
}
