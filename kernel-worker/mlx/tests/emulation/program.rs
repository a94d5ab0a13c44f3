//! The emulated program: kernels as MLX would declare them, with the emulation in front, compiled by the C++ compiler.

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use velox_mlx::metal::{Allowed, Buffer, Holds, Kernel, PRELUDE, Value, Variant};

/// Headers of the emulation; a program is compiled again when one changes.
const HEADERS: [&str; 6] = [
    include_str!("../../emulation/emulation.h"),
    include_str!("../../emulation/fault.h"),
    include_str!("../../emulation/functions.h"),
    include_str!("../../emulation/memory.h"),
    include_str!("../../emulation/numbers.h"),
    include_str!("../../emulation/threads.h"),
];

const FLAGS: [&str; 8] = [
    "-std=c++20",
    "-O1",
    // The same on every machine: a product and a sum are rounded apart.
    "-ffp-contract=off",
    // What the checked types cannot see: arrays of one thread, shifts, conversions of floats, signed overflow.
    "-fsanitize=bounds,shift,float-cast-overflow,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
    // For contexts on macOS, which also calls them deprecated.
    "-D_XOPEN_SOURCE=700",
    "-D_DARWIN_C_SOURCE",
    "-Wno-deprecated-declarations",
];

/// Attributes of a thread that MLX declares if the source names them, as far as the emulation knows them.
const ATTRIBUTES: [(&str, &str); 5] = [
    ("uint3", "thread_position_in_grid"),
    ("uint3", "threadgroup_position_in_grid"),
    ("uint3", "thread_position_in_threadgroup"),
    ("uint", "thread_index_in_simdgroup"),
    ("uint", "simdgroup_index_in_threadgroup"),
];

/// Finds a C++ compiler: `$CXX` or the usual names.
pub(crate) fn compiler() -> Option<String> {
    let named = std::env::var("CXX").ok();
    let usual = ["c++", "g++", "clang++"].map(str::to_owned);
    named.into_iter().chain(usual).find(|compiler| {
        let asked = Command::new(compiler).arg("--version").output();
        asked.is_ok_and(|output| output.status.success())
    })
}

/// Writes and compiles the program, unless the same one is there from before; returns the executable.
pub(crate) fn compile(compiler: &str, folder: &Path, variants: &[Variant]) -> PathBuf {
    let text = text(variants);
    let mut hasher = DefaultHasher::new();
    (&text, HEADERS, FLAGS, compiler).hash(&mut hasher);
    let executable = folder.join(format!("emulation-{:016x}", hasher.finish()));
    if executable.exists() {
        return executable;
    }
    // Another run of the tests may do the same at the same time.
    let source = folder.join(format!("emulation-{}.cpp", std::process::id()));
    let unfinished = source.with_extension("unfinished");
    std::fs::write(&source, text).unwrap();
    let output = Command::new(compiler)
        .args(FLAGS)
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("emulation"))
        .arg("-o")
        .arg(&unfinished)
        .arg(&source)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{compiler} refuses {}:\n{}",
        source.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    std::fs::rename(&unfinished, &executable).unwrap();
    std::fs::remove_file(&source).unwrap();
    executable
}

/// The program's text: every kernel once, then a function per variant and the table of them.
fn text(variants: &[Variant]) -> String {
    let mut text = format!("#include \"emulation.h\"\n#line 1 \"prelude.metal\"\n{PRELUDE}\n");
    let mut kernels: Vec<&Kernel> = Vec::new();
    for variant in variants {
        if !kernels
            .iter()
            .any(|known| known.name == variant.kernel().name)
        {
            kernels.push(variant.kernel());
            text.push_str(&function(variant.kernel()));
        }
    }
    for (index, variant) in variants.iter().enumerate() {
        text.push_str(&call(index, variant));
    }
    text.push_str("static void (*const variants[])(emulation::Dispatch&) = {");
    for index in 0..variants.len() {
        write!(text, "variant_{index}, ").unwrap();
    }
    text.push_str("};\nint main() { return emulation::serve(variants); }\n");
    text
}

/// A kernel as MLX declares it, with checked types in place of pointers.
fn function(kernel: &Kernel) -> String {
    let constants: Vec<String> = kernel
        .constants
        .iter()
        .map(|constant| {
            let kind = match constant.allowed {
                Allowed::Elements(_) => "typename",
                Allowed::Integers(_) => "int",
                Allowed::Boolean => "bool",
            };
            format!("{kind} {}", constant.name)
        })
        .collect();
    let holds = |buffer: &Buffer| match buffer.holds {
        Holds::Fixed(element) => element.metal_name(),
        Holds::Constant(name) => name,
    };
    let inputs = kernel
        .inputs
        .iter()
        .map(|buffer| format!("emulation::Input<{}> {}", holds(buffer), buffer.name));
    let outputs = kernel
        .outputs
        .iter()
        .map(|buffer| format!("emulation::Output<{}> {}", holds(buffer), buffer.name));
    let attributes = attributes(kernel).map(|(kind, name)| format!("{kind} {name}"));
    let parameters: Vec<String> = inputs.chain(outputs).chain(attributes).collect();
    format!(
        "template <{}>\nstatic void {name}({}) {{\n#line 1 \"{name}\"\n{}\n}}\n",
        constants.join(", "),
        parameters.join(", "),
        kernel.source,
        name = kernel.name,
    )
}

/// Binds the buffers of a dispatch to a variant and runs it.
fn call(index: usize, variant: &Variant) -> String {
    let kernel = variant.kernel();
    let mut text = format!("static void variant_{index}(emulation::Dispatch& dispatch) {{\n");
    for (kind, buffers) in [("input", kernel.inputs), ("output", kernel.outputs)] {
        for (position, buffer) in buffers.iter().enumerate() {
            let element = variant.element(buffer).unwrap().metal_name();
            let name = buffer.name;
            writeln!(
                text,
                "  auto {name} = dispatch.{kind}<{element}>({position}, \"{name}\");"
            )
            .unwrap();
        }
    }
    let values: Vec<String> = variant
        .constants()
        .map(|(_, value)| match value {
            Value::Element(element) => element.metal_name().to_owned(),
            Value::Integer(integer) => integer.to_string(),
            Value::Boolean(boolean) => boolean.to_string(),
        })
        .collect();
    let buffers = kernel.inputs.iter().chain(kernel.outputs);
    let arguments: Vec<String> = buffers
        .map(|buffer| buffer.name.to_owned())
        .chain(attributes(kernel).map(|(_, name)| format!("thread.{name}")))
        .collect();
    writeln!(
        text,
        "  dispatch.run([&](const emulation::Thread& thread) {{ {}<{}>({}); }});\n}}",
        kernel.name,
        values.join(", "),
        arguments.join(", ")
    )
    .unwrap();
    text
}

fn attributes(kernel: &Kernel) -> impl Iterator<Item = (&'static str, &'static str)> {
    ATTRIBUTES
        .into_iter()
        .filter(|(_, name)| kernel.source.contains(name))
}
