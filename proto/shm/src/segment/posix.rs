//! macOS: a POSIX object whose name is removed before anything else happens.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, ftruncate};
use rustix::io::Errno;
use rustix::shm;
use velox_proto::limits::SLOT_ALIGNMENT_BYTES;

use super::name;
use crate::error::ShmError;
use crate::layout::{WORD_BYTES, to_index};

/// Names are random: already the second attempt is unlikely.
const NAME_ATTEMPTS: usize = 8;

/// Makes an object of a fixed size.
///
/// The system allows one sizing of an object, so none can shrink later, and makes the descriptor close-on-exec.
pub(super) fn create(byte_len: u64) -> Result<OwnedFd, ShmError> {
    let descriptor = create_unlinked()?;
    ftruncate(&descriptor, byte_len).map_err(ShmError::system("sizing"))?;
    Ok(descriptor)
}

fn create_unlinked() -> Result<OwnedFd, ShmError> {
    let flags = shm::OFlags::CREATE | shm::OFlags::EXCL | shm::OFlags::RDWR;
    for _ in 0..NAME_ATTEMPTS {
        let name = name::random();
        match shm::open(name.as_str(), flags, Mode::RUSR | Mode::WUSR) {
            Ok(descriptor) => {
                shm::unlink(name.as_str()).map_err(ShmError::system("unlinking"))?;
                return Ok(descriptor);
            }
            Err(Errno::EXIST) => {}
            Err(error) => return Err(ShmError::system("creation")(error)),
        }
    }
    Err(ShmError::system("creation")(Errno::EXIST))
}

/// Nothing to verify beyond the size: the system refuses a second sizing.
#[expect(
    clippy::unnecessary_wraps,
    reason = "other systems have a check that can fail"
)]
pub(super) fn check(_descriptor: &OwnedFd) -> Result<(), ShmError> {
    Ok(())
}

/// Touches every page of a new object, whose words are all 0.
pub(super) fn touch(words: &[AtomicU64]) -> Result<(), ShmError> {
    let page_words = to_index(SLOT_ALIGNMENT_BYTES / WORD_BYTES)?;
    for word in words.iter().step_by(page_words) {
        // Relaxed: nobody else has the object yet.
        word.store(0, Ordering::Relaxed);
    }
    Ok(())
}
