//! What the kernels compute, written to be read: no packing tricks, no reductions in parts, f64 where the kernel rounds.

use half::f16;
use velox_kernels::rotary::Pairing;

/// Packs rows of codes bit by bit, least significant bit first, each row in whole words.
pub(crate) fn pack(codes: &[u8], columns: usize, bits: usize) -> Vec<u32> {
    let mut packed = Vec::new();
    for row in codes.chunks_exact(columns.max(1)) {
        let stream = row
            .iter()
            .flat_map(|&code| (0..bits).map(move |bit| u32::from(code >> bit & 1)));
        let stream: Vec<u32> = stream.collect();
        packed.extend(stream.chunks(32).map(|word| {
            word.iter()
                .enumerate()
                .fold(0_u32, |sum, (at, &bit)| sum | bit << at)
        }));
    }
    packed
}

/// Words of a packed row.
pub(crate) fn words(columns: usize, bits: usize) -> usize {
    (columns * bits).div_ceil(32)
}

/// Rows of codes with a scale, and for affine ones a minimum, per group of columns.
#[derive(Debug, Default)]
pub(crate) struct Quantised {
    /// `[rows, columns]`; signed codes as two's complement, of which the low bits count.
    pub(crate) codes: Vec<u8>,
    /// `[rows, groups]`.
    pub(crate) scales: Vec<f16>,
    /// `[rows, groups]`; empty for scalar codes.
    pub(crate) minimums: Vec<f16>,
}

/// Quantises each group from minus to plus its largest magnitude.
pub(crate) fn scalar_quantise(
    values: &[f32],
    columns: usize,
    bits: usize,
    group: usize,
) -> Quantised {
    let most = f32::from((1_u8 << (bits - 1)) - 1);
    let mut quantised = Quantised::default();
    for row in values.chunks_exact(columns.max(1)) {
        for values in row.chunks(group) {
            let largest = values
                .iter()
                .fold(0.0_f32, |most, value| most.max(value.abs()));
            let scale = f16::from_f32(if all_finite(values) {
                largest / most
            } else {
                f32::NAN
            });
            quantised.scales.push(scale);
            quantised.codes.extend(values.iter().map(|value| {
                let steps = steps(*value, scale).clamp(-most, most);
                whole(steps).to_le_bytes()[0]
            }));
        }
    }
    quantised
}

/// Quantises each group from its smallest to its largest value.
pub(crate) fn affine_quantise(
    values: &[f32],
    columns: usize,
    bits: usize,
    group: usize,
) -> Quantised {
    let most = f32::from(u8::MAX >> (8 - bits));
    let mut quantised = Quantised::default();
    for row in values.chunks_exact(columns.max(1)) {
        for values in row.chunks(group) {
            let smallest = values.iter().copied().fold(f32::INFINITY, f32::min);
            let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let minimum = f16::from_f32(smallest);
            let scale = f16::from_f32((largest - minimum.to_f32()).max(0.0) / most);
            let (scale, minimum) = if all_finite(values) {
                (scale, minimum)
            } else {
                (f16::NAN, f16::NAN)
            };
            quantised.scales.push(scale);
            quantised.minimums.push(minimum);
            quantised.codes.extend(values.iter().map(|value| {
                let steps = steps(value - minimum.to_f32(), scale).max(0.0).min(most);
                whole(steps).to_le_bytes()[0]
            }));
        }
    }
    quantised
}

fn all_finite(values: &[f32]) -> bool {
    values.iter().all(|value| value.is_finite())
}

/// How many scales a distance is, halves to even; 0 where the scale is none.
fn steps(distance: f32, scale: f16) -> f32 {
    let scale = scale.to_f32();
    if scale > 0.0 {
        (distance / scale).round_ties_even()
    } else {
        0.0
    }
}

fn whole(steps: f32) -> i32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the number is whole and fits; NaN becomes 0, as in the kernel"
    )]
    let whole = steps as i32;
    whole
}

/// Decodes `scale * code`, the code being the low `bits` as a signed number.
pub(crate) fn scalar_dequantise(
    quantised: &Quantised,
    columns: usize,
    bits: usize,
    group: usize,
) -> Vec<f32> {
    let unused = 8 - bits;
    decode(quantised, columns, group, |at, code| {
        let code = (code << unused).cast_signed() >> unused;
        quantised.scales[at].to_f32() * f32::from(code)
    })
}

/// Decodes `code * scale + minimum`; the product is exact, see the kernel.
pub(crate) fn affine_dequantise(quantised: &Quantised, columns: usize, group: usize) -> Vec<f32> {
    decode(quantised, columns, group, |at, code| {
        let (scale, minimum) = (quantised.scales[at], quantised.minimums[at]);
        f32::from(code) * scale.to_f32() + minimum.to_f32()
    })
}

/// Calls `value(group, code)` for every code.
fn decode(
    quantised: &Quantised,
    columns: usize,
    group: usize,
    value: impl Fn(usize, u8) -> f32,
) -> Vec<f32> {
    let groups = columns.div_ceil(group);
    let codes = quantised.codes.iter().enumerate();
    codes
        .map(|(index, &code)| {
            let (row, column) = (index / columns, index % columns);
            value(row * groups + column / group, code)
        })
        .collect()
}

/// The sum `(-1)^popcount(i & j) x[j]`, over the root of the length.
pub(crate) fn hadamard(row: &[f32]) -> Vec<f64> {
    let root = float(row.len()).sqrt();
    let sum = |i: usize| -> f64 {
        let terms = row.iter().enumerate().map(|(j, &x)| {
            let negative = (i & j).count_ones() % 2 == 1;
            f64::from(if negative { -x } else { x })
        });
        terms.sum()
    };
    (0..row.len()).map(|i| sum(i) / root).collect()
}

/// Rotates pair `i` of a head by `moved * inverse_frequencies[i]`.
pub(crate) fn rotate(
    head: &[f32],
    moved: i32,
    inverse_frequencies: &[f64],
    pairing: Pairing,
) -> Vec<f64> {
    let mut rotated: Vec<f64> = head.iter().copied().map(f64::from).collect();
    for (pair, inverse_frequency) in inverse_frequencies.iter().enumerate() {
        let (sine, cosine) = (f64::from(moved) * inverse_frequency).sin_cos();
        let (first, second) = match pairing {
            Pairing::HalfSplit => (pair, pair + inverse_frequencies.len()),
            Pairing::Interleaved => (2 * pair, 2 * pair + 1),
        };
        let (x, y) = (rotated[first], rotated[second]);
        rotated[first] = x * cosine - y * sine;
        rotated[second] = x * sine + y * cosine;
    }
    rotated
}

/// Softmax of the query's products with the visible keys, times their values. NaN if nothing is visible.
///
/// `keys` and `values` are one head's rows of the query's length.
pub(crate) fn attention(
    query: &[f32],
    keys: &[f32],
    values: &[f32],
    scale: f32,
    visible: &[bool],
) -> Vec<f64> {
    let head_dim = query.len();
    let positions: Vec<usize> = (0..visible.len()).filter(|&p| visible[p]).collect();
    let row = |position: usize| position * head_dim..(position + 1) * head_dim;
    let scores: Vec<f64> = positions
        .iter()
        .map(|&position| {
            let products = query.iter().zip(&keys[row(position)]);
            let sum: f64 = products.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            sum * f64::from(scale)
        })
        .collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    (0..head_dim)
        .map(|element| {
            let terms = positions.iter().zip(&weights);
            let sum: f64 = terms
                .map(|(&position, weight)| weight * f64::from(values[row(position)][element]))
                .sum();
            sum / total
        })
        .collect()
}

/// A count as f64.
pub(crate) fn float(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap())
}
