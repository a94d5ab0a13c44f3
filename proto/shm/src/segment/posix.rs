//! macOS: a POSIX object whose name is removed before anything else happens.
//!
//! Linux has the same calls, so its tests run this code too.

use std::os::fd::OwnedFd;

use rustix::fs::{Mode, ftruncate};
use rustix::io::Errno;
use rustix::shm;

use super::name;
use crate::error::ShmError;

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
pub(super) fn check(_descriptor: &OwnedFd) -> Result<(), ShmError> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use velox_proto::limits::SLOT_ALIGNMENT_BYTES;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "creates shared memory")]
    fn an_object_has_its_size_no_name_and_closes_on_exec() {
        let descriptor = create(3 * SLOT_ALIGNMENT_BYTES).unwrap();
        check(&descriptor).unwrap();
        let map = memmap2::MmapOptions::new().map_raw(&descriptor).unwrap();
        assert!(map.len() >= 3 * 16 * 1024);
        let flags = rustix::io::fcntl_getfd(&descriptor).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        let metadata = std::fs::File::from(descriptor).metadata().unwrap();
        assert!(metadata.len() >= 3 * SLOT_ALIGNMENT_BYTES);
        if cfg!(target_os = "linux") {
            assert_eq!(metadata.nlink(), 0, "a name is left");
        }
    }
}
