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

const PROMPT_TOKENS: u16 = 512;
const OUTPUT_TOKENS: u16 = 128;

struct Undisturbed;

impl Progress for Undisturbed {
    fn layer_done(&self) {}
}

/// Loads a model, runs it `runs` times and prints the table.
pub(crate) fn bench(path: &Path, options: &LoadOptions, runs: u64) -> Result<(), Box<dyn Error>> {
    let begun = Instant::now();
    let mut model = load(path, options, &mut |_| {})?;
    let load_ms = begun.elapsed().as_secs_f64() * 1e3;
    let vocab_size = u32::try_from(model.facts.spec.vocab_size)?;
    // Any tokens do: the work does not depend on them.
    let prompt: Vec<u32> = (0..u32::from(PROMPT_TOKENS))
        .map(|place| place.wrapping_mul(7919) % vocab_size)
        .collect();
    let mut prefill = Vec::new();
    let mut decode = Vec::new();
    for run in 0..runs {
        let (prefill_s, decode_s) = measure(model.runner.as_mut(), RowId(run), &prompt)?;
        prefill.push(f64::from(PROMPT_TOKENS) / prefill_s);
        decode.push(f64::from(OUTPUT_TOKENS) / decode_s);
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
    for (name, speeds) in [("prefill 512", &mut prefill), ("decode 128", &mut decode)] {
        speeds.sort_by(f64::total_cmp);
        if let (Some(least), Some(most)) = (speeds.first(), speeds.last()) {
            let median = speeds[speeds.len() / 2];
            writeln!(out, "{name:<12} {median:>10.2} {least:>10.2} {most:>10.2}")?;
        }
    }
    Ok(())
}

/// Returns the seconds of the prefill and of all decode steps.
fn measure(
    runner: &mut dyn Runner,
    row: RowId,
    prompt: &[u32],
) -> Result<(f64, f64), Box<dyn Error>> {
    let opened = OpenRow {
        row,
        capacity_tokens: prompt.len() + usize::from(OUTPUT_TOKENS),
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
    execute(runner, plan)?;
    let prefill_s = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    // One plan ahead, as the gateway does it.
    let mut waiting = None;
    for _ in 0..OUTPUT_TOKENS {
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
            collect(runner, earlier)?;
        }
    }
    if let Some(last) = waiting {
        collect(runner, last)?;
    }
    let decode_s = begun.elapsed().as_secs_f64();
    execute(
        runner,
        StepPlan {
            close_rows: vec![row],
            ..StepPlan::default()
        },
    )?;
    Ok((prefill_s, decode_s))
}

fn execute(runner: &mut dyn Runner, plan: StepPlan) -> Result<(), Box<dyn Error>> {
    let ticket = runner.submit(plan, &Undisturbed)?;
    collect(runner, ticket)
}

fn collect(runner: &mut dyn Runner, ticket: Ticket) -> Result<(), Box<dyn Error>> {
    for row in runner.collect(ticket, &Undisturbed)?.rows {
        row.result?;
    }
    Ok(())
}
