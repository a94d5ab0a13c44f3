//! Every block type against an independent decoder; `make_dequantise_fixtures.py` wrote the files.
//!
//! Equality is exact, bit for bit: both sides multiply f32 in the same order.

use std::path::Path;

use velox_kernels::block::BlockType;
use velox_kernels::error::OpError;
use velox_kernels::reference::dequantise_row;

struct Fixture {
    blocks: Vec<u8>,
    values: Vec<f32>,
}

fn fixture(block_type: BlockType) -> Fixture {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/dequantise")
        .join(format!("{}.bin", block_type.name()));
    let data = std::fs::read(path).expect("fixture is in the repository");
    let (count, rest) = data
        .split_first_chunk::<4>()
        .expect("fixture begins with a count");
    let count = usize::try_from(u32::from_le_bytes(*count)).expect("a count fits in memory");
    let (blocks, values) = rest.split_at(count * block_type.bytes());
    let values: Vec<f32> = values
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect();
    assert_eq!(values.len(), count * block_type.elements());
    Fixture {
        blocks: blocks.to_vec(),
        values,
    }
}

#[test]
fn every_type_equals_the_independent_decoder() {
    for block_type in BlockType::ALL {
        let Fixture { blocks, values } = fixture(block_type);
        let mut actual = vec![f32::NAN; values.len()];
        let _ = dequantise_row(block_type, &blocks, &mut actual).unwrap();
        for (index, (actual, expected)) in actual.iter().zip(&values).enumerate() {
            assert_eq!(
                actual.to_bits(),
                expected.to_bits(),
                "{} element {index}: {actual} instead of {expected}",
                block_type.name()
            );
        }
    }
}

#[test]
fn bytes_need_no_alignment() {
    for block_type in BlockType::ALL {
        let Fixture { blocks, values } = fixture(block_type);
        let mut moved = vec![0; blocks.len() + 1];
        moved[1..].copy_from_slice(&blocks);
        let mut actual = vec![f32::NAN; values.len()];
        let _ = dequantise_row(block_type, &moved[1..], &mut actual).unwrap();
        assert_eq!(actual, values, "{}", block_type.name());
    }
}

#[test]
fn a_row_of_another_length_is_refused() {
    for block_type in BlockType::ALL {
        let elements = block_type.elements();
        let bytes = vec![0; 3 * block_type.bytes()];
        let mut out = vec![0.0; 3 * elements];
        assert!(dequantise_row(block_type, &bytes, &mut out).is_ok());
        assert!(dequantise_row(block_type, &[], &mut []).is_ok());
        assert_eq!(
            dequantise_row(block_type, &bytes[1..], &mut out).err(),
            Some(OpError::Length {
                what: "bytes of the row",
                expected: bytes.len(),
                actual: bytes.len() - 1
            })
        );
        if elements > 1 {
            assert_eq!(
                dequantise_row(block_type, &bytes, &mut out[1..]).err(),
                Some(OpError::PartialRow {
                    what: "dequantised row",
                    row: elements,
                    actual: 3 * elements - 1
                })
            );
        }
    }
}
