//! Norm, softmax, gate, sums and rotation.

use velox_kernels::cpu;
use velox_kernels::reference;
use velox_kernels::rotary::{Pairing, Rotation};

use crate::support::{Numbers, bits, on_every_set};

const WIDTHS: [usize; 8] = [1, 3, 8, 15, 16, 17, 67, 576];

fn assert_close(actual: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(actual.len(), expected.len());
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let error = (actual - expected).abs();
        assert!(
            error <= tolerance * expected.abs() + 1e-30,
            "{what}, element {index}: {actual}, not {expected}"
        );
    }
}

/// The sum of squares is f32 in lanes where the oracle's is f64.
#[test]
fn norms_agree_within_a_millionth() {
    on_every_set(|cpu| {
        for width in WIDTHS {
            for tokens in [0, 1, 3, 40] {
                let input = Numbers::new(width).values(tokens * width);
                let weight = Numbers::new(7).values(width);
                let mut expected = vec![0.0; input.len()];
                let mut actual = vec![f32::NAN; input.len()];
                let _ = reference::rms_norm(&input, &weight, 1e-5, &mut expected).unwrap();
                let _ = cpu::rms_norm(cpu, &input, &weight, 1e-5, &mut actual).unwrap();
                assert_close(&actual, &expected, 1e-6, "norm");
                if tokens > 1 {
                    let mut alone = vec![0.0; width];
                    let last = &input[input.len() - width..];
                    let _ = cpu::rms_norm(cpu, last, &weight, 1e-5, &mut alone).unwrap();
                    assert_eq!(bits(&alone), bits(&actual[input.len() - width..]));
                }
            }
        }
        assert!(cpu::rms_norm(cpu, &[1.0; 5], &[1.0; 2], 0.0, &mut [0.0; 5]).is_err());
        assert!(cpu::rms_norm(cpu, &[1.0; 4], &[1.0; 2], 0.0, &mut [0.0; 5]).is_err());
    });
}

/// The exponential is within 3e-7, sums are of at most 576 positive numbers.
#[test]
fn softmax_agrees_within_two_millionths() {
    on_every_set(|cpu| {
        for width in WIDTHS {
            let mut expected: Vec<f32> = Numbers::new(width).values(3 * width);
            expected.iter_mut().for_each(|value| *value *= 20.0);
            let mut actual = expected.clone();
            let _ = reference::softmax(&mut expected, width).unwrap();
            let _ = cpu::softmax(cpu, &mut actual, width).unwrap();
            assert_close(&actual, &expected, 2e-6, "softmax");
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let mut row = [1.0, bad, 2.0];
            let _ = cpu::softmax(cpu, &mut row, 3).unwrap();
            assert!(row.iter().any(|value| value.is_nan()));
        }
        let mut hidden = [f32::NEG_INFINITY; 5];
        let _ = cpu::softmax(cpu, &mut hidden, 5).unwrap();
        assert!(hidden.iter().all(|value| value.is_nan()));
        assert!(cpu::softmax(cpu, &mut [0.0; 5], 2).is_err());
        assert!(cpu::softmax(cpu, &mut [], 2).is_ok());
    });
}

#[test]
fn gates_agree_within_a_millionth() {
    on_every_set(|cpu| {
        for length in [0, 1, 7, 16, 33, 40_000] {
            let mut gate = Numbers::new(length).values(length);
            gate.iter_mut().for_each(|value| *value *= 30.0);
            let up = Numbers::new(length + 1).values(length);
            let mut expected = vec![0.0; length];
            let _ = reference::silu_mul(&gate, &up, &mut expected).unwrap();
            let _ = cpu::silu_mul(cpu, &mut gate, &up).unwrap();
            assert_close(&gate, &expected, 1e-6, "gate");
        }
        let mut extremes = [-1e30, 1e30, f32::NAN];
        let _ = cpu::silu_mul(cpu, &mut extremes, &[1.0; 3]).unwrap();
        assert!(extremes[0].abs() < 1e-7 && extremes[1] == 1e30 && extremes[2].is_nan());
        assert!(cpu::silu_mul(cpu, &mut [0.0; 3], &[0.0; 4]).is_err());
    });
}

#[test]
fn sums_are_the_oracles_bits() {
    on_every_set(|cpu| {
        for width in WIDTHS {
            let addend = Numbers::new(1).values(width);
            let mut expected = Numbers::new(2).values(3 * width);
            let mut actual = expected.clone();
            let _ = reference::add(&mut expected, &addend).unwrap();
            let _ = cpu::add(cpu, &mut actual, &addend).unwrap();
            assert_eq!(bits(&actual), bits(&expected));
        }
        assert!(cpu::add(cpu, &mut [0.0; 3], &[0.0; 2]).is_err());
    });
}

#[test]
fn rotations_are_the_oracles_bits() {
    on_every_set(|cpu| {
        let frequencies: Vec<f64> = (0..4).map(|pair| 10_f64.powi(-pair)).collect();
        for (pairing, head_dim) in [
            (Pairing::HalfSplit, 8),
            (Pairing::Interleaved, 8),
            (Pairing::Interleaved, 11),
        ] {
            let positions = [0, 1, 300, 7, 40_000];
            let mut expected = Numbers::new(1).values(5 * 3 * head_dim);
            let mut actual = expected.clone();
            let rotation = Rotation {
                pairing,
                inverse_frequencies: &frequencies,
                attention_factor: 1.25,
                head_dim,
            };
            let _ = reference::rope(&mut expected, &positions, &rotation).unwrap();
            let _ = cpu::rope(cpu, &mut actual, &positions, &rotation).unwrap();
            assert_eq!(bits(&actual), bits(&expected));
            let mut table = cpu::RopeTable::new(&frequencies, 1.25);
            let mut again = Numbers::new(1).values(5 * 3 * head_dim);
            let tokens = again.chunks_exact_mut(3 * head_dim);
            for (token, position) in tokens.zip(positions) {
                let shape = (pairing, head_dim);
                let _ = table.rotate(token, &[position], shape).unwrap();
            }
            assert_eq!(bits(&again), bits(&expected));
        }
    });
}
