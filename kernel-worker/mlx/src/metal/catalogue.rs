//! The kernels.

use super::{Allowed, Buffer, Constant, Element, Holds, Kernel, Threads};

/// Every kernel.
pub const KERNELS: &[&Kernel] = &[
    &BIT_PACK,
    &BIT_UNPACK,
    &SCALAR_QUANTISE,
    &SCALAR_DEQUANTISE,
    &AFFINE_QUANTISE,
    &AFFINE_DEQUANTISE,
    &HADAMARD,
    &ROPE_REENCODE,
    &DECODE_ATTENTION,
    &DECODE_ATTENTION_AFFINE,
];

/// Packs `codes` `[rows, columns]` into a stream of `BITS` bits each, a row in whole words.
pub static BIT_PACK: Kernel = Kernel {
    name: "velox_bit_pack",
    source: include_str!("../../metal/bit_pack.metal"),
    constants: &[integers("BITS", &[1, 2, 3, 4, 8])],
    inputs: &[fixed("codes", Element::U8), fixed("sizes", Element::U32)],
    outputs: &[fixed("packed", Element::U32)],
    threads: Threads::One,
};

/// Undoes [`BIT_PACK`].
pub static BIT_UNPACK: Kernel = Kernel {
    name: "velox_bit_unpack",
    source: include_str!("../../metal/bit_unpack.metal"),
    constants: &[integers("BITS", &[1, 2, 3, 4, 8])],
    inputs: &[fixed("packed", Element::U32), fixed("sizes", Element::U32)],
    outputs: &[fixed("codes", Element::U8)],
    threads: Threads::One,
};

/// Quantises groups of `values` `[rows, columns]` from minus to plus their largest magnitude.
pub static SCALAR_QUANTISE: Kernel = Kernel {
    name: "velox_scalar_quantise",
    source: include_str!("../../metal/scalar_quantise.metal"),
    constants: &[VALUE_TYPE, integers("BITS", &[2, 3, 4, 8]), GROUP],
    inputs: &[typed("values", "T"), fixed("sizes", Element::U32)],
    outputs: &[fixed("packed", Element::U32), fixed("scales", Element::F16)],
    threads: Threads::Simdgroup,
};

/// Undoes [`SCALAR_QUANTISE`] but for rounding.
pub static SCALAR_DEQUANTISE: Kernel = Kernel {
    name: "velox_scalar_dequantise",
    source: include_str!("../../metal/scalar_dequantise.metal"),
    constants: &[VALUE_TYPE, integers("BITS", &[2, 3, 4, 8]), GROUP],
    inputs: &[
        fixed("packed", Element::U32),
        fixed("scales", Element::F16),
        fixed("sizes", Element::U32),
    ],
    outputs: &[typed("values", "T")],
    threads: Threads::One,
};

/// Quantises groups of `values` `[rows, columns]` from their smallest to their largest value.
pub static AFFINE_QUANTISE: Kernel = Kernel {
    name: "velox_affine_quantise",
    source: include_str!("../../metal/affine_quantise.metal"),
    constants: &[VALUE_TYPE, integers("BITS", &[2, 3, 4, 8]), GROUP],
    inputs: &[typed("values", "T"), fixed("sizes", Element::U32)],
    outputs: &[
        fixed("packed", Element::U32),
        fixed("scales", Element::F16),
        fixed("minimums", Element::F16),
    ],
    threads: Threads::Simdgroup,
};

/// Undoes [`AFFINE_QUANTISE`] but for rounding.
pub static AFFINE_DEQUANTISE: Kernel = Kernel {
    name: "velox_affine_dequantise",
    source: include_str!("../../metal/affine_dequantise.metal"),
    constants: &[VALUE_TYPE, integers("BITS", &[2, 3, 4, 8]), GROUP],
    inputs: &[
        fixed("packed", Element::U32),
        fixed("scales", Element::F16),
        fixed("minimums", Element::F16),
        fixed("sizes", Element::U32),
    ],
    outputs: &[typed("values", "T")],
    threads: Threads::One,
};

/// Normalised Walsh-Hadamard transform of rows of `D`; its own inverse.
pub static HADAMARD: Kernel = Kernel {
    name: "velox_hadamard",
    source: include_str!("../../metal/hadamard.metal"),
    constants: &[
        VALUE_TYPE,
        integers("D", &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
    ],
    inputs: &[typed("values", "T")],
    outputs: &[typed("transformed", "T")],
    threads: Threads::Constant("D"),
};

/// Moves rotated keys from old to new positions.
pub static ROPE_REENCODE: Kernel = Kernel {
    name: "velox_rope_reencode",
    source: include_str!("../../metal/rope_reencode.metal"),
    constants: &[
        VALUE_TYPE,
        Constant {
            name: "HALF_SPLIT",
            allowed: Allowed::Boolean,
        },
    ],
    inputs: &[
        typed("keys", "T"),
        fixed("old_positions", Element::U32),
        fixed("new_positions", Element::U32),
        fixed("turns", Element::U64),
        fixed("sizes", Element::U32),
    ],
    outputs: &[typed("rotated", "T")],
    threads: Threads::One,
};

/// Attention of one new token over a 16-bit (or f32) cache.
pub static DECODE_ATTENTION: Kernel = Kernel {
    name: "velox_decode_attention",
    source: concat!(
        include_str!("../../metal/cache_16_bit.metal"),
        include_str!("../../metal/decode_attention.metal")
    ),
    constants: &[VALUE_TYPE, HEAD_DIM, ATTENTION_THREADS, MASKED],
    inputs: &[
        typed("queries", "T"),
        typed("keys", "T"),
        typed("values", "T"),
        fixed("mask", Element::Bool),
        fixed("scale", Element::F32),
        fixed("sizes", Element::U32),
    ],
    outputs: &[typed("attended", "T")],
    threads: Threads::Constant("THREADS"),
};

/// Attention of one new token over a cache of rows that [`AFFINE_QUANTISE`] made.
pub static DECODE_ATTENTION_AFFINE: Kernel = Kernel {
    name: "velox_decode_attention_affine",
    source: concat!(
        include_str!("../../metal/cache_affine.metal"),
        include_str!("../../metal/decode_attention.metal")
    ),
    constants: &[
        VALUE_TYPE,
        HEAD_DIM,
        ATTENTION_THREADS,
        MASKED,
        integers("BITS", &[2, 4, 8]),
        integers("GROUP", &[32, 64]),
    ],
    inputs: &[
        typed("queries", "T"),
        fixed("keys", Element::U32),
        fixed("key_scales", Element::F16),
        fixed("key_minimums", Element::F16),
        fixed("values", Element::U32),
        fixed("value_scales", Element::F16),
        fixed("value_minimums", Element::F16),
        fixed("mask", Element::Bool),
        fixed("scale", Element::F32),
        fixed("sizes", Element::U32),
    ],
    outputs: &[typed("attended", "T")],
    threads: Threads::Constant("THREADS"),
};

/// Type of values before and after a kernel.
const VALUE_TYPE: Constant = Constant {
    name: "T",
    allowed: Allowed::Elements(&[Element::F16, Element::Bf16, Element::F32]),
};

/// Columns that share a scale.
const GROUP: Constant = integers("GROUP", &[32, 64, 128]);

/// Elements of a head.
const HEAD_DIM: Constant = integers("K", &[32, 64, 80, 96, 128, 256]);

/// Threads per query head; sums of `K` per SIMD-group must fit in 32 KiB of threadgroup memory.
const ATTENTION_THREADS: Constant = integers("THREADS", &[32, 64, 128, 256]);

/// Whether there is a mask.
const MASKED: Constant = Constant {
    name: "MASKED",
    allowed: Allowed::Boolean,
};

const fn integers(name: &'static str, allowed: &'static [u32]) -> Constant {
    Constant {
        name,
        allowed: Allowed::Integers(allowed),
    }
}

const fn fixed(name: &'static str, element: Element) -> Buffer {
    Buffer {
        name,
        holds: Holds::Fixed(element),
    }
}

const fn typed(name: &'static str, constant: &'static str) -> Buffer {
    Buffer {
        name,
        holds: Holds::Constant(constant),
    }
}
