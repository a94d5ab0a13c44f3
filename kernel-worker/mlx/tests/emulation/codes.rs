//! Packing and quantising, beside the oracle.
//!
//! Tolerance: none, everything is compared exactly. Packing is whole numbers. Quantising is one IEEE operation after the
//! other (largest and smallest do not depend on the order; division, rounding to f16 and to a whole number are correctly
//! rounded), and decoding an exact product and one addition, then the rounding to `T`. Metal without fast math promises the
//! same; a run on the GPU has to confirm it.

use half::f16;
use velox_kernels::block::BlockType;
use velox_kernels::reference::dequantise_row;
use velox_mlx::metal::{
    AFFINE_DEQUANTISE, AFFINE_QUANTISE, BIT_PACK, BIT_UNPACK, Element, Kernel, SCALAR_DEQUANTISE,
    SCALAR_QUANTISE, Value, Variant,
};

use crate::machine::{Emulation, bytes, decode, elements, emulation, encode, noise, stored};
use crate::oracle::{self, Quantised};

/// Rows and columns: nothing, one, odd, whole words and groups, and one more or less.
const SHAPES: [(usize, usize); 11] = [
    (0, 5),
    (3, 0),
    (1, 1),
    (2, 3),
    (3, 31),
    (2, 32),
    (3, 33),
    (2, 64),
    (1, 127),
    (3, 129),
    (2, 300),
];

const BITS: [u8; 5] = [1, 2, 3, 4, 8];

/// A quantiser's template values; not all that are allowed, but each value of each parameter.
const FORMATS: [(Element, u8, u8); 7] = [
    (Element::F16, 4, 32),
    (Element::F16, 8, 64),
    (Element::F16, 2, 128),
    (Element::F16, 4, 64),
    (Element::Bf16, 4, 64),
    (Element::F32, 3, 32),
    (Element::F32, 8, 128),
];

fn packing(kernel: &'static Kernel, bits: u8) -> Variant {
    kernel.variant(&[Value::Integer(bits.into())]).unwrap()
}

fn quantising(kernel: &'static Kernel, (element, bits, group): (Element, u8, u8)) -> Variant {
    let values = [
        Value::Element(element),
        Value::Integer(bits.into()),
        Value::Integer(group.into()),
    ];
    kernel.variant(&values).unwrap()
}

pub(crate) fn variants() -> Vec<Variant> {
    let mut variants = Vec::new();
    for bits in BITS {
        variants.push(packing(&BIT_PACK, bits));
        variants.push(packing(&BIT_UNPACK, bits));
    }
    for format in FORMATS {
        for kernel in [
            &SCALAR_QUANTISE,
            &SCALAR_DEQUANTISE,
            &AFFINE_QUANTISE,
            &AFFINE_DEQUANTISE,
        ] {
            variants.push(quantising(kernel, format));
        }
    }
    variants.push(quantising(&SCALAR_DEQUANTISE, Q8_0));
    variants.push(quantising(&AFFINE_DEQUANTISE, Q4_1));
    variants
}

// Stored blocks of these types are such groups.
const Q8_0: (Element, u8, u8) = (Element::F32, 8, 32);
const Q4_1: (Element, u8, u8) = (Element::F32, 4, 32);

/// Numbers as the kernels take them.
fn extents(sizes: &[usize]) -> Vec<u32> {
    sizes
        .iter()
        .map(|&size| u32::try_from(size).unwrap())
        .collect()
}

fn items(columns: usize, rows: usize) -> [u32; 3] {
    let [columns, rows] = extents(&[columns, rows])[..] else {
        unreachable!("two sizes make two extents")
    };
    [columns, rows, 1]
}

#[test]
fn codes_are_packed_and_unpacked() {
    let Some(emulation) = emulation("codes_are_packed_and_unpacked") else {
        return;
    };
    for bits in BITS {
        for (rows, columns) in SHAPES {
            let width = usize::from(bits);
            let words = oracle::words(columns, width);
            // Bits above the code's must not disturb its neighbours.
            let codes: Vec<u8> = noise(rows * columns, 7)
                .iter()
                .map(|value| value.to_bits().to_le_bytes()[1])
                .collect();
            let sizes = bytes(&extents(&[columns, words]));
            let [packed] = emulation.run(
                &packing(&BIT_PACK, bits),
                items(words, rows),
                &[&codes, &sizes],
                [4 * rows * words],
            );
            assert_eq!(
                elements::<u32>(&packed),
                oracle::pack(&codes, columns, width),
                "{bits} bits, {rows} rows of {columns}"
            );
            let [unpacked] = emulation.run(
                &packing(&BIT_UNPACK, bits),
                items(columns, rows),
                &[&packed, &sizes],
                [rows * columns],
            );
            let masked: Vec<u8> = codes
                .iter()
                .map(|code| code & (u8::MAX >> (8 - bits)))
                .collect();
            assert_eq!(unpacked, masked, "{bits} bits, {rows} rows of {columns}");
        }
    }
}

/// Rows that a quantiser must survive, beside ordinary ones.
fn rows(columns: usize, count: usize) -> Vec<f32> {
    let mut values = noise(count * columns, 11);
    for (index, row) in values.chunks_exact_mut(columns.max(1)).enumerate() {
        match index {
            1 => row.fill(0.0),
            // Equal, and not an f16: the f16 below or above is the minimum.
            2 => row.fill(1.000_3),
            3 => row.iter_mut().for_each(|value| *value *= 1e-6),
            4 => row.iter_mut().for_each(|value| *value *= 6e4),
            // A scale or minimum that f16 cannot hold.
            5 => row.iter_mut().for_each(|value| *value *= 1e30),
            6 => row[columns / 2] = f32::NAN,
            7 => row[columns - 1] = f32::INFINITY,
            _ => {}
        }
    }
    values
}

/// A quantised matrix as buffers.
struct Buffers {
    packed: Vec<u8>,
    scales: Vec<u8>,
    minimums: Vec<u8>,
    sizes: Vec<u8>,
}

impl Buffers {
    fn of(quantised: &Quantised, columns: usize, bits: usize, group: usize) -> Self {
        let words = oracle::words(columns, bits);
        Self {
            packed: bytes(&oracle::pack(&quantised.codes, columns, bits)),
            scales: bytes(&quantised.scales),
            minimums: bytes(&quantised.minimums),
            sizes: bytes(&extents(&[columns, words, columns.div_ceil(group)])),
        }
    }
}

/// Equal numbers, or both none.
fn assert_same(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (index, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!(
            a == e || a.is_nan() && e.is_nan(),
            "{what}: {a} instead of {e} at {index}"
        );
    }
}

fn halves(bytes: &[u8]) -> Vec<f32> {
    elements::<f16>(bytes)
        .iter()
        .map(|half| half.to_f32())
        .collect()
}

/// Runs both kernels of a quantiser over all shapes.
fn check_format(emulation: &Emulation, affine: bool, format: (Element, u8, u8)) {
    let (element, bits, group) = format;
    let (width, columns_of_group) = (usize::from(bits), usize::from(group));
    for (row_count, columns) in SHAPES.into_iter().chain([(9, 70), (9, 1)]) {
        let what = format!("affine {affine}, {format:?}, {row_count} rows of {columns}");
        let values = rows(columns, row_count);
        let values = stored(element, &values);
        let expected = if affine {
            oracle::affine_quantise(&values, columns, width, columns_of_group)
        } else {
            oracle::scalar_quantise(&values, columns, width, columns_of_group)
        };
        let buffers = Buffers::of(&expected, columns, width, columns_of_group);
        let groups = columns.div_ceil(columns_of_group);
        let source = encode(element, &values);
        let inputs: [&[u8]; 2] = [&source, &buffers.sizes];
        let items_of_groups = items(groups, row_count);
        let (packed, scale_bytes) = (buffers.packed.len(), buffers.scales.len());
        let decoded_bytes = source.len();
        let decoded = if affine {
            let variant = quantising(&AFFINE_QUANTISE, format);
            let lengths = [packed, scale_bytes, scale_bytes];
            let [packed, scales, minimums] =
                emulation.run(&variant, items_of_groups, &inputs, lengths);
            assert_eq!(packed, buffers.packed, "{what}");
            assert_same(&halves(&scales), &halves(&buffers.scales), &what);
            assert_same(&halves(&minimums), &halves(&buffers.minimums), &what);
            let inputs: [&[u8]; 4] = [&packed, &scales, &minimums, &buffers.sizes];
            let variant = quantising(&AFFINE_DEQUANTISE, format);
            let [decoded] = emulation.run(
                &variant,
                items(columns, row_count),
                &inputs,
                [decoded_bytes],
            );
            decoded
        } else {
            let variant = quantising(&SCALAR_QUANTISE, format);
            let lengths = [packed, scale_bytes];
            let [packed, scales] = emulation.run(&variant, items_of_groups, &inputs, lengths);
            assert_eq!(packed, buffers.packed, "{what}");
            assert_same(&halves(&scales), &halves(&buffers.scales), &what);
            let inputs: [&[u8]; 3] = [&packed, &scales, &buffers.sizes];
            let variant = quantising(&SCALAR_DEQUANTISE, format);
            let [decoded] = emulation.run(
                &variant,
                items(columns, row_count),
                &inputs,
                [decoded_bytes],
            );
            decoded
        };
        let expected = if affine {
            oracle::affine_dequantise(&expected, columns, columns_of_group)
        } else {
            oracle::scalar_dequantise(&expected, columns, width, columns_of_group)
        };
        let decoded = decode(element, &decoded);
        assert_same(&decoded, &stored(element, &expected), &what);
        if row_count > 7 {
            // A number that is none comes back as none, with its whole group.
            assert!(decoded[6 * columns + columns / 2].is_nan(), "{what}");
            assert!(decoded[8 * columns - 1].is_nan(), "{what}");
        }
    }
}

#[test]
fn scalar_codes_agree_with_the_oracle() {
    let Some(emulation) = emulation("scalar_codes_agree_with_the_oracle") else {
        return;
    };
    for format in FORMATS {
        check_format(emulation, false, format);
    }
}

#[test]
fn affine_codes_agree_with_the_oracle() {
    let Some(emulation) = emulation("affine_codes_agree_with_the_oracle") else {
        return;
    };
    for format in FORMATS {
        check_format(emulation, true, format);
    }
}

/// The oracle is held against the bound that quantising is about, not only against itself.
#[test]
fn what_the_oracle_decodes_is_half_a_step_away_at_most() {
    for (bits, group) in [(2_usize, 32_usize), (3, 64), (4, 64), (8, 128)] {
        let values = stored(Element::F16, &noise(3 * 130, 5));
        let affine = oracle::affine_quantise(&values, 130, bits, group);
        let scalar = oracle::scalar_quantise(&values, 130, bits, group);
        for (quantised, decoded) in [
            (&affine, oracle::affine_dequantise(&affine, 130, group)),
            (
                &scalar,
                oracle::scalar_dequantise(&scalar, 130, bits, group),
            ),
        ] {
            for (index, (value, back)) in values.iter().zip(&decoded).enumerate() {
                let at = index / 130 * 130_usize.div_ceil(group) + index % 130 / group;
                let step = quantised.scales[at].to_f32();
                // A scale that was rounded down leaves the last code short by up to 255 times 2^-11 of it.
                let limit = step * (0.5 + 255.0 / 2048.0);
                assert!(
                    (value - back).abs() <= limit,
                    "{bits} bits: {value} became {back}"
                );
            }
        }
    }
}

#[test]
fn a_block_of_q8_0_is_a_group_of_scalar_codes() {
    let Some(emulation) = emulation("a_block_of_q8_0_is_a_group_of_scalar_codes") else {
        return;
    };
    let values = noise(2 * 96, 3);
    let quantised = oracle::scalar_quantise(&values, 96, 8, 32);
    let buffers = Buffers::of(&quantised, 96, 8, 32);
    let [decoded] = emulation.run(
        &quantising(&SCALAR_DEQUANTISE, Q8_0),
        items(96, 2),
        &[&buffers.packed, &buffers.scales, &buffers.sizes],
        [4 * values.len()],
    );
    let groups = quantised.codes.chunks_exact(32).zip(&quantised.scales);
    let blocks: Vec<u8> = groups
        .flat_map(|(codes, scale)| [scale.to_le_bytes().as_slice(), codes].concat())
        .collect();
    let mut expected = vec![0.0; values.len()];
    let _ = dequantise_row(BlockType::Q8_0, &blocks, &mut expected).unwrap();
    assert_same(&decode(Element::F32, &decoded), &expected, "Q8_0");
}

#[test]
fn a_block_of_q4_1_is_a_group_of_affine_codes() {
    let Some(emulation) = emulation("a_block_of_q4_1_is_a_group_of_affine_codes") else {
        return;
    };
    let values = noise(2 * 96, 4);
    let quantised = oracle::affine_quantise(&values, 96, 4, 32);
    let buffers = Buffers::of(&quantised, 96, 4, 32);
    let [decoded] = emulation.run(
        &quantising(&AFFINE_DEQUANTISE, Q4_1),
        items(96, 2),
        &[
            &buffers.packed,
            &buffers.scales,
            &buffers.minimums,
            &buffers.sizes,
        ],
        [4 * values.len()],
    );
    let mut blocks = Vec::new();
    for (group, codes) in quantised.codes.chunks_exact(32).enumerate() {
        blocks.extend(quantised.scales[group].to_le_bytes());
        blocks.extend(quantised.minimums[group].to_le_bytes());
        let (low, high) = codes.split_at(16);
        blocks.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
    }
    let mut expected = vec![0.0; values.len()];
    let _ = dequantise_row(BlockType::Q4_1, &blocks, &mut expected).unwrap();
    assert_same(&decode(Element::F32, &decoded), &expected, "Q4_1");
}
