//! Products, dequantisation and embedding.

use velox_kernels::block::BlockType;
use velox_kernels::cpu::{self, Activations, Product};
use velox_kernels::matrix::Matrix;
use velox_kernels::reference;

use crate::support::{Numbers, bits, matrix, on_every_set};

/// Rounding of f32 sums, relative to the largest weight of a row times the sum of the magnitudes of the input.
const ROUNDING: f64 = 4e-6;

/// Rows, columns in blocks, tokens. Rows: none, one, odd, a tile, a band and more; columns beyond a panel.
const SHAPES: [(usize, usize, usize); 9] = [
    (0, 1, 2),
    (1, 1, 1),
    (3, 2, 0),
    (5, 0, 2),
    (7, 3, 3),
    (16, 2, 5),
    (33, 1, 8),
    (67, 2, 13),
    (18, 9, 6),
];

fn columns(block_type: BlockType, blocks: usize) -> usize {
    match block_type.elements() {
        // A length that no vector divides.
        1 => blocks * 23,
        32 => blocks * 32 * if blocks == 9 { 11 } else { 1 },
        elements => blocks * elements,
    }
}

fn dequantised(matrix: &Matrix, row: usize) -> Vec<f32> {
    let mut weights = vec![0.0; matrix.columns()];
    if !weights.is_empty() {
        let _ =
            reference::dequantise_row(matrix.block_type(), matrix.row(row), &mut weights).unwrap();
    }
    weights
}

/// Rounds 32 activations to 16319 steps of the largest; returns the size of a step too.
fn rounded(block: &[f32]) -> (Vec<f32>, f32) {
    let largest = block
        .iter()
        .fold(0.0_f32, |most, value| most.max(value.abs()));
    let step = largest / 16_319.0;
    let inverse = 16_319.0 / largest;
    let quants = block
        .iter()
        .map(|value| step * (value * inverse).round_ties_even());
    (quants.collect(), step)
}

fn dot(left: &[f32], right: &[f32]) -> f64 {
    left.iter()
        .zip(right)
        .map(|(&left, &right)| f64::from(left) * f64::from(right))
        .sum()
}

/// Against the oracle's weights and rounded activations within [`ROUNDING`]; against the activations as they are
/// within half a step times the magnitudes of the weights more.
fn check_product(matrix: &Matrix, input: &[f32], out: &[f32], name: &str) {
    let quantised = matrix.block_type().elements() > 1;
    for row in 0..matrix.rows() {
        let weights = dequantised(matrix, row);
        let largest = weights
            .iter()
            .fold(0.0_f32, |most, weight| most.max(weight.abs()));
        let inputs = input.chunks_exact(matrix.columns().max(1));
        for (token, exact_input) in inputs.enumerate() {
            let actual = f64::from(out[token * matrix.rows() + row]);
            let (mut used, mut error) = (Vec::new(), 0.0);
            if quantised {
                for (input, weights) in exact_input.chunks(32).zip(weights.chunks(32)) {
                    let (rounded, step) = rounded(input);
                    used.extend(rounded);
                    let magnitude: f32 = weights.iter().map(|weight| weight.abs()).sum();
                    error += 0.5 * f64::from(step) * f64::from(magnitude);
                }
            } else {
                used.extend_from_slice(exact_input);
            }
            let magnitude: f32 = used.iter().map(|value| value.abs()).sum();
            let rounding = ROUNDING * f64::from(largest) * f64::from(magnitude) + 1e-30;
            let tight = dot(&weights, &used);
            let what = format!("{name}, row {row}, token {token}");
            assert!(
                (actual - tight).abs() <= rounding,
                "{what}: {actual}, not {tight}"
            );
            let exact = dot(&weights, exact_input);
            assert!(
                (actual - exact).abs() <= 1.001 * error + rounding,
                "{what}: {actual}, not {exact}"
            );
        }
    }
}

fn check_type(block_type: BlockType) {
    for (seed, (rows, blocks, tokens)) in SHAPES.into_iter().enumerate() {
        let columns = columns(block_type, blocks);
        let matrix = matrix(block_type, rows, columns, seed);
        let input = Numbers::new(seed + 100).values(tokens * columns);
        let mut first: Option<(&str, Vec<f32>)> = None;
        on_every_set(|cpu| {
            let mut out = vec![f32::NAN; if columns == 0 { 0 } else { tokens * rows }];
            let _ = cpu::mat_mul(cpu, &input, &matrix, &mut out).unwrap();
            let name = format!("{} on {}", block_type.name(), cpu.kernels().name());
            check_product(&matrix, &input, &out, &name);
        });
        // One set: the same bits for every number of threads and of tokens.
        for kernels in cpu::CpuKernelSet::available() {
            for threads in [1, 4] {
                let threads = std::num::NonZeroUsize::new(threads).unwrap();
                let cpu = cpu::Cpu::new(kernels, threads).unwrap();
                for step in [1, 3, 8, 13] {
                    let mut out = vec![f32::NAN; if columns == 0 { 0 } else { tokens * rows }];
                    let inputs = input.chunks(step * columns.max(1));
                    for (input, out) in inputs.zip(out.chunks_mut((step * rows).max(1))) {
                        let _ = cpu::mat_mul(&cpu, input, &matrix, out).unwrap();
                    }
                    match &first {
                        Some((name, first)) if *name == kernels.name() => {
                            assert_eq!(bits(first), bits(&out), "{name}, steps of {step}");
                        }
                        _ => first = Some((kernels.name(), out)),
                    }
                }
            }
        }
    }
}

macro_rules! product_cases {
    ($($name:ident: $block_type:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            check_type(BlockType::$block_type);
        })*
    };
}

product_cases! {
    f32_products: F32,
    f16_products: F16,
    bf16_products: Bf16,
    q4_0_products: Q4_0,
    q4_1_products: Q4_1,
    q5_0_products: Q5_0,
    q5_1_products: Q5_1,
    q8_0_products: Q8_0,
    q2_k_products: Q2K,
    q3_k_products: Q3K,
    q4_k_products: Q4K,
    q5_k_products: Q5K,
    q6_k_products: Q6K,
    iq4_nl_products: Iq4Nl,
    q8_affine_products: Q8Affine,
}

/// Offsets are added to scaled quants in f32, where the oracle may subtract integers first: 2 units in the last place
/// of the largest part.
#[test]
fn rows_decode_as_the_oracle_does() {
    on_every_set(|cpu| {
        for block_type in BlockType::ALL {
            for blocks in [0, 1, 3] {
                let columns = columns(block_type, blocks);
                let matrix = matrix(block_type, 2, columns, blocks);
                let mut actual = vec![f32::NAN; columns];
                let _ = cpu::dequantise_row(cpu, block_type, matrix.row(1), &mut actual).unwrap();
                let expected = dequantised(&matrix, 1);
                let largest = expected
                    .iter()
                    .fold(0.0_f32, |most, value| most.max(value.abs()));
                for (actual, expected) in actual.iter().zip(&expected) {
                    let name = block_type.name();
                    assert!(
                        (actual - expected).abs() <= 5e-7 * largest,
                        "{name}: {actual}, not {expected}"
                    );
                }
            }
        }
        let mut out = [0.0; 33];
        assert!(cpu::dequantise_row(cpu, BlockType::Q8_0, &[0; 34], &mut out).is_err());
        assert!(cpu::dequantise_row(cpu, BlockType::Q8_0, &[0; 33], &mut out[..32]).is_err());
    });
}

#[test]
fn embedding_takes_rows_of_the_table() {
    on_every_set(|cpu| {
        let table = matrix(BlockType::Q8_0, 5, 64, 1);
        let mut out = vec![f32::NAN; 3 * 64];
        let _ = cpu::embed(cpu, &table, &[4, 0, 4], &mut out).unwrap();
        assert_eq!(out[..64], dequantised(&table, 4));
        assert_eq!(out[64..128], dequantised(&table, 0));
        assert!(cpu::embed(cpu, &table, &[5], &mut out[..64]).is_err());
        assert!(cpu::embed(cpu, &table, &[1], &mut out).is_err());
        assert!(cpu::embed(cpu, &table, &[], &mut []).is_ok());
    });
}

#[test]
fn grouped_products_equal_single_ones() {
    on_every_set(|cpu| {
        let (a, b) = (
            matrix(BlockType::Q4_1, 40, 256, 1),
            matrix(BlockType::Q6K, 17, 256, 2),
        );
        let c = matrix(BlockType::F16, 9, 256, 3);
        let input = Numbers::new(4).values(6 * 256);
        let mut grouped = [vec![0.0; 6 * 40], vec![0.0; 6 * 17], vec![0.0; 6 * 9]];
        let types = [&a, &b, &c].map(|matrix| matrix.block_type());
        let activations = Activations::new(cpu, &input, 256, types).unwrap();
        let [first, second, third] = &mut grouped;
        let products = [(&a, first), (&b, second), (&c, third)];
        let _ = cpu::multiply(
            cpu,
            &activations,
            products.map(|(matrix, out)| Product { matrix, out }),
        )
        .unwrap();
        for (matrix, grouped) in [a, b, c].iter().zip(&grouped) {
            let mut single = vec![0.0; grouped.len()];
            let _ = cpu::mat_mul(cpu, &input, matrix, &mut single).unwrap();
            assert_eq!(bits(grouped), bits(&single));
        }
    });
}

#[test]
fn what_is_not_finite_reaches_the_product() {
    on_every_set(|cpu| {
        for block_type in BlockType::ALL {
            for bad in [f32::NAN, f32::INFINITY] {
                let matrix = matrix(block_type, 3, 256, 1);
                let mut input = vec![1.0; 512];
                input[300] = bad;
                let mut out = vec![0.0; 6];
                let _ = cpu::mat_mul(cpu, &input, &matrix, &mut out).unwrap();
                assert!(out[..3].iter().all(|value| value.is_finite()));
                assert!(
                    out[3..].iter().all(|value| !value.is_finite()),
                    "{} {bad} on {} {out:?}",
                    block_type.name(),
                    cpu.kernels().name()
                );
            }
        }
    });
}

#[test]
fn shapes_that_disagree_are_refused() {
    on_every_set(|cpu| {
        for block_type in [BlockType::F32, BlockType::Q4_1] {
            let matrix = matrix(block_type, 3, 64, 1);
            assert!(cpu::mat_mul(cpu, &[0.0; 65], &matrix, &mut [0.0; 3]).is_err());
            assert!(cpu::mat_mul(cpu, &[0.0; 64], &matrix, &mut [0.0; 4]).is_err());
            let input = [0.0; 64];
            let wrong = Activations::new(cpu, &input, 32, [block_type]).unwrap();
            let out = &mut [0.0; 6];
            assert!(
                cpu::multiply(
                    cpu,
                    &wrong,
                    [Product {
                        matrix: &matrix,
                        out
                    }]
                )
                .is_err()
            );
            let unprepared = Activations::new(cpu, &input, 64, []).unwrap();
            let out = &mut [0.0; 3];
            let result = cpu::multiply(
                cpu,
                &unprepared,
                [Product {
                    matrix: &matrix,
                    out,
                }],
            );
            assert_eq!(result.is_err(), block_type == BlockType::Q4_1);
        }
    });
}
