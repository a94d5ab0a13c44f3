//! Blocks of 32 elements. Low nibbles are elements 0 to 15, high ones 16 to 31.

use super::{Format, Packed, Sink};
use crate::cpu::simd::Simd;

/// `d (q - 8)`.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q4_0;
/// `d q + m`.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q4_1;
/// `d (q - 16)` with fifth bits.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q5_0;
/// `d q + m` with fifth bits.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q5_1;
/// `d q`.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q8_0;
/// `d q + m`, `d` and `m` in f32.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Q8Affine;
/// `d table[q]`.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Iq4Nl;

/// Values of an IQ4_NL nibble.
const IQ4_NL: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Splits 16 nibble bytes of each row.
#[inline(always)]
fn nibbles<S: Simd>(simd: S, rows: &[u8], stride: usize) -> [S::I; 8] {
    let mask = simd.splat_bits(0x0f0f_0f0f);
    let [c0, c1, c2, c3] = simd.load_columns(rows, stride);
    let low = |c| simd.and(c, mask);
    let high = |c| simd.and(simd.shift_right::<4>(c), mask);
    [
        low(c0),
        low(c1),
        low(c2),
        low(c3),
        high(c0),
        high(c1),
        high(c2),
        high(c3),
    ]
}

/// Adds fifth bits: bit `e` of a row's word belongs to element `e`.
#[inline(always)]
fn with_fifth_bits<S: Simd>(simd: S, q: [S::I; 8], bits: S::I) -> [S::I; 8] {
    let places = simd.splat_bits(0x1010_1010);
    // Four bits of `four` go to bit 4 of four bytes.
    let add = |q, four: S::I| {
        let spread = simd.or(
            simd.or(simd.shift_left::<4>(four), simd.shift_left::<11>(four)),
            simd.or(simd.shift_left::<18>(four), simd.shift_left::<25>(four)),
        );
        simd.or(q, simd.and(spread, places))
    };
    let nibble = simd.splat_bits(0xf);
    [
        add(q[0], simd.and(bits, nibble)),
        add(q[1], simd.and(simd.shift_right::<4>(bits), nibble)),
        add(q[2], simd.and(simd.shift_right::<8>(bits), nibble)),
        add(q[3], simd.and(simd.shift_right::<12>(bits), nibble)),
        add(q[4], simd.and(simd.shift_right::<16>(bits), nibble)),
        add(q[5], simd.and(simd.shift_right::<20>(bits), nibble)),
        add(q[6], simd.and(simd.shift_right::<24>(bits), nibble)),
        add(q[7], simd.shift_right::<28>(bits)),
    ]
}

/// Packs quants whose weight is `d (q - zero)`.
#[inline(always)]
fn centred<S: Simd>(simd: S, q: [S::I; 8], d: S::F, zero: f32) -> Packed<S> {
    let offset = simd.mul(d, simd.splat(-zero));
    Packed {
        q,
        a: [d; 2],
        b: [offset; 2],
    }
}

/// Packs signed quants. Where weights must be unsigned, 128 is added and taken off by the offset.
#[inline(always)]
fn signed<S: Simd>(simd: S, q: [S::I; 8], d: S::F) -> Packed<S> {
    if S::UNSIGNED_WEIGHTS {
        let flip = simd.splat_bits(i32::from_ne_bytes([0x80; 4]));
        centred(simd, q.map(|q| simd.xor(q, flip)), d, 128.0)
    } else {
        centred(simd, q, d, 0.0)
    }
}

impl Format for Q4_0 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;
    const GROUP: usize = 32;
    const SIGNED: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        let (d, _) = simd.f16_halves(simd.load_column(rows, stride));
        let q = nibbles(simd, &rows[2..], stride);
        sink.push(simd, centred(simd, q, d, 8.0));
    }
}

impl Format for Q4_1 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 20;
    const GROUP: usize = 32;
    const SIGNED: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        let (d, m) = simd.f16_halves(simd.load_column(rows, stride));
        let packed = Packed {
            q: nibbles(simd, &rows[4..], stride),
            a: [d; 2],
            b: [m; 2],
        };
        sink.push(simd, packed);
    }
}

impl Format for Q5_0 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 22;
    const GROUP: usize = 32;
    const SIGNED: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        let (d, _) = simd.f16_halves(simd.load_column(rows, stride));
        let bits = simd.load_column(&rows[2..], stride);
        let q = with_fifth_bits(simd, nibbles(simd, &rows[6..], stride), bits);
        sink.push(simd, centred(simd, q, d, 16.0));
    }
}

impl Format for Q5_1 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 24;
    const GROUP: usize = 32;
    const SIGNED: bool = false;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        let (d, m) = simd.f16_halves(simd.load_column(rows, stride));
        let bits = simd.load_column(&rows[4..], stride);
        let packed = Packed {
            q: with_fifth_bits(simd, nibbles(simd, &rows[8..], stride), bits),
            a: [d; 2],
            b: [m; 2],
        };
        sink.push(simd, packed);
    }
}

impl Format for Q8_0 {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 34;
    const GROUP: usize = 32;
    const SIGNED: bool = true;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        let (d, _) = simd.f16_halves(simd.load_column(rows, stride));
        let [c0, c1, c2, c3] = simd.load_columns(&rows[2..], stride);
        let [c4, c5, c6, c7] = simd.load_columns(&rows[18..], stride);
        sink.push(simd, signed(simd, [c0, c1, c2, c3, c4, c5, c6, c7], d));
    }
}

impl Format for Q8Affine {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 40;
    const GROUP: usize = 32;
    const SIGNED: bool = true;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        let d = simd.of_bits(simd.load_column(rows, stride));
        let m = simd.of_bits(simd.load_column(&rows[4..], stride));
        let [c0, c1, c2, c3] = simd.load_columns(&rows[8..], stride);
        let [c4, c5, c6, c7] = simd.load_columns(&rows[24..], stride);
        let q = [c0, c1, c2, c3, c4, c5, c6, c7];
        // The opposite of `signed`: the quants are unsigned as they are stored.
        let packed = if S::UNSIGNED_WEIGHTS {
            Packed {
                q,
                a: [d; 2],
                b: [m; 2],
            }
        } else {
            let flip = simd.splat_bits(i32::from_ne_bytes([0x80; 4]));
            Packed {
                q: q.map(|q| simd.xor(q, flip)),
                a: [d; 2],
                b: [simd.fma(d, simd.splat(128.0), m); 2],
            }
        };
        sink.push(simd, packed);
    }
}

impl Format for Iq4Nl {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;
    const GROUP: usize = 32;
    const SIGNED: bool = true;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, rows: &[u8], stride: usize, sink: &mut impl Sink<S>) {
        let (d, _) = simd.f16_halves(simd.load_column(rows, stride));
        let q = nibbles(simd, &rows[2..], stride).map(|q| simd.look_up(q, &IQ4_NL));
        sink.push(simd, signed(simd, q, d));
    }
}
