//! Product of activations and a stored matrix.

use super::dequantise::dequantise;
use super::{ReferenceDevice, dot, worthwhile_threads};
use crate::error::{OpError, check_length, product, row_count};
use crate::matrix::Matrix;
use crate::ran::Ran;

/// Multiplications per thread below which starting it costs more than it saves.
const MINIMUM_PER_THREAD: usize = 1 << 21;

/// `out` `[T, out]` = `input` `[T, in]` times the transposed `matrix` `[out, in]`, on up to `threads` threads.
///
/// Each element is one dot product over the dequantised row, summed in lanes: the same bits for any `T` and any
/// number of threads.
///
/// # Errors
/// [`OpError`] if the shapes disagree.
pub fn mat_mul(
    input: &[f32],
    matrix: &Matrix,
    threads: usize,
    out: &mut [f32],
) -> Result<Ran<ReferenceDevice, ()>, OpError> {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    let tokens = if columns > 0 {
        row_count("input of the product", input.len(), columns)?
    } else {
        check_length("input of the product", 0, input.len())?;
        row_count("output of the product", out.len(), rows)?
    };
    let elements = product("output of the product", &[tokens, rows])?;
    check_length("output of the product", elements, out.len())?;
    if elements == 0 {
        return Ok(Ran::new(ReferenceDevice(()), ()));
    }
    let multiplications = elements.saturating_mul(columns);
    let threads = worthwhile_threads(threads, multiplications, MINIMUM_PER_THREAD);
    if tokens == 1 {
        split_rows(input, matrix, threads, out);
    } else {
        let mut transposed = vec![0.0; elements];
        split_rows(input, matrix, threads, &mut transposed);
        for (token, result) in out.chunks_exact_mut(rows).enumerate() {
            for (value, products) in result.iter_mut().zip(transposed.chunks_exact(tokens)) {
                *value = products[token];
            }
        }
    }
    Ok(Ran::new(ReferenceDevice(()), ()))
}

/// Computes `[out, T]`, a contiguous run of rows per thread.
fn split_rows(input: &[f32], matrix: &Matrix, threads: usize, transposed: &mut [f32]) {
    let tokens = transposed.len() / matrix.rows();
    let rows_per_thread = matrix.rows().div_ceil(threads);
    let mut parts = transposed.chunks_mut(rows_per_thread * tokens).enumerate();
    let own = parts.next();
    std::thread::scope(|scope| {
        for (part, products) in parts {
            scope.spawn(move || {
                multiply_rows(input, matrix, tokens, part * rows_per_thread, products)
            });
        }
        if let Some((_, products)) = own {
            multiply_rows(input, matrix, tokens, 0, products);
        }
    });
}

/// Computes `products` `[rows from first_row, T]`; each row is dequantised once.
fn multiply_rows(
    input: &[f32],
    matrix: &Matrix,
    tokens: usize,
    first_row: usize,
    products: &mut [f32],
) {
    let columns = matrix.columns();
    let mut weights = vec![0.0; columns];
    for (offset, row) in products.chunks_exact_mut(tokens).enumerate() {
        dequantise(
            matrix.block_type(),
            matrix.row(first_row + offset),
            &mut weights,
        );
        for (token, value) in row.iter_mut().enumerate() {
            *value = dot(&input[token * columns..(token + 1) * columns], &weights);
        }
    }
}

#[cfg(test)]
mod tests;
