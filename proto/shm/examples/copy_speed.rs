//! Measures what a copy through shared memory costs against `memcpy` of the same bytes in the same run.
//!
//! `cargo run --release -p velox-shm --example copy_speed`

use std::hint::black_box;
use std::io::Write as _;
use std::time::{Duration, Instant};

use velox_proto::tensor::{DType, TensorHandle};
use velox_shm::{Arena, PeerSegments, Segment, ShmError};

const BYTES: usize = 64 * 1024 * 1024;
const ROUNDS: usize = 7;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let byte_len = u64::try_from(BYTES)?;
    let mut output = std::io::stdout().lock();
    let (segment, created) = timed(|| Segment::create(1, byte_len));
    let arena = Arena::new(segment?);
    let descriptor = arena.descriptor().try_clone_to_owned()?;
    let mut peer = PeerSegments::new();
    let (accepted, opened) =
        timed(|| peer.accept(arena.segment_id(), arena.segment_bytes(), descriptor));
    accepted?;
    let mut lease = arena.lease(byte_len)?;
    let handle = TensorHandle::try_from(lease.handle(DType::U8, &[byte_len])?)?;
    let source = vec![7_u8; BYTES];
    let mut target = vec![1_u8; BYTES];

    writeln!(
        output,
        "{} MiB: create {created:.1?}, open {opened:.1?}",
        BYTES >> 20
    )?;
    let memcpy = best(|| {
        target.copy_from_slice(&source);
        black_box(&target);
        Ok(())
    })?;
    let clone = best(|| {
        black_box(source.clone());
        Ok(())
    })?;
    let write = best(|| lease.write(&source))?;
    let read = best(|| peer.read(&handle).map(|bytes| drop(black_box(bytes))))?;
    let view = best(|| {
        let mut tensor = peer.view_mut(&handle)?;
        tensor.bytes().copy_from_slice(&source);
        tensor.finish()
    })?;
    for (name, time, against, peer_time) in [
        ("Lease::write", write, "memcpy", memcpy),
        ("TensorMut and memcpy", view, "memcpy", memcpy),
        ("PeerSegments::read", read, "Vec::clone", clone),
    ] {
        let ratio = time.as_secs_f64() / peer_time.as_secs_f64();
        writeln!(
            output,
            "{name}: {time:.1?}, {ratio:.2} x {against} ({peer_time:.1?})"
        )?;
    }
    Ok(())
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    (work(), start.elapsed())
}

/// Shortest of some rounds: other processes only ever make one longer.
fn best(mut work: impl FnMut() -> Result<(), ShmError>) -> Result<Duration, ShmError> {
    let mut shortest = Duration::MAX;
    for _ in 0..ROUNDS {
        let (result, time) = timed(&mut work);
        result?;
        shortest = shortest.min(time);
    }
    Ok(shortest)
}
