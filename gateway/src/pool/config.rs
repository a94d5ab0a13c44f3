//! What a pool is told when it starts: program, size, models, limits of time.

use std::path::PathBuf;
use std::time::Duration;

use velox_proto::v1;

use super::program::WorkerProgram;

/// Workers of a pool: one device, one process; more only where several devices or tests want them.
pub const DEFAULT_WORKERS: usize = 1;

/// Time from the spawn to the worker's facts. Probing every op on a slow backend takes seconds.
pub const DEFAULT_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(60);

/// Time that loading one model may take: repacking a large file once is minutes of disk work.
pub const DEFAULT_LOAD_TIMEOUT: Duration = Duration::from_secs(900);

/// Time that one op on given tensors may take.
pub const DEFAULT_OP_TIMEOUT: Duration = Duration::from_secs(60);

/// Time that a control call without tensor work may take.
pub const DEFAULT_CONTROL_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest silence of a tensor thread that has something to do, for an empty plan. It bumps its counter once
/// per layer, so this bounds one layer, not one plan.
pub const DEFAULT_STALL_LIMIT: Duration = Duration::from_secs(10);

/// What every token of a plan adds to the stall limit: one layer of a large model on the reference backend.
pub const DEFAULT_STALL_LIMIT_PER_TOKEN: Duration = Duration::from_millis(100);

/// Longest silence of a tensor thread that a call occupies. A load bumps the counter with its progress, so this
/// bounds the repacking of one tensor or one op on given tensors.
pub const DEFAULT_STALL_LIMIT_BUSY: Duration = Duration::from_secs(120);

/// Silence of an idle worker after which it is pinged.
pub const DEFAULT_PING_INTERVAL: Duration = Duration::from_secs(3);

/// Time between the polite signal and the kill.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(5);

/// Pause before the first restart.
pub const DEFAULT_BACKOFF_INITIAL: Duration = Duration::from_millis(100);

/// Longest pause before a restart; each failure in a row doubles the pause up to here. There is no jitter: the
/// workers of one gateway share no server that they could overrun.
pub const DEFAULT_BACKOFF_MAX: Duration = Duration::from_secs(10);

/// A worker that was ready for so long, or that delivered a result, was healthy: the next pause is the first.
pub const DEFAULT_HEALTHY_AFTER: Duration = Duration::from_secs(10);

/// Processes of one slot whose evidence did not hold before the slot is given up.
pub const DEFAULT_MAX_QUARANTINES: u32 = 3;

/// A worker that was ready for so long shows that the slot is sound: earlier quarantines are forgotten.
pub const DEFAULT_FORGIVE_AFTER: Duration = Duration::from_secs(3600);

/// Size of a tensor segment; a larger lease gets a segment of its own size.
pub const DEFAULT_SEGMENT_BYTES: u64 = 8 * 1024 * 1024;

/// Most bytes of all tensor segments.
pub const DEFAULT_SHM_LIMIT_BYTES: u64 = 1024 * 1024 * 1024;

/// A model and where it lies.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ModelSource {
    /// Name under which it is served.
    pub name: String,
    /// GGUF file or Hugging Face folder.
    pub path: PathBuf,
    /// How it is loaded.
    pub shape: LoadShape,
}

/// What is made of a model's file when it is loaded, the same on every worker. The workers judge the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct LoadShape {
    /// Bits that float weights are quantised to.
    pub quantize_bits: Option<u32>,
    /// Most positions of a request.
    pub max_context_tokens: Option<u32>,
}

/// Limits of time of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolTimeouts {
    /// From the spawn to the worker's facts, and for each offered segment of the handshake.
    pub handshake: Duration,
    /// For loading one model.
    pub load: Duration,
    /// For one op on given tensors.
    pub op: Duration,
    /// For a control call without tensor work.
    pub control: Duration,
    /// Longest silence of a busy tensor thread, before the part that grows with the plan.
    pub stall: Duration,
    /// What every token of a plan adds to `stall`.
    pub stall_per_token: Duration,
    /// Longest silence of a tensor thread that a load or an op occupies.
    pub stall_busy: Duration,
    /// Silence of an idle worker after which it is pinged.
    pub ping: Duration,
    /// Between the polite signal and the kill.
    pub grace: Duration,
}

impl Default for PoolTimeouts {
    fn default() -> Self {
        Self {
            handshake: DEFAULT_HANDSHAKE_TIMEOUT,
            load: DEFAULT_LOAD_TIMEOUT,
            op: DEFAULT_OP_TIMEOUT,
            control: DEFAULT_CONTROL_TIMEOUT,
            stall: DEFAULT_STALL_LIMIT,
            stall_per_token: DEFAULT_STALL_LIMIT_PER_TOKEN,
            stall_busy: DEFAULT_STALL_LIMIT_BUSY,
            ping: DEFAULT_PING_INTERVAL,
            grace: DEFAULT_GRACE,
        }
    }
}

/// When a lost worker is started again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestartPolicy {
    /// Pause after the first failure in a row.
    pub initial: Duration,
    /// Longest pause.
    pub max: Duration,
    /// Time as a ready worker after which failures no longer count as "in a row".
    pub healthy_after: Duration,
    /// Processes whose evidence did not hold before the slot is given up.
    pub max_quarantines: u32,
    /// Time as a ready worker after which earlier quarantines are forgotten.
    pub forgive_after: Duration,
}

impl Default for RestartPolicy {
    fn default() -> Self {
        Self {
            initial: DEFAULT_BACKOFF_INITIAL,
            max: DEFAULT_BACKOFF_MAX,
            healthy_after: DEFAULT_HEALTHY_AFTER,
            max_quarantines: DEFAULT_MAX_QUARANTINES,
            forgive_after: DEFAULT_FORGIVE_AFTER,
        }
    }
}

impl RestartPolicy {
    /// Returns the pause after `failures` failures in a row: none after none, then doubling up to `max`.
    #[must_use]
    pub fn pause(&self, failures: u32) -> Duration {
        let Some(doublings) = failures.checked_sub(1) else {
            return Duration::ZERO;
        };
        let factor = 2_u32.checked_pow(doublings).unwrap_or(u32::MAX);
        self.initial.saturating_mul(factor).min(self.max)
    }
}

/// What counts against a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Failures {
    /// Failures since the last healthy process.
    pub(super) in_a_row: u32,
    /// Processes whose evidence did not hold, since one was ready for long.
    pub(super) quarantines: u32,
}

impl Failures {
    /// Forgets what a process made up for that was ready for `ready`.
    pub(super) fn forgive(&mut self, policy: &RestartPolicy, was_healthy: bool, ready: Duration) {
        if was_healthy {
            self.in_a_row = 0;
        }
        if ready >= policy.forgive_after {
            self.quarantines = 0;
        }
    }
}

/// How to run a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// The executable of the workers.
    pub worker_program: WorkerProgram,
    /// Number of slots: processes that run at a time.
    pub workers: usize,
    /// Threads of each worker; `None` = the worker decides.
    pub threads_per_worker: Option<usize>,
    /// Backend that models are loaded on; `None` = the strongest available.
    pub backend: Option<v1::Backend>,
    /// KV method of every model; `None` = 16 bit.
    pub kv_method: Option<String>,
    /// Models that every worker loads before it is ready.
    pub models: Vec<ModelSource>,
    /// Bytes that the caches of one worker may hold; `None` = the worker decides.
    pub cache_limit_bytes: Option<u64>,
    /// Size of a tensor segment.
    pub segment_bytes: u64,
    /// Most bytes of all tensor segments.
    pub shm_limit_bytes: u64,
    /// Limits of time.
    pub timeouts: PoolTimeouts,
    /// When a lost worker is started again.
    pub restart: RestartPolicy,
}

impl PoolConfig {
    /// Makes the configuration of a pool of one worker without models.
    #[must_use]
    pub fn new(worker_program: WorkerProgram) -> Self {
        Self {
            worker_program,
            workers: DEFAULT_WORKERS,
            threads_per_worker: None,
            backend: None,
            kv_method: None,
            models: Vec::new(),
            cache_limit_bytes: None,
            segment_bytes: DEFAULT_SEGMENT_BYTES,
            shm_limit_bytes: DEFAULT_SHM_LIMIT_BYTES,
            timeouts: PoolTimeouts::default(),
            restart: RestartPolicy::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quarantines_are_forgotten_after_a_long_good_time() {
        let policy = RestartPolicy::default();
        let mut failures = Failures {
            in_a_row: 2,
            quarantines: 2,
        };
        let almost = policy.forgive_after - Duration::from_secs(1);
        failures.forgive(&policy, true, almost);
        assert_eq!((failures.in_a_row, failures.quarantines), (0, 2));
        failures.forgive(&policy, true, policy.forgive_after);
        assert_eq!(failures, Failures::default());
    }

    #[test]
    fn the_pause_doubles_up_to_its_limit() {
        let policy = RestartPolicy {
            initial: Duration::from_millis(100),
            max: Duration::from_secs(1),
            ..RestartPolicy::default()
        };
        let pauses: Vec<u128> = [0, 1, 2, 3, 4, 5, 33, u32::MAX]
            .into_iter()
            .map(|failures| policy.pause(failures).as_millis())
            .collect();
        assert_eq!(pauses, [0, 100, 200, 400, 800, 1000, 1000, 1000]);
    }
}
