//! A range of a segment's data together with the generation that it must have.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::error::ShmError;
use crate::layout::to_index;
use crate::segment::Segment;
use crate::words;

/// Whether a slot of that generation is leased: generations are odd while leased, even while free.
pub(crate) fn is_leased(generation: u64) -> bool {
    !generation.is_multiple_of(2)
}

/// A range that was found to lie in its segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot<'a> {
    words: &'a [AtomicU64],
    /// One of each unit that the range touches: a range that reaches into another slot has two values.
    generations: &'a [AtomicU64],
    generation: u64,
    byte_len: u64,
}

impl<'a> Slot<'a> {
    /// Finds the range in the segment.
    pub(crate) fn new(
        segment: &'a Segment,
        generation: u64,
        offset: u64,
        byte_len: u64,
    ) -> Result<Self, ShmError> {
        Ok(Self {
            words: segment.data(offset, byte_len)?,
            generations: segment.generations(offset, byte_len)?,
            generation,
            byte_len,
        })
    }

    /// Makes a slot of private memory.
    #[cfg(test)]
    pub(crate) fn of_words(
        words: &'a [AtomicU64],
        generations: &'a [AtomicU64],
        generation: u64,
    ) -> Self {
        let byte_len = u64::try_from(size_of_val(words)).unwrap();
        Self {
            words,
            generations,
            generation,
            byte_len,
        }
    }

    /// Makes the range a slot of its generation; the caller owns the range.
    pub(crate) fn begin(&self) {
        self.store_generation(self.generation);
        // SYNC POINT (a): a peer that sees a byte written after this fence and then passes the fence (b) also sees
        // the new generation, and so refuses what it copied under the old one.
        fence(Ordering::Release);
    }

    /// Makes every handle of the slot stale; the caller owns the range and gives it back afterwards.
    pub(crate) fn end(&self) {
        self.store_generation(self.generation.wrapping_add(1));
    }

    fn store_generation(&self, generation: u64) {
        for word in self.generations {
            // Release: pairs with the Acquire load in `check`.
            word.store(generation, Ordering::Release);
        }
    }

    /// Checks that the slot is the one that the handle was made for.
    pub(crate) fn check(&self) -> Result<(), ShmError> {
        // Acquire: pairs with the Release store in `store_generation`; accesses of the data stay behind this check.
        let current = |word: &AtomicU64| word.load(Ordering::Acquire) == self.generation;
        if is_leased(self.generation) && self.generations.iter().all(current) {
            return Ok(());
        }
        Err(ShmError::Stale)
    }

    /// Checks that the slot stayed the same while it was used.
    pub(crate) fn check_again(&self) -> Result<(), ShmError> {
        // SYNC POINT (b): pairs with (a); accesses of the data stay before the second look at the generations.
        fence(Ordering::Acquire);
        self.check()
    }

    /// Copies the bytes out.
    pub(crate) fn read(&self) -> Result<Vec<u8>, ShmError> {
        self.check()?;
        let mut bytes = vec![0; to_index(self.byte_len)?];
        words::copy_out(self.words, &mut bytes);
        self.check_again()?;
        Ok(bytes)
    }

    /// Copies as many bytes in as the slot has.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), ShmError> {
        let actual = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        if actual != self.byte_len {
            return Err(ShmError::Length {
                limit: self.byte_len,
                actual,
            });
        }
        self.check()?;
        words::copy_in(self.words, bytes);
        self.check_again()
    }

    /// Returns the words; the last one may be only partly part of the slot.
    pub(crate) fn words(&self) -> &'a [AtomicU64] {
        self.words
    }

    /// Returns the number of bytes.
    pub(crate) fn byte_len(&self) -> u64 {
        self.byte_len
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn zeroes(count: usize) -> Vec<AtomicU64> {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_slot_works_from_its_begin_to_its_end() {
        let (words, generations) = (zeroes(2), zeroes(3));
        let slot = Slot::of_words(&words, &generations, 5);
        assert!(matches!(slot.read(), Err(ShmError::Stale)));
        slot.begin();
        slot.write(&[7; 16]).unwrap();
        assert_eq!(slot.read().unwrap(), [7; 16]);
        assert!(matches!(
            slot.write(&[7; 15]),
            Err(ShmError::Length {
                limit: 16,
                actual: 15
            })
        ));
        slot.end();
        assert!(matches!(slot.write(&[8; 16]), Err(ShmError::Stale)));
        assert!(matches!(slot.check_again(), Err(ShmError::Stale)));
        // The generation of free memory is no key either.
        assert!(matches!(
            Slot::of_words(&words, &generations, 6).read(),
            Err(ShmError::Stale)
        ));
    }

    #[test]
    fn a_range_that_reaches_into_another_slot_is_refused() {
        let (words, generations) = (zeroes(2), zeroes(2));
        Slot::of_words(&words, &generations[..1], 1).begin();
        Slot::of_words(&words, &generations[1..], 3).begin();
        for generation in [1, 3] {
            assert!(matches!(
                Slot::of_words(&words, &generations, generation).read(),
                Err(ShmError::Stale)
            ));
        }
    }

    #[test]
    fn a_reader_never_gets_bytes_of_a_later_lease() {
        let (rounds, length) = if cfg!(miri) { (6, 16) } else { (500, 4096) };
        // Of one lease all bytes are the same, and the next ones have others.
        let mark = |generation: u64| u8::try_from(generation / 2 % 251).unwrap();
        let (words, generations) = (zeroes(length), zeroes(2));
        let (current, done) = (AtomicU64::new(1), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0_u64..rounds {
                    let generation = 2 * round + 1;
                    let slot = Slot::of_words(&words, &generations, generation);
                    slot.begin();
                    // From the end, so that it meets a reader of the lease before.
                    for word in words.iter().rev() {
                        word.store(u64::from_ne_bytes([mark(generation); 8]), Ordering::Relaxed);
                    }
                    // Stands for the message that carries the handle.
                    current.store(generation, Ordering::Release);
                    std::thread::yield_now();
                    slot.end();
                }
                done.store(true, Ordering::Release);
            });
            while !done.load(Ordering::Acquire) {
                let generation = current.load(Ordering::Acquire);
                if let Ok(bytes) = Slot::of_words(&words, &generations, generation).read() {
                    assert!(
                        bytes.iter().all(|&byte| byte == mark(generation)),
                        "torn or late"
                    );
                }
                std::thread::yield_now();
            }
        });
    }
}
