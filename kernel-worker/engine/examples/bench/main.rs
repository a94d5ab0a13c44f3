//! Speed of the engine alone, in this process: what the service around it is compared to.
//!
//! `bench MODEL [auto|reference|cpu] [THREADS [RUNS [PROMPT [OUTPUT]]]]`: each run prefills a prompt of 512 tokens into a
//! fresh row and decodes 128, one a plan. The table on standard output has the median and the range of the runs; the
//! last line the tokens.

mod measure;

use std::error::Error;
use std::path::Path;

use velox_engine::load::LoadOptions;
use velox_engine::probe::ProbedBackends;
use velox_kernels::label::BackendLabel;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |place: usize| arguments.get(place).map(String::as_str);
    let usage = "usage: bench MODEL [auto|reference|cpu] [THREADS [RUNS [PROMPT [OUTPUT]]]]";
    let path = argument(0).ok_or(usage)?;
    let backend = match argument(1).unwrap_or("auto") {
        "auto" => None,
        "reference" => Some(BackendLabel::Reference),
        "cpu" => Some(BackendLabel::Cpu),
        other => return Err(format!("backend {other:?} is none of auto, reference, cpu").into()),
    };
    let threads: usize = argument(2).unwrap_or("2").parse()?;
    let options = LoadOptions {
        backend,
        threads,
        cache_limit_bytes: 1 << 30,
        quantise: None,
        max_context: None,
        probed: ProbedBackends::of_the_host(threads),
    };
    let size = measure::Size::parse(arguments.get(3..).unwrap_or_default())?;
    measure::bench(Path::new(path), &options, size)
}
