//! The library that this process is linked with.

use std::ffi::CStr;
use std::sync::OnceLock;

use super::error::{MlxError, keep_failure, last_failure};

/// Bytes of freed buffers that MLX keeps for the next allocation; its own limit is most of the machine's memory.
const CACHE_LIMIT_BYTES: usize = 1 << 30;

/// The version whose binary interface the C sources were compiled for.
pub const MLX_VERSION: &str = "0.32.2";

/// Shows that MLX is loaded, of the right version, and reports failures instead of ending the process.
#[derive(Debug, Clone, Copy)]
pub struct Library(());

impl Library {
    /// Prepares the library once per process.
    ///
    /// # Errors
    /// [`MlxError::Unavailable`] if it has another version than this build was made for.
    pub fn open() -> Result<Self, MlxError> {
        static OPENED: OnceLock<Result<(), MlxError>> = OnceLock::new();
        OPENED.get_or_init(prepare).clone().map(|()| Self(()))
    }

    /// Whether this library was built for an Apple GPU and one is there.
    #[must_use]
    pub fn has_metal(self) -> bool {
        let mut available = false;
        // SAFETY: the pointer is valid for writing a bool during the call.
        let status = unsafe { mlx_sys::mlx_metal_is_available(&raw mut available) };
        status == 0 && available
    }

    /// Whether this library was built for CUDA; says nothing about a driver.
    #[must_use]
    pub fn has_cuda(self) -> bool {
        let mut available = false;
        // SAFETY: the pointer is valid for writing a bool during the call.
        let status = unsafe { mlx_sys::mlx_cuda_is_available(&raw mut available) };
        status == 0 && available
    }
}

fn prepare() -> Result<(), MlxError> {
    // The first op of mlx-rs installs its handler; ours must come after it.
    let one = mlx_rs::Array::from_f32(1.0);
    let _ = mlx_rs::ops::add(&one, &one);
    // SAFETY: the handler is a function that lives as long as the process and takes no data.
    unsafe { mlx_sys::mlx_set_error_handler(Some(keep_failure), std::ptr::null_mut(), None) };
    mlx_rs::memory::set_cache_limit(CACHE_LIMIT_BYTES)?;
    let found = version()?;
    if found != MLX_VERSION {
        return Err(MlxError::Unavailable(format!(
            "MLX {found} is loaded, this worker was built for {MLX_VERSION}"
        )));
    }
    Ok(())
}

fn version() -> Result<String, MlxError> {
    // SAFETY: makes an empty string object that is freed below.
    let mut text = unsafe { mlx_sys::mlx_string_new() };
    // SAFETY: `text` is a live string object that the call may replace.
    let status = unsafe { mlx_sys::mlx_version(&raw mut text) };
    let found = if status == 0 {
        // SAFETY: `text` is a live string object.
        let data = unsafe { mlx_sys::mlx_string_data(text) };
        // SAFETY: its data is terminated and lives until the object is freed.
        Ok(unsafe { CStr::from_ptr(data) }
            .to_string_lossy()
            .into_owned())
    } else {
        Err(last_failure("no version"))
    };
    // SAFETY: made above, not used after this.
    let _ = unsafe { mlx_sys::mlx_string_free(text) };
    found
}
