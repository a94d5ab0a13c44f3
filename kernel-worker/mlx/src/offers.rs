//! Which devices of MLX this executable offers on this machine.

use std::marker::PhantomData;

use velox_engine::error::EngineError;
use velox_engine::offer::{Offer, Offers, OpenBackend, Opening};
use velox_kernels::label::BackendLabel;

use crate::backend::MlxBackend;
use crate::ffi::{Library, MLX_VERSION, MetalDevice, MlxCpuDevice, MlxCudaDevice, MlxDevice};

/// Opens one device of MLX.
#[derive(Debug)]
pub struct MlxOffer<D>(PhantomData<fn() -> D>);

impl<D> MlxOffer<D> {
    /// Offers the device, whether it is there or not.
    #[must_use]
    pub fn new() -> Self {
        Self(PhantomData)
    }
}

impl<D> Default for MlxOffer<D> {
    fn default() -> Self {
        Self::new()
    }
}

impl<D: MlxDevice> OpenBackend for MlxOffer<D> {
    type Backend = MlxBackend<D>;

    fn open(&self, opening: &Opening<'_>) -> Result<MlxBackend<D>, EngineError> {
        MlxBackend::open(opening.stored_types, opening.budget.clone())
    }

    fn kernel(&self) -> String {
        format!("mlx {MLX_VERSION}")
    }

    fn device(&self) -> Option<String> {
        D::name()
    }
}

/// What this executable offers, and what is wrong with its library.
#[derive(Debug)]
pub struct Linked {
    /// Host backends in any case.
    pub offers: Offers,
    /// Why MLX cannot be used at all.
    pub problem: Option<String>,
}

/// Looks at the MLX that this process was linked with. A GPU that the library was built for is offered; its probe says
/// whether it works.
#[must_use]
pub fn linked() -> Linked {
    let library = match Library::open() {
        Ok(library) => library,
        Err(error) => {
            let problem = error.to_string();
            return Linked {
                offers: Offers::of_the_host(&problem),
                problem: Some(problem),
            };
        }
    };
    let mut offers: Vec<Box<dyn Offer>> = vec![Box::new(MlxOffer::<MlxCpuDevice>::new())];
    let mut missing = Vec::new();
    if !cfg!(target_os = "macos") {
        missing.push((BackendLabel::Metal, "Metal exists on macOS only".to_owned()));
    } else if library.has_metal() {
        offers.push(Box::new(MlxOffer::<MetalDevice>::new()));
    } else {
        missing.push((
            BackendLabel::Metal,
            "MLX finds no Apple GPU that it can use".to_owned(),
        ));
    }
    if library.has_cuda() {
        offers.push(Box::new(MlxOffer::<MlxCudaDevice>::new()));
    } else {
        missing.push((
            BackendLabel::MlxCuda,
            "this MLX library was built without CUDA".to_owned(),
        ));
    }
    Linked {
        offers: Offers::with(offers, missing),
        problem: None,
    }
}
