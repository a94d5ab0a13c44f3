//! Whatever happens to a file's bytes, reading ends with a model or an error.

use proptest::prelude::*;
use velox_engine::files;
use velox_engine::files::gguf::Gguf;

use crate::writer::{File, OnDisk};

/// What a parsed header promises.
fn assert_sound(gguf: &Gguf<'_>, file_bytes: usize) {
    let mut end = gguf.header_bytes();
    for tensor in gguf.tensors() {
        assert!(tensor.range.start >= end && tensor.range.end <= file_bytes);
        let elements: usize = tensor.shape.iter().product();
        assert!(elements > 0);
        let blocks = elements / tensor.block_type.elements();
        assert_eq!(tensor.range.len(), blocks * tensor.block_type.bytes());
        end = tensor.range.end;
    }
    for key in gguf.metadata().keys() {
        // Each reader must end with a value or an error for each type it may meet.
        let _ = gguf.metadata().unsigned(key);
        let _ = gguf.metadata().float(key);
        let _ = gguf.metadata().text(key);
        let _ = gguf.metadata().texts(key, 6);
        let _ = gguf.metadata().unsigned_array(key, 6);
        let _ = gguf.metadata().float_array(key, 6);
    }
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = File::tiny().bytes();
    for length in 0..bytes.len() {
        assert!(
            Gguf::parse("cut", &bytes[..length]).is_err(),
            "{length} bytes"
        );
    }
    assert_sound(&Gguf::parse("whole", &bytes).unwrap(), bytes.len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn changed_bytes_never_break_the_reader(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let file = File::tiny();
        let mut bytes = file.bytes();
        let header = file.header().len();
        for (place, value) in changes {
            bytes[place.index(header)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(gguf) = Gguf::parse("changed", &bytes) {
            assert_sound(&gguf, bytes.len());
        }
        let _ = files::open(&OnDisk::new(&bytes).path(), &mut |_| {});
    }

    #[test]
    fn exchanged_words_never_break_the_reader(
        place in any::<prop::sample::Index>(),
        word in prop_oneof![
            Just(0_u64), Just(u64::MAX), Just(1 << 63), Just(1 << 32), Just((1 << 32) - 1), any::<u64>(),
        ],
    ) {
        let file = File::tiny();
        let mut bytes = file.bytes();
        let at = place.index(file.header().len() - 8);
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        if let Ok(gguf) = Gguf::parse("changed", &bytes) {
            assert_sound(&gguf, bytes.len());
        }
        let _ = files::open(&OnDisk::new(&bytes).path(), &mut |_| {});
    }

    #[test]
    fn random_bytes_behind_the_magic_never_break_the_reader(
        version in 2_u32..4,
        tail in prop::collection::vec(any::<u8>(), 0..512),
    ) {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(tail);
        if let Ok(gguf) = Gguf::parse("random", &bytes) {
            assert_sound(&gguf, bytes.len());
        }
    }
}
