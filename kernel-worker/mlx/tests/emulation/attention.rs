//! Attention of one token, beside the oracle in f64 and the reference.
//!
//! Tolerance: a product of query and key has K roundings of at most its size, and the exponential turns an error of the
//! score into the same relative error of the weight; sums of weights add about as many roundings as there are positions.
//! Outputs are averages of values of at most 1, so that gives an absolute limit, see [`limit`]; then `T` rounds.

use half::f16;
use velox_kernels::attention::{AttendCall, PageLayout, PageView, PagedView, StatsRequest};
use velox_kernels::reference::attend;
use velox_mlx::metal::{DECODE_ATTENTION, DECODE_ATTENTION_AFFINE, Element, Value, Variant};

use crate::machine::{
    Emulation, bytes, decode, elements, emulation, encode, half_step, noise, stored,
};
use crate::oracle;

/// Template values of a variant; `codes` are bits and group of a packed cache.
#[derive(Debug, Clone, Copy)]
struct Format {
    element: Element,
    head_dim: u16,
    threads: u32,
    masked: bool,
    codes: Option<(u8, u8)>,
}

const fn format(
    element: Element,
    (head_dim, threads): (u16, u32),
    masked: bool,
    codes: Option<(u8, u8)>,
) -> Format {
    Format {
        element,
        head_dim,
        threads,
        masked,
        codes,
    }
}

const FORMATS: [Format; 10] = [
    format(Element::F16, (64, 128), false, None),
    format(Element::F16, (64, 128), true, None),
    // A head that is no whole number of lanes, and a single SIMD-group.
    format(Element::F32, (80, 32), true, None),
    format(Element::Bf16, (128, 256), false, None),
    format(Element::F16, (256, 64), false, None),
    format(Element::F16, (64, 128), false, Some((4, 64))),
    format(Element::F16, (64, 128), true, Some((4, 32))),
    format(Element::F16, (128, 64), true, Some((8, 32))),
    // A head that ends inside a group.
    format(Element::F32, (80, 64), true, Some((2, 64))),
    format(Element::Bf16, (96, 256), false, Some((8, 64))),
];

fn variant(format: Format) -> Variant {
    let mut values = vec![
        Value::Element(format.element),
        Value::Integer(format.head_dim.into()),
        Value::Integer(format.threads),
        Value::Boolean(format.masked),
    ];
    let Some((bits, group)) = format.codes else {
        return DECODE_ATTENTION.variant(&values).unwrap();
    };
    values.extend([Value::Integer(bits.into()), Value::Integer(group.into())]);
    DECODE_ATTENTION_AFFINE.variant(&values).unwrap()
}

pub(crate) fn variants() -> Vec<Variant> {
    FORMATS.into_iter().map(variant).collect()
}

/// Heads, lengths and scores of a case.
#[derive(Debug, Clone, Copy)]
struct Case {
    n_heads: usize,
    n_kv_heads: usize,
    length: usize,
    capacity: usize,
    /// Factor on ordinary queries; a large one makes scores of hundreds.
    query_size: f32,
}

/// What a case stores, `[n_kv_heads, capacity, K]` per matrix.
struct Cache {
    /// Key buffers as the kernel takes them, then value buffers.
    buffers: Vec<Vec<u8>>,
    /// What reading gives.
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Cache {
    /// Makes a cache whose rows that `is_read` denies are NaN.
    fn new(format: Format, case: Case, is_read: impl Fn(usize) -> bool) -> Self {
        let head_dim = usize::from(format.head_dim);
        let matrix = |seed| {
            let mut matrix = noise(case.n_kv_heads * case.capacity * head_dim, seed);
            for (row, elements) in matrix.chunks_exact_mut(head_dim).enumerate() {
                if !is_read(row % case.capacity) {
                    elements.fill(f32::NAN);
                }
            }
            stored(format.element, &matrix)
        };
        let (key_buffers, keys) = Self::store(format, &matrix(51));
        let (value_buffers, values) = Self::store(format, &matrix(52));
        Self {
            buffers: [key_buffers, value_buffers].concat(),
            keys,
            values,
        }
    }

    fn store(format: Format, matrix: &[f32]) -> (Vec<Vec<u8>>, Vec<f32>) {
        let head_dim = usize::from(format.head_dim);
        let Some((bits, group)) = format
            .codes
            .map(|(bits, group)| (bits.into(), group.into()))
        else {
            return (vec![encode(format.element, matrix)], matrix.to_vec());
        };
        let quantised = oracle::affine_quantise(matrix, head_dim, bits, group);
        let decoded = oracle::affine_dequantise(&quantised, head_dim, group);
        let buffers = vec![
            bytes(&oracle::pack(&quantised.codes, head_dim, bits)),
            bytes(&quantised.scales),
            bytes(&quantised.minimums),
        ];
        (buffers, decoded)
    }
}

fn run(
    emulation: &Emulation,
    format: Format,
    case: Case,
    (queries, cache, mask): (&[f32], &Cache, &[bool]),
) -> Vec<f32> {
    let extent = |size: usize| u32::try_from(size).unwrap();
    let queries = encode(format.element, queries);
    let mask: Vec<u8> = mask.iter().map(|&visible| visible.into()).collect();
    let scale = bytes(&[scale(format)]);
    let sizes = [case.length, case.capacity, case.n_heads / case.n_kv_heads].map(extent);
    let sizes = bytes(&sizes);
    let mut inputs: Vec<&[u8]> = vec![&queries];
    inputs.extend(cache.buffers.iter().map(Vec::as_slice));
    inputs.extend([mask.as_slice(), &scale, &sizes]);
    let items = [extent(case.n_heads), 1, 1];
    let [attended] = emulation.run(&variant(format), items, &inputs, [queries.len()]);
    decode(format.element, &attended)
}

fn scale(format: Format) -> f32 {
    1.0 / f32::from(format.head_dim).sqrt()
}

/// How far an output may be from the exact one, see the top of this file.
fn limit(format: Format, case: Case, expected: f64) -> f64 {
    // |q| |k| over the root of K: what a score is at most.
    let largest_score = f64::from(case.query_size) * f64::from(format.head_dim).sqrt();
    let score = (f64::from(format.head_dim) + 4.0) * largest_score;
    let sums = oracle::float(case.length) + 8.0;
    (score + sums) * half_step(Element::F32) + expected.abs() * half_step(format.element)
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // None, one, fewer and more than SIMD-groups, and around the threads of one and several of them.
    for length in [0, 1, 2, 5, 31, 33, 129] {
        cases.push(Case {
            n_heads: 3,
            n_kv_heads: 1,
            length,
            capacity: 130,
            query_size: 1.0,
        });
    }
    cases.push(Case {
        n_heads: 4,
        n_kv_heads: 2,
        length: 7,
        capacity: 7,
        query_size: 1.0,
    });
    cases.push(Case {
        n_heads: 2,
        n_kv_heads: 2,
        length: 40,
        capacity: 41,
        query_size: 60.0,
    });
    cases
}

/// Every third position hidden, the first one among them; or all.
fn masks(format: Format, length: usize) -> Vec<Vec<bool>> {
    if format.masked {
        let some = (0..length).map(|position| position % 3 != 0).collect();
        vec![some, vec![false; length], vec![true; length]]
    } else {
        vec![vec![true; length]]
    }
}

#[test]
fn attention_agrees_with_its_formula() {
    let Some(emulation) = emulation("attention_agrees_with_its_formula") else {
        return;
    };
    for format in FORMATS {
        let head_dim = usize::from(format.head_dim);
        for case in cases() {
            for visible in masks(format, case.length) {
                // What is hidden or beyond the length is NaN, so reading it would show.
                let cache = Cache::new(format, case, |position| {
                    visible.get(position).copied().unwrap_or(false)
                });
                let queries = noise(case.n_heads * head_dim, 53);
                let queries: Vec<f32> = queries.iter().map(|q| q * case.query_size).collect();
                let queries = stored(format.element, &queries);
                // Without a mask none is read, not even where one lies.
                let mask = if format.masked {
                    visible.as_slice()
                } else {
                    &[]
                };
                let actual = run(emulation, format, case, (&queries, &cache, mask));
                for (head, (query, actual)) in queries
                    .chunks_exact(head_dim)
                    .zip(actual.chunks_exact(head_dim))
                    .enumerate()
                {
                    let kv_head = head / (case.n_heads / case.n_kv_heads);
                    let from = kv_head * case.capacity * head_dim;
                    let rows = from..from + case.length * head_dim;
                    let (keys, values) = (&cache.keys[rows.clone()], &cache.values[rows]);
                    let expected = oracle::attention(query, keys, values, scale(format), &visible);
                    for (actual, expected) in actual.iter().zip(expected) {
                        let what = format!("{format:?}, {case:?}: {actual} instead of {expected}");
                        if expected.is_nan() {
                            assert!(actual.is_nan(), "{what}");
                        } else {
                            let error = (f64::from(*actual) - expected).abs();
                            assert!(error <= limit(format, case, expected), "{what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn attention_agrees_with_the_reference() {
    let Some(emulation) = emulation("attention_agrees_with_the_reference") else {
        return;
    };
    let format = FORMATS[0];
    let case = Case {
        n_heads: 6,
        n_kv_heads: 2,
        length: 37,
        capacity: 48,
        query_size: 1.0,
    };
    let cache = Cache::new(format, case, |position| position < case.length);
    let queries = stored(format.element, &noise(case.n_heads * 64, 61));
    let actual = run(emulation, format, case, (&queries, &cache, &[]));
    let layout = PageLayout {
        page_tokens: case.capacity,
        n_kv_heads: case.n_kv_heads,
        head_dim: 64,
    };
    let halves: Vec<Vec<f16>> = cache
        .buffers
        .iter()
        .map(|buffer| elements(buffer))
        .collect();
    let page = PageView {
        keys: &halves[0],
        values: &halves[1],
    };
    let view = PagedView::new(layout, case.length, vec![page]).unwrap();
    let call = AttendCall {
        queries: &queries,
        start: case.length - 1,
        n_heads: case.n_heads,
        sliding_window: None,
        scale: scale(format),
        statistics: StatsRequest::None,
    };
    let mut expected = vec![0.0; queries.len()];
    let _ = attend(&call, &view, 1, &mut expected).unwrap();
    for (actual, expected) in actual.iter().zip(expected) {
        let error = f64::from((actual - expected).abs());
        // The reference rounds about as often.
        let limit = 2.0 * limit(format, case, expected.into());
        assert!(error <= limit, "{actual} instead of {expected}");
    }
}

#[test]
fn a_score_that_is_no_number_spoils_its_head_and_minus_infinity_hides() {
    let test = "a_score_that_is_no_number_spoils_its_head_and_minus_infinity_hides";
    let Some(emulation) = emulation(test) else {
        return;
    };
    let format = FORMATS[2];
    let case = Case {
        n_heads: 2,
        n_kv_heads: 2,
        length: 6,
        capacity: 6,
        query_size: 1.0,
    };
    let head_dim = usize::from(format.head_dim);
    let queries = vec![1.0; case.n_heads * head_dim];
    let mut cache = Cache::new(format, case, |_| true);
    let mut attend_with = |first_key: f32, mask: &[bool]| {
        cache.keys[..head_dim].fill(first_key);
        cache.buffers[0] = encode(format.element, &cache.keys);
        run(emulation, format, case, (&queries, &cache, mask))
    };
    let all = [true; 6];
    let others = [false, true, true, true, true, true];
    let hidden = attend_with(0.0, &others);
    // The sum of such products is -inf, which is the first and largest score so far.
    let minus_infinity = attend_with(-f32::MAX, &all);
    assert_eq!(minus_infinity[..head_dim], hidden[..head_dim]);
    for bad in [f32::MAX, f32::NAN] {
        let actual = attend_with(bad, &all);
        assert!(actual[..head_dim].iter().all(|x| x.is_nan()), "{bad}");
        // The second head has keys of its own.
        assert_eq!(actual[head_dim..], minus_infinity[head_dim..], "{bad}");
    }
}
