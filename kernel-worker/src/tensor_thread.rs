//! The one thread that owns models and does tensor work.
//!
//! It waits for the step channel and for commands at once. Plans are begun and answered in the order they arrive. An
//! eager backend has done the work when a plan is begun; a lazy one may still be at it, and then the next plan is begun
//! before the first is answered.

mod plans;

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use velox_engine::load::{LoadOptions, LoadProgress, load};
use velox_engine::probe::ProbedBackends;
use velox_engine::step::{Progress, RowId};
use velox_proto::tensor::TensorHandle;
use velox_proto::worker::v1 as wire;
use velox_proto::worker::v1::gateway_frame::Frame as FromGateway;
use velox_proto::worker::v1::worker_frame::Frame as ToGateway;
use velox_shm::{Heartbeat, PeerSegments};

use crate::command::{Command, CommandReceiver, LoadEvent, TokenizerBytes};
use crate::config::Config;
use crate::convert;
use crate::error::WorkerError;
use crate::facts::{model_facts, tokenizer_blob};
use crate::residents::{Begun, Resident, Residents};
use crate::run_op;
use crate::step_channel::{ReadState, StepChannel};
use plans::{Plan, Plans};

/// How often the thread looks whether a device finished a plan, while no other plan arrives: a small part of the time
/// that a device needs for a token, and long enough to leave the core to others.
const LOOK_EVERY: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000,
};

/// Why the thread ended without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The gateway closed the step channel.
    GatewayGone,
    /// It was asked to stop and no plan was left.
    Stopped,
}

/// Everything the thread owns.
#[derive(Debug)]
pub struct TensorThread {
    config: Config,
    probed: ProbedBackends,
    channel: StepChannel,
    commands: CommandReceiver,
    stop: Arc<AtomicBool>,
    memory: PeerSegments,
    pulse: Pulse,
    kernels: run_op::KernelSets,
    residents: Residents,
    plans: Plans,
    draining: bool,
    #[cfg(feature = "fault-hooks")]
    faults: crate::fault::Faults,
}

/// Shows the gateway that layers are finished.
#[derive(Debug, Default)]
struct Pulse {
    heartbeat: Option<Heartbeat>,
}

impl Progress for Pulse {
    fn layer_done(&self) {
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.bump();
        }
    }
}

impl TensorThread {
    /// Collects what the thread will own; nothing runs yet.
    #[must_use]
    pub fn new(
        config: Config,
        probed: ProbedBackends,
        channel: StepChannel,
        commands: CommandReceiver,
        stop: Arc<AtomicBool>,
    ) -> Self {
        Self {
            kernels: run_op::KernelSets::new(config.compute_threads()),
            config,
            probed,
            channel,
            commands,
            stop,
            memory: PeerSegments::new(),
            pulse: Pulse::default(),
            residents: Residents::default(),
            plans: Plans::default(),
            draining: false,
            #[cfg(feature = "fault-hooks")]
            faults: crate::fault::Faults::default(),
        }
    }

    /// Serves frames and commands until the gateway is gone or the stop flag is set.
    ///
    /// # Errors
    /// [`WorkerError`] if the step channel fails or carries an undecodable frame.
    pub fn run(mut self) -> Result<Ending, WorkerError> {
        loop {
            if self.plans.is_due(&self.residents) {
                self.answer_oldest()?;
                continue;
            }
            if let Some(frame) = self.channel.next_frame()? {
                self.handle(frame)?;
                continue;
            }
            // SYNC POINT: pairs with the store in lifecycle::run.
            if self.stop.load(Ordering::Acquire) {
                self.answer_all()?;
                return Ok(Ending::Stopped);
            }
            let (step_ready, woken) = self.wait()?;
            if woken {
                // A command may take a model away.
                self.answer_all()?;
                self.serve_commands();
            }
            if step_ready && self.channel.read()? == ReadState::Closed {
                return Ok(Ending::GatewayGone);
            }
        }
    }

    fn answer_oldest(&mut self) -> Result<(), WorkerError> {
        let answer = self
            .plans
            .answer(&mut self.residents, &self.memory, &self.pulse);
        answer.map_or(Ok(()), |result| {
            self.channel.write(ToGateway::Result(result))
        })
    }

    fn answer_all(&mut self) -> Result<(), WorkerError> {
        while !self.plans.is_empty() {
            self.answer_oldest()?;
        }
        Ok(())
    }

    /// Waits until the step channel or the wake socket has something, or until it is time to look at the device.
    fn wait(&self) -> Result<(bool, bool), WorkerError> {
        let step = self.channel.descriptor();
        let mut descriptors = [
            PollFd::from_borrowed_fd(step, PollFlags::IN),
            PollFd::from_borrowed_fd(self.commands.wake.as_fd(), PollFlags::IN),
        ];
        loop {
            let patience = (!self.plans.is_empty()).then_some(&LOOK_EVERY);
            match poll(&mut descriptors, patience) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    return Err(WorkerError::Channel {
                        channel: "step",
                        source: errno.into(),
                    });
                }
            }
        }
        Ok((
            !descriptors[0].revents().is_empty(),
            !descriptors[1].revents().is_empty(),
        ))
    }

    fn handle(&mut self, frame: FromGateway) -> Result<(), WorkerError> {
        match frame {
            FromGateway::Ping(ping) => {
                self.pulse.layer_done();
                self.channel
                    .write(ToGateway::Pong(wire::Pong { nonce: ping.nonce }))
            }
            FromGateway::Offer(offer) => {
                let error = self.accept(&offer).err().map(|error| error.to_string());
                self.channel
                    .write(ToGateway::Accepted(wire::SegmentAccepted {
                        segment: offer.segment,
                        error: error.unwrap_or_default(),
                    }))
            }
            FromGateway::Plan(plan) => {
                #[cfg(feature = "fault-hooks")]
                self.faults.before_plan();
                let begun = self.begin(plan);
                self.plans.push(begun);
                Ok(())
            }
        }
    }

    fn accept(&mut self, offer: &wire::SegmentOffer) -> Result<(), WorkerError> {
        let descriptor = self
            .channel
            .take_descriptor()
            .ok_or_else(|| WorkerError::Invalid {
                field: "offer",
                problem: "came without a descriptor".to_owned(),
            })?;
        match wire::SegmentRole::try_from(offer.role) {
            Ok(wire::SegmentRole::Tensors) => {
                self.memory
                    .accept(offer.segment, offer.byte_len, descriptor)?;
            }
            Ok(wire::SegmentRole::Heartbeat) => {
                self.pulse.heartbeat =
                    Some(Heartbeat::open(offer.segment, offer.byte_len, descriptor)?);
            }
            Ok(wire::SegmentRole::Unspecified) | Err(_) => {
                return Err(WorkerError::Invalid {
                    field: "offer.role",
                    problem: format!("is {}, which is not in the table", offer.role),
                });
            }
        }
        Ok(())
    }

    /// Begins a plan; whatever is wrong with it becomes an error of its rows, never of the process.
    fn begin(&mut self, mut plan: wire::StepPlan) -> Plan {
        let sequence = plan.sequence;
        let taken = Instant::now();
        // First, so that no refusal of the rest can leave them open.
        let closed: Vec<RowId> = plan.close_rows.drain(..).map(RowId).collect();
        self.residents.close(&closed, &self.pulse);
        let rows: Vec<u64> = plan
            .prefill
            .iter()
            .map(|chunk| chunk.row)
            .chain(plan.decode.iter().map(|row| row.row))
            .collect();
        if rows.is_empty() {
            return Plan::Answered(convert::nothing_ran(sequence));
        }
        let _span = tracing::debug_span!("plan", sequence, rows = rows.len()).entered();
        for row in &plan.open_rows {
            tracing::debug!(row = row.row, traceparent = %row.traceparent, "row opens");
        }
        match self.submit(plan) {
            Ok(begun) => Plan::Running {
                sequence,
                rows,
                begun,
                taken,
            },
            Err(error) => {
                tracing::warn!(sequence, %error, "plan refused");
                let rows_of_plan: Vec<RowId> = rows.iter().copied().map(RowId).collect();
                self.residents.close(&rows_of_plan, &self.pulse);
                Plan::Answered(convert::refused(sequence, &rows, &error))
            }
        }
    }

    fn submit(&mut self, plan: wire::StepPlan) -> Result<Begun, WorkerError> {
        if self.draining && !plan.open_rows.is_empty() {
            return Err(WorkerError::Draining);
        }
        let valid = convert::plan(plan, &self.memory)?;
        self.residents.submit(valid, &self.pulse)
    }

    fn serve_commands(&mut self) {
        let mut wake_bytes = [0; 64];
        // Non-blocking; how many wake-ups were merged does not matter.
        let _ = (&self.commands.wake).read(&mut wake_bytes);
        while let Ok(command) = self.commands.commands.try_recv() {
            self.serve(command);
        }
    }

    /// Answers one command; a caller that went away is no fault.
    fn serve(&mut self, command: Command) {
        match command {
            Command::Load { request, events } => {
                let last = self.load(&request, &events);
                let _ = events.try_send(last);
            }
            Command::Unload { name, reply } => {
                let _ = reply.send(self.residents.remove(&name));
            }
            Command::Tokenizer { request, reply } => {
                let _ = reply.send(self.tokenizer(request));
            }
            Command::RunOp { request, reply } => {
                let _ = reply.send(run_op::run(request, &self.memory, &self.kernels));
            }
            Command::Drain { reply } => {
                self.draining = true;
                let _ = reply.send(Ok(self.residents.open_rows()));
            }
            #[cfg(feature = "fault-hooks")]
            Command::Fault { request, reply } => {
                let _ = reply.send(self.faults.arm(&request));
            }
        }
    }

    fn load(
        &mut self,
        request: &wire::LoadModelRequest,
        events: &tokio::sync::mpsc::Sender<LoadEvent>,
    ) -> LoadEvent {
        self.residents.expect_free(&request.name)?;
        let backend = convert::label_of("backend", request.backend)?;
        let method = request.kv_method.as_str();
        velox_kvcache::KvMethod::parse(if method.is_empty() { "none" } else { method }).map_err(
            |error| WorkerError::Invalid {
                field: "kv_method",
                problem: error.to_string(),
            },
        )?;
        let (quantise, max_context) = convert::load_shape(request)?;
        let options = LoadOptions {
            backend,
            threads: self.config.compute_threads().get(),
            cache_limit_bytes: self.config.cache_limit_bytes,
            quantise,
            max_context,
            probed: self.probed.clone(),
        };
        let pulse = &self.pulse;
        let loaded = load(Path::new(&request.path), &options, &mut |progress| {
            pulse.layer_done();
            if events.capacity() > 1 {
                let _ = events.try_send(Ok(load_event(progress)));
            }
        })?;
        let tokenizer = tokenizer_blob(&loaded.tokenizer);
        let facts = model_facts(
            &request.name,
            &loaded.facts,
            &loaded.tokenizer,
            &tokenizer.sha256,
        );
        self.residents.insert(
            request.name.clone(),
            Resident {
                runner: loaded.runner,
                tokenizer,
            },
        );
        Ok(wire::LoadModelResponse {
            phase: "ready".to_owned(),
            done_bytes: loaded.facts.weight_bytes,
            total_bytes: loaded.facts.weight_bytes,
            facts: Some(facts),
        })
    }

    fn tokenizer(&self, request: wire::GetTokenizerRequest) -> Result<TokenizerBytes, WorkerError> {
        let blob = &self.residents.get(&request.model)?.tokenizer;
        let inline = match request.destination {
            None => blob.bytes.clone(),
            Some(handle) => {
                self.memory
                    .write(&TensorHandle::try_from(handle)?, &blob.bytes)?;
                bytes::Bytes::new()
            }
        };
        Ok(TokenizerBytes {
            inline,
            total_bytes: u64::try_from(blob.bytes.len()).unwrap_or(u64::MAX),
            sha256: blob.sha256.clone(),
        })
    }
}

fn load_event(event: LoadProgress) -> wire::LoadModelResponse {
    wire::LoadModelResponse {
        phase: event.phase.to_owned(),
        done_bytes: event.done_bytes,
        total_bytes: event.total_bytes,
        facts: None,
    }
}
