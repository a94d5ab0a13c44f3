//! The step channel on standard output: plans in, results and lies out.

use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::Context as _;
use prost::Message as _;
use velox_e2e::copying::VOCABULARY_TOKENS;
use velox_proto::limits::MAX_STEP_FRAME_BYTES;
use velox_proto::v1;
use velox_proto::worker::v1 as wire;
use velox_shm::{Heartbeat, PeerSegments, descriptor, frame};
use wire::gateway_frame::Frame as FromGateway;
use wire::worker_frame::Frame as ToGateway;

use crate::behaviour::{Behaviour, Mode};
use crate::copy_model::CopyModel;

/// Answers frames until the gateway closes the channel.
pub(crate) fn serve(socket: UnixStream, behaviour: &Behaviour) -> anyhow::Result<()> {
    let mut worker = Worker {
        socket,
        behaviour,
        model: CopyModel::default(),
        memory: PeerSegments::new(),
        heartbeat: None,
        descriptors: Vec::new(),
    };
    let mut decoder = frame::FrameDecoder::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        while let Some(bytes) = decoder.next_frame()? {
            let frame = wire::GatewayFrame::decode(bytes)?;
            worker.answer(frame.frame.context("a frame is empty")?)?;
        }
        let socket = worker.socket.as_fd();
        let count = descriptor::receive(socket, &mut buffer, &mut worker.descriptors)?;
        if count == 0 {
            return Ok(());
        }
        decoder.push(&buffer[..count]);
    }
}

#[derive(Debug)]
struct Worker<'a> {
    socket: UnixStream,
    behaviour: &'a Behaviour,
    model: CopyModel,
    memory: PeerSegments,
    heartbeat: Option<Heartbeat>,
    descriptors: Vec<OwnedFd>,
}

impl Worker<'_> {
    fn answer(&mut self, frame: FromGateway) -> anyhow::Result<()> {
        match frame {
            FromGateway::Ping(ping) => self.send(ToGateway::Pong(wire::Pong { nonce: ping.nonce })),
            FromGateway::Offer(offer) => {
                let error = self.map(&offer).err().map(|error| error.to_string());
                self.send(ToGateway::Accepted(wire::SegmentAccepted {
                    segment: offer.segment,
                    error: error.unwrap_or_default(),
                }))
            }
            FromGateway::Plan(plan) => self.run(&plan),
        }
    }

    fn map(&mut self, offer: &wire::SegmentOffer) -> anyhow::Result<()> {
        anyhow::ensure!(!self.descriptors.is_empty(), "the offer has no descriptor");
        let descriptor = self.descriptors.remove(0);
        if offer.role() == wire::SegmentRole::Heartbeat {
            self.heartbeat = Some(Heartbeat::open(offer.segment, offer.byte_len, descriptor)?);
        } else {
            self.memory
                .accept(offer.segment, offer.byte_len, descriptor)?;
        }
        Ok(())
    }

    fn run(&mut self, plan: &wire::StepPlan) -> anyhow::Result<()> {
        let computes = plan.prefill.is_some() || !plan.decode.is_empty();
        match self.behaviour.mode {
            Mode::Silent if computes => return Ok(()),
            Mode::DiesOfPoison if self.model.is_poisoned(plan) => std::process::abort(),
            Mode::OversizedFrame if computes => {
                let length = u32::try_from(MAX_STEP_FRAME_BYTES)?.saturating_add(1);
                return Ok(self.socket.write_all(&length.to_le_bytes())?);
            }
            Mode::GarbageFrame if computes => {
                return Ok(self
                    .socket
                    .write_all(&[5, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff])?);
            }
            Mode::HalfFrame if computes => {
                self.socket.write_all(&[200, 0, 0, 0, 10, 20])?;
                std::process::abort();
            }
            _ => {}
        }
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.bump();
        }
        std::thread::sleep(self.behaviour.plan_time);
        let mut result = self.model.execute(plan);
        if computes {
            self.falsify(&mut result);
        }
        if self.behaviour.mode == Mode::AnswersTwice {
            self.send(ToGateway::Result(result.clone()))?;
        }
        self.send(ToGateway::Result(result))
    }

    /// Puts the lie of this process into an honest result.
    fn falsify(&self, result: &mut wire::StepResult) {
        let first_row = result.rows.first_mut();
        match (self.behaviour.mode, first_row) {
            (Mode::WrongLabel, _) => result.backend = v1::Backend::Reference.into(),
            (Mode::WrongSequence, _) => result.sequence += 1,
            (Mode::WrongOpCounts, _) => {
                if let Some(entry) = result.op_counts.iter_mut().find(|op| op.op == "gated_mlp") {
                    entry.count += 1;
                }
            }
            (Mode::ExtraToken, Some(row)) => {
                row.tokens.extend(row.tokens.last().cloned());
            }
            (Mode::MissingToken, Some(row)) => {
                row.tokens.pop();
            }
            (Mode::ForeignRow, Some(row)) => row.row += 1_000_000,
            (Mode::TokenOutside, Some(row)) => {
                for token in &mut row.tokens {
                    token.token_id = VOCABULARY_TOKENS;
                }
            }
            (Mode::NanLogprob, Some(row)) => {
                for token in &mut row.tokens {
                    token.logprob = Some(f32::NAN);
                }
            }
            _ => {}
        }
    }

    fn send(&mut self, frame: ToGateway) -> anyhow::Result<()> {
        let bytes = frame::encode(&wire::WorkerFrame { frame: Some(frame) })?;
        Ok(self.socket.write_all(&bytes)?)
    }
}
