//! A GGUF header: parsing and every typed reader end with a value or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use velox_engine::files::gguf::{Gguf, Value};

fuzz_target!(|bytes: &[u8]| {
    let Ok(gguf) = Gguf::parse("fuzz.gguf", bytes) else {
        return;
    };
    let mut end = gguf.header_bytes();
    for tensor in gguf.tensors() {
        assert!(tensor.range.start >= end && tensor.range.end <= bytes.len());
        end = tensor.range.end;
    }
    let metadata = gguf.metadata();
    for key in metadata.keys() {
        let length = match metadata.get(key) {
            Some(Value::Array(array)) => array.len(),
            _ => 0,
        };
        let _ = metadata.unsigned(key);
        let _ = metadata.float(key);
        let _ = metadata.bool(key);
        let _ = metadata.text(key);
        let _ = metadata.texts(key, length);
        let _ = metadata.unsigned_array(key, length);
        let _ = metadata.float_array(key, length);
    }
});
