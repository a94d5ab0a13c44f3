//! Files that break the container's rules.

use crate::writer::{File, Tensor, Value, string};
use crate::{assert_refused, open};

/// Bytes of an array: element type, count, body.
fn array(element: u32, count: u64, body: &[u8]) -> Value {
    let mut bytes = element.to_le_bytes().to_vec();
    bytes.extend(count.to_le_bytes());
    bytes.extend(body);
    Value::Raw(9, bytes)
}

fn nested(depth: usize) -> Value {
    let mut bytes = Vec::new();
    for _ in 1..depth {
        bytes.extend(9_u32.to_le_bytes());
        bytes.extend(1_u64.to_le_bytes());
    }
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(1_u64.to_le_bytes());
    bytes.push(0);
    Value::Raw(9, bytes)
}

#[test]
fn the_tiny_file_itself_is_good() {
    assert_eq!(open(&File::tiny()).unwrap().spec.n_layers, 1);
    let mut version2 = File::tiny();
    version2.version = 2;
    open(&version2).unwrap();
}

#[test]
fn headers_that_break_the_format() {
    assert_refused(&[
        ("magic", |file| file.magic = *b"GGML", &["GGUF"]),
        ("version 1", |file| file.version = 1, &["version 1"]),
        ("version 4", |file| file.version = 4, &["version 4"]),
        (
            "big endian",
            |file| file.version = 3_u32.swap_bytes(),
            &["big-endian"],
        ),
        (
            "tensors without end",
            |file| file.tensor_count = Some(u64::MAX),
            &["tensor count is 18446744073709551615", "limit"],
        ),
        (
            "more tensors than bytes",
            |file| file.tensor_count = Some(1 << 15),
            &["tensor count is 32768", "bytes left"],
        ),
        (
            "pairs without end",
            |file| file.pair_count = Some(1 << 60),
            &["metadata count", "limit"],
        ),
        (
            "fewer pairs than there are",
            |file| file.pair_count = Some(1),
            &["model.gguf"],
        ),
        (
            "value type",
            |file| file.set("x", Value::Raw(13, vec![0])),
            &["x has value type 13", "limit is 12"],
        ),
        (
            "bool of 2",
            |file| file.set("x", Value::Raw(7, vec![2])),
            &["x is a bool that is not 0 or 1"],
        ),
        (
            "string without end",
            |file| file.set("x", Value::Raw(8, u64::MAX.to_le_bytes().to_vec())),
            &["18446744073709551615", "limit"],
        ),
        (
            "array without end",
            |file| file.set("x", array(4, 1 << 61, &[])),
            &["length of array x", "limit"],
        ),
        (
            "array of strings without end",
            |file| file.set("x", array(8, 1 << 40, &string(b"a"))),
            &["length of array x", "limit"],
        ),
        (
            "array of empty arrays without end",
            |file| file.set("x", array(9, 1 << 40, &[0; 64])),
            &["length of array x", "limit"],
        ),
        (
            "array of an unknown type",
            |file| file.set("x", array(77, 0, &[])),
            &["value type 77"],
        ),
        (
            "nesting",
            |file| file.set("x", nested(65)),
            &["deeper", "64"],
        ),
        (
            "key twice",
            |file| {
                let pair = file.pairs[1].clone();
                file.pairs.push(pair);
            },
            &["llama.context_length occurs twice"],
        ),
        (
            "empty key",
            |file| file.set("", Value::U32(1)),
            &["key is empty"],
        ),
        (
            "key too long",
            |file| file.set(&"k".repeat(65_536), Value::U32(1)),
            &["65536 bytes", "limit is 65535"],
        ),
    ]);
}

#[test]
fn the_deepest_allowed_nesting_is_read() {
    let mut file = File::tiny();
    file.set("x", nested(64));
    open(&file).unwrap();
}

#[test]
fn alignments_that_make_no_sense() {
    assert_refused(&[
        (
            "alignment 0",
            |file| file.set("general.alignment", Value::U32(0)),
            &["general.alignment is 0"],
        ),
        (
            "alignment 48",
            |file| file.set("general.alignment", Value::U32(48)),
            &["general.alignment is 48", "power of two"],
        ),
        (
            "alignment 4",
            |file| file.set("general.alignment", Value::U32(4)),
            &["general.alignment is 4"],
        ),
        (
            "alignment 2^31",
            |file| file.set("general.alignment", Value::U32(1 << 31)),
            &["general.alignment is 2147483648"],
        ),
        (
            "alignment of the wrong type",
            |file| file.set("general.alignment", Value::text("32")),
            &["general.alignment must be an unsigned integer", "string"],
        ),
        (
            "offset off the alignment",
            |file| file.tensor("output_norm.weight").offset += 4,
            &["output_norm.weight has offset", "alignment 32"],
        ),
    ]);
}

#[test]
fn tensor_tables_that_lie() {
    assert_refused(&[
        (
            "no dimension",
            |file| file.tensor("output_norm.weight").dims.clear(),
            &["output_norm.weight has 0 dimensions"],
        ),
        (
            "five dimensions",
            |file| file.tensor("output_norm.weight").dims = vec![8, 1, 1, 1, 1],
            &["5 dimensions", "1 to 4"],
        ),
        (
            "zero dimension",
            |file| file.tensor("output_norm.weight").dims = vec![0],
            &["output_norm.weight has a dimension of 0"],
        ),
        (
            "zero in a later dimension",
            |file| file.tensor("token_embd.weight").dims = vec![8, 0],
            &["token_embd.weight has a dimension of 0"],
        ),
        (
            "elements overflow",
            |file| file.tensor("token_embd.weight").dims = vec![1 << 32, 1 << 32],
            &["token_embd.weight overflows"],
        ),
        (
            "bytes overflow",
            |file| file.tensor("token_embd.weight").dims = vec![1 << 62],
            &["token_embd.weight overflows"],
        ),
        (
            "overflow over four dimensions",
            |file| file.tensor("token_embd.weight").dims = vec![1 << 16; 4],
            &["token_embd.weight overflows"],
        ),
        (
            "larger than the file",
            |file| file.tensor("token_embd.weight").dims = vec![8, 1 << 20],
            &["token_embd.weight", "ends outside the file"],
        ),
        (
            "offset behind the file",
            |file| file.tensor("token_embd.weight").offset = 1 << 40,
            &["ends outside the file"],
        ),
        (
            "offset that overflows",
            |file| file.tensor("token_embd.weight").offset = u64::MAX - 31,
            &["ends outside the file"],
        ),
        (
            "overlap",
            |file| file.tensor("output_norm.weight").offset = 32,
            &["token_embd.weight and output_norm.weight overlap"],
        ),
        (
            "name twice",
            |file| file.add_f32("output_norm.weight", vec![8]),
            &["output_norm.weight occurs twice"],
        ),
        (
            "name too long",
            |file| file.add_f32(&"n".repeat(65), vec![8]),
            &["65 bytes", "limit is 64"],
        ),
        (
            "row of half a block",
            |file| file.tensor("token_embd.weight").kind = 3,
            &["rows of 8 elements", "Q4_1 blocks of 32"],
        ),
        (
            "removed type",
            |file| file.tensor("token_embd.weight").kind = 4,
            &["token_embd.weight of type Q4_2", "removed"],
        ),
        (
            "type with a codebook",
            |file| file.tensor("token_embd.weight").kind = 16,
            &["IQ2_XXS is not supported"],
        ),
        (
            "type from the future",
            |file| file.tensor("token_embd.weight").kind = 4096,
            &["type 4096 (unknown)"],
        ),
    ]);
}

#[test]
fn tensors_behind_a_hole_are_read() {
    let mut file = File::tiny();
    file.data.extend([0; 4096]);
    file.tensors
        .retain(|tensor| tensor.name != "output_norm.weight");
    file.add_f32("output_norm.weight", vec![8]);
    open(&file).unwrap();
}

#[test]
fn a_tensor_that_ends_with_the_file_is_read_and_one_byte_less_is_not() {
    let mut file = File::tiny();
    open(&file).unwrap();
    file.data.pop();
    let error = open(&file).unwrap_err().to_string();
    assert!(error.contains("output_norm.weight of 32 bytes"), "{error}");
}

#[test]
fn a_table_without_tensors_is_no_model() {
    let mut file = File::tiny();
    file.tensors = Vec::<Tensor>::new();
    let error = open(&file).unwrap_err().to_string();
    assert!(error.contains("token_embd.weight is missing"), "{error}");
}
