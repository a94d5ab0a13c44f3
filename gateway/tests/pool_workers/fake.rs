//! A worker without an engine: speaks both channels, computes nothing, and misbehaves as its name says.

use std::io::Write as _;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use prost::Message as _;
use sha2::{Digest as _, Sha256};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};
use velox_proto::error::{Reason, ServiceFault, to_status};
use velox_proto::limits::MAX_TOKENIZER_CHUNK_BYTES;
use velox_proto::tensor::TensorHandle;
use velox_proto::v1;
use velox_proto::worker::v1 as wire;
use velox_shm::frame::{FrameDecoder, encode};
use velox_shm::{Heartbeat, PeerSegments};
use wire::gateway_frame::Frame as FromGateway;
use wire::worker_control_service_server::{WorkerControlService, WorkerControlServiceServer};
use wire::worker_frame::Frame as ToGateway;

/// Layers of every model.
pub(crate) const LAYERS: u32 = 3;

/// Width of every model's logits.
pub(crate) const VOCAB_SIZE: u32 = 1000;

/// How long the slow worker needs for a layer.
pub(crate) const SLOW_LAYER: Duration = Duration::from_millis(150);

/// How the worker behaves; the name of the file under which it is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// As it should.
    Honest,
    /// Takes its time, and shows it.
    Slow,
    /// Ends before it says anything.
    ExitsAtOnce,
    /// Speaks a protocol of the future.
    Foreign,
    /// Claims a backend that cannot be.
    ClaimsMetal,
    /// Says that it is another process.
    ClaimsOtherPid,
    /// Labels a result with another backend.
    LiesAboutLabel,
    /// Returns a token too many.
    LiesAboutTokens,
    /// Skips a layer.
    LiesAboutCounts,
    /// Announces a frame of 4 GiB.
    SendsHugeFrame,
    /// Sends a frame that is no message.
    SendsGarbage,
    /// Answers plans that nobody sent.
    InventsResult,
    /// Stops in its second plan and stays.
    Wedges,
    /// Ends in its second plan.
    Crashes,
    /// Labels an op with a backend that it was not asked for.
    LiesAboutOp,
    /// Sends another tokenizer than it announced.
    DamagesTokenizer,
    /// Does not end when asked to.
    IgnoresTheSignal,
}

impl Manner {
    /// Every manner and the file name that selects it.
    pub(crate) const ALL: [(&str, Self); 17] = [
        ("honest", Self::Honest),
        ("slow", Self::Slow),
        ("exits-at-once", Self::ExitsAtOnce),
        ("foreign", Self::Foreign),
        ("claims-metal", Self::ClaimsMetal),
        ("claims-other-pid", Self::ClaimsOtherPid),
        ("lies-about-label", Self::LiesAboutLabel),
        ("lies-about-tokens", Self::LiesAboutTokens),
        ("lies-about-counts", Self::LiesAboutCounts),
        ("sends-huge-frame", Self::SendsHugeFrame),
        ("sends-garbage", Self::SendsGarbage),
        ("invents-result", Self::InventsResult),
        ("wedges", Self::Wedges),
        ("crashes", Self::Crashes),
        ("lies-about-op", Self::LiesAboutOp),
        ("damages-tokenizer", Self::DamagesTokenizer),
        ("ignores-the-signal", Self::IgnoresTheSignal),
    ];

    /// Returns the file name that selects the manner.
    pub(crate) fn file_name(self) -> &'static str {
        let entry = Self::ALL.iter().find(|(_name, manner)| *manner == self);
        entry.expect("every manner is in the table").0
    }

    /// Finds the manner that a program was started under.
    pub(crate) fn of_program(program: &str) -> Option<Self> {
        let name = program.rsplit('/').next()?;
        let entry = Self::ALL.iter().find(|(own, _manner)| *own == name);
        entry.map(|(_name, manner)| *manner)
    }
}

/// Runs as a worker until the gateway is gone or the manner ends it.
pub(crate) fn run(manner: Manner) -> ExitCode {
    if manner == Manner::ExitsAtOnce {
        return ExitCode::from(3);
    }
    let control = inherited(std::io::stdin().as_fd());
    let step = inherited(std::io::stdout().as_fd());
    let (end, ended) = tokio::sync::oneshot::channel();
    // Not joined: a wedged thread must not keep a process that was asked to end.
    std::thread::spawn(move || end.send(StepThread::new(manner, step).run()));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async move {
        let terminate = tokio::signal::unix::SignalKind::terminate();
        // Once somebody listens, the signal no longer ends the process.
        let mut signal = tokio::signal::unix::signal(terminate).unwrap();
        tokio::select! {
            () = serve(control, manner) => ExitCode::SUCCESS,
            code = ended => code.unwrap_or(ExitCode::from(101)),
            Some(()) = signal.recv(), if manner != Manner::IgnoresTheSignal => ExitCode::SUCCESS,
        }
    })
}

fn inherited(descriptor: BorrowedFd<'_>) -> UnixStream {
    UnixStream::from(descriptor.try_clone_to_owned().unwrap())
}

async fn serve(control: UnixStream, manner: Manner) {
    control.set_nonblocking(true).unwrap();
    let socket = tokio::net::UnixStream::from_std(control).unwrap();
    let connections =
        tokio_stream::once(Ok::<_, std::io::Error>(socket)).chain(tokio_stream::pending());
    let service = WorkerControlServiceServer::new(Control { manner });
    let server = tonic::transport::Server::builder().add_service(service);
    server.serve_with_incoming(connections).await.unwrap();
}

// === the step channel

/// Stands for the tensor thread.
struct StepThread {
    manner: Manner,
    socket: UnixStream,
    memory: PeerSegments,
    heartbeat: Option<Heartbeat>,
    plans: u32,
}

impl StepThread {
    fn new(manner: Manner, socket: UnixStream) -> Self {
        Self {
            manner,
            socket,
            memory: PeerSegments::new(),
            heartbeat: None,
            plans: 0,
        }
    }

    fn run(mut self) -> ExitCode {
        let mut decoder = FrameDecoder::new();
        let mut buffer = vec![0; 64 * 1024];
        let mut descriptors = Vec::new();
        loop {
            let length =
                velox_shm::descriptor::receive(self.socket.as_fd(), &mut buffer, &mut descriptors)
                    .unwrap();
            if length == 0 {
                return ExitCode::SUCCESS;
            }
            decoder.push(&buffer[..length]);
            while let Some(frame) = decoder.next_frame().unwrap() {
                let frame = wire::GatewayFrame::decode(frame).unwrap().frame.unwrap();
                if let Err(code) = self.handle(frame, &mut descriptors) {
                    return code;
                }
            }
        }
    }

    fn handle(
        &mut self,
        frame: FromGateway,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(), ExitCode> {
        match frame {
            FromGateway::Offer(offer) => {
                let descriptor = descriptors.remove(0);
                if offer.role() == wire::SegmentRole::Heartbeat {
                    let heartbeat = Heartbeat::open(offer.segment, offer.byte_len, descriptor);
                    self.heartbeat = Some(heartbeat.unwrap());
                } else {
                    self.memory
                        .accept(offer.segment, offer.byte_len, descriptor)
                        .unwrap();
                }
                self.send(ToGateway::Accepted(wire::SegmentAccepted {
                    segment: offer.segment,
                    error: String::new(),
                }));
            }
            FromGateway::Ping(ping) => {
                let nonce = ping.nonce;
                self.send(ToGateway::Pong(wire::Pong { nonce }));
                if self.manner == Manner::InventsResult {
                    self.send(ToGateway::Result(wire::StepResult::default()));
                }
            }
            FromGateway::Plan(plan) => {
                self.plans += 1;
                if self.plans == 2 {
                    match self.manner {
                        Manner::Crashes => return Err(ExitCode::from(7)),
                        Manner::Wedges => loop {
                            std::thread::park();
                        },
                        _ => {}
                    }
                }
                let result = self.execute(&plan);
                match self.manner {
                    Manner::SendsHugeFrame => self.socket.write_all(&[0xff; 8]).unwrap(),
                    Manner::SendsGarbage => self.socket.write_all(&[1, 0, 0, 0, 0xff]).unwrap(),
                    _ => self.send(ToGateway::Result(result)),
                }
            }
        }
        Ok(())
    }

    /// Answers a plan: the chunk's token is the sum of its tokens, a decode row counts up from its number.
    fn execute(&self, plan: &wire::StepPlan) -> wire::StepResult {
        let mut rows = Vec::new();
        if let Some(chunk) = &plan.prefill {
            let sum: u32 = match &chunk.token_handle {
                Some(handle) => self.tokens_of(handle).iter().sum(),
                None => chunk.token_ids.iter().sum(),
            };
            rows.push(row(chunk.row, [sum % VOCAB_SIZE]));
        }
        rows.extend(plan.decode.iter().map(|decode| {
            let first = u32::try_from(decode.row).unwrap();
            row(decode.row, first..first + decode.steps)
        }));
        let passes = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0);
        let passes = u64::try_from(passes).unwrap();
        for _layer in 0..passes * u64::from(LAYERS) {
            if self.manner == Manner::Slow {
                std::thread::sleep(SLOW_LAYER);
            }
            self.heartbeat.as_ref().unwrap().bump();
        }
        self.lie(wire::StepResult {
            sequence: plan.sequence,
            backend: v1::Backend::Cpu.into(),
            sampler: v1::Backend::Cpu.into(),
            op_counts: counts(passes),
            rows,
            compute_us: 1,
        })
    }

    fn lie(&self, mut result: wire::StepResult) -> wire::StepResult {
        match self.manner {
            Manner::LiesAboutLabel => result.set_backend(v1::Backend::Reference),
            Manner::LiesAboutTokens => {
                let token = result.rows[0].tokens[0].clone();
                result.rows[0].tokens.push(token);
            }
            Manner::LiesAboutCounts => {
                let entry = result.op_counts.iter_mut().find(|entry| entry.op == "rope");
                entry.unwrap().count -= 1;
            }
            _ => {}
        }
        result
    }

    fn tokens_of(&self, handle: &v1::TensorHandle) -> Vec<u32> {
        let handle = TensorHandle::try_from(handle.clone()).unwrap();
        let bytes = self.memory.read(&handle).unwrap();
        let (words, _rest) = bytes.as_chunks::<4>();
        words.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    fn send(&mut self, frame: ToGateway) {
        let frame = wire::WorkerFrame { frame: Some(frame) };
        self.socket.write_all(&encode(&frame).unwrap()).unwrap();
    }
}

fn row(row: u64, token_ids: impl IntoIterator<Item = u32>) -> wire::RowResult {
    let tokens = token_ids.into_iter().map(|token_id| wire::SampledToken {
        token_id,
        ..Default::default()
    });
    wire::RowResult {
        row,
        tokens: tokens.collect(),
        ..Default::default()
    }
}

fn counts(passes: u64) -> Vec<v1::OpCount> {
    let per_pass = ["embed", "head", "sample"].map(|op| (op, 1));
    let per_layer = [
        "norm_project",
        "rope",
        "append_attend",
        "output_project",
        "gated_mlp",
    ]
    .map(|op| (op, u64::from(LAYERS)));
    let all = per_pass.into_iter().chain(per_layer);
    all.map(|(op, count)| v1::OpCount {
        op: op.to_owned(),
        count: count * passes,
    })
    .collect()
}

// === the control channel

struct Control {
    manner: Manner,
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Longer than a chunk.
fn tokenizer() -> Vec<u8> {
    let template = wire::ChatTemplate {
        name: "default".to_owned(),
        source: "x".repeat(MAX_TOKENIZER_CHUNK_BYTES + 1),
    };
    let description = wire::TokenizerDescription {
        chat_templates: vec![template],
        vocab_size: VOCAB_SIZE,
        ..Default::default()
    };
    description.encode_to_vec()
}

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tonic::async_trait]
impl WorkerControlService for Control {
    type LoadModelStream = Events<wire::LoadModelResponse>;
    type GetTokenizerStream = Events<wire::GetTokenizerResponse>;

    async fn get_facts(
        &self,
        _request: Request<wire::GetFactsRequest>,
    ) -> Result<Response<wire::GetFactsResponse>, Status> {
        let is = |manner| self.manner == manner;
        let backend = |backend: v1::Backend, available| v1::BackendCapability {
            backend: backend.into(),
            available,
            reason: String::new(),
            ..v1::BackendCapability::default()
        };
        let facts = wire::WorkerFacts {
            protocol_min: if is(Manner::Foreign) { 1000 } else { 1 },
            protocol_max: if is(Manner::Foreign) { 1001 } else { 1 },
            pid: std::process::id() + u32::from(is(Manner::ClaimsOtherPid)),
            device: "fake".to_owned(),
            backends: vec![
                backend(v1::Backend::Metal, is(Manner::ClaimsMetal)),
                backend(v1::Backend::Cpu, true),
                backend(v1::Backend::Reference, true),
            ],
            ..Default::default()
        };
        let facts = Some(facts);
        Ok(Response::new(wire::GetFactsResponse { facts }))
    }

    async fn load_model(
        &self,
        request: Request<wire::LoadModelRequest>,
    ) -> Result<Response<Self::LoadModelStream>, Status> {
        let request = request.into_inner();
        if request.path.contains("damaged") {
            let fault = ServiceFault::new(Reason::InvalidModel, "file is damaged");
            return Err(to_status(&fault));
        }
        let facts = wire::ModelFacts {
            model: Some(v1::Model {
                name: request.name,
                vocab_size: VOCAB_SIZE,
                context_length: 4096,
                ..Default::default()
            }),
            backend: v1::Backend::Cpu.into(),
            n_layers: LAYERS,
            max_rows: 8,
            tokenizer_sha256: sha256(&tokenizer()),
            ..Default::default()
        };
        let event = |phase: &str, facts| wire::LoadModelResponse {
            phase: phase.to_owned(),
            done_bytes: 1,
            total_bytes: 1,
            facts,
        };
        let events = [event("open", None), event("ready", Some(facts))];
        let events = tokio_stream::iter(events.map(Ok));
        Ok(Response::new(Box::pin(events)))
    }

    async fn unload_model(
        &self,
        _request: Request<wire::UnloadModelRequest>,
    ) -> Result<Response<wire::UnloadModelResponse>, Status> {
        Ok(Response::new(wire::UnloadModelResponse {}))
    }

    async fn get_tokenizer(
        &self,
        _request: Request<wire::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        let mut bytes = tokenizer();
        if self.manner == Manner::DamagesTokenizer {
            bytes[100] ^= 1;
        }
        let last = wire::GetTokenizerResponse {
            sha256: sha256(&bytes),
            total_bytes: u64::try_from(bytes.len()).unwrap(),
            ..Default::default()
        };
        let chunks = bytes.chunks(MAX_TOKENIZER_CHUNK_BYTES);
        let mut parts: Vec<_> = chunks
            .map(|chunk| wire::GetTokenizerResponse {
                chunk: chunk.to_vec().into(),
                ..Default::default()
            })
            .collect();
        parts.push(last);
        let parts = tokio_stream::iter(parts.into_iter().map(Ok));
        Ok(Response::new(Box::pin(parts)))
    }

    async fn run_op(
        &self,
        request: Request<wire::RunOpRequest>,
    ) -> Result<Response<wire::RunOpResponse>, Status> {
        let request = request.into_inner();
        let backend = if self.manner == Manner::LiesAboutOp {
            v1::Backend::Reference
        } else {
            v1::Backend::Cpu
        };
        let provenance = v1::Provenance {
            backend: backend.into(),
            op_counts: vec![v1::OpCount {
                op: request.op,
                count: 1,
            }],
            ..Default::default()
        };
        Ok(Response::new(wire::RunOpResponse {
            outputs: request.inputs,
            provenance: Some(provenance),
        }))
    }

    async fn drain(
        &self,
        _request: Request<wire::DrainRequest>,
    ) -> Result<Response<wire::DrainResponse>, Status> {
        Ok(Response::new(wire::DrainResponse { open_rows: 0 }))
    }
}
