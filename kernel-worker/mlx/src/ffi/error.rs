//! What MLX reports.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};

/// Why MLX did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MlxError {
    /// An op was refused or failed when it was evaluated.
    #[error("MLX: {0}")]
    Operation(String),
    /// The device is not there.
    #[error("{0}")]
    Unavailable(String),
    /// A size is beyond what MLX addresses.
    #[error("{what} is {value}, MLX addresses at most {}", i32::MAX)]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its size.
        value: usize,
    },
}

thread_local! {
    /// Text of the last failure on this thread.
    static LAST_FAILURE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps the text of a failure for the call that is about to return it.
///
/// Installed in place of the handler of mlx-rs, which would be out of reach for calls that do not go through it.
pub(super) unsafe extern "C" fn keep_failure(text: *const c_char, _data: *mut c_void) {
    let text = if text.is_null() {
        String::new()
    } else {
        // SAFETY: MLX passes a terminated string that lives as long as this call.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    };
    LAST_FAILURE.with(|last| *last.borrow_mut() = Some(text));
}

/// Forgets what failed before, so that it is not taken for the cause of what fails now.
pub(super) fn forget_failure() {
    LAST_FAILURE.with(|last| *last.borrow_mut() = None);
}

/// Returns the failure that was just reported on this thread.
pub(super) fn last_failure(fallback: &str) -> MlxError {
    let text = LAST_FAILURE.with(|last| last.borrow_mut().take());
    MlxError::Operation(text.unwrap_or_else(|| fallback.to_owned()))
}

impl From<mlx_rs::error::Exception> for MlxError {
    fn from(error: mlx_rs::error::Exception) -> Self {
        last_failure(error.what())
    }
}
