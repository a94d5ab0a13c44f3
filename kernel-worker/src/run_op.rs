//! RunOp: one kernel on given tensors.
//!
//! A stored matrix travels as a u8 tensor `[rows, bytes of a row]` with its block type as the argument `block_type`
//! (index in the table of block types) and its width as `columns`; everything else is f32.

use std::collections::HashMap;

use velox_engine::error::EngineError;
use velox_kernels::block::BlockType;
use velox_kernels::buffer::ByteSource;
use velox_kernels::label::BackendLabel;
use velox_kernels::matrix::Matrix;

use crate::kernel_set::{CpuKernels, KernelSet, ReferenceKernels};
use velox_proto::limits::MAX_INLINE_TENSOR_BYTES;
use velox_proto::op::OpId;
use velox_proto::tensor::{DType, TensorHandle, contiguous_bytes};
use velox_proto::v1;
use velox_proto::worker::v1 as wire;
use velox_shm::PeerSegments;

use crate::convert::{label_of, wire_backend};
use crate::error::WorkerError;

/// Largest output of one op.
const MAX_OUTPUT_BYTES: u64 = 1024 * 1024 * 1024;

/// An input tensor, copied out of where its sender can change it.
#[derive(Debug)]
struct Input {
    dtype: DType,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

/// An f32 output and the label of the code that made it.
struct Output {
    shape: Vec<usize>,
    values: Vec<f32>,
    label: BackendLabel,
}

/// The kernel sets of this worker.
#[derive(Debug)]
pub struct KernelSets {
    reference: ReferenceKernels,
    cpu: Result<CpuKernels, String>,
}

impl KernelSets {
    /// Starts the threads of the SIMD kernels.
    #[must_use]
    pub fn new(threads: std::num::NonZeroUsize) -> Self {
        Self {
            reference: ReferenceKernels {
                threads: threads.get(),
            },
            cpu: CpuKernels::new(threads).map_err(|error| error.to_string()),
        }
    }
}

/// Runs one op.
///
/// # Errors
/// [`WorkerError`] naming the argument at fault, or the op or type that the backend lacks.
pub fn run(
    request: wire::RunOpRequest,
    memory: &PeerSegments,
    sets: &KernelSets,
) -> Result<wire::RunOpResponse, WorkerError> {
    let op: OpId = request.op.parse()?;
    let inputs = request
        .inputs
        .into_iter()
        .map(|tensor| input(tensor, memory))
        .collect::<Result<Vec<_>, _>>()?;
    let backend = label_of("backend", request.backend)?;
    let call = Call {
        op,
        inputs: &inputs,
        arguments: &request.arguments,
    };
    let output = match (backend, &sets.cpu) {
        (Some(BackendLabel::Reference), _) | (None, Err(_)) => call.run(&sets.reference)?,
        (None | Some(BackendLabel::Cpu), Ok(cpu)) => call.run(cpu)?,
        (Some(BackendLabel::Cpu), Err(reason)) => {
            return Err(unavailable(BackendLabel::Cpu, reason.clone()));
        }
        (Some(other), _) => {
            return Err(unavailable(
                other,
                "it is not part of this build".to_owned(),
            ));
        }
    };
    respond(op, output, request.destination, memory)
}

fn input(tensor: v1::Tensor, memory: &PeerSegments) -> Result<Input, WorkerError> {
    let invalid = |problem: String| WorkerError::Invalid {
        field: "inputs",
        problem,
    };
    match tensor.data {
        None => Err(invalid("a tensor has no data".to_owned())),
        Some(v1::tensor::Data::Handle(handle)) => {
            let handle = TensorHandle::try_from(handle)?;
            if !handle.is_contiguous() {
                return Err(invalid(
                    "strided tensors are not supported by kernel ops".to_owned(),
                ));
            }
            let bytes = memory.read(&handle)?;
            Ok(Input {
                dtype: handle.dtype(),
                shape: handle.shape().to_vec(),
                bytes,
            })
        }
        Some(v1::tensor::Data::Inline(bytes)) => {
            let dtype = v1::DType::try_from(tensor.dtype)
                .map_err(|_unknown| {
                    invalid(format!("element type {} is not in the table", tensor.dtype))
                })?
                .try_into()?;
            let expected = contiguous_bytes(&tensor.shape, dtype)?;
            if u64::try_from(bytes.len()).ok() != Some(expected) {
                return Err(invalid(format!(
                    "a tensor has {} bytes, its shape needs {expected}",
                    bytes.len()
                )));
            }
            Ok(Input {
                dtype,
                shape: tensor.shape,
                bytes: bytes.to_vec(),
            })
        }
    }
}

/// A checked request.
#[derive(Debug, Clone, Copy)]
struct Call<'a> {
    op: OpId,
    inputs: &'a [Input],
    arguments: &'a HashMap<String, f64>,
}

impl Call<'_> {
    fn run<K: KernelSet>(&self, kernels: &K) -> Result<Output, WorkerError> {
        let (shape, values, ran) = match self.op {
            OpId::MatMul => {
                let (input, matrix) = (self.f32(0)?, self.matrix(1)?);
                let tokens = input.len() / matrix.columns().max(1);
                let mut out = buffer(tokens.checked_mul(matrix.rows()))?;
                let ran = kernels.mat_mul(&input, &matrix, &mut out);
                (vec![tokens, matrix.rows()], out, ran)
            }
            OpId::RmsNorm => {
                let (input, weight) = (self.f32(0)?, self.f32(1)?);
                let mut out = vec![0.0; input.len()];
                let ran = kernels.rms_norm(&input, &weight, self.epsilon()?, &mut out);
                (self.shape(0)?, out, ran)
            }
            OpId::Softmax => {
                let mut values = self.f32(0)?;
                let ran = kernels.softmax(&mut values, self.last_extent(0)?);
                (self.shape(0)?, values, ran)
            }
            OpId::Dequantize => {
                let matrix = self.matrix(0)?;
                let mut out = buffer(matrix.rows().checked_mul(matrix.columns()))?;
                let ran = kernels.dequantise(&matrix, &mut out);
                (vec![matrix.rows(), matrix.columns()], out, ran)
            }
            _ => return Err(self.unsupported()),
        };
        let ran = ran.map_err(|error| WorkerError::Invalid {
            field: "inputs",
            problem: error.to_string(),
        })?;
        Ok(Output {
            shape,
            values,
            label: ran.label(),
        })
    }

    fn unsupported(&self) -> WorkerError {
        WorkerError::OpUnsupported {
            op: self.op.name(),
            problem: "it is a stage of the model, not a kernel that runs on given tensors"
                .to_owned(),
        }
    }

    fn input(&self, index: usize) -> Result<&Input, WorkerError> {
        self.inputs.get(index).ok_or_else(|| WorkerError::Invalid {
            field: "inputs",
            problem: format!("has {} tensors, {} needs more", self.inputs.len(), self.op),
        })
    }

    fn f32(&self, index: usize) -> Result<Vec<f32>, WorkerError> {
        let input = self.input(index)?;
        if input.dtype != DType::F32 {
            return Err(WorkerError::Invalid {
                field: "inputs",
                problem: format!(
                    "tensor {index} has type {}, expected f32",
                    input.dtype.name()
                ),
            });
        }
        let values = input.bytes.chunks_exact(4);
        Ok(values
            .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]))
            .collect())
    }

    fn shape(&self, index: usize) -> Result<Vec<usize>, WorkerError> {
        let extents = self.input(index)?.shape.iter();
        extents
            .map(|&extent| usize::try_from(extent))
            .collect::<Result<_, _>>()
            .map_err(|_overflow| WorkerError::Invalid {
                field: "inputs",
                problem: format!("shape of tensor {index} overflows"),
            })
    }

    fn last_extent(&self, index: usize) -> Result<usize, WorkerError> {
        Ok(self.shape(index)?.last().copied().unwrap_or(1))
    }

    fn matrix(&self, index: usize) -> Result<Matrix, WorkerError> {
        let invalid = |problem: String| WorkerError::Invalid {
            field: "inputs",
            problem,
        };
        let input = self.input(index)?;
        if input.dtype == DType::F32 && !self.arguments.contains_key("block_type") {
            let [rows, columns] = self.shape(index)?[..] else {
                return Err(invalid(format!("tensor {index} is no matrix")));
            };
            return Matrix::new(
                BlockType::F32,
                rows,
                columns,
                ByteSource::copy_of(&input.bytes),
            )
            .map_err(|error| invalid(error.to_string()));
        }
        let kind = self.count("block_type")?;
        let block_type = *BlockType::ALL
            .get(kind)
            .ok_or_else(|| invalid(format!("block type {kind} is not in the table")))?;
        let rows = self.shape(index)?.first().copied().unwrap_or(1);
        Matrix::new(
            block_type,
            rows,
            self.count("columns")?,
            ByteSource::copy_of(&input.bytes),
        )
        .map_err(|error| invalid(error.to_string()))
    }

    fn argument(&self, name: &str) -> Result<f64, WorkerError> {
        self.arguments
            .get(name)
            .copied()
            .ok_or_else(|| WorkerError::Invalid {
                field: "arguments",
                problem: format!("{:?} is missing", name),
            })
    }

    /// A whole number that was sent as f64.
    fn count(&self, name: &str) -> Result<usize, WorkerError> {
        let value = self.argument(name)?;
        let text = format!("{value}");
        text.parse().map_err(|_bad| WorkerError::Invalid {
            field: "arguments",
            problem: format!("{name:?} is {value}, must be a whole number"),
        })
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "an epsilon loses only precision"
    )]
    fn epsilon(&self) -> Result<f32, WorkerError> {
        let value = self.argument("epsilon")?;
        if !(value.is_finite() && value >= 0.0) {
            return Err(WorkerError::Invalid {
                field: "arguments",
                problem: format!("\"epsilon\" is {value}, must be finite and not negative"),
            });
        }
        Ok(value as f32)
    }
}

/// A zeroed output of `elements` values, refused above the limit before it is allocated.
fn buffer(elements: Option<usize>) -> Result<Vec<f32>, WorkerError> {
    let bytes = elements.and_then(|count| u64::try_from(count).ok()?.checked_mul(4));
    match (elements, bytes) {
        (Some(elements), Some(bytes)) if bytes <= MAX_OUTPUT_BYTES => Ok(vec![0.0; elements]),
        _ => Err(WorkerError::Invalid {
            field: "inputs",
            problem: format!("the output would exceed {MAX_OUTPUT_BYTES} bytes"),
        }),
    }
}

fn unavailable(backend: BackendLabel, reason: String) -> WorkerError {
    WorkerError::Engine(EngineError::BackendUnavailable {
        backend: backend.name(),
        reason,
    })
}

fn respond(
    op: OpId,
    output: Output,
    destination: Option<v1::TensorHandle>,
    memory: &PeerSegments,
) -> Result<wire::RunOpResponse, WorkerError> {
    let bytes: &[u8] = bytemuck::cast_slice(&output.values);
    let data = match destination {
        Some(handle) => {
            let checked = TensorHandle::try_from(handle.clone())?;
            checked.expect_dtype(DType::F32)?;
            memory.write(&checked, bytes)?;
            v1::tensor::Data::Handle(handle)
        }
        None if bytes.len() <= MAX_INLINE_TENSOR_BYTES => {
            v1::tensor::Data::Inline(bytes.to_vec().into())
        }
        None => {
            return Err(WorkerError::Invalid {
                field: "destination",
                problem: format!(
                    "the output has {} bytes, above {MAX_INLINE_TENSOR_BYTES} a destination is needed",
                    bytes.len()
                ),
            });
        }
    };
    Ok(wire::RunOpResponse {
        outputs: vec![v1::Tensor {
            dtype: v1::DType::F32.into(),
            shape: output
                .shape
                .iter()
                .map(|&extent| u64::try_from(extent).unwrap_or(u64::MAX))
                .collect(),
            data: Some(data),
        }],
        provenance: Some(v1::Provenance {
            backend: wire_backend(output.label).into(),
            op_counts: vec![v1::OpCount {
                op: op.name().to_owned(),
                count: 1,
            }],
            ..v1::Provenance::default()
        }),
    })
}
