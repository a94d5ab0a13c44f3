//! Element by element: gate and residual.

use super::ReferenceDevice;
use crate::error::{OpError, check_length, row_count};
use crate::ran::Ran;

/// `out = silu(gate) * up`, where `silu(x) = x / (1 + exp(-x))`; all of one shape.
///
/// # Errors
/// [`OpError`] if the lengths differ.
pub fn silu_mul(
    gate: &[f32],
    up: &[f32],
    out: &mut [f32],
) -> Result<Ran<ReferenceDevice, ()>, OpError> {
    check_length("up", gate.len(), up.len())?;
    check_length("gated output", gate.len(), out.len())?;
    for ((result, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *result = gate / (1.0 + (-gate).exp()) * up;
    }
    Ok(Ran::new(ReferenceDevice(()), ()))
}

/// Adds `addend` `[N]` to every row of `target` `[T, N]`: a bias, or with `T` = 1 a residual.
///
/// # Errors
/// [`OpError`] if `target` is no whole number of rows.
pub fn add(target: &mut [f32], addend: &[f32]) -> Result<Ran<ReferenceDevice, ()>, OpError> {
    row_count("target of an addition", target.len(), addend.len())?;
    if !addend.is_empty() {
        for row in target.chunks_exact_mut(addend.len()) {
            for (sum, &value) in row.iter_mut().zip(addend) {
                *sum += value;
            }
        }
    }
    Ok(Ran::new(ReferenceDevice(()), ()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silu_follows_the_formula_at_its_extremes() {
        let gate = [0.0, 1.0, -1.0, 20.0, -20.0, 100.0, -100.0, 1e30, -1e30];
        let up = [2.0_f32; 9];
        let mut out = [f32::NAN; 9];
        let _ = silu_mul(&gate, &up, &mut out).unwrap();
        for (&x, &actual) in gate.iter().zip(&out) {
            let x = f64::from(x);
            let expected = 2.0 * x / (1.0 + (-x).exp());
            let error = (f64::from(actual) - expected).abs();
            assert!(error <= 1e-6 * expected.abs() + 1e-36, "{x}: {actual}");
        }
        assert!(silu_mul(&gate, &up[1..], &mut out).is_err());
        assert!(silu_mul(&gate, &up, &mut out[1..]).is_err());
        assert!(silu_mul(&[], &[], &mut []).is_ok());
    }

    #[test]
    fn a_bias_is_added_to_every_row() {
        let mut rows = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let _ = add(&mut rows, &[10.0, 20.0, 30.0]).unwrap();
        assert_eq!(rows, [11.0, 22.0, 33.0, 14.0, 25.0, 36.0]);
        assert!(add(&mut rows, &[1.0; 4]).is_err());
        assert!(add(&mut rows, &[]).is_err());
        assert!(add(&mut [], &[]).is_ok());
    }
}
