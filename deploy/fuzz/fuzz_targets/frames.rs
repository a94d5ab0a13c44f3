//! The step channel: frames do not depend on how the stream was cut, and no plan in them panics the worker.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message as _;
use velox_kernel_worker::convert;
use velox_proto::limits::{MAX_DECODE_STEPS, MAX_PLAN_ROWS, MAX_TOKEN_LIST};
use velox_proto::worker::v1::{GatewayFrame, gateway_frame};
use velox_shm::frame::{FRAME_HEADER_BYTES, FrameDecoder};
use velox_shm::{Arena, Lease, PeerSegments, Segment};

/// Bytes of the one slot that plans can name: at offset 0 of segment 1, with generation 1.
const SLOT_BYTES: u64 = 64;

/// Frames of a stream, then why it ended or whether it could end there.
type Frames = (Vec<Vec<u8>>, Result<bool, String>);

fn frames<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Frames {
    let mut decoder = FrameDecoder::new();
    let mut frames = Vec::new();
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame.to_vec()),
                Ok(None) => break,
                Err(error) => return (frames, Err(error.to_string())),
            }
        }
    }
    (frames, Ok(decoder.is_at_boundary()))
}

/// Cuts a stream into pieces one byte longer than these numbers, over and over.
fn cut<'a>(stream: &'a [u8], lengths: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let mut rest = stream;
    lengths.iter().cycle().map_while(move |&length| {
        let (piece, later) = rest.split_at(rest.len().min(usize::from(length) + 1));
        rest = later;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Reads a frame as the tensor thread does; a plan that is accepted keeps the limits.
fn read(frame: &[u8], memory: &PeerSegments) {
    let Ok(GatewayFrame {
        frame: Some(gateway_frame::Frame::Plan(plan)),
    }) = GatewayFrame::decode(frame)
    else {
        return;
    };
    let Ok(valid) = convert::plan(plan, memory) else {
        return;
    };
    let plan = valid.plan;
    assert!(plan.decode.len() <= MAX_PLAN_ROWS && plan.open_rows.len() <= MAX_PLAN_ROWS);
    assert_eq!(valid.model.is_none(), plan.open_rows.is_empty());
    for row in plan.open_rows {
        assert!(row.sampling.bias.len() <= MAX_TOKEN_LIST);
        assert!(row.sampling.allowed.len() <= MAX_TOKEN_LIST);
    }
    let limit = usize::try_from(MAX_DECODE_STEPS).expect("a small number");
    for row in plan.decode {
        assert!((1..=limit).contains(&row.steps));
    }
}

thread_local! {
    static MEMORY: (PeerSegments, Lease) = {
        let arena = Arena::new(Segment::create(1, SLOT_BYTES).expect("memory to share"));
        let lease = arena.lease(SLOT_BYTES).expect("an empty segment");
        let descriptor = arena.descriptor().try_clone_to_owned();
        let descriptor = descriptor.expect("the process may open files");
        let mut memory = PeerSegments::new();
        memory.accept(1, arena.segment_bytes(), descriptor).expect("our own segment");
        (memory, lease)
    };
}

fuzz_target!(|input: ([u8; 4], &[u8])| {
    let (lengths, body) = input;
    // The bytes as they are, and behind an honest frame of the same: lengths at random are mostly too large.
    let mut stream = u32::try_from(body.len())
        .expect("libFuzzer's inputs are short")
        .to_le_bytes()
        .to_vec();
    stream.extend_from_slice(body);
    stream.extend_from_slice(body);
    for stream in [&stream[FRAME_HEADER_BYTES + body.len()..], &stream] {
        let whole = frames([stream].into_iter());
        assert_eq!(frames(cut(stream, &lengths)), whole);
        MEMORY.with(|(memory, _lease)| whole.0.iter().for_each(|frame| read(frame, memory)));
    }
});
