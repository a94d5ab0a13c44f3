use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::reference;

/// Packs as the layout is documented, bit by bit.
fn pack(bits: usize, codes: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0_u8; (codes.len() * bits).div_ceil(8)];
    for (element, code) in codes.iter().enumerate() {
        for bit in 0..bits {
            let place = element * bits + bit;
            bytes[place / 8] |= (code >> bit & 1) << (place % 8);
        }
    }
    bytes
}

fn float_bytes(block_type: BlockType, values: &[f32]) -> ByteSource {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| match block_type {
            BlockType::F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
            BlockType::Bf16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        })
        .collect();
    ByteSource::copy_of(&bytes)
}

fn floats(block_type: BlockType, rows: usize, values: &[f32]) -> Matrix {
    let columns = values.len() / rows;
    Matrix::new(block_type, rows, columns, float_bytes(block_type, values)).unwrap()
}

/// Matrix of such scales and biases, and its weights as the rule gives them.
fn sample(
    layout: AffineLayout,
    block_type: BlockType,
    rows: usize,
    random: &[u8],
    scale: f32,
) -> (AffineMatrix, Vec<f32>) {
    let columns = 2 * layout.group();
    let mut random = random.iter().cycle().copied();
    let mut next = || random.next().unwrap();
    let limit = u8::MAX >> (8 - layout.bits());
    let codes: Vec<u8> = (0..rows * columns).map(|_| next() & limit).collect();
    let mut numbers = |scale: f32| -> Vec<f32> {
        (0..rows * 2)
            .map(|_| (f32::from(next()) - 127.5) * scale)
            .collect()
    };
    let scales = floats(block_type, rows, &numbers(scale));
    let biases = floats(block_type, rows, &numbers(8.0 * scale));
    let (mut of_groups, mut bias_of_groups) = (vec![0.0; rows * 2], vec![0.0; rows * 2]);
    let _ = reference::dequantise_row(block_type, scales.bytes(), &mut of_groups).unwrap();
    let _ = reference::dequantise_row(block_type, biases.bytes(), &mut bias_of_groups).unwrap();
    let weights = codes
        .iter()
        .enumerate()
        .map(|(element, code)| {
            let group = element / layout.group();
            of_groups[group] * f32::from(*code) + bias_of_groups[group]
        })
        .collect();
    let packed = ByteSource::copy_of(&pack(layout.bits(), &codes));
    let matrix = AffineMatrix::new(layout, packed, scales, biases).unwrap();
    (matrix, weights)
}

fn weights(matrix: &Matrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows() * matrix.columns()];
    let _ = reference::dequantise_row(matrix.block_type(), matrix.bytes(), &mut values).unwrap();
    values
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn every_layout_keeps_its_weights(
        random in proptest::collection::vec(any::<u8>(), 997),
        threads in 1_usize..4,
    ) {
        // More rows than one thread takes.
        let rows = 2 * 64 + 3;
        for layout in AffineLayout::all() {
            for block_type in [BlockType::F32, BlockType::F16, BlockType::Bf16] {
                let (matrix, expected) = sample(layout, block_type, rows, &random, 1e-3);
                prop_assert_eq!((matrix.rows(), matrix.columns()), (rows, 2 * layout.group()));
                let blocks = matrix.to_blocks(threads).unwrap();
                prop_assert_eq!(weights(&blocks), expected, "{} {:?}", layout.name(), block_type);
            }
        }
    }
}

#[test]
fn what_a_matrix_becomes() {
    let random: Vec<u8> = (0..=255).collect();
    let becomes = |bits, block_type, scale| {
        let layout = AffineLayout::new(bits, 64).unwrap();
        let (matrix, _) = sample(layout, block_type, 3, &random, scale);
        matrix.to_blocks(1).unwrap().block_type()
    };
    for bits in [2, 3, 4] {
        assert_eq!(becomes(bits, BlockType::F16, 1e-3), BlockType::Q4_1);
    }
    assert_eq!(becomes(5, BlockType::Bf16, 1e-3), BlockType::Q5_1);
    for bits in [6, 8] {
        assert_eq!(becomes(bits, BlockType::F16, 1e-3), BlockType::Q8Affine);
    }
    // Scales that f16 would round: in digits, below its range, above it.
    for (block_type, scale) in [
        (BlockType::F32, 1e-3),
        (BlockType::Bf16, 1e-9),
        (BlockType::Bf16, 1e6),
    ] {
        assert_eq!(becomes(4, block_type, scale), BlockType::Q8Affine);
    }
}

#[test]
fn a_scale_that_is_no_number_stays_one() {
    let layout = AffineLayout::new(4, 32).unwrap();
    let packed = ByteSource::copy_of(&[0x11; 16]);
    let scales = Matrix::from_f32(1, 1, &[f32::NAN]).unwrap();
    let biases = Matrix::from_f32(1, 1, &[0.0]).unwrap();
    let matrix = AffineMatrix::new(layout, packed, scales, biases).unwrap();
    let blocks = matrix.to_blocks(1).unwrap();
    assert!(weights(&blocks).iter().all(|weight| weight.is_nan()));
}

#[test]
fn parts_of_different_shapes_are_refused() {
    let layout = AffineLayout::new(3, 32).unwrap();
    let one = || Matrix::from_f32(2, 1, &[0.0; 2]).unwrap();
    let packed = |length| ByteSource::copy_of(&vec![0; length]);
    let refusal = |packed, scales, biases| {
        AffineMatrix::new(layout, packed, scales, biases)
            .unwrap_err()
            .to_string()
    };
    assert!(AffineMatrix::new(layout, packed(24), one(), one()).is_ok());
    assert_eq!(
        refusal(packed(23), one(), one()),
        "matrix has 23 bytes, its shape needs 24"
    );
    let wide = Matrix::from_f32(1, 2, &[0.0; 2]).unwrap();
    assert_eq!(
        refusal(packed(24), one(), wide),
        "biases have shape [1, 2], scales [2, 1]"
    );
    let blocks = Matrix::new(BlockType::Q4_0, 2, 32, packed(36)).unwrap();
    assert_eq!(
        refusal(packed(24), one(), blocks),
        "scales and biases must be F32, F16 or BF16, not Q4_0"
    );
}

#[test]
fn layouts_are_those_of_mlx() {
    assert_eq!(AffineLayout::all().count(), 18);
    for layout in AffineLayout::all() {
        let (bits, group) = (layout.bits(), layout.group());
        assert_eq!(AffineLayout::new(bits, group), Some(layout));
        assert_eq!(layout.name(), format!("MLX_AFFINE_{bits}_G{group}"));
        assert_eq!(layout.row_words(2 * group), Some(2 * group * bits / 32));
        assert_eq!(layout.row_words(group + 16), None);
    }
    for (bits, group) in [(1, 64), (7, 64), (16, 64), (4, 16), (4, 256), (0, 0)] {
        assert_eq!(AffineLayout::new(bits, group), None);
    }
}
