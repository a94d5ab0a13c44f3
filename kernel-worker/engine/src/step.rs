//! Plans and outcomes: what the gateway asks of an engine and what it gets back.

mod engine;
mod pass;
mod row;
mod validation;

pub use engine::Engine;

use crate::backend::StageCounts;
use crate::error::EngineError;
use crate::sampler::SamplingParameters;
use velox_kernels::label::BackendLabel;

/// Number of a row, chosen by the gateway, unique in the life of the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId(pub u64);

/// A sequence that starts to use memory.
#[derive(Debug, Clone, PartialEq)]
pub struct OpenRow {
    /// Its number; must not be open.
    pub row: RowId,
    /// Positions it will use at most.
    pub capacity_tokens: usize,
    /// Positions below are prompt: output-only penalties do not count them, and the output index of the token
    /// sampled at position `p` is `p + 1 - prompt_tokens`, also when a lost row is replayed.
    pub prompt_tokens: usize,
    /// How its tokens are chosen.
    pub sampling: SamplingParameters,
    /// A sampled token of this set ends the row's further steps in the same plan.
    pub end_token_ids: Vec<u32>,
    /// Alternatives per sampled token; `None` = no log-probabilities.
    pub top_logprobs: Option<usize>,
}

/// Teacher-forced scoring of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScorePart {
    /// Positions of the chunk from here on are scored; none if the chunk ends before.
    pub first_position: usize,
    /// Alternatives per position.
    pub top_n: usize,
    /// Token after the chunk's last one, if its prediction is to be scored.
    pub next_token: Option<u32>,
    /// Whether the raw logits are handed back.
    pub logits: LogitsWanted,
}

/// Whether an outcome carries raw logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsWanted {
    /// No.
    No,
    /// `[scored positions, V]`, f32.
    Yes,
}

/// What happens after a prefill chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrefillGoal {
    /// More chunks follow.
    Fill,
    /// The last position's prediction is sampled.
    Sample,
    /// The positions are scored.
    Score(ScorePart),
}

/// Tokens that enter a row's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefillChunk {
    /// The row, open.
    pub row: RowId,
    /// Position of the first token; must equal the row's length.
    pub start: usize,
    /// At least one.
    pub token_ids: Vec<u32>,
    /// What is wanted of it.
    pub goal: PrefillGoal,
}

/// One or more tokens to generate for a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeRow {
    /// The row, open and prefilled.
    pub row: RowId,
    /// Token to feed; `None` = the row's own last sample. Going on so after the capacity is full yields no token and is
    /// no fault: the gateway sends plan n+1 before it reads result n.
    pub token: Option<u32>,
    /// Tokens to generate, at least 1; exactly 1 with a draft.
    pub steps: usize,
    /// Guesses of the tokens after `token`, which must be given then. One pass feeds them all and samples every position;
    /// the samples come back up to the first that differs from its guess or ends the row. Where logits do not depend
    /// on the batch they are those of single steps, and so is the row afterwards.
    pub draft: Vec<u32>,
}

/// One iteration. Runs as one forward pass over the chunk and one token of every decode row, then as further
/// passes over the decode rows that have steps left.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepPlan {
    /// Executed first; a row that is not open (its failure closed it) is passed over.
    pub close_rows: Vec<RowId>,
    /// Executed second.
    pub open_rows: Vec<OpenRow>,
    /// At most one chunk.
    pub prefill: Option<PrefillChunk>,
    /// Rows that generate.
    pub decode: Vec<DecodeRow>,
}

/// A candidate and its log-probability from the raw logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alternative {
    /// Token.
    pub token_id: u32,
    /// Natural logarithm.
    pub logprob: f32,
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    /// Token.
    pub token_id: u32,
    /// From the raw logits; only if asked for.
    pub logprob: Option<f32>,
    /// Best alternatives, best first, ties by lowest id.
    pub top: Vec<Alternative>,
}

/// The prediction at a position.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoredPosition {
    /// Position.
    pub position: usize,
    /// Log-probability of the token after it; `None` where none was given.
    pub next_logprob: Option<f32>,
    /// Best alternatives, best first.
    pub top: Vec<Alternative>,
}

/// What a plan did for one row.
#[derive(Debug)]
pub struct RowOutcome {
    /// The row.
    pub row: RowId,
    /// Tokens or scores, or why the row alone failed; a failed row is already closed.
    pub result: Result<RowOutput, EngineError>,
    /// Bytes that its cache holds allocated for keys.
    pub key_bytes: u64,
    /// Bytes that its cache holds allocated for values.
    pub value_bytes: u64,
}

/// Tokens and scores of a row.
#[derive(Debug, Default, PartialEq)]
pub struct RowOutput {
    /// In order; fewer than planned only after an end token, behind a wrong guess, or when the capacity is full.
    pub tokens: Vec<SampledToken>,
    /// In order of position.
    pub scores: Vec<ScoredPosition>,
    /// `[scores, V]` if wanted, else empty.
    pub logits: Vec<f32>,
}

/// Result of a plan, with the label of the code that ran.
#[derive(Debug)]
pub struct StepOutcome {
    /// One entry per row with a chunk or decode steps, in the plan's order, the chunk first; after them one per row
    /// that could not be opened. A row that failed in the plan before is an error here, not of the plan.
    pub rows: Vec<RowOutcome>,
    /// Weakest label from embedding to logits; the backend's own if no pass ran.
    pub label: BackendLabel,
    /// Label of the sampler; that of its backend if nothing was sampled.
    pub sampler: BackendLabel,
    /// Stages executed.
    pub stages: StageCounts,
}

/// A submitted plan. Not `Clone`: it is collected once.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(u64);

impl Ticket {
    /// Numbers a submitted plan.
    pub(crate) fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.0
    }
}

/// Called by the engine while it computes.
pub trait Progress {
    /// A layer of a forward pass is done: the process is alive.
    fn layer_done(&self);
}

/// A resident model. Lives on one thread; a backend may compute in `submit`, or begin there and be waited for in
/// `collect`, so that the next plan is prepared meanwhile.
pub trait Runner {
    /// Starts a plan. At most two plans are uncollected at a time.
    ///
    /// # Errors
    /// [`EngineError::InvalidPlan`] if it breaks the contract (nothing was changed then).
    fn submit(&mut self, plan: StepPlan, progress: &dyn Progress) -> Result<Ticket, EngineError>;

    /// Whether [`Runner::collect`] would not have to wait.
    fn is_ready(&self, ticket: &Ticket) -> bool;

    /// Waits for a submitted plan.
    ///
    /// # Errors
    /// An error of the plan as a whole: the rows of the pass that broke off are closed, all others stay as they were.
    /// Errors of single rows are in the outcome.
    fn collect(
        &mut self,
        ticket: Ticket,
        progress: &dyn Progress,
    ) -> Result<StepOutcome, EngineError>;

    /// Returns the number of open rows.
    fn open_rows(&self) -> usize;
}
