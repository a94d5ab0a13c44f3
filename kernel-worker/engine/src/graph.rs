//! The transformer, written once over the backend trait.

use velox_kernels::affine::StoredMatrix;
use velox_kernels::ran::Ran;

use crate::backend::{
    AttentionShape, Backend, FedToken, GatedMlp, Linear, MlpOf, Norm, QkNorm, RowSpan, Stage,
    StageCounts, StatsRequest,
};
use crate::error::EngineError;
use crate::spec::{LayerTensors, LinearTensors, ModelSpec, ModelTensors};
use crate::step::Progress;

/// The tokens of one pass, flattened over its rows.
#[derive(Debug)]
pub struct Batch<'a, 'row, C, P> {
    /// `[T]`, below the vocabulary's size where they are known.
    pub tokens: &'a [FedToken<P>],
    /// `[T]`.
    pub positions: &'a [usize],
    /// Which tokens are whose; together they cover the batch.
    pub spans: &'a mut [RowSpan<'row, C>],
}

/// Who watches a pass, and what it counts.
pub struct Watch<'a> {
    /// Told of every layer.
    pub progress: &'a dyn Progress,
    /// Stages executed.
    pub stages: &'a mut StageCounts,
}

impl std::fmt::Debug for Watch<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Watch")
            .field("stages", &self.stages)
            .finish_non_exhaustive()
    }
}

/// A model whose tensors a backend has taken over.
#[derive(Debug)]
pub struct Transformer<B: Backend> {
    shape: AttentionShape,
    embedding: B::Matrix,
    layers: Vec<Layer<B>>,
    final_norm: Norm<B::Vector>,
    /// `None` = tied to the embedding.
    head: Option<B::Matrix>,
}

#[derive(Debug)]
struct Layer<B: Backend> {
    attention_norm: Norm<B::Vector>,
    /// Queries, keys, values.
    projections: B::Group<3>,
    qk_norm: Option<QkNorm<B::Vector>>,
    o_proj: Linear<B::Matrix, B::Vector>,
    mlp: MlpOf<B>,
}

impl<B: Backend> Transformer<B> {
    /// Hands every tensor to the backend. `prepared` is told the stored bytes of each matrix after it was taken.
    ///
    /// # Errors
    /// What the backend cannot take.
    pub fn new(
        backend: &mut B,
        spec: &ModelSpec,
        tensors: ModelTensors<StoredMatrix>,
        prepared: &mut dyn FnMut(u64),
    ) -> Result<Self, EngineError> {
        let mut preparation = Preparation {
            backend,
            epsilon: spec.rms_norm_eps,
            prepared,
        };
        let embedding = preparation.matrix(tensors.embedding)?;
        let layers = tensors
            .layers
            .into_iter()
            .map(|layer| preparation.layer(layer))
            .collect::<Result<_, _>>()?;
        let final_norm = preparation.norm(&tensors.final_norm)?;
        let head = tensors
            .head
            .map(|head| preparation.matrix(head))
            .transpose()?;
        backend.prepare_rope(&spec.rope, spec.context_length)?;
        Ok(Self {
            shape: AttentionShape::of(spec),
            embedding,
            layers,
            final_norm,
            head,
        })
    }

    /// Runs all layers over a batch and appends it to the caches: hidden state `[T, D]` before the final norm.
    ///
    /// # Errors
    /// What a stage says. The caches of the batch are then of unequal length in different layers and must be dropped.
    pub fn forward(
        &self,
        backend: &mut B,
        batch: Batch<'_, '_, B::Cache, B::Awaited>,
        watch: &mut Watch<'_>,
    ) -> Result<Ran<B::Device, B::Activation>, EngineError> {
        let mut hidden = backend.embed(&self.embedding, batch.tokens)?;
        watch.stages.record(Stage::Embed);
        for (index, layer) in self.layers.iter().enumerate() {
            let qkv =
                backend.norm_project(hidden.value(), &layer.attention_norm, &layer.projections)?;
            watch.stages.record(Stage::NormProject);
            // A stage takes its input by value to work in place; its own result is the evidence from there on.
            let qkv = backend.rope(
                qkv.into_value(),
                layer.qk_norm.as_ref(),
                batch.positions,
                self.shape,
            )?;
            watch.stages.record(Stage::Rope);
            let attended = backend.append_attend(
                qkv.value(),
                batch.spans,
                index,
                self.shape,
                StatsRequest::None,
            )?;
            watch.stages.record(Stage::AppendAttend);
            hidden = backend.output_project(
                hidden.into_value(),
                &attended.value().output,
                &layer.o_proj,
            )?;
            watch.stages.record(Stage::OutputProject);
            hidden = backend.gated_mlp(hidden.into_value(), &layer.mlp)?;
            watch.stages.record(Stage::GatedMlp);
            backend.end_layer(hidden.value(), watch.progress)?;
        }
        Ok(hidden)
    }

    /// Computes the logits of the batch's tokens at `rows`: `[rows, V]`.
    ///
    /// # Errors
    /// As the backend says.
    pub fn logits(
        &self,
        backend: &mut B,
        hidden: &Ran<B::Device, B::Activation>,
        rows: &[usize],
    ) -> Result<Ran<B::Device, B::Logits>, EngineError> {
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        backend.head(hidden.value(), rows, &self.final_norm, head)
    }

    /// Makes an empty cache for a row.
    ///
    /// # Errors
    /// [`EngineError::OutOfMemory`].
    pub fn new_cache(
        &self,
        backend: &mut B,
        capacity_tokens: usize,
    ) -> Result<B::Cache, EngineError> {
        backend.new_cache(self.layers.len(), self.shape, capacity_tokens)
    }
}

/// Gives tensors to a backend one by one.
struct Preparation<'a, B: Backend> {
    backend: &'a mut B,
    epsilon: f32,
    prepared: &'a mut dyn FnMut(u64),
}

impl<B: Backend> Preparation<'_, B> {
    fn matrix(&mut self, matrix: StoredMatrix) -> Result<B::Matrix, EngineError> {
        let stored_bytes = matrix.byte_length() as u64;
        let taken = self.backend.prepare_matrix(matrix)?;
        (self.prepared)(stored_bytes);
        Ok(taken)
    }

    fn linear(
        &mut self,
        linear: LinearTensors<StoredMatrix>,
    ) -> Result<Linear<B::Matrix, B::Vector>, EngineError> {
        Ok(Linear {
            weight: self.matrix(linear.weight)?,
            bias: match linear.bias {
                Some(bias) => Some(self.backend.prepare_vector(&bias)?),
                None => None,
            },
        })
    }

    fn norm(&mut self, weight: &[f32]) -> Result<Norm<B::Vector>, EngineError> {
        Ok(Norm {
            weight: self.backend.prepare_vector(weight)?,
            epsilon: self.epsilon,
        })
    }

    fn layer(&mut self, layer: LayerTensors<StoredMatrix>) -> Result<Layer<B>, EngineError> {
        let projections = [
            self.linear(layer.q_proj)?,
            self.linear(layer.k_proj)?,
            self.linear(layer.v_proj)?,
        ];
        let gate_up = [self.linear(layer.gate_proj)?, self.linear(layer.up_proj)?];
        Ok(Layer {
            attention_norm: self.norm(&layer.attention_norm)?,
            projections: self.backend.prepare_group(projections)?,
            qk_norm: match layer.qk_norm {
                Some(norms) => Some(QkNorm {
                    q_norm: self.norm(&norms.q_norm)?,
                    k_norm: self.norm(&norms.k_norm)?,
                }),
                None => None,
            },
            o_proj: self.linear(layer.o_proj)?,
            mlp: GatedMlp {
                norm: self.norm(&layer.mlp_norm)?,
                gate_up: self.backend.prepare_group(gate_up)?,
                down_proj: self.linear(layer.down_proj)?,
            },
        })
    }
}
