use proptest::prelude::*;

use super::*;
use crate::block::BlockType;
use crate::buffer::ByteSource;
use crate::reference::dequantise_row;

/// Numbers in [-1, 1) that look random; the same for the same seed.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let high = u16::try_from(state >> 16).unwrap();
        f32::from(high) / 32768.0 - 1.0
    })
    .take(count)
    .collect()
}

fn multiply(input: &[f32], matrix: &Matrix, threads: usize, tokens: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; tokens * matrix.rows()];
    let _ = mat_mul(input, matrix, threads, &mut out).unwrap();
    out
}

/// Asserts `|actual - exact| <= columns * epsilon * sum(|products|)`, the bound of any order of f32 additions.
fn assert_close(input: &[f32], weights: &[f32], actual: f32) {
    let products = || {
        let pairs = input.iter().zip(weights);
        pairs.map(|(&x, &w)| f64::from(x) * f64::from(w))
    };
    let exact: f64 = products().sum();
    let size: f64 = products().map(f64::abs).sum();
    let terms = f64::from(u32::try_from(input.len()).unwrap());
    let bound = terms * f64::from(f32::EPSILON) * size;
    assert!(
        (f64::from(actual) - exact).abs() <= bound,
        "{actual} instead of {exact}"
    );
}

proptest! {
    #[test]
    fn equals_the_formula(
        tokens in 0_usize..6,
        rows in 0_usize..8,
        columns in 0_usize..70,
        seed: u32,
    ) {
        let input = numbers(tokens * columns, seed);
        let weights = numbers(rows * columns, !seed);
        let matrix = Matrix::from_f32(rows, columns, &weights).unwrap();
        let out = multiply(&input, &matrix, 2, tokens);
        for token in 0..tokens {
            for row in 0..rows {
                let input = &input[token * columns..(token + 1) * columns];
                let weights = &weights[row * columns..(row + 1) * columns];
                assert_close(input, weights, out[token * rows + row]);
            }
        }
    }
}

#[test]
fn every_type_is_dequantised_first() {
    for block_type in BlockType::ALL {
        let columns = 2 * block_type.elements();
        let row_bytes = block_type.row_bytes(columns).unwrap();
        // 0x11 everywhere: small nibbles, and f16 scales that are small normal numbers.
        let bytes = vec![0x11; 3 * row_bytes];
        let matrix = Matrix::new(block_type, 3, columns, ByteSource::copy_of(&bytes)).unwrap();
        let mut weights = vec![0.0; columns];
        let _ = dequantise_row(block_type, matrix.row(0), &mut weights).unwrap();
        let input = numbers(columns, 5);
        for value in multiply(&input, &matrix, 1, 1) {
            assert_close(&input, &weights, value);
        }
    }
}

#[test]
fn bits_do_not_depend_on_batch_or_threads() {
    // Enough work that threads are really started.
    let (tokens, rows, columns) = (37, 401, 515);
    assert!(tokens * rows * columns > 3 * MINIMUM_PER_THREAD);
    let input = numbers(tokens * columns, 1);
    let matrix = Matrix::from_f32(rows, columns, &numbers(rows * columns, 2)).unwrap();
    let whole = multiply(&input, &matrix, 1, tokens);
    for threads in [0, 2, 3, 8] {
        assert_eq!(multiply(&input, &matrix, threads, tokens), whole);
    }
    for token in 0..tokens {
        let own = multiply(
            &input[token * columns..(token + 1) * columns],
            &matrix,
            3,
            1,
        );
        assert_eq!(own, whole[token * rows..(token + 1) * rows]);
    }
}

#[test]
fn one_token_on_threads_gives_the_same_bits() {
    let (rows, columns) = (2049, 2050);
    assert!(rows * columns > 2 * MINIMUM_PER_THREAD);
    let input = numbers(columns, 1);
    let matrix = Matrix::from_f32(rows, columns, &numbers(rows * columns, 2)).unwrap();
    assert_eq!(
        multiply(&input, &matrix, 1, 1),
        multiply(&input, &matrix, 2, 1)
    );
}

#[test]
fn shapes_are_checked() {
    let matrix = Matrix::from_f32(2, 3, &[1.0; 6]).unwrap();
    let mut out = [0.0; 4];
    assert!(mat_mul(&[0.0; 6], &matrix, 1, &mut out).is_ok());
    assert!(mat_mul(&[0.0; 5], &matrix, 1, &mut out).is_err());
    assert!(mat_mul(&[0.0; 6], &matrix, 1, &mut out[1..]).is_err());
    assert!(mat_mul(&[0.0; 9], &matrix, 1, &mut out).is_err());
    let no_columns = Matrix::from_f32(2, 0, &[]).unwrap();
    assert!(mat_mul(&[0.0], &no_columns, 1, &mut out).is_err());
    out.fill(f32::NAN);
    assert!(mat_mul(&[], &no_columns, 1, &mut out).is_ok());
    assert_eq!(out, [0.0; 4]);
}
