//! One slot: spawn, handshake, load, serve, reap, pause, again.

use std::collections::HashSet;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::sync::mpsc;
use velox_proto::error::{Reason, ServiceFault};
use velox_proto::worker::v1 as wire;

use super::attest::Violation;
use super::board::{LiveWorker, SentPlan};
use super::config::{Failures, ModelSource};
use super::control::Control;
use super::error::PoolError;
use super::event::{LossCause, PoolEvent, SlotState, WorkerKey};
use super::facts::{ModelFacts, WorkerFacts};
use super::memory::{WorkerMemory, arena_offer};
use super::process::{Spawned, WorkerProcess};
use super::session::{Command, Session};
use super::step_channel::{ChannelError, Incoming, Outgoing, StepChannel};
use super::{Shared, Slot};

/// Time that a process has to exit by itself after its handshake failed.
const EXIT_AFTER_HANDSHAKE_LIMIT: Duration = Duration::from_millis(300);

/// Owner of a slot and of its process.
#[derive(Debug)]
pub(super) struct Supervisor {
    shared: Arc<Shared>,
    index: usize,
    inbox: mpsc::Receiver<Command>,
}

/// How a process ended.
#[derive(Debug)]
struct Ended {
    cause: LossCause,
    was_healthy: bool,
    /// Time as a ready worker.
    ready: Duration,
}

impl Ended {
    fn unhealthy(cause: LossCause) -> Self {
        Self {
            cause,
            was_healthy: false,
            ready: Duration::ZERO,
        }
    }
}

/// A process that passed its handshake.
#[derive(Debug)]
struct Prepared {
    live: Arc<LiveWorker>,
    channel: StepChannel,
    plans: mpsc::Receiver<SentPlan>,
    models: Vec<Arc<ModelFacts>>,
    failed: Vec<(String, ServiceFault)>,
}

impl Supervisor {
    pub(super) fn new(shared: Arc<Shared>, index: usize, inbox: mpsc::Receiver<Command>) -> Self {
        Self {
            shared,
            index,
            inbox,
        }
    }

    /// Keeps a process in the slot until the pool shuts down or the slot is given up.
    pub(super) async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let board = &shared.slots[self.index].board;
        let policy = &shared.config.restart;
        let mut failures = Failures::default();
        while !shared.shutdown.is_cancelled() {
            let key = board.begin();
            let ended = self.incarnation(key).await;
            // Whoever waits for an answer to a command that the process did not live to obey hears so now.
            while self.inbox.try_recv().is_ok() {}
            failures.forgive(policy, ended.was_healthy, ended.ready);
            let next = match &ended.cause {
                LossCause::Drained => SlotState::Starting,
                LossCause::Quarantined(_) => {
                    failures.in_a_row = failures.in_a_row.saturating_add(1);
                    failures.quarantines = failures.quarantines.saturating_add(1);
                    if failures.quarantines >= policy.max_quarantines {
                        SlotState::Quarantined
                    } else {
                        SlotState::Backoff
                    }
                }
                _ => {
                    failures.in_a_row = failures.in_a_row.saturating_add(1);
                    SlotState::Backoff
                }
            };
            let pause = match next {
                SlotState::Backoff => policy.pause(failures.in_a_row),
                _ => Duration::ZERO,
            };
            if ended.cause == LossCause::Drained {
                tracing::info!(worker = %key, "worker has ended as asked");
            } else {
                tracing::warn!(worker = %key, cause = %ended.cause, ?pause, "worker is gone");
            }
            board.ended(ended.cause.clone(), next);
            let (worker, cause) = (key, ended.cause);
            shared.emit(PoolEvent::Lost { worker, cause }).await;
            if next == SlotState::Quarantined {
                let quarantines = failures.quarantines;
                tracing::error!(worker = %key, quarantines, "slot is given up");
                return;
            }
            tokio::select! {
                () = shared.shutdown.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        board.rests(SlotState::Stopped);
    }

    /// Runs one process from spawn to reap. Its memory is kept until after the reap.
    async fn incarnation(&mut self, key: WorkerKey) -> Ended {
        let shared = Arc::clone(&self.shared);
        let slot = &shared.slots[self.index];
        let spawned = WorkerMemory::new(&shared.segments)
            .map_err(|error| error.to_string())
            .and_then(|memory| {
                let spawned = WorkerProcess::spawn(&shared.config, key, &shared.tracker);
                Ok((memory, spawned.map_err(|error| error.to_string())?))
            });
        let (memory, spawned) = match spawned {
            Ok((memory, spawned)) => (Arc::new(memory), spawned),
            Err(error) => return Ended::unhealthy(LossCause::SpawnFailed(error)),
        };
        let Spawned {
            mut process,
            control,
            step,
        } = spawned;
        slot.board.spawned(process.pid());

        let handshake = Handshake {
            shared: &shared,
            slot,
            key,
            pid: process.pid(),
            memory: Arc::clone(&memory),
        };
        let prepared = tokio::select! {
            biased;
            () = shared.shutdown.cancelled() => Err(LossCause::Drained),
            cause = process.exited() => Err(cause),
            prepared = handshake.run(control, StepChannel::new(step)) => prepared,
        };
        let ended = match prepared {
            Ok(prepared) => self.serve(prepared, &mut process).await,
            // A broken channel may be the first sign of an exit, which then tells more; unless it is the
            // consequence of our closing the channels.
            Err(failed @ (LossCause::ChannelClosed | LossCause::ChannelFailed(_))) => {
                let exit = process.end_by_itself(EXIT_AFTER_HANDSHAKE_LIMIT).await;
                let telling = exit.filter(|exit| *exit != LossCause::Exited(0));
                Ended::unhealthy(telling.unwrap_or(failed))
            }
            Err(cause) => {
                end(&mut process, &cause, shared.config.timeouts.grace).await;
                Ended::unhealthy(cause)
            }
        };
        // Named, because the order matters: reaped above, memory free for the next process from here on.
        drop(memory);
        ended
    }

    async fn serve(&mut self, prepared: Prepared, process: &mut WorkerProcess) -> Ended {
        let shared = Arc::clone(&self.shared);
        let slot = &shared.slots[self.index];
        let live = prepared.live;
        let worker = live.key;
        tracing::info!(%worker, pid = process.pid(), device = live.facts.wire().device, "worker is ready");
        shared
            .emit(PoolEvent::Ready {
                worker,
                facts: Arc::clone(&live.facts),
                models: prepared.models,
            })
            .await;
        for (model, fault) in prepared.failed {
            tracing::error!(%worker, model, %fault, "model is not loaded");
            shared
                .emit(PoolEvent::ModelFailed {
                    worker,
                    model,
                    fault,
                })
                .await;
        }
        let control = live.control.clone();
        let mut session = Session::new(&shared, slot, live, prepared.channel, prepared.plans);
        let cause = session.serve(process, &mut self.inbox).await;
        slot.board.closed();
        let ready = session.ready_for();
        if cause == LossCause::Drained {
            // The signal that follows says the same to a worker that does not answer.
            if let Err(error) = control.drain().await {
                tracing::debug!(%worker, %error, "drain was not answered");
            }
        }
        end(process, &cause, shared.config.timeouts.grace).await;
        Ended {
            cause,
            was_healthy: session.was_healthy(),
            ready,
        }
    }
}

/// Ends a process as its cause deserves. Reaped on return.
async fn end(process: &mut WorkerProcess, cause: &LossCause, grace: Duration) {
    match cause {
        LossCause::Drained => process.terminate(grace).await,
        _ => process.kill().await,
    }
}

/// From the spawn to ready.
struct Handshake<'a> {
    shared: &'a Shared,
    slot: &'a Slot,
    key: WorkerKey,
    pid: u32,
    memory: Arc<WorkerMemory>,
}

impl Handshake<'_> {
    async fn run(self, control: UnixStream, channel: StepChannel) -> Result<Prepared, LossCause> {
        self.prepare(control, channel)
            .await
            .map_err(|error| match error {
                PoolError::NotBelieved(facts) if facts.is_lie() => Violation::from(facts).into(),
                PoolError::NotAttested(violation) => violation.into(),
                PoolError::WorkerLost(_) => LossCause::ChannelClosed,
                PoolError::Refused(fault) if is_loss(fault.reason) => {
                    LossCause::ChannelFailed(fault.to_string())
                }
                other => LossCause::HandshakeFailed(other.to_string()),
            })
    }

    async fn prepare(
        &self,
        control: UnixStream,
        mut channel: StepChannel,
    ) -> Result<Prepared, PoolError> {
        let timeouts = &self.shared.config.timeouts;
        let control = Control::connect(control, timeouts).await?;
        let facts = control.facts(timeouts.handshake).await?;
        let facts = Arc::new(WorkerFacts::try_from_wire(facts, self.pid)?);
        self.slot.board.introduced(&facts);
        self.offer_segments(&mut channel).await?;

        let live = Arc::new(LiveWorker {
            key: self.key,
            facts,
            control,
            memory: Arc::clone(&self.memory),
            commands: self.slot.commands.clone(),
            busy: Arc::default(),
        });
        let mut models: Vec<Arc<ModelFacts>> = Vec::new();
        let mut failed = Vec::new();
        let mut tried: HashSet<ModelSource> = HashSet::new();
        let plans = loop {
            let sources = self.shared.models.sources();
            // The list may have changed meanwhile, and a name may mean another model now.
            let gone: Vec<ModelSource> = tried
                .extract_if(|source| !sources.contains(source))
                .collect();
            for source in gone {
                failed.retain(|(name, _)| *name != source.name);
                if models.iter().any(|model| model.name() == source.name) {
                    self.unload(&live, &source.name).await?;
                    models.retain(|model| model.name() != source.name);
                }
            }
            for source in sources {
                if !tried.insert(source.clone()) {
                    continue;
                }
                match self.load(&live, &source).await {
                    Ok(facts) => models.push(facts),
                    Err(PoolError::Refused(fault)) if !is_loss(fault.reason) => {
                        failed.push((source.name, fault));
                    }
                    Err(error) => return Err(error),
                }
            }
            let declare = || self.slot.board.ready(Arc::clone(&live), &models);
            if let Some(plans) = self.shared.models.if_exactly_tried(&tried, declare) {
                break plans;
            }
        };
        Ok(Prepared {
            live,
            channel,
            plans,
            models,
            failed,
        })
    }

    /// Offers the heartbeat and the first arena.
    async fn offer_segments(&self, channel: &mut StepChannel) -> Result<(), PoolError> {
        let heartbeat = self.memory.heartbeat();
        let descriptor = heartbeat.descriptor();
        self.offer(channel, self.memory.heartbeat_offer(), descriptor)
            .await?;
        let arena = self
            .shared
            .acquire_arena(self.shared.config.segment_bytes)
            .await?;
        self.offer(channel, arena_offer(&arena), arena.descriptor().as_fd())
            .await?;
        self.memory.mapped(arena);
        Ok(())
    }

    async fn offer(
        &self,
        channel: &mut StepChannel,
        offer: wire::SegmentOffer,
        descriptor: std::os::fd::BorrowedFd<'_>,
    ) -> Result<(), PoolError> {
        let limit = self.shared.config.timeouts.handshake;
        let segment = offer.segment;
        let channel_error = |error: ChannelError| match error {
            ChannelError::Closed | ChannelError::Io(_) => PoolError::WorkerLost(self.key),
            ChannelError::Frame(_) | ChannelError::Message => {
                Violation::Frame(error.to_string()).into()
            }
        };
        let descriptor = descriptor
            .try_clone_to_owned()
            .map_err(|error| PoolError::SegmentRefused(error.to_string()))?;
        channel
            .send(Outgoing::Offer(offer), Some(descriptor))
            .map_err(channel_error)?;
        let answer = tokio::time::timeout(limit, channel.receive())
            .await
            .map_err(|_elapsed| PoolError::Unanswered {
                call: "SegmentOffer",
                limit,
            })?;
        match answer.map_err(channel_error)? {
            Incoming::Accepted(accepted) if accepted.segment == segment => {
                if accepted.error.is_empty() {
                    Ok(())
                } else {
                    Err(PoolError::SegmentRefused(accepted.error))
                }
            }
            _ => Err(Violation::Unexpected("frame during the handshake").into()),
        }
    }

    async fn unload(&self, live: &LiveWorker, name: &str) -> Result<(), PoolError> {
        let (call, limit) = ("UnloadModel", self.shared.config.timeouts.control);
        tokio::time::timeout(limit, live.control.unload(name))
            .await
            .unwrap_or(Err(PoolError::Unanswered { call, limit }))
    }

    async fn load(
        &self,
        live: &LiveWorker,
        source: &super::ModelSource,
    ) -> Result<Arc<ModelFacts>, PoolError> {
        let config = &self.shared.config;
        let (call, limit) = ("LoadModel", config.timeouts.load);
        let load = live.control.load(
            source,
            config.backend,
            config.kv_method.as_deref(),
            |_event| {},
        );
        let wire = tokio::time::timeout(limit, load)
            .await
            .unwrap_or(Err(PoolError::Unanswered { call, limit }))?;
        let facts = ModelFacts::try_from_wire(wire, &source.name, &live.facts)?;
        Ok(Arc::new(facts))
    }
}

/// Whether a call failed with its process rather than by its word.
fn is_loss(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::WorkerUnavailable | Reason::Internal | Reason::Cancelled
    )
}
