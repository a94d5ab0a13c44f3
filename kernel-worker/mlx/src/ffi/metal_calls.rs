//! The kernels of [`crate::metal`] as safe calls: each takes its sizes from the arrays it is given, so no caller can
//! make a body leave a buffer.
//!
//! Every array is checked against the shape that the top of its body states; what the values mean is the caller's care.

use super::error::MlxError;
use super::kernel::dispatch;
use super::tensor::{Dtype, Tensor};
use crate::metal::{
    AFFINE_DEQUANTISE, AFFINE_QUANTISE, BIT_PACK, BIT_UNPACK, DECODE_ATTENTION,
    DECODE_ATTENTION_AFFINE, HADAMARD, Kernel, ROPE_REENCODE, SCALAR_DEQUANTISE, SCALAR_QUANTISE,
    Value, Variant,
};

/// Codes with scales, and minimums if they are affine: `[rows, words]`, `[rows, groups]` each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Groups<'a> {
    /// u32.
    pub(crate) packed: &'a Tensor,
    /// f16.
    pub(crate) scales: &'a Tensor,
    /// f16; `None` for scalar codes.
    pub(crate) minimums: Option<&'a Tensor>,
}

/// What a token attends with, beside the cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attending<'a> {
    /// `[H, K]`.
    pub(crate) queries: &'a Tensor,
    /// Heads that the cache stores.
    pub(crate) kv_heads: usize,
    /// Positions that hold a token, at least one.
    pub(crate) length: usize,
    /// `[length]`, bool; given if the variant is masked.
    pub(crate) mask: Option<&'a Tensor>,
    /// Factor on scores.
    pub(crate) scale: f32,
}

/// Returns the words of a packed row.
#[must_use]
pub(crate) const fn words(columns: usize, bits: usize) -> usize {
    columns.saturating_mul(bits).div_ceil(32)
}

/// Packs codes `[rows, columns]`, u8.
pub(crate) fn bit_pack(variant: &Variant, codes: &Tensor) -> Result<Tensor, MlxError> {
    expect(variant, &[&BIT_PACK])?;
    let [rows, columns] = axes("codes", codes)?;
    let words = words(columns, integer(variant, "BITS")?);
    let sizes = numbers(&[columns, words])?;
    // SAFETY: thread (word, row) of [words, rows] reads codes of its row below `columns` and writes its word.
    let made = unsafe {
        dispatch(
            variant,
            [words, rows, 1],
            &[codes, &sizes],
            [&[rows, words]],
        )
    };
    let [packed] = made?;
    Ok(packed)
}

/// Unpacks words `[rows, words]`, u32, of as many columns.
pub(crate) fn bit_unpack(
    variant: &Variant,
    packed: &Tensor,
    columns: usize,
) -> Result<Tensor, MlxError> {
    expect(variant, &[&BIT_UNPACK])?;
    let [rows, found] = axes("packed", packed)?;
    let words = words(columns, integer(variant, "BITS")?);
    agree("words of a row", found, words)?;
    let sizes = numbers(&[columns, words])?;
    // SAFETY: thread (column, row) reads the words that hold its code, all below `words`, and writes its code.
    let made = unsafe {
        dispatch(
            variant,
            [columns, rows, 1],
            &[packed, &sizes],
            [&[rows, columns]],
        )
    };
    let [codes] = made?;
    Ok(codes)
}

/// Quantises values `[rows, columns]`; returns words and scales.
pub(crate) fn scalar_quantise(variant: &Variant, values: &Tensor) -> Result<[Tensor; 2], MlxError> {
    expect(variant, &[&SCALAR_QUANTISE])?;
    let [rows, columns] = axes("values", values)?;
    let (words, groups) = row_of(variant, columns)?;
    let sizes = numbers(&[columns, words, groups])?;
    // SAFETY: SIMD-group (group, row) of [groups, rows] reads values of its group below `columns`, writes the words of
    // its group below `words`, and its scale; groups are whole words, so all words are written.
    unsafe {
        dispatch(
            variant,
            [groups, rows, 1],
            &[values, &sizes],
            [&[rows, words], &[rows, groups]],
        )
    }
}

/// Quantises values `[rows, columns]`; returns words, scales and minimums.
pub(crate) fn affine_quantise(variant: &Variant, values: &Tensor) -> Result<[Tensor; 3], MlxError> {
    expect(variant, &[&AFFINE_QUANTISE])?;
    let [rows, columns] = axes("values", values)?;
    let (words, groups) = row_of(variant, columns)?;
    let sizes = numbers(&[columns, words, groups])?;
    // SAFETY: as in `scalar_quantise`, and the minimum of its group.
    unsafe {
        dispatch(
            variant,
            [groups, rows, 1],
            &[values, &sizes],
            [&[rows, words], &[rows, groups], &[rows, groups]],
        )
    }
}

/// Decodes rows of as many columns.
pub(crate) fn dequantise(
    variant: &Variant,
    stored: Groups<'_>,
    columns: usize,
) -> Result<Tensor, MlxError> {
    let [rows, _] = axes("packed", stored.packed)?;
    let (words, groups) = row_of(variant, columns)?;
    check_groups(stored, [rows, words, groups])?;
    let sizes = numbers(&[columns, words, groups])?;
    let mut inputs = vec![stored.packed, stored.scales];
    match stored.minimums {
        None => expect(variant, &[&SCALAR_DEQUANTISE])?,
        Some(minimums) => {
            expect(variant, &[&AFFINE_DEQUANTISE])?;
            inputs.push(minimums);
        }
    }
    inputs.push(&sizes);
    // SAFETY: thread (column, row) reads its code's words below `words` and entry column / GROUP, below `groups`, of its
    // row, whose shapes were checked above, and writes its value.
    let made = unsafe { dispatch(variant, [columns, rows, 1], &inputs, [&[rows, columns]]) };
    let [values] = made?;
    Ok(values)
}

/// Transforms rows `[rows, D]`.
pub(crate) fn hadamard(variant: &Variant, values: &Tensor) -> Result<Tensor, MlxError> {
    expect(variant, &[&HADAMARD])?;
    let [rows, length] = axes("values", values)?;
    agree("elements of a row", length, integer(variant, "D")?)?;
    // SAFETY: D threads per row read and write one element of it each.
    let made = unsafe { dispatch(variant, [rows, 1, 1], &[values], [&[rows, length]]) };
    let [transformed] = made?;
    Ok(transformed)
}

/// Moves keys `[heads, tokens, head_dim]` between positions `[tokens]`, u32; turns are `[pairs]`, u64.
pub(crate) fn rope_reencode(
    variant: &Variant,
    keys: &Tensor,
    (old, new): (&Tensor, &Tensor),
    turns: &Tensor,
) -> Result<Tensor, MlxError> {
    expect(variant, &[&ROPE_REENCODE])?;
    let [heads, tokens, head_dim] = axes("keys", keys)?;
    for positions in [old, new] {
        let [count] = axes("positions", positions)?;
        agree("positions", count, tokens)?;
    }
    let [pairs] = axes("turns", turns)?;
    if pairs > head_dim / 2 {
        return Err(MlxError::Operation(format!(
            "{pairs} pairs do not fit in {head_dim} elements"
        )));
    }
    let sizes = numbers(&[head_dim, tokens, pairs])?;
    // A kernel gets no empty buffer; this one is not read.
    let unused = Tensor::of_bytes(Dtype::U64, &[0; 8], &[1])?;
    let turns = if pairs == 0 { &unused } else { turns };
    // SAFETY: thread (element, token, head) reads two elements of its row, its token's positions and, below 2 pairs, its
    // pair's turns, and writes its element.
    let made = unsafe {
        dispatch(
            variant,
            [head_dim, tokens, heads],
            &[keys, old, new, turns, &sizes],
            [&[heads, tokens, head_dim]],
        )
    };
    let [rotated] = made?;
    Ok(rotated)
}

/// Attends over keys and values `[kv_heads, capacity, K]`.
pub(crate) fn decode_attention(
    variant: &Variant,
    attending: Attending<'_>,
    (keys, values): (&Tensor, &Tensor),
) -> Result<Tensor, MlxError> {
    expect(variant, &[&DECODE_ATTENTION])?;
    let head_dim = integer(variant, "K")?;
    let [kv_heads, capacity, found] = axes("keys", keys)?;
    agree("elements of a key", found, head_dim)?;
    agree("heads of the cache", kv_heads, attending.kv_heads)?;
    for (found, expected) in axes::<3>("values", values)?
        .into_iter()
        .zip([kv_heads, capacity, head_dim])
    {
        agree("an axis of values", found, expected)?;
    }
    // SAFETY: the cache has `capacity` rows of K for each of `kv_heads`, checked above.
    unsafe { attend(variant, attending, &[keys, values], capacity) }
}

/// Attends over packed keys and values, `[kv_heads * capacity]` rows.
pub(crate) fn decode_attention_affine(
    variant: &Variant,
    attending: Attending<'_>,
    (keys, values): (Groups<'_>, Groups<'_>),
) -> Result<Tensor, MlxError> {
    expect(variant, &[&DECODE_ATTENTION_AFFINE])?;
    let [rows, _] = axes("keys", keys.packed)?;
    let (words, groups) = row_of(variant, integer(variant, "K")?)?;
    let capacity = rows.checked_div(attending.kv_heads).unwrap_or(0);
    agree(
        "rows of the cache",
        rows,
        attending.kv_heads.saturating_mul(capacity),
    )?;
    let mut cache = Vec::new();
    for stored in [keys, values] {
        check_groups(stored, [rows, words, groups])?;
        let minimums = stored
            .minimums
            .ok_or_else(|| MlxError::Operation("a packed cache needs minimums".to_owned()))?;
        cache.extend([stored.packed, stored.scales, minimums]);
    }
    // SAFETY: the cache has `capacity` rows of `words` and `groups` for each of `kv_heads`, checked above.
    unsafe { attend(variant, attending, &cache, capacity) }
}

/// # Safety
/// The cache must have `capacity` rows, of the size that the variant's K needs, for each of its heads.
unsafe fn attend(
    variant: &Variant,
    attending: Attending<'_>,
    cache: &[&Tensor],
    capacity: usize,
) -> Result<Tensor, MlxError> {
    let [heads, found] = axes("queries", attending.queries)?;
    let head_dim = integer(variant, "K")?;
    agree("elements of a query", found, head_dim)?;
    let per_kv_head = heads.checked_div(attending.kv_heads).unwrap_or(0);
    agree(
        "query heads",
        heads,
        attending.kv_heads.saturating_mul(per_kv_head),
    )?;
    if attending.length == 0 || attending.length > capacity {
        return Err(MlxError::Operation(format!(
            "{} positions of a cache that has room for {capacity}",
            attending.length
        )));
    }
    let masked = variant
        .constants()
        .any(|constant| constant == ("MASKED", Value::Boolean(true)));
    // Without a mask the body reads none, and still gets a buffer.
    let unused = Tensor::of_bytes(Dtype::Bool, &[1], &[1])?;
    let mask = match (masked, attending.mask) {
        (true, Some(mask)) => {
            let [count] = axes("mask", mask)?;
            agree("positions of the mask", count, attending.length)?;
            mask
        }
        (false, None) => &unused,
        _ => {
            return Err(MlxError::Operation(
                "a mask is given to the masked variant, and to no other".to_owned(),
            ));
        }
    };
    let scale = Tensor::of_f32(&[attending.scale], &[1])?;
    let sizes = numbers(&[attending.length, capacity, per_kv_head.max(1)])?;
    let mut inputs = vec![attending.queries];
    inputs.extend(cache);
    inputs.extend([mask, &scale, &sizes]);
    // SAFETY: THREADS threads per query head read its query, mask entries below `length`, and rows of the cache from
    // head / per_kv_head * capacity on, fewer than `length` of them, which is at most `capacity`; heads / per_kv_head is
    // the number of the cache's heads, checked above. Together they write the K elements of the head's output.
    let made = unsafe { dispatch(variant, [heads, 1, 1], &inputs, [&[heads, head_dim]]) };
    let [attended] = made?;
    Ok(attended)
}

fn expect(variant: &Variant, kernels: &[&'static Kernel]) -> Result<(), MlxError> {
    if kernels.contains(&variant.kernel()) {
        Ok(())
    } else {
        let name = variant.kernel().name;
        Err(MlxError::Operation(format!(
            "kernel {name} is none for this call"
        )))
    }
}

fn check_groups(stored: Groups<'_>, [rows, words, groups]: [usize; 3]) -> Result<(), MlxError> {
    let expect_shape = |name, tensor: &Tensor, expected: [usize; 2]| -> Result<(), MlxError> {
        let found: [usize; 2] = axes(name, tensor)?;
        if found == expected {
            Ok(())
        } else {
            Err(MlxError::Operation(format!(
                "{name} are {found:?}, not {expected:?}"
            )))
        }
    };
    expect_shape("packed", stored.packed, [rows, words])?;
    expect_shape("scales", stored.scales, [rows, groups])?;
    match stored.minimums {
        Some(minimums) => expect_shape("minimums", minimums, [rows, groups]),
        None => Ok(()),
    }
}

/// Words and groups of a row.
fn row_of(variant: &Variant, columns: usize) -> Result<(usize, usize), MlxError> {
    let (bits, group) = (integer(variant, "BITS")?, integer(variant, "GROUP")?);
    Ok((words(columns, bits), columns.div_ceil(group.max(1))))
}

fn integer(variant: &Variant, name: &str) -> Result<usize, MlxError> {
    let found = variant.constants().find_map(|constant| match constant {
        (found, Value::Integer(value)) if found == name => usize::try_from(value).ok(),
        _ => None,
    });
    found.ok_or_else(|| {
        MlxError::Operation(format!("kernel {} has no {name}", variant.kernel().name))
    })
}

fn axes<const RANK: usize>(name: &str, tensor: &Tensor) -> Result<[usize; RANK], MlxError> {
    let shape = tensor.shape();
    shape.try_into().map_err(|shape: Vec<usize>| {
        MlxError::Operation(format!("{name} have shape {shape:?}, expected {RANK} axes"))
    })
}

fn agree(what: &str, found: usize, expected: usize) -> Result<(), MlxError> {
    if found == expected {
        Ok(())
    } else {
        Err(MlxError::Operation(format!(
            "{found} {what}, expected {expected}"
        )))
    }
}

/// The buffer `sizes` of a body.
fn numbers(sizes: &[usize]) -> Result<Tensor, MlxError> {
    let mut numbers = Vec::new();
    for &size in sizes {
        numbers.push(
            u32::try_from(size).map_err(|_too_large| MlxError::TooLarge {
                what: "a size",
                value: size,
            })?,
        );
    }
    Tensor::of_u32(&numbers, &[numbers.len()])
}
