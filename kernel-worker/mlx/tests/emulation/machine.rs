//! Runs dispatches in the emulated program.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use bytemuck::Pod;
use half::{bf16, f16};
use velox_mlx::metal::{Element, Variant};

use crate::program;

/// Status with which the emulation ends a kernel that did something wrong.
const FAULT_STATUS: i32 = 3;

/// The compiled program.
#[derive(Debug)]
pub(crate) struct Emulation {
    executable: PathBuf,
    variants: Vec<Variant>,
}

/// Where a case begins: `None`, loudly, where there is no C++ compiler.
pub(crate) fn emulation(test: &str) -> Option<&'static Emulation> {
    static EMULATION: OnceLock<Option<Emulation>> = OnceLock::new();
    let emulation = EMULATION.get_or_init(|| {
        let compiler = program::compiler()?;
        let variants = crate::variants();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        Some(Emulation {
            executable: program::compile(&compiler, folder, &variants),
            variants,
        })
    });
    if emulation.is_none() {
        assert!(
            std::env::var_os("VELOX_REQUIRE_TOOLS").is_none_or(|value| value != "1"),
            "{test}: no C++ compiler"
        );
        eprintln!(
            "SKIPPED: {test}: no C++ compiler (c++, g++, clang++ or $CXX), Metal kernels were not emulated"
        );
    }
    emulation.as_ref()
}

impl Emulation {
    /// Runs a kernel that must do nothing wrong; returns its outputs of the given lengths in bytes.
    pub(crate) fn run<const OUTPUTS: usize>(
        &self,
        variant: &Variant,
        items: [u32; 3],
        inputs: &[&[u8]],
        output_bytes: [usize; OUTPUTS],
    ) -> [Vec<u8>; OUTPUTS] {
        self.attempt(variant, items, inputs, output_bytes)
            .unwrap_or_else(|fault| {
                let constants: Vec<_> = variant.constants().collect();
                let name = variant.kernel().name;
                panic!("{name} {constants:?} of {items:?}: {fault}")
            })
    }

    /// As [`Self::run`]; returns what the emulation reports if the kernel does something wrong.
    pub(crate) fn attempt<const OUTPUTS: usize>(
        &self,
        variant: &Variant,
        items: [u32; 3],
        inputs: &[&[u8]],
        output_bytes: [usize; OUTPUTS],
    ) -> Result<[Vec<u8>; OUTPUTS], String> {
        let kernel = variant.kernel();
        assert_eq!(inputs.len(), kernel.inputs.len(), "{}", kernel.name);
        assert_eq!(OUTPUTS, kernel.outputs.len(), "{}", kernel.name);
        let Some(launch) = variant.launch(items).unwrap() else {
            // Nothing is dispatched, so nothing may be expected.
            assert_eq!(output_bytes, [0; OUTPUTS], "{} of {items:?}", kernel.name);
            return Ok(output_bytes.map(|_| Vec::new()));
        };
        let index = self.variants.iter().position(|known| known == variant);
        let index = u32::try_from(index.expect("the variant is in variants()")).unwrap();
        let mut request = index.to_le_bytes().to_vec();
        for extent in launch.grid.into_iter().chain(launch.threadgroup) {
            request.extend(extent.to_le_bytes());
        }
        request.extend(u32::try_from(inputs.len()).unwrap().to_le_bytes());
        for input in inputs {
            request.extend(u64::try_from(input.len()).unwrap().to_le_bytes());
            request.extend_from_slice(input);
        }
        request.extend(u32::try_from(OUTPUTS).unwrap().to_le_bytes());
        for bytes in output_bytes {
            request.extend(u64::try_from(bytes).unwrap().to_le_bytes());
        }
        let answer = self.exchange(&request)?;
        assert_eq!(answer.len(), output_bytes.iter().sum::<usize>());
        let mut rest = answer.as_slice();
        Ok(output_bytes.map(|bytes| {
            let (output, others) = rest.split_at(bytes);
            rest = others;
            output.to_vec()
        }))
    }

    fn exchange(&self, request: &[u8]) -> Result<Vec<u8>, String> {
        let mut child = Command::new(&self.executable)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The program reads all of it before it writes anything.
        child.stdin.take().unwrap().write_all(request).unwrap();
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        match (output.status.code(), output.status.signal()) {
            (Some(0), _) => Ok(output.stdout),
            (Some(FAULT_STATUS), _) => Err(told),
            // SIGILL or, on Arm, SIGTRAP: a trap that the compiler put in.
            (_, Some(4 | 5)) => Err("fault: undefined behaviour of C++".to_owned()),
            _ => panic!("the emulation ended with {}: {told}", output.status),
        }
    }
}

/// Numbers as elements of a type.
pub(crate) fn encode(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::F16 => bytes(&values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>()),
        Element::Bf16 => bytes(
            &values
                .iter()
                .map(|&v| bf16::from_f32(v))
                .collect::<Vec<_>>(),
        ),
        Element::F32 => bytes(values),
        other => panic!("no floating-point type: {other:?}"),
    }
}

/// Undoes [`encode`].
pub(crate) fn decode(element: Element, bytes: &[u8]) -> Vec<f32> {
    match element {
        Element::F16 => elements::<f16>(bytes).iter().map(|v| v.to_f32()).collect(),
        Element::Bf16 => elements::<bf16>(bytes).iter().map(|v| v.to_f32()).collect(),
        Element::F32 => elements(bytes),
        other => panic!("no floating-point type: {other:?}"),
    }
}

/// What the type makes of the values.
pub(crate) fn stored(element: Element, values: &[f32]) -> Vec<f32> {
    decode(element, &encode(element, values))
}

/// Half of the spacing of a type's numbers near 1: what storing a number adds to its relative error at most.
pub(crate) fn half_step(element: Element) -> f64 {
    match element {
        Element::F16 => 2.0_f64.powi(-11),
        Element::Bf16 => 2.0_f64.powi(-8),
        _ => 2.0_f64.powi(-24),
    }
}

/// The elements' bytes.
pub(crate) fn bytes<T: Pod>(elements: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(elements).to_vec()
}

/// The bytes' elements.
pub(crate) fn elements<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes
        .chunks_exact(size_of::<T>())
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

/// Numbers from -1 to 1 that look random and are the same on every run.
pub(crate) fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let [.., low, high] = state.to_le_bytes();
            f32::from(u16::from_le_bytes([low, high])) / 32767.5 - 1.0
        })
        .collect()
}
