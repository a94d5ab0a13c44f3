//! Linux: a sealed memfd, which never has a name in a file system.

use std::os::fd::OwnedFd;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, ftruncate,
    memfd_create,
};
use rustix::io::retry_on_intr;

use crate::error::ShmError;

/// A peer that could shrink the object would kill us by SIGBUS.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Makes an object of a fixed size whose pages exist.
pub(super) fn create(byte_len: u64) -> Result<OwnedFd, ShmError> {
    // The name is a label in /proc for people; it leads nowhere.
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let descriptor = memfd_create("velox", flags).map_err(ShmError::system("creation"))?;
    ftruncate(&descriptor, byte_len).map_err(ShmError::system("sizing"))?;
    // Without pages of its own, a full system would answer the first touch with SIGBUS instead of an error here.
    retry_on_intr(|| fallocate(&descriptor, FallocateFlags::empty(), 0, byte_len))
        .map_err(ShmError::system("allocation"))?;
    fcntl_add_seals(&descriptor, SEALS).map_err(ShmError::system("sealing"))?;
    Ok(descriptor)
}

/// Refuses what is not a memfd sealed by [`create`].
pub(super) fn check(descriptor: &OwnedFd) -> Result<(), ShmError> {
    let seals = fcntl_get_seals(descriptor)
        .map_err(|_no_memfd| ShmError::NotASegment("it cannot be sealed"))?;
    if !seals.contains(SEALS) {
        return Err(ShmError::NotASegment("it is not sealed"));
    }
    Ok(())
}
