use proptest::prelude::*;

use super::*;

/// Unpacks as MLX documents its layout, written apart from the packing.
fn unpack(affine: &AffineMatrix, columns: usize) -> Vec<f32> {
    let bits = affine.layout().bits();
    let (scales, biases) = (floats(affine.scales()), floats(affine.biases()));
    let mut values = Vec::new();
    for row in affine.packed().chunks(columns * bits / 8) {
        for column in 0..columns {
            let q: u32 = (0..bits)
                .map(|bit| {
                    let at = column * bits + bit;
                    u32::from(row[at / 8] >> (at % 8) & 1) << bit
                })
                .sum();
            let group = values.len() / GROUP;
            #[expect(clippy::cast_precision_loss, reason = "at most 8 bits")]
            let q = q as f32;
            values.push(scales[group] * q + biases[group]);
        }
    }
    values
}

fn floats(matrix: &Matrix) -> &[f32] {
    bytemuck::cast_slice(matrix.bytes())
}

fn reference_values(matrix: &Matrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows() * matrix.columns()];
    let _ = reference::dequantise_row(matrix.block_type(), matrix.bytes(), &mut values).unwrap();
    values
}

/// Overwrites the halves of a block by tame numbers: a random pattern may be no number at all.
fn tame(block_type: BlockType, bytes: &mut [u8], halves: &[f32]) {
    let offsets: &[usize] = match block_type {
        BlockType::F32 | BlockType::F16 | BlockType::Bf16 => &[],
        BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 | BlockType::Iq4Nl => &[0],
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
        BlockType::Q8Affine => &[0, 4],
        BlockType::Q2K => &[80, 82],
        BlockType::Q3K => &[108],
        BlockType::Q6K => &[208],
    };
    for block in bytes.chunks_mut(block_type.bytes()) {
        for (&offset, &half) in offsets.iter().zip(halves) {
            if block_type == BlockType::Q8Affine {
                block[offset..offset + 4].copy_from_slice(&half.to_le_bytes());
            } else {
                block[offset..offset + 2].copy_from_slice(&f16::from_f32(half).to_le_bytes());
            }
        }
    }
}

proptest! {
    #[test]
    fn every_type_keeps_its_values(
        random in proptest::collection::vec(any::<u8>(), 3 * 2 * 256 * 4),
        halves in [-2.0_f32..2.0, -2.0_f32..2.0],
    ) {
        let (rows, columns) = (3, 512);
        for block_type in BlockType::ALL {
            let length = rows * block_type.row_bytes(columns).unwrap();
            let mut bytes = random[..length].to_vec();
            tame(block_type, &mut bytes, &halves);
            let matrix = Matrix::new(block_type, rows, columns, ByteSource::copy_of(&bytes)).unwrap();
            let Some(affine) = affine(&matrix).unwrap() else {
                prop_assert!(bits_of(block_type).is_none());
                continue;
            };
            prop_assert_eq!(affine.packed().len(), rows * columns * affine.layout().bits() / 8);
            let expected = reference_values(&matrix);
            for (group, (got, want)) in unpack(&affine, columns).chunks(GROUP).zip(expected.chunks(GROUP)).enumerate() {
                let spread = 255.0 * floats(affine.scales())[group].abs();
                let tolerance = match block_type {
                    // Half a step of the rounding, and the additions' own.
                    BlockType::Q2K | BlockType::Q3K | BlockType::Q6K => spread * 0.502 / 255.0 + 1e-6,
                    // Sums of an exact product and an exact bias: the same additions.
                    _ => 0.0,
                };
                for (got, want) in got.iter().zip(want) {
                    prop_assert!((got - want).abs() <= tolerance, "{block_type:?}: {got} and {want}");
                }
            }
        }
    }
}

#[test]
fn equal_values_round_to_themselves() {
    let group = groups::rounded(&[0.75; GROUP]);
    assert_eq!((group.scale, group.bias, group.q), (0.0, 0.75, [0; GROUP]));
}
