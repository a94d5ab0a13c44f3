//! Activations as integers of 15 bits, 32 to a scale, each in two signed bytes.
//!
//! One byte is what others use, but then this model's greedy text departs from that of f32 activations where the best
//! two tokens are 0.2 apart in logits. The second byte costs a product more per weight, which a single token does not
//! feel: it waits for memory.

use super::simd::{Kernel, Simd};

/// Elements that share a scale.
pub(super) const BLOCK: usize = 32;

/// Steps from 0 to the largest magnitude: 127 in the high byte, 63 in the low one.
const STEPS: f32 = 16_319.0;

/// 32 activations: `x = scale * (128 * high + low)`, `high` within -127..=127 and `low` within -64..=63.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Block {
    /// High bytes, four to a word, in order.
    pub(super) high: [i32; BLOCK / 4],
    /// Low bytes.
    pub(super) low: [i32; BLOCK / 4],
    /// Largest magnitude / 16319.
    pub(super) scale: f32,
    /// `scale` times the sum of the integers, and of each half.
    pub(super) sum: f32,
    /// See `sum`.
    pub(super) half_sums: [f32; 2],
}

/// Quantises whole blocks. An input that is not finite gives a scale that is not finite either, so that it reaches
/// the product.
pub(super) struct Quantise<'a> {
    /// `[blocks, 32]`.
    pub(super) input: &'a [f32],
    /// `[blocks]`.
    pub(super) blocks: &'a mut [Block],
}

impl Kernel for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let (inputs, _) = self.input.as_chunks::<BLOCK>();
        for (input, block) in inputs.iter().zip(self.blocks) {
            quantise(input, block);
        }
    }
}

#[inline(always)]
fn quantise(input: &[f32; BLOCK], block: &mut Block) {
    const LANES: usize = 16;
    // Added to a number below 2^22, it leaves the nearest integer (ties to even) in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let mut largest = [0.0_f32; LANES];
    for part in input.as_chunks::<LANES>().0 {
        for (largest, value) in largest.iter_mut().zip(part) {
            let magnitude = value.abs();
            *largest = larger(*largest, magnitude);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            largest[lane] = larger(largest[lane], largest[lane + half]);
        }
        half /= 2;
    }
    let [largest, ..] = largest;
    // An input so small that the inverse overflows is 0.
    let inverse = STEPS / largest;
    let (scale, inverse) = if inverse.is_infinite() {
        (0.0, 0.0)
    } else {
        (largest / STEPS, inverse)
    };
    let (mut high, mut low) = ([0_u8; BLOCK], [0_u8; BLOCK]);
    let mut sums = [0_i32; 2];
    for (half, sum) in sums.iter_mut().enumerate() {
        for at in 16 * half..16 * half + 16 {
            let bits = (input[at] * inverse + ROUND).to_bits();
            // Only garbage made of what is not finite is ever cut here, and its scale is not finite either.
            let integer = bits.wrapping_sub(ROUND.to_bits()).cast_signed() << 8 >> 8;
            *sum += integer;
            [high[at], ..] = ((integer + 64) >> 7).to_le_bytes();
            [low[at], ..] = (((integer + 64) & 127) - 64).to_le_bytes();
        }
    }
    for (word, four) in block.high.iter_mut().zip(high.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(*four);
    }
    for (word, four) in block.low.iter_mut().zip(low.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(*four);
    }
    block.scale = scale;
    block.sum = scale * small(sums[0] + sums[1]);
    block.half_sums = sums.map(|sum| scale * small(sum));
}

/// The larger magnitude, or what is not a number.
#[inline(always)]
fn larger(left: f32, right: f32) -> f32 {
    if right > left || right.is_nan() {
        right
    } else {
        left
    }
}

/// Converts a sum, which is exact.
#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "at most 32 * 16319")]
fn small(sum: i32) -> f32 {
    sum as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantised(input: &[f32; BLOCK]) -> (Block, [f32; BLOCK]) {
        let mut block = Block::default();
        quantise(input, &mut block);
        let mut back = [0.0; BLOCK];
        let words = block.high.iter().zip(block.low);
        for (four, (high, low)) in back.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            let (high, low) = (high.to_le_bytes(), low.to_le_bytes());
            *four = std::array::from_fn(|at| {
                let (high, low) = (high[at].cast_signed(), low[at].cast_signed());
                assert!(high != -128 && (-64..=63).contains(&low));
                block.scale * (128.0 * f32::from(high) + f32::from(low))
            });
        }
        (block, back)
    }

    #[test]
    fn a_value_is_off_by_half_a_step_at_most() {
        let mut input = [0.0_f32; BLOCK];
        for (number, value) in (0_i8..).zip(&mut input) {
            *value = f32::from(number - 13) * 0.37;
        }
        let (block, back) = quantised(&input);
        let sum: f32 = back.iter().sum();
        assert!((block.sum - sum).abs() < 1e-4);
        let first: f32 = back[..16].iter().sum();
        assert!((block.half_sums[0] - first).abs() < 1e-4);
        for (value, back) in input.iter().zip(&back) {
            assert!((value - back).abs() <= 0.51 * block.scale);
        }
    }

    #[test]
    fn tiny_and_zero_blocks_are_zero() {
        for value in [0.0, -0.0, 1e-45, -1e-40] {
            let (block, back) = quantised(&[value; BLOCK]);
            assert_eq!((block.scale, block.sum), (0.0, 0.0));
            assert_eq!(back, [0.0; BLOCK]);
        }
    }

    #[test]
    fn what_is_not_finite_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 15, 16, 31] {
                let mut input = [1.0; BLOCK];
                input[place] = bad;
                let (block, _) = quantised(&input);
                assert!(!block.scale.is_finite(), "{bad} at {place}");
            }
        }
    }
}
