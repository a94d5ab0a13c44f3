//! Devices of MLX and the labels that their results carry.

use std::marker::PhantomData;

use mlx_rs::{DeviceType, Stream, with_stream};
use velox_kernels::label::BackendLabel;
use velox_kernels::ran::{Device, Ran};

use super::error::{MlxError, forget_failure};
use super::library::Library;
use super::tensor::{Dtype, Tensor, evaluate};

/// A device that MLX can compute on. Sealed: only this module makes witnesses.
pub trait MlxDevice: Device + sealed::Witness + std::fmt::Debug + 'static {
    /// How it gets along with elements of 16 bits.
    const HALF_PRECISION: HalfPrecision;

    /// How it runs the kernels of [`crate::metal`].
    const KERNEL_PATH: KernelPath;

    /// Returns what MLX calls the device; `None` = the processor.
    #[must_use]
    fn name() -> Option<String> {
        match Self::KIND {
            DeviceType::Cpu => None,
            DeviceType::Gpu => Some(mlx_rs::Device::gpu().to_string()),
        }
    }
}

/// Whether a device computes in 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HalfPrecision {
    /// At least as fast as in 32.
    Fast,
    /// 10 to 42 times slower: everything is converted to f32.
    Slow,
}

/// What computes the kernels of [`crate::metal`] on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelPath {
    /// Our own bodies.
    Metal,
    /// Ops of MLX that give the same.
    Ops,
}

mod sealed {
    use super::{DeviceType, Library, MlxError};

    pub trait Witness: Sized {
        const KIND: DeviceType;

        /// Why the device cannot be there, whatever MLX says.
        fn check(library: Library) -> Result<(), MlxError>;

        fn witness() -> Self;
    }
}

/// The Apple GPU.
///
/// Nobody else can make the witness, so nobody else can put its label on a value:
///
/// ```compile_fail
/// use velox_kernels::ran::Ran;
/// use velox_mlx::ffi::MetalDevice;
///
/// let forged = Ran::new(MetalDevice(()), 42);
/// ```
///
/// Nor can the trait be implemented for another type, which would bring a witness of its own:
///
/// ```compile_fail
/// struct Mine;
/// impl velox_mlx::ffi::MlxDevice for Mine {}
/// ```
#[derive(Debug)]
pub struct MetalDevice(());

/// An NVIDIA GPU.
#[derive(Debug)]
pub struct MlxCudaDevice(());

/// The CPU device.
#[derive(Debug)]
pub struct MlxCpuDevice(());

impl Device for MetalDevice {
    const LABEL: BackendLabel = BackendLabel::Metal;
}

impl Device for MlxCudaDevice {
    const LABEL: BackendLabel = BackendLabel::MlxCuda;
}

impl Device for MlxCpuDevice {
    const LABEL: BackendLabel = BackendLabel::MlxCpu;
}

impl sealed::Witness for MetalDevice {
    const KIND: DeviceType = DeviceType::Gpu;

    fn check(library: Library) -> Result<(), MlxError> {
        match (cfg!(target_os = "macos"), library.has_metal()) {
            (true, true) => Ok(()),
            (true, false) => Err(MlxError::Unavailable(
                "MLX finds no Apple GPU that it can use".to_owned(),
            )),
            (false, _) => Err(MlxError::Unavailable(
                "Metal exists on macOS only".to_owned(),
            )),
        }
    }

    fn witness() -> Self {
        Self(())
    }
}

impl sealed::Witness for MlxCudaDevice {
    const KIND: DeviceType = DeviceType::Gpu;

    fn check(library: Library) -> Result<(), MlxError> {
        if library.has_cuda() {
            Ok(())
        } else {
            Err(MlxError::Unavailable(
                "the MLX library was built without CUDA".to_owned(),
            ))
        }
    }

    fn witness() -> Self {
        Self(())
    }
}

impl sealed::Witness for MlxCpuDevice {
    const KIND: DeviceType = DeviceType::Cpu;

    fn check(_library: Library) -> Result<(), MlxError> {
        Ok(())
    }

    fn witness() -> Self {
        Self(())
    }
}

impl MlxDevice for MetalDevice {
    const HALF_PRECISION: HalfPrecision = HalfPrecision::Fast;
    const KERNEL_PATH: KernelPath = KernelPath::Metal;
}

impl MlxDevice for MlxCudaDevice {
    const HALF_PRECISION: HalfPrecision = HalfPrecision::Fast;
    const KERNEL_PATH: KernelPath = KernelPath::Ops;
}

impl MlxDevice for MlxCpuDevice {
    const HALF_PRECISION: HalfPrecision = HalfPrecision::Slow;
    const KERNEL_PATH: KernelPath = KernelPath::Ops;
}

/// A stream of one device, on the thread that opened it.
pub struct DeviceStream<D> {
    stream: Stream,
    // Not sendable: MLX finds streams by thread.
    device: PhantomData<(D, *const ())>,
}

impl<D> std::fmt::Debug for DeviceStream<D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("DeviceStream")
            .finish_non_exhaustive()
    }
}

impl<D: MlxDevice> DeviceStream<D> {
    /// Opens a stream and computes something on it, so that a device without a driver is found here.
    ///
    /// # Errors
    /// [`MlxError::Unavailable`] with the reason.
    pub fn open() -> Result<Self, MlxError> {
        let library = Library::open()?;
        D::check(library)?;
        let device = mlx_rs::Device::new(D::KIND, 0);
        let stream = Stream::try_default_on_device(&device)?;
        let opened = Self {
            stream,
            device: PhantomData,
        };
        let sum = opened.record(|| {
            let one = Tensor::of_f32(&[1.0; 4], &[4])?;
            one.add(&one)?.cast(Dtype::F32)
        })?;
        let sum = sum.into_value();
        evaluate([&sum])?;
        if sum.to_f32()? != [2.0; 4] {
            return Err(MlxError::Unavailable(
                "the device computes 1 + 1 wrongly".to_owned(),
            ));
        }
        Ok(opened)
    }

    /// Records ops on this stream. The result is labelled: an op is evaluated on the stream it was recorded on, or
    /// fails.
    ///
    /// # Errors
    /// What the closure says.
    pub fn record<T, E>(&self, ops: impl FnOnce() -> Result<T, E>) -> Result<Ran<D, T>, E> {
        forget_failure();
        with_stream(&self.stream, ops).map(|value| Ran::new(D::witness(), value))
    }
}
