//! The oracle: naive, readable f32.
//!
//! Every op reads as its formula and has one fixed order of additions per output element, which depends neither on
//! the number of tokens in the batch nor on threads. Sums of products run in [`LANES`] lanes, the one concession to
//! speed; it makes the oracle usable as a backend on any machine. No op here is tuned further: `cpu` is compared with
//! these.

mod activation;
mod attend;
mod dequantise;
mod embed;
mod mat_mul;
mod quantise;
mod rms_norm;
mod rope;
mod softmax;

pub use activation::{add, silu_mul};
pub use attend::attend;
pub(crate) use dequantise::dequantise;
pub use dequantise::dequantise_row;
pub use embed::embed;
pub use mat_mul::mat_mul;
pub use quantise::quantise_row;
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use softmax::softmax;

use crate::label::BackendLabel;
use crate::ran::{Device, Ran};

/// Witness that the oracle evaluated; only ops of this module make it.
///
/// ```compile_fail
/// let forged = velox_kernels::reference::ReferenceDevice(());
/// ```
#[derive(Debug)]
pub struct ReferenceDevice(());

impl Device for ReferenceDevice {
    const LABEL: BackendLabel = BackendLabel::Reference;
}

/// Runs plain code on the processor and labels what it gives: for work that no device did, whatever its input came from.
pub fn by_plain_code<T>(compute: impl FnOnce() -> T) -> Ran<ReferenceDevice, T> {
    Ran::new(ReferenceDevice(()), compute())
}

/// Partial sums of a sum of products: element `i` is added to lane `i % LANES`.
pub const LANES: usize = 16;

/// Sums `left[i] * right[i]` in lanes, then the lanes in halves. Both have the same length.
fn dot(left: &[f32], right: &[f32]) -> f32 {
    debug_assert_eq!(left.len(), right.len());
    let mut lanes = [0.0_f32; LANES];
    let left_rows = left.chunks_exact(LANES);
    let right_rows = right.chunks_exact(LANES);
    let (left_rest, right_rest) = (left_rows.remainder(), right_rows.remainder());
    for (left_row, right_row) in left_rows.zip(right_rows) {
        for lane in 0..LANES {
            lanes[lane] += left_row[lane] * right_row[lane];
        }
    }
    for (lane, (left_value, right_value)) in left_rest.iter().zip(right_rest).enumerate() {
        lanes[lane] += left_value * right_value;
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Returns how many threads are worth starting: at most `threads`, one per `minimum` multiplications.
fn worthwhile_threads(threads: usize, multiplications: usize, minimum: usize) -> usize {
    threads.min(multiplications / minimum).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_adds_every_element_once() {
        for length in [0_u8, 1, 15, 16, 17, 31, 33, 200] {
            let ones = vec![1.0_f32; usize::from(length)];
            let ramp: Vec<f32> = (0..length).map(f32::from).collect();
            let expected: f32 = ramp.iter().sum();
            // Sums of small integers are exact.
            assert_eq!(dot(&ones, &ramp), expected, "{length}");
        }
    }

    #[test]
    fn a_result_keeps_its_label() {
        let mut sum = [1.0];
        let ran = add(&mut sum, &[2.0]).unwrap();
        let more = softmax(&mut [0.0], 1).unwrap();
        let joined = ran.map(|()| sum[0]).zip(more.map(|()| 7));
        assert_eq!(joined.label(), BackendLabel::Reference);
        assert_eq!(joined.into_value(), (3.0, 7));
    }

    #[test]
    fn small_work_stays_on_one_thread() {
        assert_eq!(worthwhile_threads(8, 99, 100), 1);
        assert_eq!(worthwhile_threads(8, 350, 100), 3);
        assert_eq!(worthwhile_threads(2, 350, 100), 2);
        assert_eq!(worthwhile_threads(0, 350, 100), 1);
    }
}
