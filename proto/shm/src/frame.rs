//! Frames of the step channel: a u32 little-endian length, then one message; no I/O here.

use bytes::{Buf as _, Bytes, BytesMut};
use prost::Message;
use velox_proto::limits::MAX_STEP_FRAME_BYTES;

use crate::error::ShmError;

/// Bytes of the length in front of every frame.
pub const FRAME_HEADER_BYTES: usize = size_of::<u32>();

/// Most bytes that a decoder holds: a whole frame and as much of what came with its end.
const MAX_BUFFERED_BYTES: usize = 2 * (FRAME_HEADER_BYTES + MAX_STEP_FRAME_BYTES);

/// Encodes a message with its length in front.
///
/// # Errors
/// [`ShmError::FrameTooLarge`].
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, ShmError> {
    let body_bytes = message.encoded_len();
    let length = checked_length(body_bytes)?;
    let mut frame = Vec::with_capacity(FRAME_HEADER_BYTES + body_bytes);
    frame.extend_from_slice(&length.to_le_bytes());
    message.encode_raw(&mut frame);
    Ok(frame)
}

fn checked_length(body_bytes: usize) -> Result<u32, ShmError> {
    u32::try_from(body_bytes)
        .ok()
        .filter(|_| body_bytes <= MAX_STEP_FRAME_BYTES)
        .ok_or_else(|| ShmError::FrameTooLarge(u64::try_from(body_bytes).unwrap_or(u64::MAX)))
}

/// Cuts a stream of bytes into frames.
///
/// A length beyond the limit is refused before its frame is buffered. After an error the stream has no more
/// frames: every later call answers the same.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    buffer: BytesMut,
    fault: Option<Fault>,
}

/// Why the stream cannot go on.
#[derive(Debug, Clone, Copy)]
enum Fault {
    TooLarge(u64),
    NotTaken(u64),
}

impl FrameDecoder {
    /// Makes a decoder at the beginning of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes as they arrived; take the frames with [`Self::next_frame`] before the next push.
    pub fn push(&mut self, mut bytes: &[u8]) {
        if self.buffer.len() < FRAME_HEADER_BYTES {
            let (header, rest) =
                bytes.split_at(bytes.len().min(FRAME_HEADER_BYTES - self.buffer.len()));
            self.buffer.extend_from_slice(header);
            bytes = rest;
        }
        if self.fault.is_some() || self.body_bytes().is_err() {
            self.buffer.clear();
            return;
        }
        let held = self.buffer.len().saturating_add(bytes.len());
        if held > MAX_BUFFERED_BYTES {
            self.fail(Fault::NotTaken(u64::try_from(held).unwrap_or(u64::MAX)));
            return;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next whole frame without its length; `None` until more bytes are pushed.
    ///
    /// # Errors
    /// [`ShmError::FrameTooLarge`] or [`ShmError::FramesNotTaken`]; the stream is over then.
    pub fn next_frame(&mut self) -> Result<Option<Bytes>, ShmError> {
        let Some(body_bytes) = self.body_bytes()? else {
            return Ok(None);
        };
        if self.buffer.len() - FRAME_HEADER_BYTES < body_bytes {
            return Ok(None);
        }
        self.buffer.advance(FRAME_HEADER_BYTES);
        Ok(Some(self.buffer.split_to(body_bytes).freeze()))
    }

    /// Whether the stream could end here: no frame is half there.
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        self.fault.is_none() && self.buffer.is_empty()
    }

    /// Length of the frame at the beginning of the buffer, once its header is there.
    fn body_bytes(&mut self) -> Result<Option<usize>, ShmError> {
        if let Some(fault) = self.fault {
            return Err(fault.into());
        }
        let Some(header) = self.buffer.first_chunk::<FRAME_HEADER_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*header);
        match usize::try_from(length) {
            Ok(body_bytes) if body_bytes <= MAX_STEP_FRAME_BYTES => Ok(Some(body_bytes)),
            _ => Err(self.fail(Fault::TooLarge(length.into()))),
        }
    }

    fn fail(&mut self, fault: Fault) -> ShmError {
        self.fault = Some(fault);
        self.buffer = BytesMut::new();
        fault.into()
    }
}

impl From<Fault> for ShmError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::TooLarge(bytes) => Self::FrameTooLarge(bytes),
            Fault::NotTaken(bytes) => Self::FramesNotTaken(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use velox_proto::worker::v1::{GatewayFrame, Ping, gateway_frame};

    use super::*;

    fn ping(nonce: u64) -> GatewayFrame {
        GatewayFrame {
            frame: Some(gateway_frame::Frame::Ping(Ping { nonce })),
        }
    }

    #[test]
    fn a_message_survives() {
        let mut decoder = FrameDecoder::new();
        decoder.push(&encode(&ping(7)).unwrap());
        let frame = decoder.next_frame().unwrap().unwrap();
        assert_eq!(GatewayFrame::decode(frame).unwrap(), ping(7));
        assert!(decoder.next_frame().unwrap().is_none());
        assert!(decoder.is_at_boundary());
    }

    #[test]
    fn an_empty_message_is_a_frame() {
        let mut decoder = FrameDecoder::new();
        decoder.push(&encode(&GatewayFrame::default()).unwrap());
        assert!(decoder.next_frame().unwrap().unwrap().is_empty());
    }

    #[test]
    fn a_hostile_length_is_refused_before_its_frame_is_buffered() {
        let mut decoder = FrameDecoder::new();
        let length = u32::try_from(MAX_STEP_FRAME_BYTES).unwrap() + 1;
        decoder.push(&length.to_le_bytes());
        decoder.push(&[0; 4096]);
        assert!(decoder.buffer.is_empty());
        let first = decoder.next_frame().unwrap_err().to_string();
        assert_eq!(
            first,
            format!("frame has {length} bytes, limit is {MAX_STEP_FRAME_BYTES}")
        );
        decoder.push(&encode(&ping(1)).unwrap());
        assert_eq!(decoder.next_frame().unwrap_err().to_string(), first);
        assert!(!decoder.is_at_boundary());
    }

    #[test]
    fn a_decoder_that_nobody_empties_is_bounded() {
        let mut decoder = FrameDecoder::new();
        let zeroes = vec![0; 1024 * 1024];
        for _ in 0..17 {
            decoder.push(&zeroes);
        }
        assert!(matches!(
            decoder.next_frame(),
            Err(ShmError::FramesNotTaken(_))
        ));
    }

    #[test]
    fn a_message_beyond_the_limit_is_not_encoded() {
        let message = velox_proto::v1::Tensor {
            data: Some(velox_proto::v1::tensor::Data::Inline(
                vec![0; MAX_STEP_FRAME_BYTES].into(),
            )),
            ..Default::default()
        };
        assert!(matches!(encode(&message), Err(ShmError::FrameTooLarge(_))));
    }

    proptest! {
        #![proptest_config(crate::property(256))]

        #[test]
        fn frames_do_not_depend_on_how_the_stream_was_cut(
            nonces in prop::collection::vec(any::<u64>(), 1..12), pieces in prop::collection::vec(1_usize..20, 1..12),
        ) {
            let stream: Vec<u8> = nonces.iter().flat_map(|&nonce| encode(&ping(nonce)).unwrap()).collect();
            let mut decoder = FrameDecoder::new();
            let mut decoded = Vec::new();
            let (mut rest, mut sizes) = (stream.as_slice(), pieces.iter().cycle());
            while !rest.is_empty() {
                let (piece, later) = rest.split_at(rest.len().min(*sizes.next().unwrap()));
                decoder.push(piece);
                rest = later;
                while let Some(frame) = decoder.next_frame().unwrap() {
                    decoded.push(GatewayFrame::decode(frame).unwrap());
                }
            }
            prop_assert_eq!(decoded, nonces.into_iter().map(ping).collect::<Vec<_>>());
            prop_assert!(decoder.is_at_boundary());
        }

        #[test]
        fn hostile_bytes_never_panic_nor_pile_up(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
        ) {
            let mut decoder = FrameDecoder::new();
            for piece in pieces {
                decoder.push(&piece);
                while let Ok(Some(frame)) = decoder.next_frame() {
                    prop_assert!(frame.len() <= MAX_STEP_FRAME_BYTES);
                }
                prop_assert!(decoder.buffer.len() <= MAX_BUFFERED_BYTES);
            }
        }
    }
}
