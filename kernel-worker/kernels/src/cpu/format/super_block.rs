//! Blocks of 256 elements with small integer scales.

use super::{Format, Packed, Sink};
use crate::cpu::simd::Simd;

/// 16 groups of 16; 2-bit quants.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q2K;
/// 16 groups of 16; 2-bit quants with a third bit apart.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q3K;
/// 8 groups of 32; 4-bit quants.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q4K;
/// 8 groups of 32; 4-bit quants with a fifth bit apart.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q5K;
/// 16 groups of 16; 4-bit quants with two bits apart.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q6K;

/// Repeats a byte in a word.
const fn bytes(byte: u8) -> i32 {
    i32::from_ne_bytes([byte; 4])
}

/// Reads 32 bytes of each row.
#[inline(always)]
fn load_32<S: Simd>(simd: S, rows: &[u8], stride: usize) -> [S::I; 8] {
    let [c0, c1, c2, c3] = simd.load_columns(rows, stride);
    let [c4, c5, c6, c7] = simd.load_columns(&rows[16..], stride);
    [c0, c1, c2, c3, c4, c5, c6, c7]
}

/// Takes the lowest byte of each lane as a number and moves the next one down.
#[inline(always)]
fn next_byte<S: Simd>(simd: S, word: &mut S::I) -> S::F {
    let value = simd.to_f32(simd.and(*word, simd.splat_bits(0xff)));
    *word = simd.shift_right::<8>(*word);
    value
}

/// The 6-bit scales and minima of Q4_K and Q5_K: groups 0 to 3, then 4 to 7, a byte each.
#[inline(always)]
fn scales_and_minima<S: Simd>(simd: S, rows: &[u8], stride: usize) -> ([S::I; 2], [S::I; 2]) {
    let first = simd.load_column(rows, stride);
    let second = simd.load_column(&rows[4..], stride);
    let third = simd.load_column(&rows[8..], stride);
    let (six, four) = (simd.splat_bits(bytes(0x3f)), simd.splat_bits(bytes(0x0f)));
    let top = |word| simd.and(simd.shift_right::<2>(word), simd.splat_bits(bytes(0x30)));
    let late_scales = simd.or(simd.and(third, four), top(first));
    let late_minima = simd.or(simd.and(simd.shift_right::<4>(third), four), top(second));
    (
        [simd.and(first, six), late_scales],
        [simd.and(second, six), late_minima],
    )
}

/// Unpacks Q4_K and Q5_K; `high` are the bytes whose bit `g` is the fifth bit of group `g`.
#[inline(always)]
fn groups_of_32<S: Simd>(
    simd: S,
    [rows, quants]: [&[u8]; 2],
    stride: usize,
    mut high: Option<[S::I; 8]>,
    sink: &mut impl Sink<S>,
) {
    let (d, minimum) = simd.f16_halves(simd.load_column(rows, stride));
    let minimum = simd.mul(minimum, simd.splat(-1.0));
    let (mut scales, mut minima) = scales_and_minima(simd, &rows[4..], stride);
    let nibble = simd.splat_bits(bytes(0x0f));
    for pair in 0..4 {
        let mut columns = load_32(simd, &quants[32 * pair..], stride);
        for _ in 0..2 {
            let mut q = columns.map(|c| simd.and(c, nibble));
            columns = columns.map(|c| simd.shift_right::<4>(c));
            if let Some(high) = &mut high {
                for (q, high) in q.iter_mut().zip(high) {
                    let bit = simd.and(*high, simd.splat_bits(bytes(1)));
                    *q = simd.or(*q, simd.shift_left::<4>(bit));
                    *high = simd.shift_right::<1>(*high);
                }
            }
            let a = simd.mul(d, next_byte(simd, &mut scales[pair / 2]));
            let b = simd.mul(minimum, next_byte(simd, &mut minima[pair / 2]));
            let packed = Packed {
                q,
                a: [a; 2],
                b: [b; 2],
            };
            sink.push(simd, packed);
        }
    }
}

impl Format for Q4K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 144;
    const GROUP: usize = 32;
    const SIGNED: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        groups_of_32(simd, [rows, &rows[16..]], stride, None, sink);
    }
}

impl Format for Q5K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 176;
    const GROUP: usize = 32;
    const SIGNED: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        let high = load_32(simd, &rows[16..], stride);
        groups_of_32(simd, [rows, &rows[48..]], stride, Some(high), sink);
    }
}

impl Format for Q6K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 210;
    const GROUP: usize = 16;
    const SIGNED: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        // The block ends with d, so the word that holds it starts two bytes before.
        let (_, d) = simd.f16_halves(simd.load_column(&rows[206..], stride));
        let scales = simd.load_columns(&rows[192..], stride);
        let mut scales = scales.map(|word| simd.xor(word, simd.splat_bits(bytes(0x80))));
        let (nibble, two) = (simd.splat_bits(bytes(0x0f)), simd.splat_bits(bytes(0x30)));
        for half in 0..2 {
            let low = [
                load_32(simd, &rows[64 * half..], stride),
                load_32(simd, &rows[64 * half + 32..], stride),
            ];
            let high = load_32(simd, &rows[128 + 32 * half..], stride);
            for part in 0..4 {
                let mut q = low[part % 2];
                for (q, high) in q.iter_mut().zip(high) {
                    let four = if part < 2 {
                        *q
                    } else {
                        simd.shift_right::<4>(*q)
                    };
                    let bits = match part {
                        0 => simd.shift_left::<4>(high),
                        1 => simd.shift_left::<2>(high),
                        2 => high,
                        _ => simd.shift_right::<2>(high),
                    };
                    *q = simd.or(simd.and(four, nibble), simd.and(bits, two));
                }
                let word = &mut scales[2 * half + part / 2];
                let mut scale = || {
                    let signed = simd.sub(next_byte(simd, word), simd.splat(128.0));
                    simd.mul(d, signed)
                };
                let a = [scale(), scale()];
                let b = a.map(|a| simd.mul(a, simd.splat(-32.0)));
                sink.push(simd, Packed { q, a, b });
            }
        }
    }
}

/// Two-bit quants of one of the four planes of 32 bytes.
#[inline(always)]
fn plane<S: Simd>(simd: S, columns: [S::I; 8], part: usize) -> [S::I; 8] {
    columns.map(|column| {
        let shifted = match part {
            0 => column,
            1 => simd.shift_right::<2>(column),
            2 => simd.shift_right::<4>(column),
            _ => simd.shift_right::<6>(column),
        };
        simd.and(shifted, simd.splat_bits(bytes(0x03)))
    })
}

impl Format for Q2K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 84;
    const GROUP: usize = 16;
    const SIGNED: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        let (d, minimum) = simd.f16_halves(simd.load_column(&rows[80..], stride));
        let minimum = simd.mul(minimum, simd.splat(-1.0));
        let nibble = simd.splat_bits(bytes(0x0f));
        let packed_scales = simd.load_columns(rows, stride);
        let mut scales = packed_scales.map(|word| simd.and(word, nibble));
        let mut minima = packed_scales.map(|word| simd.and(simd.shift_right::<4>(word), nibble));
        for half in 0..2 {
            let columns = load_32(simd, &rows[16 + 32 * half..], stride);
            for part in 0..4 {
                let word = 2 * half + part / 2;
                let mut a = || simd.mul(d, next_byte(simd, &mut scales[word]));
                let a = [a(), a()];
                let mut b = || simd.mul(minimum, next_byte(simd, &mut minima[word]));
                let b = [b(), b()];
                let q = plane(simd, columns, part);
                sink.push(simd, Packed { q, a, b });
            }
        }
    }
}

impl Format for Q3K {
    const ELEMENTS: usize = 256;
    const BYTES: usize = 110;
    const GROUP: usize = 16;
    const SIGNED: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        // The block ends with d, so the word that holds it starts two bytes before.
        let (_, d) = simd.f16_halves(simd.load_column(&rows[106..], stride));
        let first = simd.load_column(&rows[96..], stride);
        let second = simd.load_column(&rows[100..], stride);
        let third = simd.load_column(&rows[104..], stride);
        let (nibble, two) = (simd.splat_bits(bytes(0x0f)), simd.splat_bits(bytes(0x30)));
        let scale = |four, top| simd.or(simd.and(four, nibble), simd.and(top, two));
        let mut scales = [
            scale(first, simd.shift_left::<4>(third)),
            scale(second, simd.shift_left::<2>(third)),
            scale(simd.shift_right::<4>(first), third),
            scale(simd.shift_right::<4>(second), simd.shift_right::<2>(third)),
        ];
        let mut mask = load_32(simd, rows, stride);
        for half in 0..2 {
            let columns = load_32(simd, &rows[32 + 32 * half..], stride);
            for part in 0..4 {
                let mut q = plane(simd, columns, part);
                for (q, mask) in q.iter_mut().zip(&mut mask) {
                    let bit = simd.and(*mask, simd.splat_bits(bytes(1)));
                    *q = simd.or(*q, simd.shift_left::<2>(bit));
                    *mask = simd.shift_right::<1>(*mask);
                }
                let word = &mut scales[2 * half + part / 2];
                let mut a = || {
                    let signed = simd.sub(next_byte(simd, word), simd.splat(32.0));
                    simd.mul(d, signed)
                };
                let a = [a(), a()];
                let b = a.map(|a| simd.mul(a, simd.splat(-4.0)));
                sink.push(simd, Packed { q, a, b });
            }
        }
    }
}
