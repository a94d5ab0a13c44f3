//! Arguments and results of kernels: arrays on a device whose shape and type were checked when they were made.

use half::{bf16, f16};
use velox_kernels::rotary::Pairing;

use super::error::KernelError;
use crate::ffi::metal_calls::{Attending, Groups, words};
use crate::ffi::{Dtype, Tensor};
use crate::metal::{BIT_PACK, Element, Value, turns};

/// Bits of a code, and columns of a row that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// 2, 3, 4 or 8; whatever else is refused by the kernel.
    pub bits: usize,
    /// 32, 64 or 128; whatever else is refused by the kernel.
    pub group: usize,
}

impl Format {
    pub(super) fn values(self, element: Element) -> [Value; 3] {
        [
            Value::Element(element),
            super::integer(self.bits),
            super::integer(self.group),
        ]
    }
}

/// Values `[rows, columns]`.
#[derive(Debug, Clone)]
pub struct Rows {
    tensor: Tensor,
    shape: [usize; 2],
    element: Element,
}

impl Rows {
    /// Copies values, rounded to the type.
    ///
    /// # Errors
    /// [`KernelError`] if the shape has another number of elements or too many, or the type is no float.
    pub fn new(values: &[f32], shape: [usize; 2], element: Element) -> Result<Self, KernelError> {
        let tensor = floats("values", values, &shape, element)?;
        Ok(Self::made(tensor, shape, element))
    }

    pub(super) fn made(tensor: Tensor, shape: [usize; 2], element: Element) -> Self {
        Self {
            tensor,
            shape,
            element,
        }
    }

    /// Returns rows and columns.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the type of the values.
    #[must_use]
    pub fn element(&self) -> Element {
        self.element
    }

    /// Returns the array.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Keys or values `[heads, positions, head_dim]`.
#[derive(Debug, Clone)]
pub struct HeadRows {
    tensor: Tensor,
    shape: [usize; 3],
    element: Element,
}

impl HeadRows {
    /// Copies values, rounded to the type.
    ///
    /// # Errors
    /// As for [`Rows::new`].
    pub fn new(values: &[f32], shape: [usize; 3], element: Element) -> Result<Self, KernelError> {
        let tensor = floats("keys or values", values, &shape, element)?;
        Ok(Self::made(tensor, shape, element))
    }

    pub(super) fn made(tensor: Tensor, shape: [usize; 3], element: Element) -> Self {
        Self {
            tensor,
            shape,
            element,
        }
    }

    /// Returns heads, positions and elements of a head.
    #[must_use]
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// Returns the type of the values.
    #[must_use]
    pub fn element(&self) -> Element {
        self.element
    }

    /// Returns the array.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Codes `[rows, columns]`, u8, each below 2^bits.
#[derive(Debug, Clone)]
pub struct Codes {
    tensor: Tensor,
    shape: [usize; 2],
    bits: usize,
}

impl Codes {
    /// Copies codes.
    ///
    /// # Errors
    /// [`KernelError`] if the shape has another number of elements or too many, there is no storage of so many bits,
    /// or a code needs more.
    pub fn new(codes: &[u8], shape: [usize; 2], bits: usize) -> Result<Self, KernelError> {
        let _ = BIT_PACK.variant(&[super::integer(bits)])?;
        fill("codes", codes.len(), &shape)?;
        let unused = u8::MAX
            .checked_shl(u32::try_from(bits).unwrap_or(8))
            .unwrap_or(0);
        if let Some(index) = codes.iter().position(|code| code & unused != 0) {
            let value = codes[index];
            return Err(KernelError::Code { index, value, bits });
        }
        let tensor = Tensor::of_bytes(Dtype::U8, codes, &shape)?;
        Ok(Self::made(tensor, shape, bits))
    }

    pub(super) fn made(tensor: Tensor, shape: [usize; 2], bits: usize) -> Self {
        Self {
            tensor,
            shape,
            bits,
        }
    }

    /// Returns rows and columns.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the bits of a code.
    #[must_use]
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// Returns the array.
    #[must_use]
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Codes `[rows, columns]` as a stream of bits, least significant bit first, a row in whole words.
#[derive(Debug, Clone)]
pub struct Packed {
    words: Tensor,
    shape: [usize; 2],
    bits: usize,
}

impl Packed {
    /// Copies words, for a shape of codes.
    ///
    /// # Errors
    /// [`KernelError`] if the codes need another number of words, or there is no storage of so many bits.
    pub fn new(packed: &[u32], shape: [usize; 2], bits: usize) -> Result<Self, KernelError> {
        let _ = BIT_PACK.variant(&[super::integer(bits)])?;
        countable("packed", &shape)?;
        let stored = [shape[0], words(shape[1], bits)];
        fill("packed", packed.len(), &stored)?;
        let packed = Tensor::of_u32(packed, &stored)?;
        Ok(Self::made(packed, shape, bits))
    }

    pub(super) fn made(words: Tensor, shape: [usize; 2], bits: usize) -> Self {
        Self { words, shape, bits }
    }

    /// Returns rows and columns of the codes.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the bits of a code.
    #[must_use]
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// Returns the array, `[rows, words]`, u32.
    #[must_use]
    pub fn words(&self) -> &Tensor {
        &self.words
    }
}

/// Signed codes with a scale per group of a row.
#[derive(Debug, Clone)]
pub struct ScalarCodes {
    packed: Packed,
    scales: Tensor,
    group: usize,
}

impl ScalarCodes {
    /// Copies scales, `[rows, groups]`; the last group of a row may have fewer columns. A scale may be NaN: so a group
    /// says that its values were no numbers.
    ///
    /// # Errors
    /// [`KernelError`] if there is another number of scales.
    pub fn new(packed: Packed, scales: &[f16], group: usize) -> Result<Self, KernelError> {
        let scales = per_group("scales", &packed, scales, group)?;
        Ok(Self::made(packed, scales, group))
    }

    pub(super) fn made(packed: Packed, scales: Tensor, group: usize) -> Self {
        Self {
            packed,
            scales,
            group,
        }
    }

    /// Returns bits and group.
    #[must_use]
    pub fn format(&self) -> Format {
        Format {
            bits: self.packed.bits,
            group: self.group,
        }
    }

    /// Returns the codes.
    #[must_use]
    pub fn packed(&self) -> &Packed {
        &self.packed
    }

    /// Returns the scales, `[rows, groups]`, f16.
    #[must_use]
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    pub(super) fn groups(&self) -> Groups<'_> {
        Groups {
            packed: &self.packed.words,
            scales: &self.scales,
            minimums: None,
        }
    }
}

/// Codes with a scale and a minimum per group of a row.
#[derive(Debug, Clone)]
pub struct AffineCodes {
    packed: Packed,
    scales: Tensor,
    minimums: Tensor,
    group: usize,
}

impl AffineCodes {
    /// Copies scales and minimums, `[rows, groups]` each, as [`ScalarCodes::new`] does.
    ///
    /// # Errors
    /// [`KernelError`] if there is another number of either.
    pub fn new(
        packed: Packed,
        scales: &[f16],
        minimums: &[f16],
        group: usize,
    ) -> Result<Self, KernelError> {
        let scales = per_group("scales", &packed, scales, group)?;
        let minimums = per_group("minimums", &packed, minimums, group)?;
        Ok(Self::made(packed, scales, minimums, group))
    }

    pub(super) fn made(packed: Packed, scales: Tensor, minimums: Tensor, group: usize) -> Self {
        Self {
            packed,
            scales,
            minimums,
            group,
        }
    }

    /// Returns bits and group.
    #[must_use]
    pub fn format(&self) -> Format {
        Format {
            bits: self.packed.bits,
            group: self.group,
        }
    }

    /// Returns the codes.
    #[must_use]
    pub fn packed(&self) -> &Packed {
        &self.packed
    }

    /// Returns the scales, `[rows, groups]`, f16.
    #[must_use]
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// Returns the minimums, `[rows, groups]`, f16.
    #[must_use]
    pub fn minimums(&self) -> &Tensor {
        &self.minimums
    }

    pub(super) fn groups(&self) -> Groups<'_> {
        Groups {
            packed: &self.packed.words,
            scales: &self.scales,
            minimums: Some(&self.minimums),
        }
    }
}

/// How keys move: where each token was and shall be, and the rotation.
#[derive(Debug)]
pub struct Reencoding {
    old: Tensor,
    new: Tensor,
    tokens: usize,
    turns: Tensor,
    pairs: usize,
    pairing: Pairing,
}

impl Reencoding {
    /// Prepares a move by positions `[tokens]` each, with radians per position for each rotated pair.
    ///
    /// # Errors
    /// [`KernelError`] if the numbers of positions differ, or a frequency is no finite number.
    pub fn new(
        old: &[u32],
        new: &[u32],
        inverse_frequencies: &[f64],
        pairing: Pairing,
    ) -> Result<Self, KernelError> {
        same_shape("new positions", [old.len()], [new.len()])?;
        for &frequency in inverse_frequencies {
            finite("inverse frequency", frequency)?;
        }
        let pairs = inverse_frequencies.len();
        let frequencies = inverse_frequencies.iter();
        let turns: Vec<u64> = frequencies.map(|&frequency| turns(frequency)).collect();
        Ok(Self {
            old: Tensor::of_u32(old, &[old.len()])?,
            new: Tensor::of_u32(new, &[new.len()])?,
            tokens: old.len(),
            turns: Tensor::of_bytes(Dtype::U64, bytemuck::cast_slice(&turns), &[pairs])?,
            pairs,
            pairing,
        })
    }

    /// Checks that keys are of so many tokens, and heads of so many elements.
    pub(super) fn check(&self, keys: &HeadRows) -> Result<(), KernelError> {
        let [heads, tokens, head_dim] = keys.shape;
        same_shape(
            "keys",
            [heads, self.tokens, head_dim],
            [heads, tokens, head_dim],
        )?;
        if self.pairs > head_dim / 2 {
            return Err(KernelError::AboveLimit {
                argument: "number of inverse frequencies",
                value: self.pairs,
                limit: head_dim / 2,
            });
        }
        Ok(())
    }

    pub(super) fn is_half_split(&self) -> bool {
        self.pairing == Pairing::HalfSplit
    }

    pub(super) fn positions(&self) -> (&Tensor, &Tensor) {
        (&self.old, &self.new)
    }

    pub(super) fn pairs(&self) -> usize {
        self.pairs
    }

    pub(super) fn turns(&self) -> &Tensor {
        &self.turns
    }
}

/// What one new token attends with.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// `[H, K]`: head `h` reads head `h / (H / G)` of the cache's `G`.
    pub queries: &'a Rows,
    /// Positions of the cache that hold a token.
    pub length: usize,
    /// `[length]`, true = visible; without one everything is.
    pub mask: Option<&'a [bool]>,
    /// Factor on scores.
    pub scale: f32,
}

/// Keys and values as [`super::DeviceKernels::affine_quantise`] made them of `[G * capacity, K]`.
#[derive(Debug, Clone, Copy)]
pub struct AffineCache<'a> {
    /// Keys.
    pub keys: &'a AffineCodes,
    /// Values, of the keys' shape and format.
    pub values: &'a AffineCodes,
    /// `G`.
    pub kv_heads: usize,
}

impl AffineCache<'_> {
    /// Returns heads, capacity and elements of a head.
    pub(super) fn check(&self) -> Result<[usize; 3], KernelError> {
        let [rows, head_dim] = self.keys.packed.shape;
        same_shape("values", [rows, head_dim], self.values.packed.shape)?;
        let (keys, values) = (self.keys.format(), self.values.format());
        same_shape(
            "format of values",
            [keys.bits, keys.group],
            [values.bits, values.group],
        )?;
        let capacity = rows.checked_div(self.kv_heads).unwrap_or(0);
        same_shape(
            "keys",
            [capacity * self.kv_heads, head_dim],
            [rows, head_dim],
        )?;
        Ok([self.kv_heads, capacity, head_dim])
    }
}

/// An attention that goes with its cache.
pub(super) struct Parsed<'a> {
    attention: Attention<'a>,
    kv_heads: usize,
    mask: Option<Tensor>,
}

impl<'a> Attention<'a> {
    /// Checks it against a cache of `[kv_heads, capacity, head_dim]`.
    pub(super) fn parse(&self, cache: [usize; 3]) -> Result<Parsed<'a>, KernelError> {
        let [kv_heads, capacity, head_dim] = cache;
        let [heads, _] = self.queries.shape;
        same_shape("queries", [heads, head_dim], self.queries.shape)?;
        if heads.checked_rem(kv_heads) != Some(0) {
            return Err(KernelError::Heads { heads, kv_heads });
        }
        if self.length > capacity {
            return Err(KernelError::AboveLimit {
                argument: "length",
                value: self.length,
                limit: capacity,
            });
        }
        finite("scale", self.scale.into())?;
        let mask = match self.mask {
            None => None,
            Some(mask) => {
                same_shape("mask", [self.length], [mask.len()])?;
                let bytes: Vec<u8> = mask.iter().map(|&visible| visible.into()).collect();
                Some(Tensor::of_bytes(Dtype::Bool, &bytes, &[mask.len()])?)
            }
        };
        Ok(Parsed {
            attention: *self,
            kv_heads,
            mask,
        })
    }
}

impl Parsed<'_> {
    pub(super) fn call(&self) -> Attending<'_> {
        Attending {
            queries: &self.attention.queries.tensor,
            kv_heads: self.kv_heads,
            length: self.attention.length,
            mask: self.mask.as_ref(),
            scale: self.attention.scale,
        }
    }
}

// === checks ===

pub(super) fn same_shape<const RANK: usize>(
    argument: &'static str,
    expected: [usize; RANK],
    actual: [usize; RANK],
) -> Result<(), KernelError> {
    if expected == actual {
        Ok(())
    } else {
        Err(KernelError::Shape {
            argument,
            expected: expected.to_vec(),
            actual: actual.to_vec(),
        })
    }
}

pub(super) fn same_type(
    argument: &'static str,
    expected: Element,
    actual: Element,
) -> Result<(), KernelError> {
    if expected == actual {
        Ok(())
    } else {
        Err(KernelError::Type {
            argument,
            expected,
            actual,
        })
    }
}

/// Returns the type of an array of values.
pub(super) fn dtype(element: Element) -> Result<Dtype, KernelError> {
    match element {
        Element::F16 => Ok(Dtype::F16),
        Element::Bf16 => Ok(Dtype::Bf16),
        Element::F32 => Ok(Dtype::F32),
        other => Err(KernelError::NoFloat(other)),
    }
}

fn finite(argument: &'static str, value: f64) -> Result<(), KernelError> {
    if value.is_finite() {
        Ok(())
    } else {
        Err(KernelError::NotFinite { argument, value })
    }
}

/// Returns the elements of a shape that a kernel can count.
fn countable(argument: &'static str, shape: &[usize]) -> Result<usize, KernelError> {
    let elements = shape
        .iter()
        .try_fold(1_usize, |product, &size| product.checked_mul(size));
    elements
        .filter(|&elements| i32::try_from(elements).is_ok())
        .ok_or_else(|| KernelError::TooLarge {
            argument,
            shape: shape.to_vec(),
        })
}

fn fill(argument: &'static str, actual: usize, shape: &[usize]) -> Result<(), KernelError> {
    let expected = countable(argument, shape)?;
    if expected == actual {
        Ok(())
    } else {
        Err(KernelError::Length {
            argument,
            shape: shape.to_vec(),
            expected,
            actual,
        })
    }
}

fn floats(
    argument: &'static str,
    values: &[f32],
    shape: &[usize],
    element: Element,
) -> Result<Tensor, KernelError> {
    let dtype = dtype(element)?;
    fill(argument, values.len(), shape)?;
    let bytes: Vec<u8> = match dtype {
        Dtype::F16 => halves(values.iter().map(|&value| f16::from_f32(value))),
        Dtype::Bf16 => values
            .iter()
            .flat_map(|&value| bf16::from_f32(value).to_le_bytes())
            .collect(),
        _ => bytemuck::cast_slice(values).to_vec(),
    };
    Ok(Tensor::of_bytes(dtype, &bytes, shape)?)
}

fn halves(values: impl Iterator<Item = f16>) -> Vec<u8> {
    values.flat_map(f16::to_le_bytes).collect()
}

fn per_group(
    argument: &'static str,
    packed: &Packed,
    values: &[f16],
    group: usize,
) -> Result<Tensor, KernelError> {
    let [rows, columns] = packed.shape;
    // A group of nothing is refused by the kernel, as every other that it was not written for.
    let shape = [rows, columns.div_ceil(group.max(1))];
    fill(argument, values.len(), &shape)?;
    let bytes = halves(values.iter().copied());
    Ok(Tensor::of_bytes(Dtype::F16, &bytes, &shape)?)
}
