//! Speed of the engine on a device of MLX, in this process.
//!
//! `bench_mlx MODEL [auto|metal|mlx-cuda|mlx-cpu|cpu|reference] [THREADS [RUNS [PROMPT [OUTPUT]]]]`, as the bench of
//! velox-engine.

#[path = "../../engine/examples/bench/measure.rs"]
mod measure;

use std::error::Error;
use std::path::Path;

use velox_engine::load::LoadOptions;
use velox_engine::probe::ProbedBackends;
use velox_kernels::label::BackendLabel;
use velox_mlx::offers;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |place: usize| arguments.get(place).map(String::as_str);
    let usage = "usage: bench_mlx MODEL [auto|metal|mlx-cuda|mlx-cpu|cpu|reference] [THREADS [RUNS [PROMPT [OUTPUT]]]]";
    let path = argument(0).ok_or(usage)?;
    let backend = match argument(1).unwrap_or("auto") {
        "auto" => None,
        "metal" => Some(BackendLabel::Metal),
        "mlx-cuda" => Some(BackendLabel::MlxCuda),
        "mlx-cpu" => Some(BackendLabel::MlxCpu),
        "cpu" => Some(BackendLabel::Cpu),
        "reference" => Some(BackendLabel::Reference),
        _ => return Err(usage.into()),
    };
    let threads: usize = argument(2).unwrap_or("2").parse()?;
    let offers = offers::linked().offers;
    let options = LoadOptions {
        backend,
        threads,
        cache_limit_bytes: 1 << 30,
        quantise: None,
        max_context: None,
        probed: ProbedBackends::of(offers, threads, &mut |_, _, _| {}),
    };
    let size = measure::Size::parse(arguments.get(3..).unwrap_or_default())?;
    measure::bench(Path::new(path), &options, size)
}
