//! Frequencies of the rotary embedding and the rules that stretch them.

use std::f64::consts::TAU;

/// How a model trained for short contexts was stretched to longer ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum RopeScaling {
    /// Not at all.
    None,
    /// Positions are divided by the factor.
    Linear { factor: f64 },
    /// Long wavelengths are divided, short ones kept, those between blended.
    Llama3 {
        factor: f64,
        low_frequency_factor: f64,
        high_frequency_factor: f64,
        original_context: f64,
    },
    /// Blend by rotations over the original context, and a factor on cosine and sine.
    Yarn(Yarn),
}

/// Constants of YaRN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Yarn {
    pub(super) factor: f64,
    pub(super) original_context: f64,
    pub(super) beta_fast: f64,
    pub(super) beta_slow: f64,
    /// Factor on cosine and sine.
    pub(super) attention_factor: f64,
}

impl Yarn {
    /// `0.1 ln(factor) + 1`, the paper's temperature.
    pub(super) fn default_attention_factor(factor: f64) -> f64 {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * factor.ln() + 1.0
        }
    }
}

impl RopeScaling {
    /// Returns the factor on cosine and sine.
    pub(super) fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn(yarn) => yarn.attention_factor,
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } => 1.0,
        }
    }
}

/// Returns one frequency per rotated pair of a head with `head_dim` elements.
pub(super) fn inverse_frequencies(theta: f64, head_dim: usize, scaling: &RopeScaling) -> Vec<f64> {
    let dimensions = to_f64(head_dim);
    let plain = (0..head_dim / 2).map(|pair| theta.powf(-2.0 * to_f64(pair) / dimensions));
    match *scaling {
        RopeScaling::None => plain.collect(),
        RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
        RopeScaling::Llama3 {
            factor,
            low_frequency_factor: low,
            high_frequency_factor: high,
            original_context,
        } => plain
            .map(|frequency| {
                let wavelength = TAU / frequency;
                if wavelength < original_context / high {
                    frequency
                } else if wavelength > original_context / low {
                    frequency / factor
                } else {
                    let smooth = (original_context / wavelength - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            })
            .collect(),
        RopeScaling::Yarn(yarn) => {
            // The pair that turns `rotations` times over the original context.
            let pair_of = |rotations: f64| {
                dimensions * (yarn.original_context / (rotations * TAU)).ln() / (2.0 * theta.ln())
            };
            let low = pair_of(yarn.beta_fast).floor().max(0.0);
            let high = pair_of(yarn.beta_slow).ceil().min(dimensions - 1.0);
            // Equal bounds would divide by zero; the usual implementations add the same small number.
            let high = if low == high { high + 0.001 } else { high };
            plain
                .enumerate()
                .map(|(pair, frequency)| {
                    let interpolated = ((to_f64(pair) - low) / (high - low)).clamp(0.0, 1.0);
                    frequency / yarn.factor * interpolated + frequency * (1.0 - interpolated)
                })
                .collect()
        }
    }
}

fn to_f64(count: usize) -> f64 {
    f64::from(u32::try_from(count).expect("sizes of a head fit 32 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_frequencies_fall_from_one_by_a_constant_ratio() {
        let frequencies = inverse_frequencies(10_000.0, 8, &RopeScaling::None);
        for (found, expected) in frequencies.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
    }

    #[test]
    fn linear_scaling_divides_every_frequency() {
        let frequencies = inverse_frequencies(10_000.0, 4, &RopeScaling::Linear { factor: 4.0 });
        assert!((frequencies[0] - 0.25).abs() < 1e-12);
        assert!((frequencies[1] - 0.0025).abs() < 1e-12);
    }

    #[test]
    fn llama3_scaling_keeps_short_and_divides_long_wavelengths() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context: 8192.0,
        };
        let plain = inverse_frequencies(500_000.0, 128, &RopeScaling::None);
        let scaled = inverse_frequencies(500_000.0, 128, &scaling);
        assert!((scaled[0] - plain[0]).abs() < 1e-15);
        assert!((scaled[63] - plain[63] / 8.0).abs() < 1e-15);
        let blended = scaled
            .iter()
            .zip(&plain)
            .filter(|(scaled, plain)| *scaled < *plain && **scaled > **plain / 8.0)
            .count();
        assert!(blended > 3, "{blended} pairs lie between the two rules");
        assert!(scaled.windows(2).all(|pair| pair[0] > pair[1]));
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_divides_slow_ones() {
        let scaling = RopeScaling::Yarn(Yarn {
            factor: 4.0,
            original_context: 32_768.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: Yarn::default_attention_factor(4.0),
        });
        let plain = inverse_frequencies(1e6, 128, &RopeScaling::None);
        let scaled = inverse_frequencies(1e6, 128, &scaling);
        assert!((scaled[0] - plain[0]).abs() < 1e-15);
        assert!((scaled[63] - plain[63] / 4.0).abs() < 1e-15);
        assert!((scaling.attention_factor() - 1.138_629_436).abs() < 1e-8);
    }
}
