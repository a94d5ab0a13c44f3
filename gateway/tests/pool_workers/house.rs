//! A pool with fake workers, its events, and short limits.

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use velox_gateway::pool::{
    AttestedResult, LoadShape, LossCause, ModelFacts, ModelSource, Pool, PoolConfig, PoolEvent,
    PoolTimeouts, RestartPolicy, WorkerKey, WorkerProgram,
};
use velox_proto::worker::v1 as wire;

use crate::fake::Manner;

/// Nothing here takes so long; a story that waits in vain fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// Silence after which a worker counts as wedged.
pub(crate) const STALL: Duration = Duration::from_millis(600);

/// Name of the model that every worker has.
pub(crate) const MODEL: &str = "model";

/// A running pool.
pub(crate) struct House {
    pub(crate) pool: Pool,
    pub(crate) tracker: TaskTracker,
    pub(crate) shutdown: CancellationToken,
    events: mpsc::Receiver<PoolEvent>,
    _programs: tempfile::TempDir,
}

impl House {
    /// Starts a pool of one worker.
    pub(crate) fn open(manner: Manner) -> Self {
        Self::open_with(manner, |_config| {})
    }

    /// Starts a pool after changes to its configuration.
    pub(crate) fn open_with(manner: Manner, change: impl FnOnce(&mut PoolConfig)) -> Self {
        let programs = tempfile::tempdir().unwrap();
        let program = programs.path().join(manner.file_name());
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &program).unwrap();
        let mut config = PoolConfig {
            models: vec![source(MODEL, "good.gguf")],
            segment_bytes: 64 * 1024,
            timeouts: PoolTimeouts {
                stall: STALL,
                stall_per_token: Duration::ZERO,
                ping: Duration::from_millis(100),
                grace: Duration::from_millis(500),
                ..PoolTimeouts::default()
            },
            restart: RestartPolicy {
                initial: Duration::from_millis(40),
                max: Duration::from_millis(400),
                ..RestartPolicy::default()
            },
            ..PoolConfig::new(WorkerProgram::given(program))
        };
        change(&mut config);
        let (tracker, shutdown) = (TaskTracker::new(), CancellationToken::new());
        let (pool, events) = Pool::start(config, tracker.clone(), shutdown.clone());
        Self {
            pool,
            tracker,
            shutdown,
            events,
            _programs: programs,
        }
    }

    /// Waits for the next event.
    pub(crate) async fn event(&mut self) -> PoolEvent {
        let event = tokio::time::timeout(PATIENCE, self.events.recv()).await;
        event.expect("an event in time").expect("the pool runs")
    }

    /// Waits until a worker is ready and returns its models.
    pub(crate) async fn ready(&mut self) -> (WorkerKey, Vec<std::sync::Arc<ModelFacts>>) {
        match self.event().await {
            PoolEvent::Ready { worker, models, .. } => (worker, models),
            other => panic!("{other:?} instead of a ready worker"),
        }
    }

    pub(crate) async fn result(&mut self) -> AttestedResult {
        match self.event().await {
            PoolEvent::Result { result, .. } => result,
            other => panic!("{other:?} instead of a result"),
        }
    }

    pub(crate) async fn lost(&mut self) -> LossCause {
        match self.event().await {
            PoolEvent::Lost { cause, .. } => cause,
            other => panic!("{other:?} instead of a loss"),
        }
    }

    /// Returns the process of the only slot.
    pub(crate) fn pid(&self) -> u32 {
        self.pool.snapshots()[0].pid.expect("a process lives")
    }

    /// Ends the pool and checks that all of its tasks and processes end.
    pub(crate) async fn close(self) {
        let pids: Vec<u32> = self.pids();
        let Self {
            pool,
            tracker,
            shutdown,
            mut events,
            ..
        } = self;
        shutdown.cancel();
        tracker.close();
        drop(pool);
        let ended = async {
            while events.recv().await.is_some() {}
            tracker.wait().await;
        };
        let ended = tokio::time::timeout(PATIENCE, ended).await;
        ended.expect("tasks of the pool end");
        assert!(!pids.into_iter().any(exists), "a process is left");
    }

    /// Returns the processes that live.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let snapshots = self.pool.snapshots().into_iter();
        snapshots.filter_map(|snapshot| snapshot.pid).collect()
    }
}

pub(crate) fn source(name: &str, path: &str) -> ModelSource {
    ModelSource {
        name: name.to_owned(),
        path: PathBuf::from(path),
        shape: LoadShape::default(),
    }
}

/// A plan that opens a row and samples after its prompt.
pub(crate) fn first_plan(sequence: u64, row: u64, token_ids: Vec<u32>) -> wire::StepPlan {
    wire::StepPlan {
        sequence,
        open_rows: vec![wire::OpenRow {
            row,
            model: MODEL.to_owned(),
            ..Default::default()
        }],
        prefill: Some(wire::PrefillChunk {
            row,
            token_ids,
            sample: true,
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A plan that decodes.
pub(crate) fn decode_plan(sequence: u64, row: u64, steps: u32) -> wire::StepPlan {
    wire::StepPlan {
        sequence,
        decode: vec![wire::DecodeRow {
            row,
            steps,
            ..Default::default()
        }],
        ..Default::default()
    }
}

/// Sends a signal to a process.
pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) {
    rustix::process::kill_process(process(pid), signal).unwrap();
}

/// Whether a process exists, also as a zombie.
pub(crate) fn exists(pid: u32) -> bool {
    rustix::process::test_kill_process(process(pid)).is_ok()
}

fn process(pid: u32) -> rustix::process::Pid {
    rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}
