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
