//! The safetensors container.

use proptest::prelude::*;
use velox_engine::files::safetensors::Safetensors;

/// A file with this header and as many zeros behind it.
fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

/// Pads with spaces as writers do, so that the data begins on a multiple of 8.
fn padded(header: &str) -> String {
    format!("{header:<width$}", width = header.len().next_multiple_of(8))
}

fn error(header: &str, data_bytes: usize) -> String {
    let bytes = file(&padded(header), data_bytes);
    Safetensors::parse("m", &bytes)
        .expect_err(header)
        .to_string()
}

const GOOD: &str = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;

#[test]
fn tensors_come_in_order_of_their_place() {
    let bytes = file(&padded(GOOD), 16);
    let parsed = Safetensors::parse("m", &bytes).unwrap();
    let names: Vec<_> = parsed
        .tensors()
        .iter()
        .map(|tensor| tensor.name.as_str())
        .collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(parsed.tensors()[1].shape, [2, 3]);
    assert_eq!(parsed.tensors()[1].range.end, bytes.len());
}

#[test]
fn headers_that_lie_are_refused() {
    let one = |fields: &str| format!("{{\"a\":{{{fields}}}}}");
    let cases = [
        (one(r#""dtype":"I8","shape":[4],"data_offsets":[0,4]"#), 4, "tensor a of type I8 is not supported"),
        (one(r#""dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]"#), 4, "F8_E4M3"),
        (one(r#""dtype":"F32","shape":[2],"data_offsets":[0,4]"#), 4, "its shape needs 8 bytes"),
        (one(r#""dtype":"F32","shape":[1],"data_offsets":[4,0]"#), 4, "its shape needs 4 bytes"),
        (one(r#""dtype":"F32","shape":[0],"data_offsets":[0,0]"#), 0, "dimension of 0"),
        (
            one(r#""dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]"#),
            4,
            "overflows",
        ),
        (
            one(r#""dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,18446744073709551616]"#),
            4,
            "tensor table",
        ),
        (
            one(r#""dtype":"F32","shape":[1],"data_offsets":[18446744073709551611,18446744073709551615]"#),
            4,
            "overflows",
        ),
        (one(r#""dtype":"F32","shape":[-1],"data_offsets":[0,4]"#), 4, "tensor table"),
        (one(r#""dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]"#), 4, "9 dimensions"),
        (one(r#""dtype":"F32","shape":[1],"data_offsets":[4,8]"#), 8, "leaves a hole"),
        (one(r#""dtype":"F32","shape":[1],"data_offsets":[0,4]"#), 8, "tensors need 4 bytes of data, the file has 8"),
        (one(r#""dtype":"F32","shape":[2],"data_offsets":[0,8]"#), 4, "tensors need 8 bytes of data, the file has 4"),
        (one(r#""dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1"#), 4, "unknown field"),
        (one(r#""dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]"#), 4, "duplicate field"),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#
                .to_owned(),
            8,
            "a occurs twice",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#
                .to_owned(),
            12,
            "tensor b begins at data offset 4, the one before ends at 8: it overlaps",
        ),
        (r#"{"__metadata__":{"a":1}}"#.to_owned(), 0, "tensor table"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.to_owned(), 0, "__metadata__ occurs twice"),
        ("[]".to_owned(), 0, "an object of tensors by name"),
        ("{} {}".to_owned(), 0, "trailing"),
    ];
    for (header, data_bytes, words) in cases {
        let error = error(&header, data_bytes);
        assert!(error.starts_with("m: "), "{error}");
        assert!(
            error.contains(words),
            "{header}: \"{error}\" lacks \"{words}\""
        );
    }
}

#[test]
fn a_header_length_beyond_file_or_limit_is_refused() {
    for (length, words) in [
        (u64::MAX, "limit is 100000000"),
        (100_000_001, "limit is 100000000"),
        (1000, "header has 1000 bytes, 2 are left"),
    ] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(b"{}");
        let error = Safetensors::parse("m", &bytes).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = file(&padded(GOOD), 16);
    for length in 0..bytes.len() {
        assert!(
            Safetensors::parse("cut", &bytes[..length]).is_err(),
            "{length} bytes"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn changed_bytes_never_break_the_reader(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = file(&padded(GOOD), 16);
        for (place, value) in changes {
            let at = place.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(parsed) = Safetensors::parse("changed", &bytes) {
            let covered: usize = parsed.tensors().iter().map(|tensor| tensor.range.len()).sum();
            prop_assert_eq!(parsed.header_bytes() + covered, bytes.len());
        }
    }
}
