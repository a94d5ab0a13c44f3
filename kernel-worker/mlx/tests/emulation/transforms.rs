//! Hadamard transform and rotary re-encoding, beside the oracle.

use velox_kernels::reference::rope;
use velox_kernels::rotary::{Pairing, Rotation};
use velox_mlx::metal::{Element, HADAMARD, ROPE_REENCODE, Value, Variant, turns};

use crate::machine::{Emulation, bytes, decode, emulation, encode, half_step, noise, stored};
use crate::oracle;

/// Every power of two in f32, and the head dimensions in half precision.
const HADAMARDS: [(Element, u32); 14] = [
    (Element::F32, 1),
    (Element::F32, 2),
    (Element::F32, 4),
    (Element::F32, 8),
    (Element::F32, 16),
    (Element::F32, 32),
    (Element::F32, 64),
    (Element::F32, 128),
    (Element::F32, 256),
    (Element::F32, 512),
    (Element::F32, 1024),
    (Element::F16, 64),
    (Element::F16, 128),
    (Element::Bf16, 128),
];

const ROTATIONS: [(Element, Pairing); 4] = [
    (Element::F32, Pairing::HalfSplit),
    (Element::F32, Pairing::Interleaved),
    (Element::F16, Pairing::HalfSplit),
    (Element::Bf16, Pairing::Interleaved),
];

fn hadamard((element, length): (Element, u32)) -> Variant {
    HADAMARD
        .variant(&[Value::Element(element), Value::Integer(length)])
        .unwrap()
}

fn reencode((element, pairing): (Element, Pairing)) -> Variant {
    let half_split = Value::Boolean(pairing == Pairing::HalfSplit);
    ROPE_REENCODE
        .variant(&[Value::Element(element), half_split])
        .unwrap()
}

pub(crate) fn variants() -> Vec<Variant> {
    let hadamards = HADAMARDS.into_iter().map(hadamard);
    hadamards
        .chain(ROTATIONS.into_iter().map(reencode))
        .collect()
}

#[test]
fn hadamard_agrees_with_its_formula_and_is_its_own_inverse() {
    let Some(emulation) = emulation("hadamard_agrees_with_its_formula_and_is_its_own_inverse")
    else {
        return;
    };
    for format in HADAMARDS {
        let (element, length) = format;
        let width = usize::try_from(length).unwrap();
        let variant = hadamard(format);
        for rows in [0_u32, 1, 3] {
            let values = noise(width * usize::try_from(rows).unwrap(), 21);
            let values = stored(element, &values);
            let source = encode(element, &values);
            let transform =
                |input: &[u8]| emulation.run(&variant, [rows, 1, 1], &[input], [source.len()]);
            let [transformed] = transform(&source);
            let actual = decode(element, &transformed);
            // Each of log2 D sums and the two products rounds once, relative to at most the root of D; then T rounds.
            let roundings = f64::from(length.ilog2() + 2);
            let tolerance = roundings * f64::from(length).sqrt() * half_step(Element::F32);
            for (row, actual) in values.chunks_exact(width).zip(actual.chunks_exact(width)) {
                for (actual, expected) in actual.iter().zip(oracle::hadamard(row)) {
                    let limit = tolerance + expected.abs() * half_step(element);
                    let error = (f64::from(*actual) - expected).abs();
                    assert!(error <= limit, "{format:?}: {actual} instead of {expected}");
                }
            }
            let [back] = transform(&transformed);
            // Twice the sums; what T rounded off a row the second pass spreads over it, and T rounds again.
            let limit = 2.0 * tolerance + 8.0 * half_step(element);
            for (back, value) in decode(element, &back).iter().zip(&values) {
                let error = f64::from((back - value).abs());
                assert!(error <= limit, "{format:?}: {value} came back as {back}");
            }
        }
    }
}

/// Keys to move: sizes, and where tokens were and shall be.
struct Move<'a> {
    heads: usize,
    head_dim: usize,
    inverse_frequencies: &'a [f64],
    old: &'a [u32],
    new: &'a [u32],
}

fn run_move(
    emulation: &Emulation,
    format: (Element, Pairing),
    case: &Move<'_>,
    keys: &[f32],
) -> Vec<f32> {
    let extent = |size: usize| u32::try_from(size).unwrap();
    let (head_dim, tokens) = (extent(case.head_dim), extent(case.old.len()));
    let frequencies = case.inverse_frequencies.iter();
    let turns: Vec<u64> = frequencies.map(|&frequency| turns(frequency)).collect();
    let source = encode(format.0, keys);
    let inputs: [&[u8]; 5] = [
        &source,
        &bytes(case.old),
        &bytes(case.new),
        &bytes(&turns),
        &bytes(&[head_dim, tokens, extent(turns.len())]),
    ];
    let items = [head_dim, tokens, extent(case.heads)];
    let [rotated] = emulation.run(&reencode(format), items, &inputs, [source.len()]);
    decode(format.0, &rotated)
}

/// The usual frequencies of `pairs` pairs.
fn frequencies(pairs: u8) -> Vec<f64> {
    (0..pairs)
        .map(|pair| 10_000.0_f64.powf(-f64::from(pair) / f64::from(pairs)))
        .collect()
}

const OLD: [u32; 5] = [0, 7, 100_003, 12, 4_000_000];
const NEW: [u32; 5] = [3, 7, 1, 1_000_000, 0];

#[test]
fn keys_move_as_the_oracle_rotates() {
    let Some(emulation) = emulation("keys_move_as_the_oracle_rotates") else {
        return;
    };
    for format in ROTATIONS {
        // No pairs at all, a part of the head, an odd number of pairs, all of it; one token and none.
        for (heads, head_dim, pairs, tokens) in [
            (1, 2, 1, 1),
            (2, 10, 3, 5),
            (2, 7, 0, 2),
            (3, 64, 32, 5),
            (1, 300, 150, 2),
            (2, 64, 32, 0),
        ] {
            let inverse_frequencies = frequencies(pairs);
            let case = Move {
                heads,
                head_dim,
                inverse_frequencies: &inverse_frequencies,
                old: &OLD[..tokens],
                new: &NEW[..tokens],
            };
            let keys = stored(format.0, &noise(heads * tokens * head_dim, 31));
            let actual = run_move(emulation, format, &case, &keys);
            assert_eq!(actual.len(), keys.len());
            let moves = case.old.iter().zip(case.new).cycle();
            let rows = keys
                .chunks_exact(head_dim)
                .zip(actual.chunks_exact(head_dim));
            for ((row, actual), (&old, &new)) in rows.zip(moves) {
                let moved = new.cast_signed() - old.cast_signed();
                let expected = oracle::rotate(row, moved, case.inverse_frequencies, format.1);
                for (actual, expected) in actual.iter().zip(expected) {
                    // The angle (at most pi) rounds twice, to 2^-22; cosine, sine, products and sum add 4 times 2^-24.
                    // Values are at most 1. The frequency's 53 bits lose 2^-52 per position: nothing here.
                    let limit = 2.0_f64.powi(-21) + expected.abs() * half_step(format.0);
                    let error = (f64::from(*actual) - expected).abs();
                    assert!(error <= limit, "{format:?}: {actual} instead of {expected}");
                }
            }
        }
    }
}

#[test]
fn a_moved_key_is_the_key_rotated_to_its_new_position() {
    let Some(emulation) = emulation("a_moved_key_is_the_key_rotated_to_its_new_position") else {
        return;
    };
    let inverse_frequencies = frequencies(16);
    for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
        let rotation = Rotation {
            pairing,
            inverse_frequencies: &inverse_frequencies,
            attention_factor: 1.0,
            head_dim: 32,
        };
        let raw = noise(OLD.len() * 32, 41);
        let rotated = |positions: &[u32]| {
            let positions: Vec<usize> = positions.iter().map(|&p| p.try_into().unwrap()).collect();
            let mut keys = raw.clone();
            let _ = rope(&mut keys, &positions, &rotation).unwrap();
            keys
        };
        let case = Move {
            heads: 1,
            head_dim: 32,
            inverse_frequencies: &inverse_frequencies,
            old: &OLD,
            new: &NEW,
        };
        let actual = run_move(emulation, (Element::F32, pairing), &case, &rotated(&OLD));
        for (actual, expected) in actual.iter().zip(rotated(&NEW)) {
            // As above, and both results of the reference round cosine, sine, products and a sum of at most 2^0.5.
            let error = (actual - expected).abs();
            assert!(error <= 1e-6, "{pairing:?}: {actual} instead of {expected}");
        }
    }
}
