//! A dispatch of one of our Metal kernels.
//!
//! mlx-rs owns the objects of the call (kernel, configuration, lists) and frees them. MLX compiles a kernel when it is
//! first evaluated and keeps it by name and template values.

use mlx_rs::Array;
use mlx_rs::fast::{
    MetalKernel, MetalKernelApplyOptions, MetalKernelOptions, MetalKernelOutput, TemplateArg,
};

use super::error::MlxError;
use super::library::Library;
use super::tensor::{Dtype, Tensor, int, sizes};
use crate::metal::{Element, PRELUDE, Value, Variant};

/// Dispatches a kernel for `items` (x, y, z); returns its outputs, one of each shape. With no items at all, the outputs
/// are zeros, of which there are none if the shapes follow from the items.
///
/// # Errors
/// [`MlxError::Unavailable`] on a library without Metal; [`MlxError::Operation`] if an input is missing, not of the type
/// that the variant says, or too long for the indices of a body.
///
/// # Safety
/// For the inputs' and outputs' shapes, the body must stay within its buffers and write every element of the outputs.
pub(super) unsafe fn dispatch<const OUTPUTS: usize>(
    variant: &Variant,
    items: [usize; 3],
    inputs: &[&Tensor],
    output_shapes: [&[usize]; OUTPUTS],
) -> Result<[Tensor; OUTPUTS], MlxError> {
    if !Library::open()?.has_metal() {
        return Err(MlxError::Unavailable(
            "no Metal back-end: this MLX library has none, or finds no Apple GPU".to_owned(),
        ));
    }
    let kernel = variant.kernel();
    let wrong = |what: String| MlxError::Operation(format!("kernel {}: {what}", kernel.name));
    if inputs.len() != kernel.inputs.len() || OUTPUTS != kernel.outputs.len() {
        return Err(wrong(format!(
            "{} inputs and {OUTPUTS} outputs",
            inputs.len()
        )));
    }
    for (buffer, tensor) in kernel.inputs.iter().zip(inputs) {
        let expected = variant.element(buffer).map(dtype_of);
        if expected.is_none() || tensor.dtype() != expected {
            return Err(wrong(format!(
                "{} is {:?}, not {expected:?}",
                buffer.name,
                tensor.dtype()
            )));
        }
        indexable(buffer.name, &tensor.shape())?;
    }
    let mut outputs = Vec::new();
    for (buffer, shape) in kernel.outputs.iter().zip(output_shapes) {
        indexable(buffer.name, shape)?;
        let element = variant.element(buffer);
        let element = element.ok_or_else(|| wrong(format!("{} has no type", buffer.name)))?;
        outputs.push(MetalKernelOutput {
            shape: sizes(shape)?,
            dtype: dtype_of(element).of_mlx(),
        });
    }
    let mut extents = [0; 3];
    for (extent, &count) in extents.iter_mut().zip(&items) {
        *extent = u32::try_from(count).map_err(|_too_large| MlxError::TooLarge {
            what: "a dispatch",
            value: count,
        })?;
    }
    let launch = variant
        .launch(extents)
        .map_err(|error| wrong(error.to_string()))?;
    let made = match launch {
        None => outputs
            .iter()
            .map(|output| mlx_rs::ops::zeros_dtype(&output.shape, output.dtype))
            .collect::<Result<Vec<Array>, _>>()?,
        Some(launch) => {
            let names = |buffers: &[crate::metal::Buffer]| -> Vec<&'static str> {
                buffers.iter().map(|buffer| buffer.name).collect()
            };
            let options = MetalKernelOptions {
                header: PRELUDE.to_owned(),
                ensure_row_contiguous: true,
                atomic_outputs: false,
            };
            let (inputs_of, outputs_of) = (names(kernel.inputs), names(kernel.outputs));
            let made =
                MetalKernel::new(kernel.name, &inputs_of, &outputs_of, kernel.source, options)?;
            let arrays: Vec<&Array> = inputs.iter().map(|tensor| &tensor.0).collect();
            let (grid, group) = (triple(launch.grid)?, triple(launch.threadgroup)?);
            let options = MetalKernelApplyOptions {
                template_args: template(variant)?,
                init_value: None,
                verbose: false,
            };
            // SAFETY: the caller shows that the body stays within these buffers and writes all outputs; their types
            // were compared with the variant's above, and no index of theirs exceeds 32 bits.
            unsafe { made.apply(&arrays, &outputs, grid, group, options) }?
        }
    };
    let tensors: Vec<Tensor> = made.into_iter().map(Tensor).collect();
    let count = tensors.len();
    tensors
        .try_into()
        .map_err(|_other_length| wrong(format!("{count} outputs came back")))
}

/// Returns the type of arrays for a buffer of these elements.
pub(super) const fn dtype_of(element: Element) -> Dtype {
    match element {
        Element::Bool => Dtype::Bool,
        Element::U8 => Dtype::U8,
        Element::U32 => Dtype::U32,
        Element::U64 => Dtype::U64,
        Element::F16 => Dtype::F16,
        Element::Bf16 => Dtype::Bf16,
        Element::F32 => Dtype::F32,
    }
}

/// Refuses what a body's 32-bit indices, or MLX's sizes, cannot address.
fn indexable(name: &'static str, shape: &[usize]) -> Result<(), MlxError> {
    let elements = shape
        .iter()
        .try_fold(1_usize, |product, &size| product.checked_mul(size))
        .unwrap_or(usize::MAX);
    int(elements)
        .map(|_fits| ())
        .map_err(|_too_large| MlxError::TooLarge {
            what: name,
            value: elements,
        })
}

fn triple([x, y, z]: [u32; 3]) -> Result<(i32, i32, i32), MlxError> {
    let extent = |value: u32| int(usize::try_from(value).unwrap_or(usize::MAX));
    Ok((extent(x)?, extent(y)?, extent(z)?))
}

fn template(variant: &Variant) -> Result<Vec<(String, TemplateArg)>, MlxError> {
    let constants = variant.constants();
    constants
        .map(|(name, value)| {
            let value = match value {
                Value::Element(element) => TemplateArg::Dtype(dtype_of(element).of_mlx()),
                Value::Integer(integer) => {
                    TemplateArg::Int(int(usize::try_from(integer).unwrap_or(usize::MAX))?)
                }
                Value::Boolean(boolean) => TemplateArg::Bool(boolean),
            };
            Ok((name.to_owned(), value))
        })
        .collect()
}
