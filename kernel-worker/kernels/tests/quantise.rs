//! The quantisers against independent ones; `make_quantise_fixtures.py` wrote the files. Equality is byte for byte.

use std::path::Path;

use velox_kernels::block::BlockType;
use velox_kernels::reference::quantise_row;

#[test]
fn every_block_equals_the_independent_quantiser_s() {
    for block_type in [BlockType::Q4_1, BlockType::Q5_1, BlockType::Q8_0] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures/quantise")
            .join(format!("{}.bin", block_type.name()));
        let data = std::fs::read(path).expect("fixture is in the repository");
        let (count, rest) = data
            .split_first_chunk::<4>()
            .expect("fixture begins with a count");
        let count = usize::try_from(u32::from_le_bytes(*count)).expect("a count fits in memory");
        let (values, blocks) = rest.split_at(count * block_type.elements() * 4);
        let values: Vec<f32> = values
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        assert!(count > 0 && blocks.len() == count * block_type.bytes());
        // All in one row, as a matrix has them.
        let mut quantised = vec![0; blocks.len()];
        let _ = quantise_row(block_type, &values, &mut quantised).unwrap();
        let pairs = quantised
            .chunks(block_type.bytes())
            .zip(blocks.chunks(block_type.bytes()));
        for (index, (actual, expected)) in pairs.enumerate() {
            assert_eq!(actual, expected, "{} block {index}", block_type.name());
        }
    }
}
