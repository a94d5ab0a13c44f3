//! A hash that tells model files apart without reading all of them.

use sha2::{Digest, Sha256};

/// Samples of the tensor data of one file.
const SAMPLES: usize = 16;
const SAMPLE_BYTES: usize = 64 * 1024;

/// Hash over lengths, headers and samples of the tensor data.
#[derive(Debug, Default)]
pub(super) struct Fingerprint(Sha256);

impl Fingerprint {
    /// Adds a whole small file or header.
    pub(super) fn add_all(&mut self, bytes: &[u8]) {
        self.add_length(bytes.len());
        self.0.update(bytes);
    }

    /// Adds first, last and evenly spaced samples.
    pub(super) fn add_samples(&mut self, bytes: &[u8]) {
        self.add_length(bytes.len());
        if bytes.len() <= SAMPLES * SAMPLE_BYTES {
            self.0.update(bytes);
            return;
        }
        let stride = (bytes.len() - SAMPLE_BYTES) / (SAMPLES - 1);
        let starts = (0..SAMPLES - 1).map(|sample| sample * stride);
        for start in starts.chain([bytes.len() - SAMPLE_BYTES]) {
            self.0.update(&bytes[start..start + SAMPLE_BYTES]);
        }
    }

    /// Returns the hash in lower-case hex.
    pub(super) fn finish(self) -> String {
        hexadecimal(&self.0.finalize())
    }

    fn add_length(&mut self, length: usize) {
        let length = u64::try_from(length).expect("a length in memory fits 64 bits");
        self.0.update(length.to_le_bytes());
    }
}

/// Writes bytes in lower-case hex.
#[must_use]
pub fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut hex = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        write!(hex, "{byte:02x}").expect("writing to a string cannot fail");
    }
    hex
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> String {
        let mut fingerprint = Fingerprint::default();
        fingerprint.add_samples(bytes);
        fingerprint.finish()
    }

    #[test]
    fn first_and_last_byte_and_length_count() {
        let mut bytes = vec![7_u8; 2 * SAMPLES * SAMPLE_BYTES + 5];
        let before = of(&bytes);
        assert_eq!(before.len(), 64);
        assert_ne!(before, of(&bytes[1..]));
        *bytes.last_mut().unwrap() = 8;
        let last_changed = of(&bytes);
        assert_ne!(before, last_changed);
        bytes[0] = 8;
        assert_ne!(last_changed, of(&bytes));
    }
}
