//! Scripted workers with a tiny model: the next token is a function of all tokens so far.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use velox_proto::tensor::TensorHandle;
use velox_proto::v1::{self, Backend};
use velox_proto::worker::v1 as wire;
use velox_shm::{Arena, Lease, PeerSegments, Segment};

use super::super::{LeaseFuture, RowEnd, RowEvent, RowHandle, Scheduler, SchedulerConfig, Workers};
use crate::catalog::Catalog;
use crate::error::GatewayError;
use crate::pool::plan::{PlanError, PlanExpectation};
use crate::pool::scripted::ScriptedWorker;
use crate::pool::{LossCause, PoolError, PoolEvent, WorkerKey};
use crate::request::{Delivery, GenerationParts, Job, ModelLimits, ValidRequest};

pub(super) const VOCAB_SIZE: u32 = 64;

/// A prompt that begins with this kills the worker of any plan that computes it.
pub(super) const POISON: u32 = 60;

/// A prompt that begins with this makes its row fail.
pub(super) const FAILING: u32 = 61;

/// Time in which everything that can happen without a result has happened.
const QUIET: Duration = Duration::from_millis(1);

const CONTEXT: u32 = 2000;

fn model() -> v1::Model {
    v1::Model {
        name: "m".to_owned(),
        context_length: CONTEXT,
        vocab_size: VOCAB_SIZE,
        kv: Some(kv()),
        ..v1::Model::default()
    }
}

fn kv() -> v1::KvGeometry {
    v1::KvGeometry {
        method: "none".to_owned(),
        page_tokens: 16,
        key_bytes_per_token: 4,
        value_bytes_per_token: 4,
        ..v1::KvGeometry::default()
    }
}

fn limits() -> ModelLimits {
    ModelLimits {
        name: "m".into(),
        fingerprint: "".into(),
        context_length: CONTEXT,
        vocab_size: VOCAB_SIZE,
        kv: kv(),
        end_token_ids: vec![],
        backends: vec![Backend::Cpu],
        missing: String::new(),
    }
}

/// A prompt that begins with this is answered with its last tokens again and again, but for every eleventh token.
pub(super) const ECHO: u32 = 62;

/// Tokens that an echo repeats.
const PERIOD: usize = 4;

/// The next token after `tokens`.
fn next_token(tokens: &[u32]) -> u32 {
    if tokens[0] == ECHO && !tokens.len().is_multiple_of(11) {
        return tokens[tokens.len().saturating_sub(PERIOD)];
    }
    let mix = tokens.iter().fold(17_u32, |mix, &token| {
        mix.wrapping_mul(31).wrapping_add(token)
    });
    mix % 40 + 10
}

/// What an undisturbed worker answers.
pub(super) fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        tokens.push(next_token(&tokens));
    }
    tokens.split_off(prompt.len())
}

pub(super) fn job(prompt: &[u32], max_tokens: u32) -> Job {
    generation(prompt, options(max_tokens, None))
}

pub(super) fn job_with_options(prompt: &[u32], options: v1::GenerationOptions) -> Job {
    generation(prompt, options)
}

/// Looks drafts up by single tokens.
pub(super) fn drafting_job(prompt: &[u32], max_tokens: u32, end: Option<u32>) -> Job {
    let options = v1::GenerationOptions {
        prompt_lookup: Some(v1::PromptLookup {
            ngram_tokens: Some(1),
            max_draft_tokens: Some(5),
        }),
        ..options(max_tokens, end)
    };
    generation(prompt, options)
}

pub(super) fn job_with_end(prompt: &[u32], max_tokens: u32, end: u32) -> Job {
    generation(prompt, options(max_tokens, Some(end)))
}

pub(super) fn options(max_tokens: u32, end: Option<u32>) -> v1::GenerationOptions {
    v1::GenerationOptions {
        max_tokens: Some(max_tokens),
        stop_token_ids: end.into_iter().collect(),
        ..v1::GenerationOptions::default()
    }
}

fn generation(prompt: &[u32], options: v1::GenerationOptions) -> Job {
    let parts = GenerationParts {
        generation: Some(options),
        ..GenerationParts::default()
    };
    let request = ValidRequest::generate(&limits(), prompt.to_vec(), parts, Delivery::Stream, 1);
    request.unwrap().job
}

pub(super) fn score_job(tokens: &[u32], first_position: u32) -> Job {
    let request = v1::ScoreRequest {
        first_position,
        return_logits: true,
        ..v1::ScoreRequest::default()
    };
    Job::score(&limits(), tokens.to_vec(), &request).unwrap()
}

/// A plan that was sent and not answered.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) worker: WorkerKey,
    pub(super) plan: wire::StepPlan,
    expectation: PlanExpectation,
}

impl Sent {
    /// Rows that compute.
    pub(super) fn rows(&self) -> Vec<u64> {
        let prefill = self.plan.prefill.iter().map(|chunk| chunk.row);
        prefill
            .chain(self.plan.decode.iter().map(|decode| decode.row))
            .collect()
    }
}

/// What a step came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Answered,
    Crashed,
    Idle,
}

#[derive(Debug)]
struct State {
    workers: BTreeMap<WorkerKey, ScriptedWorker>,
    sent: VecDeque<Sent>,
    opened: Vec<wire::OpenRow>,
    most_rows: usize,
    memory: Arena,
    /// Plans that are refused before others are taken.
    refusals: usize,
}

#[derive(Debug, Clone)]
struct Scripted(Arc<Mutex<State>>);

impl Scripted {
    /// Tokens that end a row, as the plan said that opened it.
    fn end_tokens(&self, row: u64) -> Vec<u32> {
        let state = self.0.lock().unwrap();
        let open = state.opened.iter().find(|open| open.row == row);
        open.map(|open| open.end_token_ids.clone())
            .unwrap_or_default()
    }
}

impl Workers for Scripted {
    fn submit(&self, worker: WorkerKey, plan: wire::StepPlan) -> Result<(), PoolError> {
        let mut state = self.0.lock().unwrap();
        if let Some(left) = state.refusals.checked_sub(1) {
            state.refusals = left;
            return Err(PlanError::TooManyPlans.into());
        }
        let Some(scripted) = state.workers.get_mut(&worker) else {
            return Err(PoolError::WorkerLost(worker));
        };
        let expectation = scripted.expect(&plan);
        state.opened.extend(plan.open_rows.iter().cloned());
        let sent = Sent {
            worker,
            plan,
            expectation,
        };
        state.most_rows = state.most_rows.max(sent.rows().len());
        state.sent.push_back(sent);
        Ok(())
    }

    fn lease(&self, _worker: WorkerKey, byte_len: u64) -> LeaseFuture {
        let lease: Result<Lease, _> = self.0.lock().unwrap().memory.lease(byte_len);
        Box::pin(std::future::ready(lease.map_err(PoolError::from)))
    }
}

/// An answer as its reader has it.
#[derive(Debug)]
pub(super) struct Answer {
    row: RowHandle,
    pub(super) tokens: Vec<u32>,
    pub(super) recoveries: (u32, &'static str),
    /// Draft tokens that were checked, and those that are among the tokens.
    pub(super) drafts: (u32, usize),
    end: Option<Result<RowEnd, GatewayError>>,
}

/// A scheduler and its scripted workers.
#[derive(Debug)]
pub(super) struct House {
    pub(super) scheduler: Scheduler,
    pub(super) shutdown: CancellationToken,
    pool: Scripted,
    events: mpsc::Sender<PoolEvent>,
    /// Tokens of each row in each process.
    rows: HashMap<(WorkerKey, u64), Vec<u32>>,
    peer: PeerSegments,
    idle_plans: usize,
}

impl House {
    pub(super) fn new(config: SchedulerConfig) -> Self {
        let segment = Segment::create(1, 1 << 20).unwrap();
        let memory = Arena::new(segment);
        let mut peer = PeerSegments::new();
        let descriptor = memory.descriptor().try_clone_to_owned().unwrap();
        peer.accept(memory.segment_id(), memory.segment_bytes(), descriptor)
            .unwrap();
        let pool = Scripted(Arc::new(Mutex::new(State {
            workers: BTreeMap::new(),
            sent: VecDeque::new(),
            opened: Vec::new(),
            most_rows: 0,
            memory,
            refusals: 0,
        })));
        let (events, receiver) = mpsc::channel(64);
        let shutdown = CancellationToken::new();
        let scheduler = Scheduler::start(
            config,
            pool.clone(),
            receiver,
            Arc::new(Catalog::new(&["m".to_owned()])),
            (&TaskTracker::new(), shutdown.clone()),
        );
        Self {
            scheduler,
            shutdown,
            pool,
            events,
            rows: HashMap::new(),
            peer,
            idle_plans: 0,
        }
    }

    pub(super) async fn ready(&mut self, slot: u32) -> WorkerKey {
        self.ready_on(slot, Backend::Cpu).await
    }

    pub(super) async fn ready_on(&mut self, slot: u32, backend: Backend) -> WorkerKey {
        let key = WorkerKey {
            slot,
            incarnation: 1,
        };
        self.start(key, backend).await
    }

    pub(super) async fn restart(&mut self, lost: WorkerKey) -> WorkerKey {
        let key = WorkerKey {
            incarnation: lost.incarnation + 1,
            ..lost
        };
        self.start(key, Backend::Cpu).await
    }

    async fn start(&mut self, key: WorkerKey, backend: Backend) -> WorkerKey {
        let worker = ScriptedWorker::new(key, backend, &[model()]);
        let event = PoolEvent::Ready {
            worker: key,
            facts: Arc::clone(&worker.facts),
            models: worker.models.values().cloned().collect(),
        };
        self.pool.0.lock().unwrap().workers.insert(key, worker);
        self.tell(event).await;
        key
    }

    pub(super) async fn lose(&mut self, worker: WorkerKey, cause: LossCause) {
        {
            let mut state = self.pool.0.lock().unwrap();
            state.workers.remove(&worker);
            state.sent.retain(|sent| sent.worker != worker);
        }
        self.rows.retain(|(owner, _row), _tokens| *owner != worker);
        self.tell(PoolEvent::Lost { worker, cause }).await;
    }

    /// Refuses the next plan.
    pub(super) fn refuse_one(&self) {
        self.pool.0.lock().unwrap().refusals = 1;
    }

    pub(super) async fn drain(&mut self, worker: WorkerKey) {
        self.tell(PoolEvent::Draining { worker }).await;
        self.lose(worker, LossCause::Drained).await;
    }

    async fn tell(&self, event: PoolEvent) {
        self.events.send(event).await.unwrap();
        quiet().await;
    }

    pub(super) async fn submit(&self, job: Job) -> Answer {
        let row = self
            .scheduler
            .submit(job, tracing::Span::none())
            .await
            .unwrap();
        quiet().await;
        Answer {
            row,
            tokens: Vec::new(),
            recoveries: (0, ""),
            drafts: (0, 0),
            end: None,
        }
    }

    /// Takes the oldest plan that was sent.
    pub(super) async fn plan(&mut self) -> Sent {
        quiet().await;
        self.take().expect("the scheduler sends a plan")
    }

    /// Checks that no further plan was sent.
    pub(super) async fn no_plan(&mut self) {
        quiet().await;
        assert!(self.pool.0.lock().unwrap().sent.is_empty());
    }

    /// Takes the oldest plan that was sent, if there is one.
    pub(super) fn take(&mut self) -> Option<Sent> {
        self.pool.0.lock().unwrap().sent.pop_front()
    }

    /// Computes a plan as an honest worker does.
    pub(super) async fn answer(&mut self, sent: Sent) {
        let Sent {
            worker,
            plan,
            expectation,
        } = sent;
        for row in &plan.close_rows {
            self.rows.remove(&(worker, *row));
        }
        for open in &plan.open_rows {
            self.rows.insert((worker, open.row), Vec::new());
        }
        let mut results = Vec::new();
        if let Some(chunk) = &plan.prefill {
            results.push(self.prefill(worker, chunk));
        }
        for decode in &plan.decode {
            let Some(tokens) = self.rows.get_mut(&(worker, decode.row)) else {
                results.push(failed(decode.row));
                continue;
            };
            let draft = &decode.draft_token_ids;
            let ends = self.pool.end_tokens(decode.row);
            assert!(draft.is_empty() || decode.token == tokens.last().copied());
            let steps = usize::try_from(decode.steps).unwrap() + draft.len();
            let mut sampled = Vec::with_capacity(steps);
            for step in 0..steps {
                let token = next_token(tokens);
                tokens.push(token);
                sampled.push(token);
                let guess = draft.get(step).copied();
                if !draft.is_empty() && (guess != Some(token) || ends.contains(&token)) {
                    break;
                }
            }
            results.push(row_result(decode.row, sampled));
        }
        if results.is_empty() {
            self.idle_plans += 1;
        }
        let result = {
            let mut state = self.pool.0.lock().unwrap();
            let scripted = state.workers.get_mut(&worker).unwrap();
            scripted.result(&plan, &expectation, results)
        };
        self.tell(PoolEvent::Result { worker, result }).await;
    }

    fn prefill(&mut self, worker: WorkerKey, chunk: &wire::PrefillChunk) -> wire::RowResult {
        let tokens = self.rows.get_mut(&(worker, chunk.row)).unwrap();
        assert_eq!(tokens.len(), usize::try_from(chunk.start).unwrap());
        tokens.extend(&chunk.token_ids);
        if tokens[0] == FAILING {
            self.rows.remove(&(worker, chunk.row));
            return failed(chunk.row);
        }
        let sampled = chunk.sample.then(|| next_token(tokens));
        tokens.extend(sampled);
        let mut result = row_result(chunk.row, sampled.into_iter().collect());
        if let Some(score) = &chunk.score {
            let end = chunk.start + u32::try_from(chunk.token_ids.len()).unwrap();
            let positions = score.first_position..end;
            result.scores = positions
                .clone()
                .map(|position| wire::ScoredToken {
                    position,
                    next_logprob: (position + 1 < end || score.next_token.is_some())
                        .then_some(-1.0),
                    top: vec![],
                })
                .collect();
            if let Some(handle) = &score.logits {
                let handle = TensorHandle::try_from(handle.clone()).unwrap();
                let row = |position| {
                    let value = f32::from(u16::try_from(position).unwrap());
                    value
                        .to_le_bytes()
                        .repeat(usize::try_from(VOCAB_SIZE).unwrap())
                };
                let bytes: Vec<u8> = positions.flat_map(row).collect();
                self.peer.write(&handle, &bytes).unwrap();
            }
        }
        result
    }

    /// Answers one plan, or lets time pass if there is none.
    pub(super) async fn step(&mut self) {
        quiet().await;
        match self.take() {
            Some(sent) => self.answer(sent).await,
            None => tokio::time::sleep(Duration::from_secs(1)).await,
        }
    }

    /// Answers one plan, or crashes its worker if it computes a poisonous row.
    pub(super) async fn step_or_crash(&mut self, worker: WorkerKey) -> Outcome {
        quiet().await;
        let Some(sent) = self.take() else {
            return Outcome::Idle;
        };
        let first = sent.plan.prefill.as_ref().map(|chunk| chunk.token_ids[0]);
        if first == Some(POISON) {
            self.lose(worker, LossCause::Exited(101)).await;
            return Outcome::Crashed;
        }
        self.answer(sent).await;
        Outcome::Answered
    }

    /// Answers plans until none is left.
    pub(super) async fn settle(&mut self) {
        loop {
            quiet().await;
            let Some(sent) = self.take() else { return };
            self.answer(sent).await;
        }
    }

    /// Reads whatever is there.
    pub(super) fn drain_events(&self, answer: &mut Answer) {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        while let std::task::Poll::Ready(Some(event)) = answer.row.poll_next(&mut context) {
            answer.take(event);
        }
    }

    /// Answers plans until the reader has so many tokens.
    pub(super) async fn read(&mut self, answer: &mut Answer, count: usize) {
        while answer.tokens.len() < count {
            self.step().await;
            self.drain_events(answer);
        }
    }

    /// Answers plans until the answer has ended.
    pub(super) async fn finish(&mut self, answer: &mut Answer) -> Result<RowEnd, GatewayError> {
        loop {
            self.drain_events(answer);
            if let Some(end) = answer.end.take() {
                return end;
            }
            self.step().await;
        }
    }

    pub(super) fn open_rows(&self, worker: WorkerKey) -> usize {
        let state = self.pool.0.lock().unwrap();
        state
            .workers
            .get(&worker)
            .map_or(0, ScriptedWorker::open_rows)
    }

    pub(super) fn opened(&self) -> Vec<wire::OpenRow> {
        self.pool.0.lock().unwrap().opened.clone()
    }

    pub(super) fn most_rows_in_a_plan(&self) -> usize {
        self.pool.0.lock().unwrap().most_rows
    }

    pub(super) fn idle_plans(&self) -> usize {
        self.idle_plans
    }
}

impl Answer {
    fn take(&mut self, event: RowEvent) {
        assert!(self.end.is_none(), "something followed the end");
        match event {
            RowEvent::Started(_) => {}
            RowEvent::Step(step) => {
                self.tokens
                    .extend(step.tokens.iter().map(|token| token.token_id));
                self.recoveries = step.recoveries;
                self.drafts.0 += step.drafted;
                self.drafts.1 += step.accepted_drafts;
                self.end = step.end.map(Ok);
            }
            RowEvent::Failed(error) => self.end = Some(Err(error)),
        }
    }
}

/// Lets the scheduler do everything that it can do now. Time is paused, so this takes none.
async fn quiet() {
    tokio::time::sleep(QUIET).await;
}

fn row_result(row: u64, tokens: Vec<u32>) -> wire::RowResult {
    wire::RowResult {
        row,
        tokens: tokens
            .into_iter()
            .map(|token_id| wire::SampledToken {
                token_id,
                logprob: None,
                top: vec![],
            })
            .collect(),
        key_bytes: 64,
        value_bytes: 64,
        ..wire::RowResult::default()
    }
}

fn failed(row: u64) -> wire::RowResult {
    wire::RowResult {
        row,
        error: Some(wire::RowError {
            reason: "NUMERIC_ERROR".to_owned(),
            message: "logits are not numbers".to_owned(),
        }),
        ..wire::RowResult::default()
    }
}
