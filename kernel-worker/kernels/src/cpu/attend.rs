//! Causal attention over paged f16 caches.
//!
//! The cache is cut into segments of whole pages, counted from position 0. A query's softmax runs over one segment
//! at a time; results of segments are joined in order. So what is added to what depends on the query's position and
//! the window alone, and segments can be computed by different threads: a chunk of a prompt is split by blocks of
//! queries, a single query by segments.

mod segment;
mod statistics;

use std::ops::Range;

use super::output::Output;
use super::simd::{Kernel, Simd};
use super::{Cpu, CpuDevice};
use crate::attention::{AttendCall, PagedView, StatsRequest};
use crate::error::OpError;
use crate::ran::Ran;
use segment::{Block, States};
use statistics::Statistics;

/// Positions of a segment, rounded up to whole pages.
const SEGMENT_TOKENS: usize = 256;
/// Queries of a block.
const BLOCK_TOKENS: usize = 16;
/// Spans of up to this many tokens are split by segments, longer ones by blocks.
const SPLIT_TOKENS: usize = 4;

/// One row's queries, its cache and where the result goes.
#[derive(Debug)]
pub struct AttendSpan<'a> {
    /// What is asked.
    pub call: AttendCall<'a>,
    /// The row's cache in this layer; it holds the queries' own positions already.
    pub view: &'a PagedView<'a>,
    /// `[T, H*K]`.
    pub out: &'a mut [f32],
}

/// `out` `[T, H*K]` = for every query and head, the values of the positions it sees, weighted by
/// `softmax(scale * query . keys)`. Returns the requested statistics `[H, positions]`, or nothing.
///
/// # Errors
/// [`OpError`] as [`AttendCall::check`].
pub fn attend(
    cpu: &Cpu,
    call: &AttendCall<'_>,
    view: &PagedView<'_>,
    out: &mut [f32],
) -> Result<Ran<CpuDevice, Vec<f32>>, OpError> {
    let span = AttendSpan {
        call: *call,
        view,
        out,
    };
    Ok(attend_all(cpu, vec![span])?.map(|mut statistics| statistics.pop().unwrap_or_default()))
}

/// Attends for several rows as one parallel job; see [`attend`]. Returns each row's statistics.
///
/// # Errors
/// [`OpError`] as [`AttendCall::check`], before anything is computed.
pub fn attend_all(
    cpu: &Cpu,
    spans: Vec<AttendSpan<'_>>,
) -> Result<Ran<CpuDevice, Vec<Vec<f32>>>, OpError> {
    let mut tasks = Tasks::default();
    let mut jobs = Vec::with_capacity(spans.len());
    for span in spans {
        let tokens = span.call.check(span.view, span.out.len())?;
        jobs.push(Job::new(span, tokens));
    }
    for (index, job) in jobs.iter().enumerate() {
        tasks.plan(index, job);
    }
    let mut partial = vec![0.0; tasks.partial_elements];
    let partial = Output::new(&mut partial);
    cpu.pool().run(tasks.list.len(), &|index| {
        let task = &tasks.list[index];
        cpu.kernels().run(RunTask {
            job: &jobs[task.job],
            task,
            partial: &partial,
        });
    });
    for join in &tasks.joins {
        cpu.kernels().run(RunJoin {
            job: &jobs[join.job],
            join,
            partial: &partial,
        });
    }
    let mut statistics = Vec::with_capacity(jobs.len());
    for job in &jobs {
        statistics.push(job.statistics(cpu));
    }
    Ok(Ran::new(CpuDevice(()), statistics))
}

/// A checked span.
#[derive(Debug)]
struct Job<'a> {
    call: AttendCall<'a>,
    view: &'a PagedView<'a>,
    out: Output<'a, f32>,
    tokens: usize,
    /// Query heads of a key/value head.
    group: usize,
    /// Pages of a segment.
    segment_pages: usize,
}

impl<'a> Job<'a> {
    fn new(span: AttendSpan<'a>, tokens: usize) -> Self {
        let layout = span.view.layout();
        Self {
            call: span.call,
            view: span.view,
            out: Output::new(span.out),
            tokens,
            group: span.call.n_heads / layout.n_kv_heads,
            segment_pages: SEGMENT_TOKENS.div_ceil(layout.page_tokens),
        }
    }

    /// Returns the segments that the tokens see something of.
    fn segments(&self, tokens: &Range<usize>) -> Range<usize> {
        let segment_tokens = self.segment_pages * self.view.layout().page_tokens;
        let first = self.call.visible(self.call.start + tokens.start).start;
        let last = self.call.start + tokens.end - 1;
        first / segment_tokens..last / segment_tokens + 1
    }

    fn block(&self, tokens: Range<usize>, kv_head: usize) -> Block<'_> {
        Block {
            call: &self.call,
            view: self.view,
            tokens,
            kv_head,
            group: self.group,
        }
    }

    /// Writes the rows of a block, `[tokens, group]` of one key/value head.
    #[inline(always)]
    fn write<S: Simd>(
        &self,
        simd: S,
        states: &States<S>,
        (tokens, kv_head): (Range<usize>, usize),
    ) {
        let head_dim = self.view.layout().head_dim;
        for (index, token) in tokens.enumerate() {
            for member in 0..self.group {
                let head = kv_head * self.group + member;
                let from = (token * self.call.n_heads + head) * head_dim;
                // SAFETY: only the task or join of this block and head writes these elements, once.
                let out = unsafe { self.out.slice(from..from + head_dim) };
                states.write(simd, index * self.group + member, out);
            }
        }
    }

    fn statistics(&self, cpu: &Cpu) -> Vec<f32> {
        let positions = self.call.statistics_positions(self.tokens);
        let mut statistics = vec![0.0; self.call.n_heads * positions];
        if positions > 0 {
            let heads = self.group * positions;
            let output = Output::new(&mut statistics);
            cpu.pool().run(self.view.layout().n_kv_heads, &|kv_head| {
                // SAFETY: each key/value head has its own run of query heads, and the pool hands out each once.
                let statistics = unsafe { output.slice(kv_head * heads..(kv_head + 1) * heads) };
                let tokens = match self.call.statistics {
                    StatsRequest::DecodeWeights => self.tokens - 1..self.tokens,
                    StatsRequest::None | StatsRequest::ColumnSums => 0..self.tokens,
                };
                cpu.kernels().run(Statistics {
                    job: self,
                    kv_head,
                    tokens,
                    statistics,
                });
            });
        }
        statistics
    }
}

/// What one chunk of the parallel job does.
#[derive(Debug)]
struct Task {
    job: usize,
    kv_head: usize,
    tokens: Range<usize>,
    segments: Range<usize>,
    /// Where an unfinished result goes; `None` = it is finished.
    partial: Option<Range<usize>>,
}

/// Unfinished results of consecutive segments.
#[derive(Debug)]
struct Join {
    job: usize,
    kv_head: usize,
    tokens: Range<usize>,
    partials: Vec<Range<usize>>,
}

#[derive(Debug, Default)]
struct Tasks {
    list: Vec<Task>,
    joins: Vec<Join>,
    partial_elements: usize,
}

impl Tasks {
    fn plan(&mut self, index: usize, job: &Job<'_>) {
        let n_kv_heads = job.view.layout().n_kv_heads;
        for from in (0..job.tokens).step_by(BLOCK_TOKENS) {
            let tokens = from..job.tokens.min(from + BLOCK_TOKENS);
            let segments = job.segments(&tokens);
            let split = job.tokens <= SPLIT_TOKENS && segments.len() > 1;
            for kv_head in 0..n_kv_heads {
                let task = |segments, partial| Task {
                    job: index,
                    kv_head,
                    tokens: tokens.clone(),
                    segments,
                    partial,
                };
                if !split {
                    self.list.push(task(segments.clone(), None));
                    continue;
                }
                let elements = tokens.len()
                    * job.group
                    * States::<super::portable::Portable>::stored(job.view.layout().head_dim);
                let mut partials = Vec::with_capacity(segments.len());
                for segment in segments.clone() {
                    let partial = self.partial_elements..self.partial_elements + elements;
                    self.partial_elements = partial.end;
                    partials.push(partial.clone());
                    self.list.push(task(segment..segment + 1, Some(partial)));
                }
                self.joins.push(Join {
                    job: index,
                    kv_head,
                    tokens: tokens.clone(),
                    partials,
                });
            }
        }
        // The longest tasks first, so that none of them is left for the end.
        self.list.reverse();
    }
}

struct RunTask<'a> {
    job: &'a Job<'a>,
    task: &'a Task,
    partial: &'a Output<'a, f32>,
}

impl Kernel for RunTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { job, task, partial } = self;
        let block = job.block(task.tokens.clone(), task.kv_head);
        let rows = task.tokens.len() * job.group;
        let head_dim = job.view.layout().head_dim;
        let mut scratch = segment::Scratch::default();
        let mut total = States::new(simd, rows, head_dim);
        let mut states = States::new(simd, rows, head_dim);
        for segment in task.segments.clone() {
            let pages = segment * job.segment_pages..(segment + 1) * job.segment_pages;
            block.attend(simd, pages, &mut scratch, &mut states);
            total.join(simd, &mut states);
        }
        match &task.partial {
            None => job.write(simd, &total, (task.tokens.clone(), task.kv_head)),
            Some(range) => {
                // SAFETY: every task has its own range, and the pool hands out each task once.
                let stored = unsafe { partial.slice(range.clone()) };
                total.save(simd, stored);
            }
        }
    }
}

struct RunJoin<'a> {
    job: &'a Job<'a>,
    join: &'a Join,
    partial: &'a Output<'a, f32>,
}

impl Kernel for RunJoin<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { job, join, partial } = self;
        let rows = join.tokens.len() * job.group;
        let head_dim = job.view.layout().head_dim;
        let mut total = States::new(simd, rows, head_dim);
        let mut states = States::new(simd, rows, head_dim);
        for range in &join.partials {
            // SAFETY: the job that wrote it has ended.
            let stored = unsafe { partial.slice(range.clone()) };
            states.restore(simd, stored);
            total.join(simd, &mut states);
        }
        job.write(simd, &total, (join.tokens.clone(), join.kv_head));
    }
}
