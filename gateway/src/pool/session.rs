//! The life of a ready process: plans in, results out, until it ends or has to.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;
use velox_proto::worker::v1 as wire;
use velox_shm::PooledArena;

use super::attest::{AttestedResult, Violation};
use super::board::{LiveWorker, SentPlan};
use super::error::PoolError;
use super::event::{LossCause, PoolEvent, WorkerKey};
use super::liveness::{Liveness, Verdict};
use super::memory::arena_offer;
use super::plan::PlanExpectation;
use super::process::WorkerProcess;
use super::step_channel::{ChannelError, Incoming, Outgoing, StepChannel};
use super::{Shared, Slot};

/// Time that results which a process wrote before it ended have to arrive: they are in the socket already.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(100);

/// Time that a process has to exit after it closed a channel.
const EXIT_LIMIT: Duration = Duration::from_secs(1);

/// What others ask of a supervisor. Each names the process that it is meant for; one for a process that is
/// gone is dropped, and with it the sender of its reply.
#[derive(Debug)]
pub(super) enum Command {
    /// Let the worker map an arena.
    Offer {
        key: WorkerKey,
        arena: PooledArena,
        reply: oneshot::Sender<Result<(), PoolError>>,
    },
    /// End the process in peace; the reply is dropped when it is reaped.
    Drain {
        key: WorkerKey,
        reply: oneshot::Sender<()>,
    },
    /// A call that occupies the tensor thread passed its limit.
    Unresponsive {
        key: WorkerKey,
        call: &'static str,
        limit: Duration,
    },
    /// Evidence did not hold.
    Quarantine {
        key: WorkerKey,
        violation: Violation,
    },
}

impl Command {
    pub(super) fn key(&self) -> WorkerKey {
        match self {
            Self::Offer { key, .. }
            | Self::Drain { key, .. }
            | Self::Unresponsive { key, .. }
            | Self::Quarantine { key, .. } => *key,
        }
    }
}

/// An arena that the worker was asked to map.
#[derive(Debug)]
struct PendingOffer {
    arena: PooledArena,
    reply: oneshot::Sender<Result<(), PoolError>>,
}

/// Everything that the gateway knows of a ready process.
#[derive(Debug)]
pub(super) struct Session<'a> {
    shared: &'a Shared,
    slot: &'a Slot,
    live: Arc<LiveWorker>,
    channel: StepChannel,
    plans: mpsc::Receiver<SentPlan>,
    plans_closed: bool,
    in_flight: VecDeque<PlanExpectation>,
    offers: HashMap<u64, PendingOffer>,
    pings_sent: u64,
    ping_awaited: bool,
    liveness: Liveness,
    /// Present while draining: when patience with the plans in flight ends.
    drain_deadline: Option<tokio::time::Instant>,
    drains: Vec<oneshot::Sender<()>>,
    results: u64,
    ready_since: Instant,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        slot: &'a Slot,
        live: Arc<LiveWorker>,
        channel: StepChannel,
        plans: mpsc::Receiver<SentPlan>,
    ) -> Self {
        let now = Instant::now();
        let heartbeat = live.memory.heartbeat().value();
        Self {
            liveness: Liveness::new(&shared.config.timeouts, heartbeat, now),
            shared,
            slot,
            live,
            channel,
            plans,
            plans_closed: false,
            in_flight: VecDeque::new(),
            offers: HashMap::new(),
            pings_sent: 0,
            ping_awaited: false,
            drain_deadline: None,
            drains: Vec::new(),
            results: 0,
            ready_since: now,
        }
    }

    /// Whether the process was of use: it delivered something, or stayed for a while.
    pub(super) fn was_healthy(&self) -> bool {
        self.results > 0 || self.ready_since.elapsed() >= self.shared.config.restart.healthy_after
    }

    /// Time since the process became ready.
    pub(super) fn ready_for(&self) -> Duration {
        self.ready_since.elapsed()
    }

    /// Serves until the process ends or has to; the caller ends and reaps it.
    pub(super) async fn serve(
        &mut self,
        process: &mut WorkerProcess,
        inbox: &mut mpsc::Receiver<Command>,
    ) -> LossCause {
        let mut checks = tokio::time::interval(self.liveness.check_interval());
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            if self.has_drained() {
                return LossCause::Drained;
            }
            // Results first, so that what a process finished before its end counts.
            let served = tokio::select! {
                biased;
                frame = self.channel.receive() => match frame {
                    Ok(frame) => self.take(frame).await,
                    Err(error) => return self.channel_failed(error, process).await,
                },
                cause = process.exited() => return self.exited(cause).await,
                Some(command) = inbox.recv() => self.obey(command).await,
                plan = self.plans.recv(), if !self.plans_closed => self.pass_on(plan),
                () = self.shared.shutdown.cancelled(), if self.drain_deadline.is_none() => {
                    self.start_draining().await;
                    Ok(())
                }
                _ = checks.tick() => self.check(),
            };
            if let Err(cause) = served {
                return cause;
            }
        }
    }

    // --- frames of the worker

    async fn take(&mut self, frame: Incoming) -> Result<(), LossCause> {
        self.liveness.sign(Instant::now());
        match frame {
            Incoming::Result(result) => self.take_result(result).await,
            Incoming::Accepted(accepted) => self.take_accepted(accepted),
            Incoming::Pong(pong) if self.ping_awaited && pong.nonce == self.pings_sent => {
                self.ping_awaited = false;
                Ok(())
            }
            Incoming::Pong(_) => Err(Violation::Unexpected("pong").into()),
        }
    }

    async fn take_result(&mut self, result: wire::StepResult) -> Result<(), LossCause> {
        let Some(expectation) = self.in_flight.pop_front() else {
            let actual = result.sequence;
            let expected = None;
            return Err(Violation::Sequence { expected, actual }.into());
        };
        let result = AttestedResult::attest(self.live.key, &self.live.facts, &expectation, result)?;
        self.results += 1;
        let worker = self.live.key;
        // The place first: once the plan has retired nothing may delay or lose its result.
        let place = self.shared.events.reserve().await;
        self.slot.board.retired(worker, &result);
        // Without a scheduler there is nobody to tell.
        if let Ok(place) = place {
            place.send(PoolEvent::Result { worker, result });
        }
        Ok(())
    }

    fn take_accepted(&mut self, accepted: wire::SegmentAccepted) -> Result<(), LossCause> {
        let pending = self.offers.remove(&accepted.segment);
        let Some(PendingOffer { arena, reply }) = pending else {
            return Err(Violation::Unexpected("acceptance of a segment").into());
        };
        let answer = if accepted.error.is_empty() {
            self.live.memory.mapped(arena);
            Ok(())
        } else {
            Err(PoolError::SegmentRefused(accepted.error))
        };
        // A caller that went away leaves the arena to the next lease.
        let _gone = reply.send(answer);
        Ok(())
    }

    // --- wishes of others

    fn pass_on(&mut self, plan: Option<SentPlan>) -> Result<(), LossCause> {
        let Some(SentPlan { plan, expectation }) = plan else {
            self.plans_closed = true;
            return Ok(());
        };
        self.note_question();
        self.in_flight.push_back(expectation);
        self.send(Outgoing::Plan(plan), None)
    }

    async fn obey(&mut self, command: Command) -> Result<(), LossCause> {
        if command.key() != self.live.key {
            return Ok(());
        }
        match command {
            Command::Offer { arena, reply, .. } => self.offer(arena, reply),
            Command::Drain { reply, .. } => {
                self.drains.push(reply);
                self.start_draining().await;
                Ok(())
            }
            Command::Unresponsive { call, limit, .. } => {
                Err(LossCause::Unresponsive { call, limit })
            }
            Command::Quarantine { violation, .. } => Err(violation.into()),
        }
    }

    fn offer(
        &mut self,
        arena: PooledArena,
        reply: oneshot::Sender<Result<(), PoolError>>,
    ) -> Result<(), LossCause> {
        let descriptor = match arena.descriptor().try_clone_to_owned() {
            Ok(descriptor) => descriptor,
            Err(error) => {
                let _gone = reply.send(Err(PoolError::SegmentRefused(error.to_string())));
                return Ok(());
            }
        };
        let offer = arena_offer(&arena);
        self.note_question();
        self.offers
            .insert(offer.segment, PendingOffer { arena, reply });
        self.send(Outgoing::Offer(offer), Some(descriptor))
    }

    async fn start_draining(&mut self) {
        if self.drain_deadline.is_none() {
            let grace = self.shared.config.timeouts.grace;
            self.drain_deadline = Some(tokio::time::Instant::now() + grace);
            // Drops the only sender of plans: those that it holds are still passed on.
            self.slot.board.draining();
            let worker = self.live.key;
            self.shared.emit(PoolEvent::Draining { worker }).await;
        }
    }

    fn has_drained(&self) -> bool {
        self.drain_deadline.is_some_and(|deadline| {
            let finished = self.plans_closed && self.in_flight.is_empty();
            finished || tokio::time::Instant::now() >= deadline
        })
    }

    // --- signs of life

    fn check(&mut self) -> Result<(), LossCause> {
        let now = Instant::now();
        let heartbeat = self.live.memory.heartbeat().value();
        let verdict = if self.live.busy.is_busy() {
            // The call has its own limit besides, and reports when it passes it.
            self.liveness.judge_busy(heartbeat, now)
        } else {
            self.liveness.judge(heartbeat, self.awaited_tokens(), now)
        };
        match verdict {
            Verdict::Alive => Ok(()),
            Verdict::Ask => {
                self.note_question();
                self.ping_awaited = true;
                self.pings_sent += 1;
                let nonce = self.pings_sent;
                self.send(Outgoing::Ping(wire::Ping { nonce }), None)
            }
            Verdict::Wedged { silence, limit } => Err(LossCause::Wedged { silence, limit }),
        }
    }

    /// Tokens of the pass that the worker is at, or 0 if it only owes an answer.
    fn awaited_tokens(&self) -> Option<u32> {
        let owes_answer = self.ping_awaited || !self.offers.is_empty();
        let plan = self.in_flight.front();
        plan.map(|expectation| expectation.pass_tokens)
            .or(owes_answer.then_some(0))
    }

    /// Silence counts from the first question.
    fn note_question(&mut self) {
        if self.awaited_tokens().is_none() {
            self.liveness.sign(Instant::now());
        }
    }

    // --- the channel

    fn send(&mut self, frame: Outgoing, descriptor: Option<OwnedFd>) -> Result<(), LossCause> {
        match self.channel.send(frame, descriptor) {
            // The end is noticed where frames are received, after the last ones.
            Ok(()) | Err(ChannelError::Closed) => Ok(()),
            Err(error) => Err(LossCause::ChannelFailed(error.to_string())),
        }
    }

    async fn channel_failed(
        &mut self,
        error: ChannelError,
        process: &mut WorkerProcess,
    ) -> LossCause {
        match error {
            ChannelError::Closed => {
                self.slot.board.closed();
                let cause = process.end_by_itself(EXIT_LIMIT).await;
                self.expected_end(cause.unwrap_or(LossCause::ChannelClosed))
            }
            ChannelError::Io(error) => LossCause::ChannelFailed(error.to_string()),
            ChannelError::Frame(_) | ChannelError::Message => {
                Violation::Frame(error.to_string()).into()
            }
        }
    }

    /// Takes what the process wrote before its end.
    async fn exited(&mut self, cause: LossCause) -> LossCause {
        let last_words = async {
            while let Ok(frame) = self.channel.receive().await {
                self.take(frame).await?;
            }
            Ok(())
        };
        match tokio::time::timeout(LAST_WORDS_LIMIT, last_words).await {
            Ok(Err(violation)) => violation,
            Ok(Ok(())) | Err(_) => self.expected_end(cause),
        }
    }

    /// A process that was asked to end has ended as asked.
    fn expected_end(&self, cause: LossCause) -> LossCause {
        if self.drain_deadline.is_some() {
            LossCause::Drained
        } else {
            cause
        }
    }
}
