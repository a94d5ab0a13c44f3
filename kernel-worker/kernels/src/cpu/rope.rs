//! Rotary position embedding.

use super::{Cpu, CpuDevice};
use crate::error::OpError;
use crate::ran::Ran;
use crate::rotary::{Pairing, Rotation};

/// Positions that a table grows by at least.
const GROWTH: usize = 256;

/// Cosines and sines of the positions seen so far, computed in f64 and rounded once.
#[derive(Debug, Default)]
pub struct RopeTable {
    inverse_frequencies: Vec<f64>,
    attention_factor: f32,
    /// `[positions, pairs]`: cosine and sine.
    turns: Vec<[f32; 2]>,
}

impl RopeTable {
    /// Makes an empty table; factors as in [`Rotation`].
    #[must_use]
    pub fn new(inverse_frequencies: &[f64], attention_factor: f32) -> Self {
        Self {
            inverse_frequencies: inverse_frequencies.to_vec(),
            attention_factor,
            turns: Vec::new(),
        }
    }

    /// Makes sure that the table holds the positions up to `last`.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "a position is below 2^52; cosine and sine are rounded to f32 on purpose"
    )]
    fn grow(&mut self, last: usize) {
        let pairs = self.inverse_frequencies.len();
        let held = self.turns.len().checked_div(pairs).unwrap_or(usize::MAX);
        if last < held {
            return;
        }
        let factor = f64::from(self.attention_factor);
        for position in held..(last + 1).max(held + GROWTH) {
            let frequencies = self.inverse_frequencies.iter();
            self.turns.extend(frequencies.map(|frequency| {
                let (sine, cosine) = (position as f64 * frequency).sin_cos();
                [(cosine * factor) as f32, (sine * factor) as f32]
            }));
        }
    }

    /// Rotates `activations` `[T, heads*K]` in place, token `i` to `positions[i]`.
    ///
    /// # Errors
    /// [`OpError`] if lengths disagree or more than `K` elements are rotated.
    pub fn rotate(
        &mut self,
        activations: &mut [f32],
        positions: &[usize],
        (pairing, head_dim): (Pairing, usize),
    ) -> Result<Ran<CpuDevice, ()>, OpError> {
        let rotation = Rotation {
            pairing,
            inverse_frequencies: &self.inverse_frequencies,
            attention_factor: self.attention_factor,
            head_dim,
        };
        let heads = rotation.check(activations.len(), positions.len())?;
        if heads > 0 {
            self.grow(positions.iter().copied().max().unwrap_or(0));
            let pairs = self.inverse_frequencies.len();
            let tokens = activations.chunks_exact_mut(heads * head_dim);
            for (token, &position) in tokens.zip(positions) {
                let turns = &self.turns[position * pairs..(position + 1) * pairs];
                for head in token.chunks_exact_mut(head_dim) {
                    rotate_head(&mut head[..2 * pairs], turns, pairing);
                }
            }
        }
        Ok(Ran::new(CpuDevice(()), ()))
    }
}

/// Rotates `activations` `[T, heads*K]` in place, token `i` to `positions[i]`, with a table of its own.
///
/// # Errors
/// [`OpError`] if lengths disagree or more than `K` elements are rotated.
pub fn rope(
    _cpu: &Cpu,
    activations: &mut [f32],
    positions: &[usize],
    rotation: &Rotation<'_>,
) -> Result<Ran<CpuDevice, ()>, OpError> {
    let mut table = RopeTable::new(rotation.inverse_frequencies, rotation.attention_factor);
    table.rotate(
        activations,
        positions,
        (rotation.pairing, rotation.head_dim),
    )
}

fn rotate_head(head: &mut [f32], turns: &[[f32; 2]], pairing: Pairing) {
    let rotate = |x: &mut f32, y: &mut f32, [cosine, sine]: [f32; 2]| {
        (*x, *y) = (*x * cosine - *y * sine, *x * sine + *y * cosine);
    };
    match pairing {
        Pairing::HalfSplit => {
            let (first, second) = head.split_at_mut(turns.len());
            for ((x, y), turn) in first.iter_mut().zip(second).zip(turns) {
                rotate(x, y, *turn);
            }
        }
        Pairing::Interleaved => {
            for ([x, y], turn) in head.as_chunks_mut().0.iter_mut().zip(turns) {
                rotate(x, y, *turn);
            }
        }
    }
}
