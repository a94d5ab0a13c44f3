//! Copies between private bytes and shared words.
//!
//! The peer may write at any moment. Relaxed atomic words make that a value nobody relies on instead of
//! undefined behaviour, and the loops still run at the speed of memory.

use std::sync::atomic::{AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// Copies `bytes` to the beginning of `words`; what lies behind them in the last word stays.
///
/// Copies only what fits; callers compare lengths before.
pub(crate) fn copy_in(words: &[AtomicU64], bytes: &[u8]) {
    let (whole, tail) = bytes.as_chunks::<WORD>();
    // Relaxed, here and below: order comes from the generations (see `slot`) and the message that carries the handle.
    for (word, chunk) in words.iter().zip(whole) {
        word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
    }
    if let Some(word) = words.get(whole.len()).filter(|_| !tail.is_empty()) {
        let mut last = word.load(Ordering::Relaxed).to_ne_bytes();
        last[..tail.len()].copy_from_slice(tail);
        word.store(u64::from_ne_bytes(last), Ordering::Relaxed);
    }
}

/// Fills `bytes` from the beginning of `words`.
///
/// Copies only what is there; callers compare lengths before.
pub(crate) fn copy_out(words: &[AtomicU64], bytes: &mut [u8]) {
    let (whole, tail) = bytes.as_chunks_mut::<WORD>();
    for (word, chunk) in words.iter().zip(whole.iter_mut()) {
        *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
    }
    if let Some(word) = words.get(whole.len()) {
        let last = word.load(Ordering::Relaxed).to_ne_bytes();
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeroes(count: usize) -> Vec<AtomicU64> {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn every_length_survives_and_leaves_its_neighbours_alone() {
        for length in 0..=33_u8 {
            let words = zeroes(5);
            copy_in(&words, &[0xEE; 40]);
            let bytes: Vec<u8> = (1..=length).collect();
            copy_in(&words, &bytes);
            let mut all = [0; 40];
            copy_out(&words, &mut all);
            assert_eq!(all[..bytes.len()], bytes);
            assert!(all[bytes.len()..].iter().all(|&byte| byte == 0xEE));
            let mut same = vec![0; bytes.len()];
            copy_out(&words, &mut same);
            assert_eq!(same, bytes);
        }
    }

    #[test]
    fn nothing_is_touched_outside_the_words() {
        let words = zeroes(1);
        copy_in(&words, &[7; 20]);
        let mut bytes = [9; 20];
        copy_out(&words, &mut bytes);
        assert_eq!(bytes[..8], [7; 8]);
        assert_eq!(bytes[8..], [9; 12]);
    }
}
