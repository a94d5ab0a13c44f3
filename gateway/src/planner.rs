//! What a worker does in its next iteration: a pure function of its rows and what it has not answered yet.

/// Number of a row, unique in the life of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId(pub u64);

/// Number of a model, of the scheduler's choosing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct ModelIndex(pub u32);

/// What the planner must know of the worker itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkerState {
    /// Its plans without an answer.
    pub uncollected: usize,
    /// Model of its last plan.
    pub last_model: ModelIndex,
}

/// Sizes that shape a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanLimits {
    /// Most plans of a worker without an answer.
    pub uncollected_plans: usize,
    /// Tokens of a prefill chunk while other rows decode: bounds the pause in their streams.
    pub shared_chunk_tokens: u32,
    /// Tokens of a prefill chunk when nobody waits for a token.
    pub sole_chunk_tokens: u32,
    /// Most decode rows of a plan.
    pub decode_rows: usize,
    /// Most draft tokens of a plan: like a chunk, they make everybody's pass longer.
    pub draft_tokens: u32,
}

impl Default for PlanLimits {
    fn default() -> Self {
        Self {
            uncollected_plans: 2,
            shared_chunk_tokens: 256,
            sole_chunk_tokens: 512,
            // One place is left for the prompt.
            decode_rows: velox_proto::limits::MAX_PLAN_ROWS - 1,
            draft_tokens: 64,
        }
    }
}

/// What a row does once its tokens are in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// It samples up to `left` further tokens, at most `steps` of them in one plan.
    Generate {
        /// Outputs that no plan asked for yet.
        left: u32,
        /// More than 1 only if nobody minds that tokens past an end are computed for nothing.
        steps: u32,
    },
    /// It is done.
    Score,
}

/// Whether a row may share a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Company {
    /// It runs with others.
    Any,
    /// It may have crashed a worker: it runs alone until it made progress.
    Alone,
}

/// Whether the reader of a row keeps up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// There is room for what the next plan yields.
    Ready,
    /// Its channel is full: the row pauses, the others do not.
    Behind,
}

/// What a row that decodes is fed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Its own last sample, whatever it is: a plan may go out before the last result is read.
    OwnSample,
    /// Its last sample and a draft of so many tokens, which depends on the last result: the row waits for it.
    Draft {
        /// 0 = there is no guess; the step is a plain one.
        tokens: u32,
    },
}

/// A row on the worker, as of the last plan that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowView {
    /// Its number.
    pub id: RowId,
    /// Which model it is of: rows of two models cannot share a forward pass.
    pub model: ModelIndex,
    /// Position of the next token to feed.
    pub position: u32,
    /// Known tokens that no plan fed yet; 0 = the row decodes.
    pub unfed: u32,
    /// What comes after them.
    pub goal: Goal,
    /// What it is fed then.
    pub source: Source,
    /// Whether it may share a plan.
    pub company: Company,
    /// Whether its reader keeps up.
    pub reader: Reader,
    /// Plans without an answer that contain it.
    pub in_flight: usize,
}

impl RowView {
    /// Returns whether a plan can contain it now.
    fn is_runnable(&self) -> bool {
        let has_work = self.unfed > 0 || matches!(self.goal, Goal::Generate { left: 1.., .. });
        self.reader == Reader::Ready && has_work && !self.awaits_result()
    }

    /// Returns whether it decodes from drafts.
    fn is_drafting(&self) -> bool {
        self.unfed == 0 && matches!(self.source, Source::Draft { .. })
    }

    /// Returns whether its next draft depends on a result that is not there.
    fn awaits_result(&self) -> bool {
        self.is_drafting() && self.in_flight > 0
    }
}

/// Part of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Its row.
    pub row: RowId,
    /// Position of its first token.
    pub start: u32,
    /// Its length, at least 1.
    pub tokens: u32,
    /// Whether it ends the row's known tokens.
    pub last: bool,
}

/// Further tokens of a row, each from the row's own last sample, or the check of a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decode {
    /// Its row.
    pub row: RowId,
    /// Tokens to generate, at least 1; exactly 1 with a draft.
    pub steps: u32,
    /// Tokens of its draft to check.
    pub draft: u32,
}

/// Content of the next plan of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decision {
    /// At most one part of a prompt.
    pub prefill: Option<Chunk>,
    /// One entry for every row that decodes.
    pub decode: Vec<Decode>,
}

impl Decision {
    /// Returns whether there is nothing to compute.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.prefill.is_none() && self.decode.is_empty()
    }
}

/// Decides what a worker computes next; `rows` are in the order in which they were placed.
///
/// Every row that can decode gets a token; one prompt, the oldest, gets a chunk. Models take turns. A suspect row
/// runs alone: it waits until no plan in flight contains another row, and the others wait for it. Rows with drafts wait
/// for their results, all of a model together, so that they go on sharing their passes; the others do not wait for them.
#[must_use]
pub fn decide(rows: &[RowView], worker: WorkerState, limits: &PlanLimits) -> Decision {
    if worker.uncollected >= limits.uncollected_plans {
        return Decision::default();
    }
    let suspect = rows
        .iter()
        .find(|row| row.company == Company::Alone && row.is_runnable());
    if let Some(suspect) = suspect {
        let joined = rows
            .iter()
            .any(|row| row.id != suspect.id && row.in_flight > 0);
        return if joined {
            Decision::default()
        } else {
            compose(&[suspect], limits)
        };
    }
    // A suspect that waits for its result must not be joined while it is in flight.
    if rows
        .iter()
        .any(|row| row.company == Company::Alone && row.in_flight > 0)
    {
        return Decision::default();
    }
    let gathers = |row: &RowView| {
        let awaited = |other: &RowView| other.model == row.model && other.awaits_result();
        row.is_drafting() && rows.iter().any(awaited)
    };
    let runnable = || rows.iter().filter(|row| row.is_runnable() && !gathers(row));
    let after_last = runnable()
        .map(|row| row.model)
        .filter(|&model| model > worker.last_model)
        .min();
    let Some(model) = after_last.or_else(|| runnable().map(|row| row.model).min()) else {
        return Decision::default();
    };
    let of_model: Vec<&RowView> = runnable().filter(|row| row.model == model).collect();
    compose(&of_model, limits)
}

/// Makes a plan of runnable rows of one model.
fn compose(rows: &[&RowView], limits: &PlanLimits) -> Decision {
    let mut draft_tokens = limits.draft_tokens;
    // The row at most, and how many steps it wants.
    let decoding: Vec<(Decode, u32)> = rows
        .iter()
        .filter(|row| row.unfed == 0)
        .filter_map(|row| match row.goal {
            Goal::Generate { left, steps } => Some((row, left, steps)),
            Goal::Score => None,
        })
        .take(limits.decode_rows)
        .map(|(row, left, steps)| {
            let draft = match row.source {
                Source::OwnSample => 0,
                // Behind a draft that is right comes one token more.
                Source::Draft { tokens } => tokens.min(left.saturating_sub(1)).min(draft_tokens),
            };
            draft_tokens -= draft;
            let most = Decode {
                row: row.id,
                steps: left,
                draft,
            };
            (most, if draft > 0 { 1 } else { steps })
        })
        .collect();
    let chunk_tokens = if decoding.is_empty() {
        limits.sole_chunk_tokens
    } else {
        limits.shared_chunk_tokens
    };
    let prefill = rows.iter().find(|row| row.unfed > 0).map(|row| {
        let tokens = row.unfed.min(chunk_tokens);
        Chunk {
            row: row.id,
            start: row.position,
            tokens,
            last: tokens == row.unfed,
        }
    });
    // Several steps only if they keep nobody waiting: neither a reader of single tokens, nor a draft, nor a prompt.
    let steps = match prefill {
        Some(_) => 1,
        None => decoding.iter().map(|row| row.1).min().unwrap_or(1),
    };
    Decision {
        prefill,
        decode: decoding
            .into_iter()
            .map(|(most, _)| Decode {
                steps: steps.clamp(1, most.steps),
                ..most
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests;
