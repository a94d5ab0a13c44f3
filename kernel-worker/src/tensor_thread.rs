//! The one thread that owns models and does tensor work.
//!
//! It waits for the step channel and for commands at once. Plans are executed in the order they arrive; a plan that
//! waits in the socket is the one in flight ahead. With an eager backend the work happens in `submit`.

use std::collections::HashMap;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use velox_engine::load::{LoadOptions, LoadProgress, load};
use velox_engine::step::{Progress, RowId, Runner, StepOutcome, StepPlan};
use velox_proto::tensor::TensorHandle;
use velox_proto::worker::v1 as wire;
use velox_proto::worker::v1::gateway_frame::Frame as FromGateway;
use velox_proto::worker::v1::worker_frame::Frame as ToGateway;
use velox_shm::{Heartbeat, PeerSegments};

use crate::command::{Command, CommandReceiver, LoadEvent, TokenizerBytes};
use crate::config::Config;
use crate::convert;
use crate::error::WorkerError;
use crate::facts::{TokenizerBlob, model_facts, tokenizer_blob};
use crate::run_op;
use crate::step_channel::{ReadState, StepChannel};

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
    channel: StepChannel,
    commands: CommandReceiver,
    stop: Arc<AtomicBool>,
    memory: PeerSegments,
    pulse: Pulse,
    kernels: run_op::KernelSets,
    models: HashMap<String, Resident>,
    row_models: HashMap<RowId, String>,
    draining: bool,
    #[cfg(feature = "fault-hooks")]
    faults: crate::fault::Faults,
}

/// A loaded model.
struct Resident {
    runner: Box<dyn Runner>,
    tokenizer: TokenizerBlob,
}

impl std::fmt::Debug for Resident {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Resident")
            .field("open_rows", &self.runner.open_rows())
            .finish_non_exhaustive()
    }
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

    fn is_cancelled(&self) -> bool {
        // Plans are short and the process ends with its gateway: there is nothing to give up for.
        false
    }
}

impl TensorThread {
    /// Collects what the thread will own; nothing runs yet.
    #[must_use]
    pub fn new(
        config: Config,
        channel: StepChannel,
        commands: CommandReceiver,
        stop: Arc<AtomicBool>,
    ) -> Self {
        Self {
            kernels: run_op::KernelSets::new(config.compute_threads()),
            config,
            channel,
            commands,
            stop,
            memory: PeerSegments::new(),
            pulse: Pulse::default(),
            models: HashMap::new(),
            row_models: HashMap::new(),
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
            while let Some(frame) = self.channel.next_frame()? {
                self.handle(frame)?;
            }
            // SYNC POINT: pairs with the store in lifecycle::run.
            if self.stop.load(Ordering::Acquire) {
                return Ok(Ending::Stopped);
            }
            let (step_ready, woken) = self.wait()?;
            if woken {
                self.serve_commands();
            }
            if step_ready && self.channel.read()? == ReadState::Closed {
                return Ok(Ending::GatewayGone);
            }
        }
    }

    /// Waits until the step channel or the wake socket has something.
    fn wait(&self) -> Result<(bool, bool), WorkerError> {
        let step = self.channel.descriptor();
        let mut descriptors = [
            PollFd::from_borrowed_fd(step, PollFlags::IN),
            PollFd::from_borrowed_fd(self.commands.wake.as_fd(), PollFlags::IN),
        ];
        loop {
            match poll(&mut descriptors, None) {
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
                let result = self.execute(plan);
                self.channel.write(ToGateway::Result(result))
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

    /// Runs a plan; whatever is wrong with it becomes an error of its rows, never of the process.
    fn execute(&mut self, plan: wire::StepPlan) -> wire::StepResult {
        let sequence = plan.sequence;
        let rows: Vec<u64> = plan
            .prefill
            .iter()
            .map(|chunk| chunk.row)
            .chain(plan.decode.iter().map(|row| row.row))
            .collect();
        let _span = tracing::debug_span!("plan", sequence, rows = rows.len()).entered();
        for row in &plan.open_rows {
            tracing::debug!(row = row.row, traceparent = %row.traceparent, "row opens");
        }
        let started = Instant::now();
        match self.try_execute(plan) {
            Ok(outcome) => {
                let compute_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
                convert::result(sequence, outcome, compute_us)
            }
            Err(error) => {
                tracing::warn!(sequence, %error, "plan refused");
                self.forget(rows.iter().copied().map(RowId).collect());
                convert::refused(sequence, &rows, &error)
            }
        }
    }

    fn try_execute(&mut self, plan: wire::StepPlan) -> Result<StepOutcome, WorkerError> {
        let opens = !plan.open_rows.is_empty();
        let mut valid = convert::plan(plan, &self.memory)?;
        if self.draining && opens {
            return Err(WorkerError::Draining);
        }
        let model = self.model_of(&valid)?;
        let closed = std::mem::take(&mut valid.plan.close_rows);
        self.close_elsewhere(&closed, model.as_deref())?;
        valid.plan.close_rows = match &model {
            None => Vec::new(),
            Some(name) => closed
                .into_iter()
                .filter(|row| self.row_models.get(row) == Some(name))
                .collect(),
        };
        let Some(name) = model else {
            return Err(WorkerError::Invalid {
                field: "plan",
                problem: "has no rows".to_owned(),
            });
        };
        for row in &valid.plan.close_rows {
            self.row_models.remove(row);
        }
        let opened: Vec<RowId> = valid.plan.open_rows.iter().map(|row| row.row).collect();
        let resident = self
            .models
            .get_mut(&name)
            .ok_or_else(|| WorkerError::ModelNotFound(name.clone()))?;
        let ticket = resident.runner.submit(valid.plan, &self.pulse)?;
        let mut outcome = resident.runner.collect(ticket)?;
        self.row_models
            .extend(opened.into_iter().map(|row| (row, name.clone())));
        for row in &mut outcome.rows {
            if row.result.is_err() {
                self.row_models.remove(&row.row);
            }
            store_logits(row, &valid.logits, &self.memory);
        }
        Ok(outcome)
    }

    /// Finds the model that a plan's rows belong to.
    fn model_of(&self, plan: &convert::ValidPlan) -> Result<Option<String>, WorkerError> {
        let prefill = plan.plan.prefill.iter().map(|chunk| chunk.row);
        let working = prefill.chain(plan.plan.decode.iter().map(|row| row.row));
        let mut model = plan.model.clone();
        for row in working {
            let Some(name) = self.row_models.get(&row) else {
                continue;
            };
            match &model {
                None => model = Some(name.clone()),
                Some(other) if other == name => {}
                Some(other) => {
                    return Err(WorkerError::Invalid {
                        field: "plan",
                        problem: format!("mixes rows of models {other:?} and {name:?}"),
                    });
                }
            }
        }
        let closing = || {
            plan.plan
                .close_rows
                .iter()
                .find_map(|row| self.row_models.get(row))
        };
        Ok(model.or_else(|| closing().cloned()))
    }

    /// Closes rows of models that the plan does not run.
    fn close_elsewhere(&mut self, rows: &[RowId], model: Option<&str>) -> Result<(), WorkerError> {
        let mut by_model: HashMap<String, Vec<RowId>> = HashMap::new();
        for row in rows {
            match self.row_models.get(row) {
                Some(name) if Some(name.as_str()) != model => {
                    by_model.entry(name.clone()).or_default().push(*row);
                }
                // A row that failed is closed already.
                Some(_) | None => {}
            }
        }
        for (name, rows) in by_model {
            for row in &rows {
                self.row_models.remove(row);
            }
            self.close(&name, rows)?;
        }
        Ok(())
    }

    fn close(&mut self, model: &str, rows: Vec<RowId>) -> Result<(), WorkerError> {
        if let Some(resident) = self.models.get_mut(model) {
            let plan = StepPlan {
                close_rows: rows,
                ..StepPlan::default()
            };
            let ticket = resident.runner.submit(plan, &self.pulse)?;
            resident.runner.collect(ticket)?;
        }
        Ok(())
    }

    /// Frees the rows of a refused plan as far as they are open.
    fn forget(&mut self, rows: Vec<RowId>) {
        if let Err(error) = self.close_elsewhere(&rows, None) {
            tracing::error!(%error, "rows of a refused plan could not be closed");
        }
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
                let _ = reply.send(self.unload(&name));
            }
            Command::Tokenizer { request, reply } => {
                let _ = reply.send(self.tokenizer(request));
            }
            Command::RunOp { request, reply } => {
                let _ = reply.send(run_op::run(request, &self.memory, &self.kernels));
            }
            Command::Release { segments, reply } => {
                self.memory.release(&segments);
                let _ = reply.send(Ok(()));
            }
            Command::Drain { reply } => {
                self.draining = true;
                let _ = reply.send(Ok(self.row_models.len()));
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
        if self.models.contains_key(&request.name) {
            return Err(WorkerError::ModelExists(request.name.clone()));
        }
        let backend = convert::label_of("backend", request.backend)?;
        let method = request.kv_method.as_str();
        velox_kvcache::KvMethod::parse(if method.is_empty() { "none" } else { method }).map_err(
            |error| WorkerError::Invalid {
                field: "kv_method",
                problem: error.to_string(),
            },
        )?;
        let options = LoadOptions {
            backend,
            threads: self.config.compute_threads().get(),
            cache_limit_bytes: self.config.cache_limit_bytes,
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
        self.models.insert(
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

    fn unload(&mut self, name: &str) -> Result<(), WorkerError> {
        let resident = self
            .models
            .get(name)
            .ok_or_else(|| WorkerError::ModelNotFound(name.to_owned()))?;
        let rows = resident.runner.open_rows();
        if rows > 0 {
            return Err(WorkerError::ModelBusy {
                name: name.to_owned(),
                rows,
            });
        }
        self.models.remove(name);
        Ok(())
    }

    fn tokenizer(&self, request: wire::GetTokenizerRequest) -> Result<TokenizerBytes, WorkerError> {
        let resident = self
            .models
            .get(&request.model)
            .ok_or_else(|| WorkerError::ModelNotFound(request.model.clone()))?;
        let blob = &resident.tokenizer;
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

/// Moves a scored row's logits to their destination; a destination that does not fit fails the row only.
fn store_logits(
    row: &mut velox_engine::step::RowOutcome,
    destinations: &HashMap<RowId, TensorHandle>,
    memory: &PeerSegments,
) {
    let (Ok(output), Some(handle)) = (&mut row.result, destinations.get(&row.row)) else {
        return;
    };
    let logits = std::mem::take(&mut output.logits);
    if let Err(error) = memory.write(handle, bytemuck::cast_slice(&logits)) {
        row.result = Err(velox_engine::error::EngineError::InvalidPlan(format!(
            "logits cannot be stored: {error}"
        )));
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
