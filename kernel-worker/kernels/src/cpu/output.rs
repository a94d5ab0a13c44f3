//! A slice that threads write disjoint parts of.

use std::marker::PhantomData;
use std::ops::Range;

/// Hands out parts of a slice to the chunks of a job.
#[derive(Debug)]
pub(super) struct Output<'a, T> {
    start: *mut T,
    length: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: an `Output` gives access to nothing but `T`s of a slice that it borrows exclusively, and only through
// `slice`, whose callers promise disjoint ranges; sending `&mut T` to another thread needs `T: Send` only.
unsafe impl<T: Send> Sync for Output<'_, T> {}

impl<'a, T> Output<'a, T> {
    /// Borrows a slice.
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            length: slice.len(),
            borrow: PhantomData,
        }
    }

    /// Returns a part.
    ///
    /// # Safety
    /// No two parts that exist at the same time overlap.
    ///
    /// # Panics
    /// If the range ends outside the slice.
    #[inline(always)]
    pub(super) unsafe fn slice(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.length,
            "part of an output ends outside of it"
        );
        // SAFETY: the assertion proved that the range lies in the slice.
        let start = unsafe { self.start.add(range.start) };
        // SAFETY: the elements lie in a slice that is borrowed exclusively for `'a`, and the caller promises that no
        // other part that exists now overlaps this one.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}
