//! The measurement that benches of all executables share.

use std::error::Error;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use velox_engine::load::{LoadOptions, load};
use velox_engine::sampler::SamplingParameters;
use velox_engine::step::{
    DecodeRow, OpenRow, PrefillChunk, PrefillGoal, Progress, RowId, Runner, StepPlan, Ticket,
};

/// How much is computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) runs: u32,
    pub(crate) prompt_tokens: u32,
    pub(crate) output_tokens: u32,
}

impl Size {
    /// Reads `[RUNS [PROMPT_TOKENS [OUTPUT_TOKENS]]]`.
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, Box<dyn Error>> {
        let number = |place: usize, default: u32| {
            let given = arguments.get(place).map(|text| text.parse());
            given.unwrap_or(Ok(default))
        };
        Ok(Self {
            runs: number(0, 3)?,
            prompt_tokens: number(1, 512)?,
            output_tokens: number(2, 128)?,
        })
    }
}

/// What one run took and gave.
struct Run {
    prefill_s: f64,
    decode_s: f64,
    token_ids: Vec<u32>,
}

struct Undisturbed;

impl Progress for Undisturbed {
    fn layer_done(&self) {}
}

/// Loads a model, runs it and prints the table and the tokens of the last run.
pub(crate) fn bench(path: &Path, options: &LoadOptions, size: Size) -> Result<(), Box<dyn Error>> {
    let begun = Instant::now();
    let mut model = load(path, options, &mut |_| {})?;
    let load_ms = begun.elapsed().as_secs_f64() * 1e3;
    let vocab_size = u32::try_from(model.facts.spec.vocab_size)?;
    // Any tokens do: the work does not depend on them.
    let prompt: Vec<u32> = (0..size.prompt_tokens)
        .map(|place| place.wrapping_mul(7919) % vocab_size)
        .collect();
    let mut prefill = Vec::new();
    let mut decode = Vec::new();
    let mut token_ids = Vec::new();
    for run in 0..size.runs {
        let row = RowId(u64::from(run));
        let run = measure(model.runner.as_mut(), row, &prompt, size.output_tokens)?;
        prefill.push(f64::from(size.prompt_tokens) / run.prefill_s);
        decode.push(f64::from(size.output_tokens) / run.decode_s);
        token_ids = run.token_ids;
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "backend {} ({})  threads {}  load {load_ms:.0} ms",
        model.facts.backend, model.facts.kernel, options.threads
    )?;
    writeln!(
        out,
        "{:<12} {:>10} {:>10} {:>10}  tokens/s",
        "", "median", "least", "most"
    )?;
    let sizes = [size.prompt_tokens, size.output_tokens];
    let speeds = [("prefill", &mut prefill), ("decode", &mut decode)];
    for ((name, speeds), tokens) in speeds.into_iter().zip(sizes) {
        speeds.sort_by(f64::total_cmp);
        if let (Some(least), Some(most)) = (speeds.first(), speeds.last()) {
            let median = speeds[speeds.len() / 2];
            let name = format!("{name} {tokens}");
            writeln!(out, "{name:<12} {median:>10.2} {least:>10.2} {most:>10.2}")?;
        }
    }
    let token_ids: Vec<String> = token_ids.iter().map(u32::to_string).collect();
    writeln!(out, "tokens {}", token_ids.join(" "))?;
    Ok(())
}

/// Prefills a prompt and decodes greedily.
fn measure(
    runner: &mut dyn Runner,
    row: RowId,
    prompt: &[u32],
    output_tokens: u32,
) -> Result<Run, Box<dyn Error>> {
    let opened = OpenRow {
        row,
        capacity_tokens: prompt.len() + usize::try_from(output_tokens)?,
        prompt_tokens: prompt.len(),
        sampling: SamplingParameters::greedy(),
        end_token_ids: Vec::new(),
        top_logprobs: None,
    };
    let plan = StepPlan {
        open_rows: vec![opened],
        prefill: Some(PrefillChunk {
            row,
            start: 0,
            token_ids: prompt.to_vec(),
            goal: PrefillGoal::Sample,
        }),
        ..StepPlan::default()
    };
    let begun = Instant::now();
    let mut token_ids = execute(runner, plan)?;
    let prefill_s = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    // One plan ahead, as the gateway does it.
    let mut waiting = None;
    for _ in 0..output_tokens {
        let plan = StepPlan {
            decode: vec![DecodeRow {
                row,
                token: None,
                steps: 1,
                draft: vec![],
            }],
            ..StepPlan::default()
        };
        let ticket = runner.submit(plan, &Undisturbed)?;
        if let Some(earlier) = waiting.replace(ticket) {
            token_ids.extend(collect(runner, earlier)?);
        }
    }
    if let Some(last) = waiting {
        token_ids.extend(collect(runner, last)?);
    }
    let decode_s = begun.elapsed().as_secs_f64();
    execute(
        runner,
        StepPlan {
            close_rows: vec![row],
            ..StepPlan::default()
        },
    )?;
    Ok(Run {
        prefill_s,
        decode_s,
        token_ids,
    })
}

fn execute(runner: &mut dyn Runner, plan: StepPlan) -> Result<Vec<u32>, Box<dyn Error>> {
    let ticket = runner.submit(plan, &Undisturbed)?;
    collect(runner, ticket)
}

/// Returns the tokens of all rows.
fn collect(runner: &mut dyn Runner, ticket: Ticket) -> Result<Vec<u32>, Box<dyn Error>> {
    let mut token_ids = Vec::new();
    for row in runner.collect(ticket, &Undisturbed)?.rows {
        token_ids.extend(row.result?.tokens.iter().map(|token| token.token_id));
    }
    Ok(token_ids)
}
