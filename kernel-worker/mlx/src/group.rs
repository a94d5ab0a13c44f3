//! Projections of one input as few products.

use velox_engine::backend::Linear;

use crate::ffi::{MlxError, Tensor, evaluate};
use crate::weights::Weight;

/// Projections whose results lie side by side. Neighbours that are stored alike became one matrix.
#[derive(Debug)]
pub struct Grouped {
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    weight: Weight,
    /// `[out]`, of all projections of the part.
    bias: Option<Tensor>,
    /// Rows of each projection.
    widths: Vec<usize>,
}

impl Grouped {
    /// Joins what can be joined; the device holds each weight once when this returns.
    ///
    /// # Errors
    /// As MLX says.
    pub fn new(
        projections: impl IntoIterator<Item = Linear<Weight, Tensor>>,
    ) -> Result<Self, MlxError> {
        let mut parts: Vec<Part> = Vec::new();
        for projection in projections {
            let next = Part {
                widths: vec![projection.weight.rows()],
                weight: projection.weight,
                bias: projection.bias,
            };
            match parts.pop() {
                None => parts.push(next),
                Some(last) if last.is_like(&next) => parts.push(last.joined(next)?),
                Some(last) => parts.extend([last, next]),
            }
        }
        Ok(Self { parts })
    }

    /// `[T, in]` to `[T, out]` of each projection, in order.
    ///
    /// # Errors
    /// As MLX says.
    pub fn multiply(&self, input: &Tensor) -> Result<Vec<Tensor>, MlxError> {
        let mut results = Vec::new();
        for part in &self.parts {
            let mut product = part.weight.multiply(input)?;
            if let Some(bias) = &part.bias {
                product = product.add(bias)?;
            }
            if part.widths.len() == 1 {
                results.push(product);
                continue;
            }
            let mut from = 0;
            for width in &part.widths {
                results.push(product.slice(1, from..from + width)?);
                from += width;
            }
        }
        Ok(results)
    }
}

impl Part {
    fn is_like(&self, other: &Self) -> bool {
        self.bias.is_some() == other.bias.is_some() && self.weight.is_like(&other.weight)
    }

    fn joined(self, other: Self) -> Result<Self, MlxError> {
        let weight = self.weight.above(&other.weight)?;
        let bias = match (self.bias, other.bias) {
            (Some(upper), Some(lower)) => {
                let joined = Tensor::concatenate(&[upper, lower], 0)?;
                evaluate([&joined])?;
                Some(joined)
            }
            _ => None,
        };
        let mut widths = self.widths;
        widths.extend(other.widths);
        Ok(Self {
            weight,
            bias,
            widths,
        })
    }
}
