//! The emulation's own half-precision types, beside those of the crate `half`.

use half::{bf16, f16};
use velox_mlx::metal::{
    Allowed, Buffer, Constant, Element, Holds, Kernel, Threads, Value, Variant,
};

use crate::machine::{bytes, elements, emulation};

static CONVERSIONS: Kernel = Kernel {
    name: "conversions",
    source: include_str!("../../emulation/conversions.metal"),
    // MLX needs none; a kernel of the emulated program has one at least.
    constants: &[Constant {
        name: "UNUSED",
        allowed: Allowed::Integers(&[0]),
    }],
    inputs: &[
        buffer("floats", Element::F32),
        buffer("halves", Element::F16),
        buffer("bfloats", Element::Bf16),
    ],
    outputs: &[
        buffer("to_half", Element::F16),
        buffer("to_bfloat", Element::Bf16),
        buffer("from_half", Element::F32),
        buffer("from_bfloat", Element::F32),
    ],
    threads: Threads::One,
};

const fn buffer(name: &'static str, element: Element) -> Buffer {
    Buffer {
        name,
        holds: Holds::Fixed(element),
    }
}

pub(crate) fn variants() -> Vec<Variant> {
    vec![CONVERSIONS.variant(&[Value::Integer(0)]).unwrap()]
}

/// Floats where rounding decides: near a number of a half-precision type, and near the middle of two.
fn floats() -> Vec<f32> {
    let near = |bits: u32| [bits.wrapping_sub(1), bits, bits.wrapping_add(1)];
    let mut floats = Vec::new();
    for pattern in 0..=u16::MAX {
        // The middle between a bfloat and the next has the upper bit of what is cut off.
        let bfloat = u32::from(pattern) << 16;
        let half = f16::from_bits(pattern);
        let next = f16::from_bits(pattern.wrapping_add(1));
        let middle = f32::midpoint(half.to_f32(), next.to_f32());
        for bits in [
            bfloat,
            bfloat | 0x8000,
            half.to_f32().to_bits(),
            middle.to_bits(),
        ] {
            // A sixteenth of all patterns, and each bit pattern of the low byte.
            if pattern % 16 == 0 || pattern % 257 == 0 || bits == middle.to_bits() {
                floats.extend(near(bits).map(f32::from_bits));
            }
        }
    }
    floats
}

#[test]
fn half_precision_converts_as_elsewhere() {
    let Some(emulation) = emulation("half_precision_converts_as_elsewhere") else {
        return;
    };
    let floats = floats();
    let patterns: Vec<u16> = (0..=u16::MAX).cycle().take(floats.len()).collect();
    let count = floats.len();
    let [to_half, to_bfloat, from_half, from_bfloat] = emulation.run(
        &variants()[0],
        [u32::try_from(count).unwrap(), 1, 1],
        &[&bytes(&floats), &bytes(&patterns), &bytes(&patterns)],
        [2 * count, 2 * count, 4 * count, 4 * count],
    );
    let same = |actual: f32, expected: f32| {
        actual.to_bits() == expected.to_bits() || actual.is_nan() && expected.is_nan()
    };
    for (float, half) in floats.iter().zip(elements::<f16>(&to_half)) {
        let expected = f16::from_f32(*float).to_f32();
        assert!(same(half.to_f32(), expected), "{float:e} became {half:e}");
    }
    for (float, bfloat) in floats.iter().zip(elements::<bf16>(&to_bfloat)) {
        let expected = bf16::from_f32(*float).to_f32();
        assert!(
            same(bfloat.to_f32(), expected),
            "{float:e} became {bfloat:e}"
        );
    }
    let backs = elements::<f32>(&from_half)
        .into_iter()
        .zip(elements::<f32>(&from_bfloat));
    for (&pattern, (half, bfloat)) in patterns.iter().zip(backs) {
        assert!(
            same(half, f16::from_bits(pattern).to_f32()),
            "half {pattern:#x}"
        );
        assert!(
            same(bfloat, bf16::from_bits(pattern).to_f32()),
            "bfloat {pattern:#x}"
        );
    }
}
