//! Super-blocks of 256 elements, whose groups have scales of their own.

use super::half_at;

/// 84 bytes: 16 bytes of scale (low nibble) and minimum (high nibble) per group of 16, 64 bytes of 2-bit planes,
/// d f16, dmin f16; `d scale q - dmin minimum`.
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (group, values) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(block[group] & 15);
        let minimum = dmin * f32::from(block[group] >> 4);
        for (index, value) in values.iter_mut().enumerate() {
            let q = two_bits(&block[16..80], group * 16 + index);
            *value = scale * f32::from(q) - minimum;
        }
    }
}

/// 110 bytes: 32 bytes of third bits, 64 bytes of 2-bit planes, 12 bytes of 6-bit scales per group of 16, d f16;
/// `d (scale - 32) q`, where a clear third bit means `q - 4`.
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half_at(block, 108);
    let scales = &block[96..108];
    for (group, values) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        let scale = d * (f32::from(low | high << 4) - 32.0);
        for (index, value) in values.iter_mut().enumerate() {
            let element = group * 16 + index;
            let third_bit = block[element % 32] >> (element / 32) & 1;
            let q = f32::from(two_bits(&block[32..96], element));
            *value = scale * if third_bit == 1 { q } else { q - 4.0 };
        }
    }
}

/// 144 bytes: d f16, dmin f16, 12 bytes of 6-bit scales and minima per group of 32, 128 bytes of nibbles;
/// `d scale q - dmin minimum`.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = scale_and_minimum(&block[4..16], group);
        let (scale, minimum) = (d * scale, dmin * minimum);
        for (index, value) in values.iter_mut().enumerate() {
            let q = paired_nibble(&block[16..], group, index);
            *value = scale * f32::from(q) - minimum;
        }
    }
}

/// 176 bytes: d f16, dmin f16, 12 bytes of 6-bit scales and minima per group of 32, 32 bytes of fifth bits, 128 bytes
/// of nibbles; `d scale q - dmin minimum`.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = scale_and_minimum(&block[4..16], group);
        let (scale, minimum) = (d * scale, dmin * minimum);
        for (index, value) in values.iter_mut().enumerate() {
            let fifth_bit = block[16 + index] >> group & 1;
            let q = paired_nibble(&block[48..], group, index) | fifth_bit << 4;
            *value = scale * f32::from(q) - minimum;
        }
    }
}

/// 210 bytes: 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 i8 scales per group of 16, d f16;
/// `d scale (q - 32)`.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    for (group, values) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(block[192 + group].cast_signed());
        for (index, value) in values.iter_mut().enumerate() {
            let element = group * 16 + index;
            let (half, quarter, lane) = (element / 128, element % 128 / 32, element % 32);
            let nibbles = block[half * 64 + quarter % 2 * 32 + lane];
            let low = nibbles >> (4 * (quarter / 2)) & 15;
            let high = block[128 + half * 32 + lane] >> (2 * quarter) & 3;
            *value = scale * (f32::from(low | high << 4) - 32.0);
        }
    }
}

/// Reads a 2-bit value: per 128 elements 32 bytes, whose bit pairs are elements `l`, `l + 32`, `l + 64`, `l + 96`.
fn two_bits(planes: &[u8], element: usize) -> u8 {
    let (half, quarter, lane) = (element / 128, element % 128 / 32, element % 32);
    planes[half * 32 + lane] >> (2 * quarter) & 3
}

/// Reads a nibble: per two groups of 32 elements 32 bytes, low nibbles for the first group, high for the second.
fn paired_nibble(bytes: &[u8], group: usize, index: usize) -> u8 {
    bytes[group / 2 * 32 + index] >> (4 * (group % 2)) & 15
}

/// Reads the 6-bit scale and minimum of a group of 32. Groups 0 to 3 keep them in the low 6 bits of bytes `group` and
/// `group + 4`; groups 4 to 7 keep 4 bits in byte `group + 4` and 2 in the top of what the earlier groups left free.
fn scale_and_minimum(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        (
            packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
            packed[group + 4] >> 4 | packed[group] >> 6 << 4,
        )
    };
    (f32::from(scale), f32::from(minimum))
}
