//! Rotary position embedding.

use super::ReferenceDevice;
use crate::error::OpError;
use crate::ran::Ran;
use crate::rotary::{Pairing, Rotation};

/// Rotates `activations` `[T, heads*K]` in place, token `i` to `positions[i]`.
///
/// Angles are f64; cosine and sine are rounded to f32 after the attention factor.
///
/// # Errors
/// [`OpError`] if lengths disagree or more than `K` elements are rotated.
pub fn rope(
    activations: &mut [f32],
    positions: &[usize],
    rotation: &Rotation<'_>,
) -> Result<Ran<ReferenceDevice, ()>, OpError> {
    let heads = rotation.check(activations.len(), positions.len())?;
    if heads > 0 {
        let tokens = activations.chunks_exact_mut(heads * rotation.head_dim);
        for (token, &position) in tokens.zip(positions) {
            rotate_token(token, position, rotation);
        }
    }
    Ok(Ran::new(ReferenceDevice(()), ()))
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a position is below 2^52; cosine and sine are rounded to f32 on purpose"
)]
fn rotate_token(token: &mut [f32], position: usize, rotation: &Rotation<'_>) {
    let pairs = rotation.inverse_frequencies.len();
    let factor = f64::from(rotation.attention_factor);
    for (pair, inverse_frequency) in rotation.inverse_frequencies.iter().enumerate() {
        let angle = position as f64 * inverse_frequency;
        let cosine = (angle.cos() * factor) as f32;
        let sine = (angle.sin() * factor) as f32;
        let (first, second) = match rotation.pairing {
            Pairing::HalfSplit => (pair, pair + pairs),
            Pairing::Interleaved => (2 * pair, 2 * pair + 1),
        };
        for head in token.chunks_exact_mut(rotation.head_dim) {
            let (x, y) = (head[first], head[second]);
            head[first] = x * cosine - y * sine;
            head[second] = x * sine + y * cosine;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD_DIM: usize = 10;
    const HEADS: usize = 3;
    const POSITIONS: [usize; 4] = [0, 1, 7, 100_003];

    fn rotation(inverse_frequencies: &[f64], pairing: Pairing) -> Rotation<'_> {
        Rotation {
            pairing,
            inverse_frequencies,
            attention_factor: 1.0,
            head_dim: HEAD_DIM,
        }
    }

    fn activations() -> Vec<f32> {
        (0_u8..120).map(|n| (f32::from(n) * 0.37).sin()).collect()
    }

    fn rotated(rotation: &Rotation<'_>) -> Vec<f32> {
        let mut activations = activations();
        let _ = rope(&mut activations, &POSITIONS, rotation).unwrap();
        activations
    }

    #[test]
    fn both_pairings_equal_the_complex_product() {
        // Two pairs fewer than half the head: the rest stays.
        let frequencies = [1.0, 0.1, 0.003];
        for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
            let input = activations();
            let actual = rotated(&rotation(&frequencies, pairing));
            for (row, head) in input.chunks_exact(HEAD_DIM).enumerate() {
                let out = &actual[row * HEAD_DIM..(row + 1) * HEAD_DIM];
                let position = f64::from(u32::try_from(POSITIONS[row / HEADS]).unwrap());
                for (pair, frequency) in frequencies.iter().enumerate() {
                    let (i, j) = match pairing {
                        Pairing::HalfSplit => (pair, pair + 3),
                        Pairing::Interleaved => (2 * pair, 2 * pair + 1),
                    };
                    let (x, y) = (f64::from(head[i]), f64::from(head[j]));
                    let (sine, cosine) = (position * frequency).sin_cos();
                    let expected = [x * cosine - y * sine, x * sine + y * cosine];
                    assert!((f64::from(out[i]) - expected[0]).abs() < 3e-7);
                    assert!((f64::from(out[j]) - expected[1]).abs() < 3e-7);
                }
                assert_eq!(out[6..], head[6..]);
            }
        }
    }

    #[test]
    fn position_0_changes_nothing_and_the_factor_scales() {
        let frequencies = [1.0, 0.5, 0.25, 0.125, 0.0625];
        let plain = rotation(&frequencies, Pairing::HalfSplit);
        assert_eq!(rotated(&plain)[..30], activations()[..30]);
        let doubled = Rotation {
            attention_factor: 2.0,
            ..plain
        };
        let expected: Vec<f32> = rotated(&plain).iter().map(|x| 2.0 * x).collect();
        assert_eq!(rotated(&doubled), expected);
    }

    #[test]
    fn shapes_are_checked() {
        let six = [1.0; 6];
        let too_wide = rotation(&six, Pairing::HalfSplit);
        assert_eq!(
            rope(&mut [], &[], &too_wide).err(),
            Some(OpError::AboveLimit {
                what: "rotated elements",
                limit: 10,
                value: 12
            })
        );
        let fitting = rotation(&six[..5], Pairing::HalfSplit);
        assert!(rope(&mut [0.0; 15], &[0], &fitting).is_err());
        assert!(rope(&mut [0.0; 30], &[0, 1], &fitting).is_err());
        assert!(rope(&mut [0.0; 30], &[], &fitting).is_err());
        assert!(rope(&mut [], &[], &fitting).is_ok());
        assert!(rope(&mut [0.0; 30], &[0], &fitting).is_ok());
    }
}
