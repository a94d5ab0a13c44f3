//! Float matrices to blocks, when a model loads.

use std::collections::BTreeSet;

use velox_kernels::affine::StoredMatrix;
use velox_kernels::block::BlockType;
use velox_kernels::error::OpError;
use velox_kernels::matrix::{Matrix, NotWritten};
use velox_kernels::reference::{dequantise_row, quantise_row};

use super::ModelSource;
use super::blame::Blame;
use super::fingerprint::Fingerprint;
use crate::error::EngineError;
use crate::load::LoadProgress;
use crate::spec::{LayerTensors, ModelTensors};

/// What float matrices are turned into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantisation {
    /// 4 bits: `Q4_1`.
    Bits4,
    /// 5 bits: `Q5_1`.
    Bits5,
    /// 8 bits: `Q8_0`.
    Bits8,
}

impl Quantisation {
    /// Returns the quantisation of so many bits a weight; `None` if there is none.
    #[must_use]
    pub const fn of_bits(bits: u32) -> Option<Self> {
        match bits {
            4 => Some(Self::Bits4),
            5 => Some(Self::Bits5),
            8 => Some(Self::Bits8),
            _ => None,
        }
    }

    /// Returns the block type.
    #[must_use]
    pub const fn block_type(self) -> BlockType {
        match self {
            Self::Bits4 => BlockType::Q4_1,
            Self::Bits5 => BlockType::Q5_1,
            Self::Bits8 => BlockType::Q8_0,
        }
    }
}

/// Turns the float matrices of a model into blocks. One whose width is no whole number of blocks stays float, one that
/// is quantised stays as it is. Bytes, types and fingerprint of the source are then those of what is held: vectors as
/// f32. Returns whether there was anything to quantise; if not, nothing has changed.
///
/// # Errors
/// [`EngineError::InvalidModel`] if a weight is no number or too large, [`EngineError::OutOfMemory`].
pub(crate) fn quantise(
    source: &mut ModelSource,
    to: Quantisation,
    (threads, blame): (usize, &Blame),
    report: &mut dyn FnMut(LoadProgress),
) -> Result<bool, EngineError> {
    let total_bytes = source.weight_bytes;
    let mut done_bytes = 0;
    let mut changed = false;
    for (name, matrix) in matrices(&mut source.tensors) {
        done_bytes += byte_length(matrix);
        if let StoredMatrix::Blocks(stored) = matrix
            && let Some(blocks) = quantised(stored, to, threads)
                .map_err(|refusal| refusal.into_error(&name, stored, blame))?
        {
            *matrix = blocks.into();
            changed = true;
        }
        report(LoadProgress {
            phase: "quantize",
            done_bytes,
            total_bytes,
        });
    }
    if !changed {
        return Ok(false);
    }
    let vector_bytes = 4 * vector_elements(&source.tensors);
    let held = matrices(&mut source.tensors);
    source.weight_bytes =
        vector_bytes + held.iter().map(|(_, held)| byte_length(held)).sum::<u64>();
    let types: BTreeSet<&'static str> = held
        .iter()
        .flat_map(|(_, held)| type_names(held))
        .chain([BlockType::F32.name()])
        .collect();
    source.tensor_types = types.into_iter().collect();
    // The numbers are no longer those of the file: only a worker that did the same computes the same.
    let mut fingerprint = Fingerprint::default();
    fingerprint.add_all(source.fingerprint.as_bytes());
    fingerprint.add_all(to.block_type().name().as_bytes());
    source.fingerprint = fingerprint.finish();
    Ok(true)
}

/// Why a matrix was not quantised.
enum Refusal {
    Values(OpError),
    Memory(usize),
}

impl Refusal {
    fn into_error(self, name: &str, matrix: &Matrix, blame: &Blame) -> EngineError {
        match self {
            Self::Values(error) => blame.invalid(format!(
                "{name} of type {} cannot be quantised: {error}",
                matrix.block_type().name()
            )),
            Self::Memory(bytes) => EngineError::OutOfMemory {
                what: format!("quantised {name}"),
                needed_bytes: u64::try_from(bytes).unwrap_or(u64::MAX),
                available_bytes: 0,
            },
        }
    }
}

/// Quantises a matrix; `None` if it stays as it is.
fn quantised(matrix: &Matrix, to: Quantisation, threads: usize) -> Result<Option<Matrix>, Refusal> {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    let is_float = matches!(
        matrix.block_type(),
        BlockType::F32 | BlockType::F16 | BlockType::Bf16
    );
    if !is_float || to.block_type().row_bytes(columns).is_none() {
        return Ok(None);
    }
    let write = |first: usize, out: &mut [u8]| quantise_rows(matrix, to, first, out);
    Matrix::written(to.block_type(), (rows, columns), threads, write)
        .map(Some)
        .map_err(|refused| match refused {
            NotWritten::NoRoom(no_room) => Refusal::Memory(no_room.bytes),
            NotWritten::Rows(error) => Refusal::Values(error),
        })
}

/// Quantises the rows from `first` on that `out` has room for.
fn quantise_rows(
    matrix: &Matrix,
    to: Quantisation,
    first: usize,
    out: &mut [u8],
) -> Result<(), OpError> {
    let mut values = vec![0.0; matrix.columns()];
    let row_bytes = to.block_type().row_bytes(values.len()).unwrap_or(0).max(1);
    for (row, out) in out.chunks_mut(row_bytes).enumerate() {
        let _ran = dequantise_row(matrix.block_type(), matrix.row(first + row), &mut values)?;
        let _ran = quantise_row(to.block_type(), &values, out)?;
    }
    Ok(())
}

fn byte_length(matrix: &StoredMatrix) -> u64 {
    u64::try_from(matrix.byte_length()).unwrap_or(u64::MAX)
}

/// The types of a matrix's parts.
fn type_names(matrix: &StoredMatrix) -> Vec<&'static str> {
    let parts = match matrix {
        StoredMatrix::Blocks(_) => vec![],
        StoredMatrix::Affine(matrix) => vec![matrix.scales(), matrix.biases()],
    };
    parts
        .into_iter()
        .map(|part| part.block_type().name())
        .chain([matrix.stored_type().name()])
        .collect()
}

/// Every matrix and what to call it.
fn matrices(tensors: &mut ModelTensors<StoredMatrix>) -> Vec<(String, &mut StoredMatrix)> {
    let mut found = vec![("the embedding".to_owned(), &mut tensors.embedding)];
    for (number, layer) in tensors.layers.iter_mut().enumerate() {
        let LayerTensors {
            q_proj,
            k_proj,
            v_proj,
            o_proj,
            gate_proj,
            up_proj,
            down_proj,
            ..
        } = layer;
        found.extend(
            [
                ("q_proj", q_proj),
                ("k_proj", k_proj),
                ("v_proj", v_proj),
                ("o_proj", o_proj),
                ("gate_proj", gate_proj),
                ("up_proj", up_proj),
                ("down_proj", down_proj),
            ]
            .map(|(name, linear)| (format!("{name} of layer {number}"), &mut linear.weight)),
        );
    }
    found.extend(
        tensors
            .head
            .as_mut()
            .map(|head| ("the head".to_owned(), head)),
    );
    found
}

/// Counts the elements of all vectors.
fn vector_elements(tensors: &ModelTensors<StoredMatrix>) -> u64 {
    let of_layer = |layer: &LayerTensors<StoredMatrix>| {
        let linears = [
            &layer.q_proj,
            &layer.k_proj,
            &layer.v_proj,
            &layer.o_proj,
            &layer.gate_proj,
            &layer.up_proj,
            &layer.down_proj,
        ];
        let biases = linears.iter().filter_map(|linear| linear.bias.as_ref());
        let norms = layer.qk_norm.iter();
        let norms = norms.flat_map(|norms| [&norms.q_norm, &norms.k_norm]);
        let always = [&layer.attention_norm, &layer.mlp_norm];
        biases
            .chain(norms)
            .chain(always)
            .map(Vec::len)
            .sum::<usize>()
    };
    let layers: usize = tensors.layers.iter().map(of_layer).sum();
    u64::try_from(layers + tensors.final_norm.len()).unwrap_or(u64::MAX)
}
