//! The kernels of [`crate::metal`] on every device of MLX: our own bodies on an Apple GPU, ops of MLX elsewhere.
//!
//! Both ways store the same: words, scales and minimums bit for bit, as the top of each body says. Arguments are parsed
//! before anything is dispatched ([`arguments`]); which bits, groups and lengths there are, the catalogue says for both.
//!
//! Results are recorded, not computed: reading one ([`DeviceKernels::read_values`] and its like) evaluates it.

pub mod arguments;
mod attention;
mod codes;
mod error;
mod transforms;

use velox_kernels::ran::Ran;

pub use self::arguments::{
    AffineCache, AffineCodes, Attention, Codes, Format, HeadRows, Packed, Reencoding, Rows,
    ScalarCodes,
};
pub use self::error::KernelError;
use crate::ffi::metal_calls;
use crate::ffi::{DeviceStream, Dtype, KernelPath, MlxDevice, MlxError, Tensor, evaluate};
use crate::metal::{
    AFFINE_DEQUANTISE, AFFINE_QUANTISE, BIT_PACK, BIT_UNPACK, DECODE_ATTENTION,
    DECODE_ATTENTION_AFFINE, Element, HADAMARD, ROPE_REENCODE, SCALAR_DEQUANTISE, SCALAR_QUANTISE,
    Value,
};

/// Threads per query head on an Apple GPU.
const ATTENTION_THREADS: u32 = 128;

/// Runs kernels on one device, on the thread that opened it.
#[derive(Debug)]
pub struct DeviceKernels<D> {
    stream: DeviceStream<D>,
}

type Outcome<D, T> = Result<Ran<D, T>, KernelError>;

impl<D: MlxDevice> DeviceKernels<D> {
    /// Opens the device.
    ///
    /// # Errors
    /// [`MlxError::Unavailable`] with the reason.
    pub fn open() -> Result<Self, MlxError> {
        DeviceStream::open().map(|stream| Self { stream })
    }

    /// Packs codes.
    ///
    /// # Errors
    /// [`KernelError`], as for every kernel: an argument that it does not take, or what MLX says.
    pub fn bit_pack(&self, codes: &Codes) -> Outcome<D, Packed> {
        let variant = BIT_PACK.variant(&[integer(codes.bits())])?;
        self.record(|path| {
            let words = match path {
                KernelPath::Metal => metal_calls::bit_pack(&variant, codes.tensor())?,
                KernelPath::Ops => codes::pack(codes.tensor(), codes.bits())?,
            };
            Ok(Packed::made(words, codes.shape(), codes.bits()))
        })
    }

    /// Unpacks codes.
    ///
    /// # Errors
    /// As for [`Self::bit_pack`].
    pub fn bit_unpack(&self, packed: &Packed) -> Outcome<D, Codes> {
        let variant = BIT_UNPACK.variant(&[integer(packed.bits())])?;
        let columns = packed.shape()[1];
        self.record(|path| {
            let codes = match path {
                KernelPath::Metal => metal_calls::bit_unpack(&variant, packed.words(), columns)?,
                KernelPath::Ops => {
                    codes::unpack(packed.words(), columns, packed.bits())?.cast(Dtype::U8)?
                }
            };
            Ok(Codes::made(codes, packed.shape(), packed.bits()))
        })
    }

    /// Quantises groups of each row from minus to plus their largest magnitude.
    ///
    /// # Errors
    /// As for [`Self::bit_pack`].
    pub fn scalar_quantise(&self, values: &Rows, format: Format) -> Outcome<D, ScalarCodes> {
        let variant = SCALAR_QUANTISE.variant(&format.values(values.element()))?;
        self.record(|path| {
            let [words, scales] = match path {
                KernelPath::Metal => metal_calls::scalar_quantise(&variant, values.tensor())?,
                KernelPath::Ops => codes::scalar_quantise(values.tensor(), format)?,
            };
            let packed = Packed::made(words, values.shape(), format.bits);
            Ok(ScalarCodes::made(packed, scales, format.group))
        })
    }

    /// Decodes scalar codes.
    ///
    /// # Errors
    /// As for [`Self::bit_pack`].
    pub fn scalar_dequantise(&self, stored: &ScalarCodes, element: Element) -> Outcome<D, Rows> {
        let variant = SCALAR_DEQUANTISE.variant(&stored.format().values(element))?;
        self.record(|path| {
            let shape = stored.packed().shape();
            let values = match path {
                KernelPath::Metal => metal_calls::dequantise(&variant, stored.groups(), shape[1])?,
                KernelPath::Ops => {
                    let exact = codes::scalar_dequantise(stored)?;
                    exact.cast(arguments::dtype(element)?)?
                }
            };
            Ok(Rows::made(values, shape, element))
        })
    }

    /// Quantises groups of each row from their smallest to their largest value.
    ///
    /// # Errors
    /// As for [`Self::bit_pack`].
    pub fn affine_quantise(&self, values: &Rows, format: Format) -> Outcome<D, AffineCodes> {
        let variant = AFFINE_QUANTISE.variant(&format.values(values.element()))?;
        self.record(|path| {
            let [words, scales, minimums] = match path {
                KernelPath::Metal => metal_calls::affine_quantise(&variant, values.tensor())?,
                KernelPath::Ops => codes::affine_quantise(values.tensor(), format)?,
            };
            let packed = Packed::made(words, values.shape(), format.bits);
            Ok(AffineCodes::made(packed, scales, minimums, format.group))
        })
    }

    /// Decodes affine codes.
    ///
    /// # Errors
    /// As for [`Self::bit_pack`].
    pub fn affine_dequantise(&self, stored: &AffineCodes, element: Element) -> Outcome<D, Rows> {
        let variant = AFFINE_DEQUANTISE.variant(&stored.format().values(element))?;
        self.record(|path| {
            let shape = stored.packed().shape();
            let values = match path {
                KernelPath::Metal => metal_calls::dequantise(&variant, stored.groups(), shape[1])?,
                KernelPath::Ops => {
                    let exact = codes::affine_dequantise(stored)?;
                    exact.cast(arguments::dtype(element)?)?
                }
            };
            Ok(Rows::made(values, shape, element))
        })
    }

    /// Normalised Walsh-Hadamard transform of each row.
    ///
    /// # Errors
    /// As for [`Self::bit_pack`].
    pub fn hadamard(&self, values: &Rows) -> Outcome<D, Rows> {
        let [_, length] = values.shape();
        let variant = HADAMARD.variant(&[Value::Element(values.element()), integer(length)])?;
        self.record(|path| {
            let transformed = match path {
                KernelPath::Metal => metal_calls::hadamard(&variant, values.tensor())?,
                KernelPath::Ops => transforms::hadamard(values)?,
            };
            Ok(Rows::made(transformed, values.shape(), values.element()))
        })
    }

    /// Moves rotated keys to other positions.
    ///
    /// # Errors
    /// As for [`Self::bit_pack`].
    pub fn rope_reencode(&self, keys: &HeadRows, reencoding: &Reencoding) -> Outcome<D, HeadRows> {
        reencoding.check(keys)?;
        let half_split = Value::Boolean(reencoding.is_half_split());
        let variant = ROPE_REENCODE.variant(&[Value::Element(keys.element()), half_split])?;
        self.record(|path| {
            let rotated = match path {
                KernelPath::Metal => metal_calls::rope_reencode(
                    &variant,
                    keys.tensor(),
                    reencoding.positions(),
                    reencoding.turns(),
                )?,
                KernelPath::Ops => transforms::rope_reencode(keys, reencoding)?,
            };
            Ok(HeadRows::made(rotated, keys.shape(), keys.element()))
        })
    }

    /// Attention of one new token over a cache of 16-bit or f32 keys and values.
    ///
    /// # Errors
    /// As for [`Self::bit_pack`].
    pub fn decode_attention(
        &self,
        attention: &Attention<'_>,
        keys: &HeadRows,
        values: &HeadRows,
    ) -> Outcome<D, Rows> {
        let attending = attention.parse(keys.shape())?;
        let element = attention.queries.element();
        for (argument, rows) in [("keys", keys), ("values", values)] {
            arguments::same_type(argument, element, rows.element())?;
        }
        arguments::same_shape("values", keys.shape(), values.shape())?;
        let variant = DECODE_ATTENTION.variant(&attending_values(attention))?;
        self.attended(attention, |path| match path {
            KernelPath::Metal => {
                let caches = (keys.tensor(), values.tensor());
                Ok(metal_calls::decode_attention(
                    &variant,
                    attending.call(),
                    caches,
                )?)
            }
            KernelPath::Ops => attention::attend(&attending.call(), keys.tensor(), values.tensor()),
        })
    }

    /// Attention of one new token over a packed affine cache.
    ///
    /// # Errors
    /// As for [`Self::bit_pack`].
    pub fn decode_attention_affine(
        &self,
        attention: &Attention<'_>,
        cache: &AffineCache<'_>,
    ) -> Outcome<D, Rows> {
        let shape = cache.check()?;
        let attending = attention.parse(shape)?;
        let format = cache.keys.format();
        let mut constants = attending_values(attention);
        constants.extend([integer(format.bits), integer(format.group)]);
        let variant = DECODE_ATTENTION_AFFINE.variant(&constants)?;
        self.attended(attention, |path| match path {
            KernelPath::Metal => {
                let caches = (cache.keys.groups(), cache.values.groups());
                Ok(metal_calls::decode_attention_affine(
                    &variant,
                    attending.call(),
                    caches,
                )?)
            }
            KernelPath::Ops => {
                let rows = |stored: &AffineCodes| -> Result<Tensor, KernelError> {
                    Ok(codes::affine_dequantise(stored)?.reshape(&shape)?)
                };
                attention::attend(&attending.call(), &rows(cache.keys)?, &rows(cache.values)?)
            }
        })
    }

    /// Evaluates values and copies them out, `[rows, columns]`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn read_values(&self, rows: &Rows) -> Outcome<D, Vec<f32>> {
        self.read(rows.tensor())
    }

    /// Evaluates keys or values and copies them out, `[heads, positions, head_dim]`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn read_heads(&self, rows: &HeadRows) -> Outcome<D, Vec<f32>> {
        self.read(rows.tensor())
    }

    /// Evaluates codes and copies them out, `[rows, columns]`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn read_codes(&self, codes: &Codes) -> Outcome<D, Vec<u8>> {
        self.record(|_| Ok(codes.tensor().to_u8()?))
    }

    /// Evaluates words and copies them out, `[rows, words]`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn read_words(&self, packed: &Packed) -> Outcome<D, Vec<u32>> {
        self.record(|_| Ok(packed.words().to_u32()?))
    }

    /// Evaluates scales of scalar codes and copies them out, `[rows, groups]`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn read_scales(&self, stored: &ScalarCodes) -> Outcome<D, Vec<f32>> {
        self.read(stored.scales())
    }

    /// Evaluates scales and minimums of affine codes and copies them out, `[rows, groups]` each.
    ///
    /// # Errors
    /// As MLX says.
    pub fn read_groups(&self, stored: &AffineCodes) -> Outcome<D, (Vec<f32>, Vec<f32>)> {
        Ok(self
            .read(stored.scales())?
            .zip(self.read(stored.minimums())?))
    }

    fn read(&self, floats: &Tensor) -> Outcome<D, Vec<f32>> {
        // Evaluated by itself first: the conversion is not the kernel's.
        self.record(|_| {
            evaluate([floats])?;
            Ok(floats.cast(Dtype::F32)?.to_f32()?)
        })
    }

    /// Where no position is stored there is nothing to dispatch, and nothing to tell.
    fn attended(
        &self,
        attention: &Attention<'_>,
        ops: impl FnOnce(KernelPath) -> Result<Tensor, KernelError>,
    ) -> Outcome<D, Rows> {
        let (shape, element) = (attention.queries.shape(), attention.queries.element());
        let dtype = arguments::dtype(element)?;
        self.record(|path| {
            let attended = if attention.length == 0 {
                Tensor::filled(dtype, f32::NAN, &shape)?
            } else {
                ops(path)?.cast(dtype)?
            };
            Ok(Rows::made(attended, shape, element))
        })
    }

    fn record<T>(&self, ops: impl FnOnce(KernelPath) -> Result<T, KernelError>) -> Outcome<D, T> {
        self.stream.record(|| ops(D::KERNEL_PATH))
    }
}

fn integer(value: usize) -> Value {
    // What does not fit is no value that a kernel allows.
    Value::Integer(u32::try_from(value).unwrap_or(u32::MAX))
}

/// Template values that both attention kernels begin with.
fn attending_values(attention: &Attention<'_>) -> Vec<Value> {
    let [_, head_dim] = attention.queries.shape();
    vec![
        Value::Element(attention.queries.element()),
        integer(head_dim),
        Value::Integer(ATTENTION_THREADS),
        Value::Boolean(attention.mask.is_some()),
    ]
}
