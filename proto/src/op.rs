//! The one table of ops: capabilities, op counts, the worker's RunOp and the kernel service use these names.

use std::fmt;
use std::str::FromStr;

/// Where an op can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// A fused stage of the transformer: counted on every result.
    Stage,
    /// A kernel that RunOp executes on given tensors.
    Kernel,
}

macro_rules! op_table {
    ($($(#[doc = $doc:literal])+ $variant:ident = $name:literal, $kind:ident;)+) => {
        /// An op that a backend can offer.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum OpId { $($(#[doc = $doc])+ $variant,)+ }

        impl OpId {
            /// Every op, in the order of the table.
            pub const ALL: &'static [OpId] = &[$(OpId::$variant,)+];

            /// Returns the name used on the wire and in every table.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(OpId::$variant => $name,)+ }
            }

            /// Returns where the op can be asked for.
            #[must_use]
            pub const fn kind(self) -> OpKind {
                match self { $(OpId::$variant => OpKind::$kind,)+ }
            }
        }
    };
}

op_table! {
    /// Rows of the embedding table.
    Embed = "embed", Stage;
    /// RMS norm and a group of projections of the normed input.
    NormProject = "norm_project", Stage;
    /// Rotary position embedding of queries and keys.
    Rope = "rope", Stage;
    /// Appends keys and values to the cache and attends to it.
    AppendAttend = "append_attend", Stage;
    /// Output projection of attention added to the residual.
    OutputProject = "output_project", Stage;
    /// RMS norm, gate and up projections, SiLU, down projection, added to the residual.
    GatedMlp = "gated_mlp", Stage;
    /// Final norm and output head.
    Head = "head", Stage;
    /// Choice of the next token.
    Sample = "sample", Stage;
    /// `y = W x` with a stored matrix of any block type.
    MatMul = "mat_mul", Kernel;
    /// Block types to f32.
    Dequantize = "dequantize", Kernel;
    /// Root-mean-square norm.
    RmsNorm = "rms_norm", Kernel;
    /// Softmax over the last axis.
    Softmax = "softmax", Kernel;
}

impl fmt::Display for OpId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A name that is not in the op table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("op {0:?} is not in the op table")]
pub struct UnknownOp(pub String);

impl FromStr for OpId {
    type Err = UnknownOp;

    fn from_str(name: &str) -> Result<Self, UnknownOp> {
        Self::ALL
            .iter()
            .copied()
            .find(|op| op.name() == name)
            .ok_or_else(|| UnknownOp(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_back_to_its_op() {
        for &op in OpId::ALL {
            assert_eq!(op.name().parse(), Ok(op));
        }
        assert_eq!("shell".parse::<OpId>(), Err(UnknownOp("shell".to_owned())));
    }
}
