//! The real worker process, driven over its two inherited sockets as the gateway does it.
#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot set up its worker has failed"
)]

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message as _;
use tonic::transport::{Channel, Endpoint};
use velox_proto::error::{Reason, ServiceFault};
use velox_proto::tensor::DType;
use velox_proto::v1;
use velox_proto::worker::v1 as wire;
use velox_proto::worker::v1::gateway_frame::Frame as ToWorker;
use velox_proto::worker::v1::worker_control_service_client::WorkerControlServiceClient;
use velox_proto::worker::v1::worker_frame::Frame as FromWorker;
use velox_shm::{Arena, Heartbeat, Segment, descriptor, frame};

/// Longest wait for one answer of a healthy worker on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);
const SEGMENT_BYTES: u64 = 1024 * 1024;
const MODEL: &str = "tiny";

/// A worker and the gateway's ends of its channels.
struct Worker {
    child: Child,
    step: UnixStream,
    decoder: frame::FrameDecoder,
    control: WorkerControlServiceClient<Channel>,
    #[cfg(feature = "fault-hooks")]
    channel: Channel,
    runtime: tokio::runtime::Runtime,
}

impl Worker {
    fn start() -> Self {
        let (control, control_peer) = UnixStream::pair().unwrap();
        let (step, step_peer) = UnixStream::pair().unwrap();
        step.set_read_timeout(Some(PATIENCE)).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_velox-kernel-worker"))
            .args(["--threads", "1"])
            .stdin(Stdio::from(OwnedFd::from(control_peer)))
            .stdout(Stdio::from(OwnedFd::from(step_peer)))
            .spawn()
            .unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let channel = runtime.block_on(async {
            control.set_nonblocking(true).unwrap();
            let mut stream = Some(tokio::net::UnixStream::from_std(control).unwrap());
            Endpoint::from_static("http://worker")
                .connect_with_connector(tower::service_fn(move |_| {
                    let stream = stream.take().map(TokioIo::new);
                    async move { stream.ok_or_else(|| std::io::Error::other("connected once")) }
                }))
                .await
                .unwrap()
        });
        Self {
            child,
            step,
            decoder: frame::FrameDecoder::new(),
            control: WorkerControlServiceClient::new(channel.clone()),
            #[cfg(feature = "fault-hooks")]
            channel,
            runtime,
        }
    }

    /// Sends bytes with at most one descriptor.
    fn send(&self, frame: ToWorker, descriptors: &[std::os::fd::BorrowedFd<'_>]) {
        let bytes = frame::encode(&wire::GatewayFrame { frame: Some(frame) }).unwrap();
        let sent = descriptor::send(self.step.as_fd(), &bytes, descriptors).unwrap();
        assert_eq!(sent, bytes.len(), "a small frame fits the socket's buffer");
    }

    fn receive(&mut self) -> FromWorker {
        loop {
            if let Some(bytes) = self.decoder.next_frame().unwrap() {
                return wire::WorkerFrame::decode(bytes).unwrap().frame.unwrap();
            }
            let mut buffer = [0; 4096];
            let count = std::io::Read::read(&mut self.step, &mut buffer).unwrap();
            assert!(count > 0, "the worker closed the step channel");
            self.decoder.push(&buffer[..count]);
        }
    }

    fn offer(
        &mut self,
        segment: u64,
        byte_len: u64,
        role: wire::SegmentRole,
        fd: std::os::fd::BorrowedFd<'_>,
    ) -> String {
        let offer = wire::SegmentOffer {
            segment,
            byte_len,
            role: role.into(),
        };
        self.send(ToWorker::Offer(offer), &[fd]);
        match self.receive() {
            FromWorker::Accepted(accepted) => {
                assert_eq!(accepted.segment, segment);
                accepted.error
            }
            other => panic!("expected an acceptance, got {other:?}"),
        }
    }

    fn arena(&mut self) -> Arena {
        let arena = Arena::new(Segment::create(7, SEGMENT_BYTES).unwrap());
        let error = self.offer(
            7,
            arena.segment_bytes(),
            wire::SegmentRole::Tensors,
            arena.descriptor(),
        );
        assert_eq!(error, "");
        arena
    }

    fn load(&mut self) -> wire::ModelFacts {
        let path = model_folder();
        let request = wire::LoadModelRequest {
            name: MODEL.to_owned(),
            path: path.to_str().unwrap().to_owned(),
            backend: v1::Backend::Reference.into(),
            ..wire::LoadModelRequest::default()
        };
        let mut control = self.control.clone();
        self.runtime.block_on(async move {
            let mut events = control.load_model(request).await.unwrap().into_inner();
            while let Some(event) = events.message().await.unwrap() {
                if let Some(facts) = event.facts {
                    return facts;
                }
            }
            panic!("loading ended without facts");
        })
    }

    fn run_op(&mut self, request: wire::RunOpRequest) -> Result<wire::RunOpResponse, ServiceFault> {
        let mut control = self.control.clone();
        self.runtime
            .block_on(async move { control.run_op(request).await })
            .map(tonic::Response::into_inner)
            .map_err(|status| ServiceFault::from_status(&status))
    }

    fn plan(&mut self, plan: wire::StepPlan) -> wire::StepResult {
        let sequence = plan.sequence;
        self.send(ToWorker::Plan(plan), &[]);
        match self.receive() {
            FromWorker::Result(result) => {
                assert_eq!(result.sequence, sequence);
                result
            }
            other => panic!("expected a result, got {other:?}"),
        }
    }

    fn answers_pings(&mut self) {
        self.send(ToWorker::Ping(wire::Ping { nonce: 99 }), &[]);
        assert_eq!(self.receive(), FromWorker::Pong(wire::Pong { nonce: 99 }));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn model_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("engine/tests/fixtures/families/llama-tied")
}

fn sampling() -> wire::Sampling {
    wire::Sampling {
        top_p: 1.0,
        repetition_penalty: 1.0,
        penalty_window_tokens: 64,
        ..wire::Sampling::default()
    }
}

fn open(row: u64) -> wire::OpenRow {
    wire::OpenRow {
        row,
        model: MODEL.to_owned(),
        capacity_tokens: 32,
        prompt_tokens: 3,
        sampling: Some(sampling()),
        ..wire::OpenRow::default()
    }
}

fn prefill(row: u64) -> wire::PrefillChunk {
    wire::PrefillChunk {
        row,
        token_ids: vec![1, 2, 3],
        sample: true,
        ..wire::PrefillChunk::default()
    }
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

fn inline(shape: &[u64], values: &[f32]) -> v1::Tensor {
    v1::Tensor {
        dtype: v1::DType::F32.into(),
        shape: shape.to_vec(),
        data: Some(v1::tensor::Data::Inline(f32_bytes(values).into())),
    }
}

#[test]
fn a_plan_generates_and_says_what_ran() {
    let mut worker = Worker::start();
    let heartbeat = Heartbeat::create(3).unwrap();
    let error = worker.offer(
        3,
        heartbeat.byte_len(),
        wire::SegmentRole::Heartbeat,
        heartbeat.descriptor(),
    );
    assert_eq!(error, "");
    let facts = worker.load();
    assert_eq!(facts.backend(), v1::Backend::Reference);
    let before = heartbeat.value();

    let first = worker.plan(wire::StepPlan {
        sequence: 1,
        open_rows: vec![open(1)],
        prefill: Some(prefill(1)),
        ..wire::StepPlan::default()
    });
    let second = worker.plan(wire::StepPlan {
        sequence: 2,
        decode: vec![wire::DecodeRow {
            row: 1,
            token: None,
            steps: 2,
            draft_token_ids: vec![],
        }],
        ..wire::StepPlan::default()
    });

    assert_eq!(first.backend(), v1::Backend::Reference);
    assert_eq!(first.rows[0].tokens.len(), 1);
    assert_eq!(second.rows[0].tokens.len(), 2);
    assert!(second.rows[0].key_bytes > 0 && second.rows[0].value_bytes > 0);
    let count = |result: &wire::StepResult, op: &str| {
        result
            .op_counts
            .iter()
            .find(|count| count.op == op)
            .map(|count| count.count)
    };
    assert_eq!(count(&first, "gated_mlp"), Some(u64::from(facts.n_layers)));
    assert_eq!(
        count(&second, "gated_mlp"),
        Some(2 * u64::from(facts.n_layers))
    );
    assert_eq!(count(&second, "sample"), Some(2));
    assert!(heartbeat.value() >= before + 3 * u64::from(facts.n_layers));
}

#[test]
fn a_broken_plan_fails_its_rows_and_nothing_else() {
    let mut worker = Worker::start();
    worker.load();
    worker.plan(wire::StepPlan {
        sequence: 1,
        open_rows: vec![open(1)],
        prefill: Some(prefill(1)),
        ..wire::StepPlan::default()
    });

    // Row 2 was never opened.
    let refused = worker.plan(wire::StepPlan {
        sequence: 2,
        decode: vec![wire::DecodeRow {
            row: 2,
            token: None,
            steps: 1,
            draft_token_ids: vec![],
        }],
        ..wire::StepPlan::default()
    });
    assert!(refused.rows[0].error.is_some());
    let refused = worker.plan(wire::StepPlan {
        sequence: 3,
        decode: vec![wire::DecodeRow {
            row: 1,
            token: None,
            steps: 1000,
            draft_token_ids: vec![],
        }],
        ..wire::StepPlan::default()
    });
    assert!(
        refused.rows[0]
            .error
            .as_ref()
            .unwrap()
            .message
            .contains("1000")
    );

    let fresh = worker.plan(wire::StepPlan {
        sequence: 4,
        open_rows: vec![open(3)],
        prefill: Some(prefill(3)),
        ..wire::StepPlan::default()
    });
    assert!(fresh.rows[0].error.is_none());
    worker.answers_pings();
}

#[test]
fn tokens_and_logits_travel_through_shared_memory() {
    let mut worker = Worker::start();
    let facts = worker.load();
    let vocabulary = u64::from(facts.model.unwrap().vocab_size);
    let arena = worker.arena();
    let mut tokens = arena.lease(12).unwrap();
    tokens
        .write(&[1_u32, 2, 3].map(u32::to_le_bytes).concat())
        .unwrap();
    let logits = arena.lease(2 * vocabulary * 4).unwrap();

    let result = worker.plan(wire::StepPlan {
        sequence: 1,
        open_rows: vec![open(1)],
        prefill: Some(wire::PrefillChunk {
            row: 1,
            token_handle: Some(tokens.handle(DType::U32, &[3]).unwrap()),
            score: Some(wire::ScorePart {
                first_position: 1,
                top_n: 1,
                next_token: None,
                logits: Some(logits.handle(DType::F32, &[2, vocabulary]).unwrap()),
            }),
            ..wire::PrefillChunk::default()
        }),
        ..wire::StepPlan::default()
    });

    let scores = &result.rows[0].scores;
    assert_eq!(
        scores
            .iter()
            .map(|score| score.position)
            .collect::<Vec<_>>(),
        [1, 2]
    );
    let bytes = logits.copy_out(2 * vocabulary * 4).unwrap();
    let values: Vec<f32> = bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
        .collect();
    // The best of each row of logits is the alternative that the scores name.
    for (row, score) in values.chunks_exact(values.len() / 2).zip(scores) {
        let best = (0..row.len())
            .max_by(|&a, &b| row[a].total_cmp(&row[b]))
            .unwrap();
        assert_eq!(u32::try_from(best).unwrap(), score.top[0].token_id);
    }
}

#[test]
fn an_op_runs_on_tensors_in_shared_memory_on_either_backend() {
    let mut worker = Worker::start();
    let arena = worker.arena();
    let weight = inline(&[2, 4], &[1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 2.0]);
    for backend in [v1::Backend::Reference, v1::Backend::Cpu] {
        let mut input = arena.lease(16).unwrap();
        input.write(&f32_bytes(&[3.0, 4.0, 5.0, 6.0])).unwrap();
        let out = arena.lease(8).unwrap();
        let response = worker
            .run_op(wire::RunOpRequest {
                op: "mat_mul".to_owned(),
                inputs: vec![
                    v1::Tensor {
                        data: Some(v1::tensor::Data::Handle(
                            input.handle(DType::F32, &[1, 4]).unwrap(),
                        )),
                        ..v1::Tensor::default()
                    },
                    weight.clone(),
                ],
                backend: backend.into(),
                destination: Some(out.handle(DType::F32, &[1, 2]).unwrap()),
                ..wire::RunOpRequest::default()
            })
            .unwrap();
        assert_eq!(response.provenance.unwrap().backend(), backend);
        assert_eq!(out.copy_out(8).unwrap(), f32_bytes(&[3.0, 14.0]));
    }
}

#[test]
fn hostile_ops_and_handles_are_refused_by_reason() {
    let mut worker = Worker::start();
    let arena = worker.arena();
    let lease = arena.lease(16).unwrap();
    let good = lease.handle(DType::F32, &[4]).unwrap();
    let softmax = |handle: v1::TensorHandle| wire::RunOpRequest {
        op: "softmax".to_owned(),
        inputs: vec![v1::Tensor {
            data: Some(v1::tensor::Data::Handle(handle)),
            ..v1::Tensor::default()
        }],
        ..wire::RunOpRequest::default()
    };
    let refused = |worker: &mut Worker, change: &dyn Fn(&mut v1::TensorHandle)| {
        let mut hostile = good.clone();
        change(&mut hostile);
        worker.run_op(softmax(hostile)).unwrap_err().reason
    };

    assert!(worker.run_op(softmax(good.clone())).is_ok());
    assert_eq!(
        refused(&mut worker, &|handle| handle.generation += 2),
        Reason::InvalidHandle
    );
    assert_eq!(
        refused(&mut worker, &|handle| handle.segment = 8),
        Reason::InvalidHandle
    );
    assert_eq!(
        refused(&mut worker, &|handle| handle.offset = SEGMENT_BYTES),
        Reason::InvalidHandle
    );
    assert_eq!(
        refused(&mut worker, &|handle| handle.shape = vec![1; 9]),
        Reason::InvalidHandle
    );
    drop(lease);
    assert_eq!(
        worker.run_op(softmax(good.clone())).unwrap_err().reason,
        Reason::InvalidHandle
    );

    let unknown = wire::RunOpRequest {
        op: "shell".to_owned(),
        ..wire::RunOpRequest::default()
    };
    assert_eq!(
        worker.run_op(unknown).unwrap_err().reason,
        Reason::OpUnsupported
    );
    let stage = wire::RunOpRequest {
        op: "gated_mlp".to_owned(),
        ..wire::RunOpRequest::default()
    };
    assert_eq!(
        worker.run_op(stage).unwrap_err().reason,
        Reason::OpUnsupported
    );
    let empty = wire::RunOpRequest {
        op: "mat_mul".to_owned(),
        ..wire::RunOpRequest::default()
    };
    assert_eq!(
        worker.run_op(empty).unwrap_err().reason,
        Reason::InvalidRequest
    );
    let metal = wire::RunOpRequest {
        op: "softmax".to_owned(),
        inputs: vec![inline(&[1, 2], &[0.0, 1.0])],
        backend: v1::Backend::Metal.into(),
        ..wire::RunOpRequest::default()
    };
    assert_eq!(
        worker.run_op(metal).unwrap_err().reason,
        Reason::BackendUnavailable
    );
    worker.answers_pings();
}

#[test]
fn a_file_as_a_segment_is_refused_and_the_worker_lives() {
    let mut worker = Worker::start();
    let file = tempfile::tempfile().unwrap();
    file.set_len(SEGMENT_BYTES).unwrap();
    let error = worker.offer(9, SEGMENT_BYTES, wire::SegmentRole::Tensors, file.as_fd());
    assert_ne!(error, "");
    worker.answers_pings();
}

#[test]
fn the_worker_ends_with_its_gateway() {
    let mut worker = Worker::start();
    worker.answers_pings();
    worker.step.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(worker.child.wait().unwrap().success());
}

#[test]
fn the_end_of_the_control_channel_alone_ends_the_worker() {
    let mut worker = Worker::start();
    worker.load();
    // The connection lives on its runtime; the step channel stays open.
    worker.runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    assert!(worker.child.wait().unwrap().success());
}

#[cfg(feature = "fault-hooks")]
#[test]
fn a_wedged_worker_ends_with_its_gateway() {
    use velox_proto::worker::v1::fault_service_client::FaultServiceClient;

    let mut worker = Worker::start();
    worker.load();
    let mut faults = FaultServiceClient::new(worker.channel.clone());
    let request = wire::InjectFaultRequest {
        fault: wire::Fault::Wedge.into(),
        ..wire::InjectFaultRequest::default()
    };
    worker
        .runtime
        .block_on(faults.inject_fault(request))
        .unwrap();
    worker.send(
        ToWorker::Plan(wire::StepPlan {
            sequence: 1,
            ..wire::StepPlan::default()
        }),
        &[],
    );
    // Facts are still answered: only the tensor thread is stuck.
    worker
        .runtime
        .block_on(worker.control.clone().get_facts(wire::GetFactsRequest {}))
        .unwrap();
    worker.runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    worker.step.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(worker.child.wait().unwrap().success());
}

#[test]
fn started_by_hand_it_says_who_starts_it() {
    let output = Command::new(env!("CARGO_BIN_EXE_velox-kernel-worker"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("started by velox-gateway"), "{text}");
}
