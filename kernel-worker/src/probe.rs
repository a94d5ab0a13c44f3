//! Runs every op once on this machine before anything is promised.

use std::num::NonZeroUsize;
use std::time::Instant;

use velox_engine::offer::{Offer, Offers};
use velox_engine::probe::{ProbeOutcome, ProbedBackends, sample_matrix};
use velox_kernels::block::BlockType;
use velox_kernels::cpu::CpuKernelSet;
use velox_kernels::label::BackendLabel;
use velox_kernels::ran::Device as _;
use velox_proto::op::OpId;
use velox_proto::v1;

use crate::convert::{op_of, wire_backend};
use crate::kernel_set::{CpuKernels, KernelSet, ReferenceKernels};

/// Shapes of the kernel cases: odd, and one block of the widest type.
const TOKENS: usize = 3;
const ROWS: usize = 5;
const COLUMNS: usize = 256;

/// What the probes found.
#[derive(Debug, Clone)]
pub struct ProbeReport {
    /// For people: the processor.
    pub device: String,
    /// Kernel set that the dispatcher chose.
    pub kernel: String,
    /// Every label, with the reason where it is missing.
    pub backends: Vec<v1::BackendCapability>,
    /// One entry per op, type and backend that this build has.
    pub ops: Vec<v1::OpCapability>,
    /// The same for the loader, which does not probe again.
    pub probed: ProbedBackends,
}

/// Runs all probes of this executable.
#[must_use]
pub fn run(threads: NonZeroUsize, offers: Offers) -> ProbeReport {
    let mut ops = Vec::new();
    let mut started = Instant::now();
    let probed = ProbedBackends::of(offers, threads.get(), &mut |label, case, outcome| {
        let op = op_of(case.stage);
        let outcome = outcome.as_ref().map_err(ToString::to_string).copied();
        ops.push(entry(op, case.dtype(), label, &outcome, started));
        started = Instant::now();
    });
    probe_kernels(&mut ops, &ReferenceKernels { threads: 1 });
    match CpuKernels::new(threads) {
        Ok(kernels) => probe_kernels(&mut ops, &kernels),
        Err(error) => tracing::warn!(%error, "SIMD kernels cannot be probed"),
    }
    let device = device_name();
    let backends = BackendLabel::AUTO_ORDER
        .into_iter()
        .map(|label| {
            let missing = probed.why_not(label, &[]);
            let reason = missing.unwrap_or_else(|| withdrawn(&ops, label));
            let offer = probed.offers().find(label).ok();
            let offer = offer.filter(|_there| reason.is_empty());
            v1::BackendCapability {
                device: offer.map_or_else(String::new, |offer| {
                    offer.device().unwrap_or_else(|| device.clone())
                }),
                kernel: offer.map_or_else(String::new, Offer::kernel),
                backend: wire_backend(label).into(),
                available: reason.is_empty(),
                reason,
                batch_invariant: probed.is_invariant_on(label),
            }
        })
        .collect();
    ProbeReport {
        device,
        kernel: CpuKernelSet::detect().name().to_owned(),
        backends,
        ops,
        probed,
    }
}

/// Why a backend cannot be used: a stage that no type passes. Empty if every stage has one.
fn withdrawn(ops: &[v1::OpCapability], label: BackendLabel) -> String {
    let wire = i32::from(wire_backend(label));
    // A stage without a case is another backend's.
    let mut of_stage = velox_engine::backend::Stage::ALL.iter().map(|&stage| {
        let name = op_of(stage).name();
        let mut cases = ops
            .iter()
            .filter(|op| op.backend == wire && op.op == name)
            .peekable();
        let passed = cases.peek().is_none() || cases.any(|case| case.available);
        (name, passed)
    });
    of_stage
        .find(|&(_, passed)| !passed)
        .map_or_else(String::new, |(name, _)| {
            format!("no case of {name} came out right")
        })
}

fn probe_kernels<K: KernelSet>(ops: &mut Vec<v1::OpCapability>, kernels: &K) {
    let oracle = ReferenceKernels { threads: 1 };
    let of_types = [OpId::MatMul, OpId::Dequantize]
        .into_iter()
        .flat_map(|op| BlockType::ALL.map(|block_type| (op, block_type)));
    let plain = [OpId::RmsNorm, OpId::Softmax].map(|op| (op, BlockType::F32));
    for (op, block_type) in of_types.chain(plain) {
        let started = Instant::now();
        let outcome = kernel_values(kernels, op, block_type).and_then(|got| {
            compare(
                &got,
                &kernel_values(&oracle, op, block_type)?,
                tolerance(op, block_type),
            )
        });
        ops.push(entry(
            op,
            block_type.name(),
            K::Device::LABEL,
            &outcome,
            started,
        ));
    }
}

/// Part of the largest magnitude that a kernel may be off: rounding of activations to 8 bits, or an order of additions.
fn tolerance(op: OpId, block_type: BlockType) -> f64 {
    match (op, block_type) {
        (OpId::MatMul, BlockType::F32 | BlockType::F16 | BlockType::Bf16) => 1e-4,
        (OpId::MatMul, _) => 2e-2,
        _ => 1e-5,
    }
}

/// Runs a kernel on the tensors of its case.
fn kernel_values<K: KernelSet>(
    kernels: &K,
    op: OpId,
    block_type: BlockType,
) -> Result<Vec<f32>, String> {
    let matrix = sample_matrix(block_type, ROWS, COLUMNS);
    let mut out = values(TOKENS * COLUMNS);
    let input = out.clone();
    let ran = match op {
        OpId::MatMul => {
            out = vec![0.0; TOKENS * ROWS];
            kernels.mat_mul(&input, &matrix, &mut out)
        }
        OpId::Dequantize => {
            out = vec![0.0; ROWS * COLUMNS];
            kernels.dequantise(&matrix, &mut out)
        }
        OpId::RmsNorm => kernels.rms_norm(&input, &values(COLUMNS), 1e-5, &mut out),
        OpId::Softmax => kernels.softmax(&mut out, COLUMNS),
        _ => return Err(format!("{op} is no kernel")),
    };
    ran.map(|ran| ran.map(|()| out).into_value())
        .map_err(|error| error.to_string())
}

/// Values of a bounded, uneven wave.
fn values(count: usize) -> Vec<f32> {
    (0..count)
        .map(|index| (f32::from(u16::try_from(index % 997).unwrap_or(0)) * 0.37).sin())
        .collect()
}

fn compare(got: &[f32], expected: &[f32], relative: f64) -> Result<ProbeOutcome, String> {
    if got.len() != expected.len() || got.iter().any(|value| !value.is_finite()) {
        return Err("the probe gave values that are no numbers".to_owned());
    }
    let difference = |(got, expected): (&f32, &f32)| f64::from((got - expected).abs());
    let magnitude = expected
        .iter()
        .map(|value| f64::from(value.abs()))
        .fold(0.0, f64::max);
    Ok(ProbeOutcome {
        max_error: got.iter().zip(expected).map(difference).fold(0.0, f64::max),
        tolerance: relative * magnitude,
    })
}

fn entry(
    op: OpId,
    dtype: &str,
    label: BackendLabel,
    outcome: &Result<ProbeOutcome, String>,
    started: Instant,
) -> v1::OpCapability {
    let reason = match outcome {
        Err(error) => error.clone(),
        Ok(outcome) => outcome.fault().unwrap_or_default(),
    };
    v1::OpCapability {
        op: op.name().to_owned(),
        dtype: dtype.to_owned(),
        backend: wire_backend(label).into(),
        available: reason.is_empty(),
        reason,
        // The reference has nothing to be compared with: its case shows only that it runs.
        max_error: match label {
            BackendLabel::Reference => None,
            _ => outcome.as_ref().ok().map(|outcome| outcome.max_error),
        },
        probe_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
    }
}

/// Name of the processor, as the system gives it.
fn device_name() -> String {
    let from_cpuinfo = std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        });
    from_cpuinfo.unwrap_or_else(|| format!("{} CPU", std::env::consts::ARCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_offers_cpu_and_reference_and_says_why_not_the_others() {
        let report = run(NonZeroUsize::MIN, Offers::of_the_host("no MLX here"));
        for backend in &report.backends {
            let built = matches!(backend.backend(), v1::Backend::Cpu | v1::Backend::Reference);
            assert_eq!(backend.available, built, "{backend:?}");
            assert_eq!(backend.reason.is_empty(), built, "{backend:?}");
        }
        let failed: Vec<_> = report.ops.iter().filter(|op| !op.available).collect();
        assert!(failed.is_empty(), "{failed:?}");
        assert!(
            report.ops.iter().any(|op| op.max_error > Some(0.0)),
            "CPU was compared with nothing"
        );
    }

    #[test]
    fn an_op_whose_probe_is_wrong_is_withdrawn_with_the_reason() {
        let wrong = compare(&[1.0, 2.0], &[1.0, 3.0], 1e-2);
        let entry = entry(
            OpId::MatMul,
            "Q4_1",
            BackendLabel::Cpu,
            &wrong,
            Instant::now(),
        );
        assert!(
            !entry.available && entry.reason.contains("off by 1.000e0"),
            "{entry:?}"
        );
    }
}
