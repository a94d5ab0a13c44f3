//! The tensors of a model by name, handed out once each.

use std::collections::{BTreeMap, BTreeSet};

use velox_kernels::affine::{AffineLayout, AffineMatrix, StoredMatrix};
use velox_kernels::block::BlockType;
use velox_kernels::buffer::ByteSource;
use velox_kernels::matrix::Matrix;

use super::affine_rules::{AffineRule, AffineRules};
use super::blame::{Blame, excerpt};
use crate::error::EngineError;

/// How many names an error lists.
const MAX_NAMES_IN_ERROR: usize = 8;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// Numbers, or blocks of them.
    Blocks(BlockType),
    /// Words into which elements of fewer bits are packed.
    U32,
}

impl ElementType {
    /// Returns the name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blocks(block_type) => block_type.name(),
            Self::U32 => "U32",
        }
    }

    /// Returns the bytes of one block or word.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Blocks(block_type) => block_type.bytes(),
            Self::U32 => 4,
        }
    }
}

/// A tensor in a mapped file.
#[derive(Debug)]
pub(super) struct StoredTensor {
    /// How its elements are stored.
    pub(super) element_type: ElementType,
    /// Slowest dimension first.
    pub(super) shape: Vec<usize>,
    /// Its bytes, whose length fits type and shape.
    pub(super) bytes: ByteSource,
    /// File that holds it.
    pub(super) blame: Blame,
}

/// How a quantised matrix is stored, and where its parts are.
struct Packing {
    layout: AffineLayout,
    scales: String,
    biases: String,
}

/// Sums over the tensors that were handed out.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) parameters: u64,
    pub(super) weight_bytes: u64,
    pub(super) tensor_types: BTreeSet<&'static str>,
}

/// Every tensor must be taken exactly once, in its expected shape.
#[derive(Debug)]
pub(super) struct TensorSet {
    tensors: BTreeMap<String, StoredTensor>,
    /// How tensors of words are packed; `None` if there must be none.
    affine: Option<AffineRules>,
    totals: Totals,
    blame: Blame,
}

impl TensorSet {
    /// Makes an empty set; `blame` names the model where no single file is at fault.
    pub(super) fn new(blame: Blame) -> Self {
        Self {
            tensors: BTreeMap::new(),
            affine: None,
            totals: Totals::default(),
            blame,
        }
    }

    /// Adds what the configuration says of packed matrices.
    pub(super) fn with_affine(self, affine: Option<AffineRules>) -> Self {
        Self { affine, ..self }
    }

    /// Adds a tensor.
    pub(super) fn insert(&mut self, name: &str, tensor: StoredTensor) -> Result<(), EngineError> {
        let blame = tensor.blame.clone();
        match self.tensors.insert(name.to_owned(), tensor) {
            None => Ok(()),
            Some(first) => Err(blame.invalid(format!(
                "tensor {} occurs in {} as well",
                excerpt(name),
                first.blame.file()
            ))),
        }
    }

    /// Returns whether a tensor is there and not yet taken.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the bytes of the tensors not yet taken.
    pub(super) fn bytes(&self) -> u64 {
        self.tensors
            .values()
            .map(|tensor| byte_length(&tensor.bytes))
            .sum()
    }

    /// Returns the bytes of the tensors taken.
    pub(super) fn taken_bytes(&self) -> u64 {
        self.totals.weight_bytes
    }

    /// Returns the rows of a matrix, its first dimension.
    pub(super) fn rows(&self, name: &str) -> Result<usize, EngineError> {
        let tensor = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        match tensor.shape.as_slice() {
            [rows, _] => Ok(*rows),
            shape => Err(tensor.blame.invalid(format!(
                "tensor {name} has shape {shape:?}, must have 2 dimensions"
            ))),
        }
    }

    /// Takes a matrix without copying it, with its scales and biases if it is quantised.
    pub(super) fn matrix(
        &mut self,
        name: &str,
        rows: usize,
        columns: usize,
    ) -> Result<StoredMatrix, EngineError> {
        let shape = [rows, columns];
        let matrix = match self.packing(name)? {
            Some(packing) => StoredMatrix::Affine(self.affine_matrix(name, &packing, shape)?),
            None => StoredMatrix::Blocks(self.plain_matrix(name, shape)?),
        };
        self.count_parameters(&shape);
        Ok(matrix)
    }

    fn plain_matrix(
        &mut self,
        name: &str,
        [rows, columns]: [usize; 2],
    ) -> Result<Matrix, EngineError> {
        let tensor = self.take(name, &[rows, columns])?;
        let blame = tensor.blame;
        let ElementType::Blocks(block_type) = tensor.element_type else {
            return Err(blame.invalid(format!(
                "tensor {name} is packed in U32 words, but has no scales"
            )));
        };
        self.totals.tensor_types.insert(block_type.name());
        Matrix::new(block_type, rows, columns, tensor.bytes)
            .map_err(|error| blame.invalid(format!("tensor {name}: {error}")))
    }

    /// Finds out how a matrix is packed; `None` if it is not.
    fn packing(&self, name: &str) -> Result<Option<Packing>, EngineError> {
        let Some(module) = name.strip_suffix(".weight") else {
            return Ok(None);
        };
        let scales = format!("{module}.scales");
        let scaled = self.contains(&scales);
        let rule = self.affine.as_ref().map(|affine| affine.rule(module));
        let layout = match rule {
            Some(AffineRule::Always(layout)) => layout,
            Some(AffineRule::IfScaled(layout)) if scaled => layout,
            Some(AffineRule::Never) | None if scaled => {
                return Err(self.blame.invalid(format!(
                    "tensor {scales} belongs to a module that config.json does not call quantised"
                )));
            }
            Some(AffineRule::Never | AffineRule::IfScaled(_)) | None => return Ok(None),
        };
        Ok(Some(Packing {
            layout,
            scales,
            biases: format!("{module}.biases"),
        }))
    }

    fn affine_matrix(
        &mut self,
        name: &str,
        packing: &Packing,
        [rows, columns]: [usize; 2],
    ) -> Result<AffineMatrix, EngineError> {
        let layout = packing.layout;
        let words = layout.row_words(columns).ok_or_else(|| {
            self.blame.invalid(format!(
                "tensor {name} has {columns} columns, no whole number of groups of {}",
                layout.group()
            ))
        })?;
        let groups = [rows, columns / layout.group()];
        let packed = self.take(name, &[rows, words])?;
        let blame = packed.blame;
        if packed.element_type != ElementType::U32 {
            return Err(blame.invalid(format!(
                "tensor {name} of type {} has scales, must be packed in U32 words",
                packed.element_type.name()
            )));
        }
        self.totals.tensor_types.insert(layout.name());
        let scales = self.plain_matrix(&packing.scales, groups)?;
        let biases = self.plain_matrix(&packing.biases, groups)?;
        AffineMatrix::new(layout, packed.bytes, scales, biases)
            .map_err(|error| blame.invalid(format!("tensor {name}: {error}")))
    }

    /// Takes a small vector as f32.
    pub(super) fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>, EngineError> {
        let tensor = self.take(name, &[length])?;
        self.count_parameters(&[length]);
        self.totals.tensor_types.insert(tensor.element_type.name());
        let bytes = tensor.bytes.as_slice();
        let values: Vec<f32> = match tensor.element_type {
            ElementType::Blocks(BlockType::F32) => {
                elements(bytes).map(f32::from_le_bytes).collect()
            }
            ElementType::Blocks(BlockType::F16) => elements(bytes)
                .map(|bytes| half::f16::from_le_bytes(bytes).to_f32())
                .collect(),
            ElementType::Blocks(BlockType::Bf16) => elements(bytes)
                .map(|bytes| half::bf16::from_le_bytes(bytes).to_f32())
                .collect(),
            other => {
                return Err(tensor.blame.unsupported(format!(
                    "vector {name} of type {} (F32, F16 and BF16 are)",
                    other.name()
                )));
            }
        };
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(values),
            Some(index) => Err(tensor
                .blame
                .invalid(format!("{name}[{index}] is {}", values[index]))),
        }
    }

    /// Ends the hand-out.
    ///
    /// # Errors
    /// [`EngineError::UnsupportedModel`] if tensors are left: ignoring one would compute another model.
    pub(super) fn finish(self) -> Result<Totals, EngineError> {
        if self.tensors.is_empty() {
            return Ok(self.totals);
        }
        let mut names: Vec<String> = self
            .tensors
            .keys()
            .take(MAX_NAMES_IN_ERROR)
            .map(|name| excerpt(name))
            .collect();
        if self.tensors.len() > names.len() {
            names.push(format!("{} more", self.tensors.len() - names.len()));
        }
        Err(self.blame.unsupported(format!(
            "a model with further tensors ({})",
            names.join(", ")
        )))
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<StoredTensor, EngineError> {
        let tensor = self
            .tensors
            .remove(name)
            .ok_or_else(|| self.missing(name))?;
        if tensor.shape != shape {
            return Err(tensor.blame.invalid(format!(
                "tensor {name} has shape {:?}, must have {shape:?}",
                tensor.shape
            )));
        }
        self.totals.weight_bytes += byte_length(&tensor.bytes);
        Ok(tensor)
    }

    /// Counts the elements of a tensor that was taken; scales and biases of groups are no parameters.
    fn count_parameters(&mut self, shape: &[usize]) {
        let elements: usize = shape.iter().product();
        self.totals.parameters += u64::try_from(elements).unwrap_or(u64::MAX);
    }

    fn missing(&self, name: &str) -> EngineError {
        self.blame.invalid(format!("tensor {name} is missing"))
    }
}

fn byte_length(bytes: &ByteSource) -> u64 {
    u64::try_from(bytes.as_slice().len()).expect("a length in memory fits 64 bits")
}

fn elements<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}
