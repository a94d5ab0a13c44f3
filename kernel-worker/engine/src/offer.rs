//! The backends that an executable can run, behind one interface: probing and loading know no others.

use std::fmt::Debug;
use std::sync::Arc;

use velox_kernels::cpu::CpuKernelSet;
use velox_kernels::label::BackendLabel;
use velox_kernels::ran::Device as _;
use velox_kvcache::PageBudget;

use crate::backend::cpu::CpuBackend;
use crate::backend::reference::ReferenceBackend;
use crate::backend::{Backend, Stage};
use crate::error::EngineError;
use crate::files::ModelSource;
use crate::load::{LoadProgress, LoadedModel, assemble};
use crate::probe::{ProbeCase, ProbeOutcome, is_batch_invariant};

/// What a backend is opened for.
#[derive(Debug, Clone)]
pub struct Opening<'a> {
    /// Names of the block types of the model as it was stored, before anything was made of it.
    pub stored_types: &'a [&'static str],
    /// Compute threads, at least 1.
    pub threads: usize,
    /// What its caches may allocate.
    pub budget: PageBudget,
}

/// Makes backends of one kind.
pub trait OpenBackend: Debug + Send + Sync {
    /// The kind.
    type Backend: Backend + 'static;

    /// Opens the device for the calling thread, which must run the backend.
    ///
    /// # Errors
    /// [`EngineError::BackendUnavailable`] with the reason.
    fn open(&self, opening: &Opening<'_>) -> Result<Self::Backend, EngineError>;

    /// Returns the kernel set, for people.
    fn kernel(&self) -> String;

    /// Returns the name of the device, for people; `None` = the processor.
    fn device(&self) -> Option<String>;
}

/// Told of each case as soon as it is done.
pub type EachCase<'a> = dyn FnMut(ProbeCase, &Result<ProbeOutcome, EngineError>) + 'a;

/// One backend of an executable.
pub trait Offer: Debug + Send + Sync {
    /// Label of what it runs.
    fn label(&self) -> BackendLabel;

    /// Runs every probe on the calling thread. Returns whether logits do not depend on the batch.
    ///
    /// # Errors
    /// [`EngineError::BackendUnavailable`] if the device cannot be opened.
    fn probe(&self, opening: &Opening<'_>, each: &mut EachCase<'_>) -> Result<bool, EngineError>;

    /// Hands a model to the backend, on the thread that will run it.
    ///
    /// # Errors
    /// What the backend cannot take.
    fn load(
        &self,
        source: ModelSource,
        opening: &Opening<'_>,
        report: &mut dyn FnMut(LoadProgress),
    ) -> Result<LoadedModel, EngineError>;

    /// Returns the kernel set, for people.
    fn kernel(&self) -> String;

    /// Returns the name of the device, for people; `None` = the processor.
    fn device(&self) -> Option<String>;
}

impl<O: OpenBackend> Offer for O {
    fn label(&self) -> BackendLabel {
        <O::Backend as Backend>::Device::LABEL
    }

    fn probe(&self, opening: &Opening<'_>, each: &mut EachCase<'_>) -> Result<bool, EngineError> {
        let mut backend = self.open(opening)?;
        let mut oracle = ReferenceBackend::new(1, opening.budget.clone());
        // What another backend does is that one's to show.
        let own_sampler = <O::Backend as Backend>::Sampler::LABEL == self.label();
        let cases = ProbeCase::all().into_iter();
        for case in cases.filter(|case| own_sampler || case.stage != Stage::Sample) {
            each(case, &case.run(&mut backend, &mut oracle));
        }
        Ok(is_batch_invariant(&mut backend).unwrap_or(false))
    }

    fn load(
        &self,
        source: ModelSource,
        opening: &Opening<'_>,
        report: &mut dyn FnMut(LoadProgress),
    ) -> Result<LoadedModel, EngineError> {
        let mut loaded = assemble(source, self.open(opening)?, report)?;
        loaded.facts.kernel = OpenBackend::kernel(self);
        loaded.facts.device = OpenBackend::device(self);
        Ok(loaded)
    }

    fn kernel(&self) -> String {
        OpenBackend::kernel(self)
    }

    fn device(&self) -> Option<String> {
        OpenBackend::device(self)
    }
}

/// SIMD kernels.
#[derive(Debug, Clone, Copy)]
pub struct CpuOffer;

impl OpenBackend for CpuOffer {
    type Backend = CpuBackend;

    fn open(&self, opening: &Opening<'_>) -> Result<CpuBackend, EngineError> {
        CpuBackend::new(
            CpuKernelSet::detect(),
            opening.threads,
            opening.budget.clone(),
        )
    }

    fn kernel(&self) -> String {
        CpuKernelSet::detect().name().to_owned()
    }

    fn device(&self) -> Option<String> {
        None
    }
}

/// The oracle.
#[derive(Debug, Clone, Copy)]
pub struct ReferenceOffer;

impl OpenBackend for ReferenceOffer {
    type Backend = ReferenceBackend;

    fn open(&self, opening: &Opening<'_>) -> Result<ReferenceBackend, EngineError> {
        Ok(ReferenceBackend::new(
            opening.threads,
            opening.budget.clone(),
        ))
    }

    fn kernel(&self) -> String {
        "f32".to_owned()
    }

    fn device(&self) -> Option<String> {
        None
    }
}

/// What an executable offers, and why it lacks the rest. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Offers {
    offers: Arc<[Box<dyn Offer>]>,
    /// Labels that are not offered, and why.
    missing: Arc<[(BackendLabel, String)]>,
}

impl Offers {
    /// What every executable has, `CPU` and `REFERENCE`; `why_no_mlx` is what it says of MLX's backends.
    #[must_use]
    pub fn of_the_host(why_no_mlx: &str) -> Self {
        let labels = [
            BackendLabel::Metal,
            BackendLabel::MlxCuda,
            BackendLabel::MlxCpu,
        ];
        Self::with(
            Vec::new(),
            labels.map(|label| (label, why_no_mlx.to_owned())).into(),
        )
    }

    /// Those of the host and `more` that are linked in; `missing` says of other labels why they are not.
    #[must_use]
    pub fn with(more: Vec<Box<dyn Offer>>, missing: Vec<(BackendLabel, String)>) -> Self {
        let mut offers = more;
        offers.push(Box::new(CpuOffer));
        offers.push(Box::new(ReferenceOffer));
        // Strong ones first.
        offers.sort_by_key(|offer| std::cmp::Reverse(offer.label()));
        Self {
            offers: offers.into(),
            missing: missing.into(),
        }
    }

    /// Returns them, strong ones first.
    pub fn iter(&self) -> impl Iterator<Item = &dyn Offer> {
        self.offers.iter().map(AsRef::as_ref)
    }

    /// Returns the one with a label.
    ///
    /// # Errors
    /// Why there is none.
    pub fn find(&self, label: BackendLabel) -> Result<&dyn Offer, String> {
        let found = self.iter().find(|offer| offer.label() == label);
        found.ok_or_else(|| {
            let why = self.missing.iter().find(|(missing, _)| *missing == label);
            why.map_or_else(
                || "it is not part of this build".to_owned(),
                |(_, why)| why.clone(),
            )
        })
    }
}
