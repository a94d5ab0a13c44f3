//! Chains of elementwise ops that a GPU runs as one kernel, which MLX writes when they are first used.

use mlx_rs::error::Exception;
use mlx_rs::transforms::compile::compile;
use mlx_rs::{Array, ops};

use super::device::{HalfPrecision, MlxDevice};
use super::error::MlxError;
use super::tensor::Tensor;

type Chain = Box<dyn for<'a> FnMut((&'a Array, &'a Array)) -> Result<Array, Exception>>;

/// The chains, on the thread that made them.
pub struct Fused {
    /// `None` where fusing does not pay: on the processor MLX would start a C++ compiler for code that is no faster.
    gated: Option<Chain>,
}

impl std::fmt::Debug for Fused {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Fused")
            .field("compiled", &self.gated.is_some())
            .finish()
    }
}

impl Fused {
    /// Prepares the chains for a device.
    #[must_use]
    pub fn on<D: MlxDevice>() -> Self {
        Self {
            gated: match D::HALF_PRECISION {
                HalfPrecision::Fast => {
                    let mut compiled = compile(silu_times, true);
                    Some(Box::new(move |pair| compiled(pair)))
                }
                HalfPrecision::Slow => None,
            },
        }
    }

    /// `silu(gate) * up`.
    ///
    /// # Errors
    /// As MLX says.
    pub fn gated(&mut self, gate: &Tensor, up: &Tensor) -> Result<Tensor, MlxError> {
        let arguments = (&gate.0, &up.0);
        let product = match &mut self.gated {
            Some(chain) => chain(arguments),
            None => silu_times(arguments),
        };
        Ok(Tensor(product?))
    }
}

fn silu_times((gate, up): (&Array, &Array)) -> Result<Array, Exception> {
    ops::multiply(ops::multiply(gate, ops::sigmoid(gate)?)?, up)
}
