//! One block of each type as groups of 32 integers with a scale and a bias.

use super::{GROUP, Group, half_at};

/// Values of an IQ4_NL nibble, plus 128.
const IQ4_NL_SHIFTED: [u8; 16] = [
    1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241,
];

/// Low nibbles are elements 0 to 15, high nibbles 16 to 31.
fn nibbles(bytes: &[u8]) -> [u8; GROUP] {
    std::array::from_fn(|element| {
        if element < 16 {
            bytes[element] & 15
        } else {
            bytes[element - 16] >> 4
        }
    })
}

fn with_fifth_bits(bytes: &[u8], nibbles: [u8; GROUP]) -> [u8; GROUP] {
    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    std::array::from_fn(|element| {
        let high = if bits >> element & 1 == 1 { 16 } else { 0 };
        nibbles[element] | high
    })
}

pub(super) fn q4_0(block: &[u8; 18]) -> Group {
    let scale = half_at(block, 0);
    Group {
        scale,
        bias: -8.0 * scale,
        q: nibbles(&block[2..]),
    }
}

pub(super) fn q4_1(block: &[u8; 20]) -> Group {
    Group {
        scale: half_at(block, 0),
        bias: half_at(block, 2),
        q: nibbles(&block[4..]),
    }
}

pub(super) fn q8_affine(block: &[u8; 40]) -> Group {
    let float_at =
        |at| f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    Group {
        scale: float_at(0),
        bias: float_at(4),
        q: std::array::from_fn(|element| block[8 + element]),
    }
}

pub(super) fn q5_0(block: &[u8; 22]) -> Group {
    let scale = half_at(block, 0);
    Group {
        scale,
        bias: -16.0 * scale,
        q: with_fifth_bits(&block[2..6], nibbles(&block[6..])),
    }
}

pub(super) fn q5_1(block: &[u8; 24]) -> Group {
    Group {
        scale: half_at(block, 0),
        bias: half_at(block, 2),
        q: with_fifth_bits(&block[4..8], nibbles(&block[8..])),
    }
}

/// Signed bytes become unsigned ones by flipping the sign bit.
pub(super) fn q8_0(block: &[u8; 34]) -> Group {
    let scale = half_at(block, 0);
    Group {
        scale,
        bias: -128.0 * scale,
        q: std::array::from_fn(|element| block[2 + element] ^ 0x80),
    }
}

/// The table's values are integers of 8 bits.
pub(super) fn iq4_nl(block: &[u8; 18]) -> Group {
    let scale = half_at(block, 0);
    Group {
        scale,
        bias: -128.0 * scale,
        q: nibbles(&block[2..]).map(|nibble| IQ4_NL_SHIFTED[usize::from(nibble)]),
    }
}

/// 6-bit scales and minima: the products with `d` and `dmin` fit f32 exactly.
fn scales_of(block: &[u8], group: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, minimum) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        (
            packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
            packed[group + 4] >> 4 | packed[group] >> 6 << 4,
        )
    };
    (
        half_at(block, 0) * f32::from(scale),
        -(half_at(block, 2) * f32::from(minimum)),
    )
}

/// Per two groups 32 bytes: low nibbles for the first, high nibbles for the second.
fn paired_nibbles(bytes: &[u8], group: usize) -> [u8; GROUP] {
    let pair = &bytes[group / 2 * GROUP..][..GROUP];
    std::array::from_fn(|element| pair[element] >> (4 * (group % 2)) & 15)
}

pub(super) fn q4_k(block: &[u8; 144]) -> [Group; 8] {
    std::array::from_fn(|group| {
        let (scale, bias) = scales_of(block, group);
        Group {
            scale,
            bias,
            q: paired_nibbles(&block[16..], group),
        }
    })
}

pub(super) fn q5_k(block: &[u8; 176]) -> [Group; 8] {
    std::array::from_fn(|group| {
        let (scale, bias) = scales_of(block, group);
        let low = paired_nibbles(&block[48..], group);
        Group {
            scale,
            bias,
            q: std::array::from_fn(|element| {
                low[element] | (block[16 + element] >> group & 1) << 4
            }),
        }
    })
}

/// Rounds values to 8 bits between their minimum and maximum.
pub(super) fn rounded(values: &[f32; GROUP]) -> Group {
    let minimum = values.iter().copied().fold(f32::INFINITY, f32::min);
    let maximum = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (maximum - minimum) / 255.0;
    let steps = if scale > 0.0 { scale.recip() } else { 0.0 };
    Group {
        scale,
        bias: minimum,
        q: values.map(|value| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "the step lies between 0 and 255; what is no number becomes 0"
            )]
            let q = ((value - minimum) * steps).round() as u8;
            q
        }),
    }
}
