//! A safetensors header: tensors cover the data or the file is refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use velox_engine::files::safetensors::Safetensors;

fuzz_target!(|bytes: &[u8]| {
    let Ok(parsed) = Safetensors::parse("fuzz.safetensors", bytes) else {
        return;
    };
    let covered: usize = parsed
        .tensors()
        .iter()
        .map(|tensor| tensor.range.len())
        .sum();
    assert_eq!(parsed.header_bytes() + covered, bytes.len());
});
