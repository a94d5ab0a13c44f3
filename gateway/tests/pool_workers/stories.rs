//! What must hold whatever a worker does.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::mpsc;
use velox_gateway::pool::{
    LoadShape, LossCause, MAX_RESIDENT_MODELS, ModelSource, PoolError, PoolEvent, SlotState,
    Violation, WorkerKey,
};
use velox_proto::error::{Reason, ServiceError as _};
use velox_proto::tensor::DType;
use velox_proto::v1;
use velox_proto::worker::v1 as wire;

use crate::fake::{Manner, SLOW_LAYER, VOCAB_SIZE};
use crate::house::{House, MODEL, STALL, decode_plan, exists, first_plan, signal, source};

/// Every story and its name.
pub(crate) const ALL: [(&str, fn()); 19] = [
    ("plans_are_answered_in_order", || {
        run(plans_are_answered_in_order())
    }),
    ("a_bad_plan_is_not_sent", || run(a_bad_plan_is_not_sent())),
    ("tokens_travel_through_leased_memory", || {
        run(tokens_travel_through_leased_memory())
    }),
    ("killed_workers_cost_no_memory", || {
        run(killed_workers_cost_no_memory())
    }),
    ("lies_are_quarantined_until_the_slot_is_given_up", || {
        run(lies_are_quarantined())
    }),
    ("lies_of_the_handshake_are_quarantined", || {
        run(lies_of_the_handshake())
    }),
    ("a_foreign_protocol_is_no_lie", || {
        run(a_foreign_protocol_is_no_lie())
    }),
    (
        "a_worker_that_exits_at_once_is_restarted_ever_later",
        || run(restarted_ever_later()),
    ),
    ("a_program_that_is_missing_is_a_loss_too", || {
        run(a_program_that_is_missing())
    }),
    ("a_wedged_worker_is_killed_and_replaced", || {
        run(a_wedged_worker())
    }),
    ("a_stopped_worker_is_killed_and_replaced", || {
        run(a_stopped_worker())
    }),
    ("a_lease_does_not_wait_for_ever", || {
        run(a_lease_does_not_wait_for_ever())
    }),
    ("a_slow_worker_is_not_dead", || {
        run(a_slow_worker_is_not_dead())
    }),
    ("a_crash_says_how", || run(a_crash_says_how())),
    ("models_come_and_go_and_come_back_after_a_restart", || {
        run(models_come_and_go())
    }),
    ("loads_are_limited_and_need_a_caller", || {
        run(loads_are_limited())
    }),
    ("a_drained_worker_finishes_and_is_replaced", || {
        run(a_drained_worker())
    }),
    ("shutdown_leaves_nothing", || run(shutdown_leaves_nothing())),
    ("tokenizers_and_ops_are_checked", || {
        run(tokenizers_and_ops_are_checked())
    }),
];

fn run(story: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(story);
}

async fn plans_are_answered_in_order() {
    let mut house = House::open(Manner::Honest);
    let (worker, models) = house.ready().await;
    assert_eq!(worker.to_string(), "w0.1");
    assert_eq!(models[0].name(), MODEL);
    house
        .pool
        .submit(worker, first_plan(1, 40, vec![1, 2, 4]))
        .unwrap();
    house.pool.submit(worker, decode_plan(2, 40, 3)).unwrap();
    let third = house.pool.submit(worker, decode_plan(3, 40, 1));
    assert!(matches!(third, Err(PoolError::InvalidPlan(_))), "{third:?}");

    let first = house.result().await;
    assert_eq!(first.sequence(), 1);
    assert_eq!(first.rows()[0].tokens[0].token_id, 7);
    let second = house.result().await;
    let ids: Vec<u32> = second.rows()[0]
        .tokens
        .iter()
        .map(|token| token.token_id)
        .collect();
    assert_eq!(ids, [40, 41, 42]);
    let provenance = second.provenance().unwrap();
    assert_eq!(provenance.backend(), v1::Backend::Cpu);
    assert_eq!(provenance.worker(), worker);

    let snapshot = &house.pool.snapshots()[0];
    assert_eq!(snapshot.state, SlotState::Ready);
    assert_eq!(
        (snapshot.rows, snapshot.in_flight, snapshot.restarts),
        (1, 0, 0)
    );
    house.close().await;
}

async fn a_bad_plan_is_not_sent() {
    let mut house = House::open(Manner::Honest);
    let (worker, _models) = house.ready().await;
    let unknown_row = house.pool.submit(worker, decode_plan(1, 1, 1));
    assert!(matches!(unknown_row, Err(PoolError::InvalidPlan(_))));
    let stranger = WorkerKey {
        incarnation: 9,
        ..worker
    };
    let other_process = house.pool.submit(stranger, first_plan(1, 1, vec![1]));
    assert!(matches!(other_process, Err(PoolError::WorkerLost(_))));
    let no_slot = WorkerKey { slot: 9, ..worker };
    let other_slot = house.pool.submit(no_slot, first_plan(1, 1, vec![1]));
    assert_eq!(other_slot.unwrap_err().reason(), Reason::WorkerNotFound);
    // The worker is not the worse for it.
    house
        .pool
        .submit(worker, first_plan(1, 1, vec![1]))
        .unwrap();
    assert_eq!(house.result().await.sequence(), 1);
    house.close().await;
}

async fn tokens_travel_through_leased_memory() {
    let mut house = House::open(Manner::Honest);
    let (worker, _models) = house.ready().await;
    let before = house.pool.shm_segment_bytes();
    // The second does not fit the first segment, the third is larger than a segment.
    for (sequence, tokens) in [(1, 10_000_u32), (2, 10_000), (3, 40_000)] {
        let token_ids: Vec<u32> = (0..tokens).map(|index| index % 7).collect();
        let bytes: Vec<u8> = token_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let byte_len = u64::try_from(bytes.len()).unwrap();
        let mut lease = house.pool.lease(worker, byte_len).await.unwrap();
        lease.write(&bytes).unwrap();
        let mut plan = first_plan(sequence, sequence, Vec::new());
        let chunk = plan.prefill.as_mut().unwrap();
        chunk.token_handle = Some(lease.handle(DType::U32, &[u64::from(tokens)]).unwrap());
        house.pool.submit(worker, plan).unwrap();
        let sampled = house.result().await.rows()[0].tokens[0].token_id;
        assert_eq!(sampled, token_ids.iter().sum::<u32>() % VOCAB_SIZE);
        assert!(house.pool.shm_leased_bytes() >= byte_len);
        if sequence == 1 {
            // Kept, so that the next one needs a further segment.
            std::mem::forget(lease);
        }
    }
    assert!(house.pool.shm_segment_bytes() > before);
    let too_much = house.pool.lease(worker, 1 << 40).await.unwrap_err();
    assert!(matches!(too_much, PoolError::Memory(_)), "{too_much}");
    house.close().await;
}

async fn killed_workers_cost_no_memory() {
    let mut house = House::open(Manner::Slow);
    let mut created = 0;
    for round in 0..5 {
        let (worker, _models) = house.ready().await;
        let lease = house.pool.lease(worker, 50_000).await.unwrap();
        let pid = house.pid();
        house
            .pool
            .submit(worker, first_plan(1, 1, vec![1]))
            .unwrap();
        signal(pid, Signal::KILL);
        assert_eq!(house.lost().await, LossCause::Killed(9));
        assert!(!exists(pid), "reaped before the loss is told");
        assert!(matches!(
            house.pool.lease(worker, 1).await,
            Err(PoolError::WorkerLost(_))
        ));
        drop(lease);
        if round == 0 {
            created = house.pool.shm_segment_bytes();
        }
    }
    assert_eq!(house.pool.shm_leased_bytes(), 0);
    assert_eq!(house.pool.shm_segment_bytes(), created);
    house.close().await;
}

async fn lies_are_quarantined() {
    for manner in [
        Manner::LiesAboutLabel,
        Manner::LiesAboutTokens,
        Manner::LiesAboutCounts,
        Manner::SendsHugeFrame,
        Manner::SendsGarbage,
        Manner::InventsResult,
    ] {
        let mut house = House::open(manner);
        for _process in 0..3 {
            let (worker, _models) = house.ready().await;
            let pid = house.pid();
            house
                .pool
                .submit(worker, first_plan(1, 1, vec![1]))
                .unwrap();
            if manner == Manner::InventsResult {
                // It is honest until it is pinged.
                assert_eq!(house.result().await.sequence(), 1);
            }
            let cause = house.lost().await;
            let found = match manner {
                Manner::LiesAboutLabel => {
                    matches!(cause, LossCause::Quarantined(Violation::Label { .. }))
                }
                Manner::LiesAboutTokens => {
                    matches!(cause, LossCause::Quarantined(Violation::Output { .. }))
                }
                Manner::LiesAboutCounts => {
                    matches!(cause, LossCause::Quarantined(Violation::OpCount { .. }))
                }
                Manner::InventsResult => {
                    matches!(cause, LossCause::Quarantined(Violation::Sequence { .. }))
                }
                _ => matches!(cause, LossCause::Quarantined(Violation::Frame(_))),
            };
            assert!(found, "{manner:?}: {cause}");
            assert!(!exists(pid));
        }
        let slot = &house.pool.snapshots()[0];
        assert_eq!(
            (slot.state, slot.pid),
            (SlotState::Quarantined, None),
            "{manner:?}"
        );
        house.close().await;
    }
}

async fn lies_of_the_handshake() {
    let mut manners = vec![Manner::ClaimsOtherPid];
    if !cfg!(target_os = "macos") {
        manners.push(Manner::ClaimsMetal);
    }
    for manner in manners {
        let mut house = House::open(manner);
        let cause = house.lost().await;
        assert!(
            matches!(cause, LossCause::Quarantined(Violation::Facts(_))),
            "{cause}"
        );
        house.close().await;
    }
}

async fn a_foreign_protocol_is_no_lie() {
    let mut house = House::open(Manner::Foreign);
    for _attempt in 0..4 {
        let cause = house.lost().await;
        assert!(
            matches!(&cause, LossCause::HandshakeFailed(text) if text.contains("1000")),
            "{cause}"
        );
    }
    house.close().await;
}

async fn restarted_ever_later() {
    let mut house = House::open(Manner::ExitsAtOnce);
    let mut pauses = Vec::new();
    let mut last = Instant::now();
    for _attempt in 0..6 {
        assert_eq!(house.lost().await, LossCause::Exited(3));
        pauses.push(last.elapsed());
        last = Instant::now();
    }
    // 40, 80, 160, 320 and 400 ms lie between the losses; starting a process takes time besides.
    for (pause, least) in pauses[1..].iter().zip([40, 80, 160, 320, 400]) {
        assert!(*pause >= Duration::from_millis(least - 1), "{pauses:?}");
    }
    assert_eq!(
        house.pool.snapshots()[0].last_exit,
        Some(LossCause::Exited(3))
    );
    house.close().await;
}

async fn a_program_that_is_missing() {
    let mut house = House::open_with(Manner::Honest, |config| {
        config.worker_program.path.set_file_name("missing");
    });
    let cause = house.lost().await;
    assert!(matches!(cause, LossCause::SpawnFailed(_)), "{cause}");
    house.close().await;
}

async fn a_wedged_worker() {
    let mut house = House::open(Manner::Wedges);
    let (worker, _models) = house.ready().await;
    let pid = house.pid();
    house
        .pool
        .submit(worker, first_plan(1, 1, vec![1]))
        .unwrap();
    house.pool.submit(worker, decode_plan(2, 1, 1)).unwrap();
    assert_eq!(house.result().await.sequence(), 1);
    let cause = house.lost().await;
    assert!(
        matches!(cause, LossCause::Wedged { silence, limit } if silence > limit && limit == STALL),
        "{cause}"
    );
    assert!(!exists(pid));
    let (successor, _models) = house.ready().await;
    house
        .pool
        .submit(successor, first_plan(1, 1, vec![1]))
        .unwrap();
    assert_eq!(house.result().await.sequence(), 1);
    house.close().await;
}

async fn a_stopped_worker() {
    let mut house = House::open(Manner::Honest);
    house.ready().await;
    // Idle: only the ping can find out.
    signal(house.pid(), Signal::STOP);
    let cause = house.lost().await;
    assert!(matches!(cause, LossCause::Wedged { .. }), "{cause}");
    let (successor, _models) = house.ready().await;
    house
        .pool
        .submit(successor, first_plan(1, 1, vec![1]))
        .unwrap();
    assert_eq!(house.result().await.sequence(), 1);
    house.close().await;
}

async fn a_lease_does_not_wait_for_ever() {
    let mut house = House::open_with(Manner::Honest, |config| {
        config.timeouts.load = Duration::from_secs(2);
        // Nothing else ends the wait.
        config.timeouts.stall = Duration::from_secs(3600);
    });
    let (worker, _models) = house.ready().await;
    signal(house.pid(), Signal::STOP);
    // More than any segment has that the worker mapped before.
    let lease = house.pool.lease(worker, 4 * 1024 * 1024);
    let lease = tokio::time::timeout(Duration::from_secs(30), lease).await;
    let error = lease.expect("the lease is given up").unwrap_err();
    assert!(
        matches!(
            error,
            PoolError::Unanswered {
                call: "SegmentOffer",
                ..
            }
        ),
        "{error}"
    );
    house.close().await;
}

async fn a_slow_worker_is_not_dead() {
    let mut house = House::open(Manner::Slow);
    let (worker, _models) = house.ready().await;
    let started = Instant::now();
    house
        .pool
        .submit(worker, first_plan(1, 1, vec![1]))
        .unwrap();
    house.pool.submit(worker, decode_plan(2, 1, 4)).unwrap();
    house.result().await;
    house.result().await;
    let layers = 15;
    assert!(
        started.elapsed() >= SLOW_LAYER * layers,
        "it was slower than any limit"
    );
    assert!(SLOW_LAYER * layers > STALL);
    house.close().await;
}

async fn a_crash_says_how() {
    let mut house = House::open(Manner::Crashes);
    let (worker, _models) = house.ready().await;
    house
        .pool
        .submit(worker, first_plan(1, 1, vec![1]))
        .unwrap();
    house.pool.submit(worker, decode_plan(2, 1, 1)).unwrap();
    // What it finished before its end counts.
    assert_eq!(house.result().await.sequence(), 1);
    assert_eq!(house.lost().await, LossCause::Exited(7));
    let (successor, _models) = house.ready().await;
    assert_eq!(successor.to_string(), "w0.2");
    house.close().await;
}

async fn models_come_and_go() {
    let mut house = House::open(Manner::Honest);
    let (worker, _models) = house.ready().await;
    let (progress, mut phases) = mpsc::channel(8);
    let load = |name: &str, path: &str| house.pool.load_model(source(name, path), progress.clone());

    let facts = load("second", "second.gguf").await.unwrap();
    assert_eq!(facts.name(), "second");
    assert_eq!(phases.recv().await.unwrap().phase, "open");
    let again = load("second", "second.gguf").await.unwrap();
    assert_eq!(again, facts);
    let taken = load("second", "other.gguf").await.unwrap_err();
    assert_eq!(taken.reason(), Reason::ModelExists);
    // Other weights of the same file are another model.
    let quantised = ModelSource {
        shape: LoadShape {
            quantize_bits: Some(4),
            ..LoadShape::default()
        },
        ..source("second", "second.gguf")
    };
    let taken = house.pool.load_model(quantised, progress.clone());
    assert_eq!(taken.await.unwrap_err().reason(), Reason::ModelExists);
    let damaged = load("third", "damaged.gguf").await.unwrap_err();
    assert_eq!(damaged.reason(), Reason::InvalidModel);
    let event = house.event().await;
    assert!(matches!(event, PoolEvent::ModelLoaded { .. }), "{event:?}");

    signal(house.pid(), Signal::KILL);
    assert_eq!(house.lost().await, LossCause::Killed(9));
    let (successor, models) = house.ready().await;
    assert_ne!(successor, worker);
    let names: Vec<&str> = models.iter().map(|model| model.name()).collect();
    assert_eq!(names, [MODEL, "second"]);

    house
        .pool
        .submit(successor, first_plan(1, 1, vec![1]))
        .unwrap();
    house.result().await;
    let busy = house.pool.unload_model(MODEL).await.unwrap_err();
    assert_eq!(busy.reason(), Reason::ModelBusy);
    house.pool.unload_model("second").await.unwrap();
    let unknown = house.pool.unload_model("second").await.unwrap_err();
    assert_eq!(unknown.reason(), Reason::ModelNotFound);
    let event = house.event().await;
    assert!(
        matches!(event, PoolEvent::ModelUnloaded { .. }),
        "{event:?}"
    );
    house.close().await;

    let mut house = House::open_with(Manner::Honest, |config| {
        config.models.push(source("bad", "damaged.gguf"));
    });
    let (_worker, models) = house.ready().await;
    assert_eq!(models.len(), 1);
    let event = house.event().await;
    assert!(
        matches!(&event, PoolEvent::ModelFailed { fault, .. } if fault.reason == Reason::InvalidModel),
        "{event:?}"
    );
    house.close().await;
}

async fn loads_are_limited() {
    let mut house = House::open(Manner::Honest);
    house.ready().await;
    let (progress, closed) = mpsc::channel(1);
    drop(closed);
    let nobody = house.pool.load_model(source("m0", "m0.gguf"), progress);
    let error = nobody.await.unwrap_err();
    assert!(matches!(error, PoolError::CallerLeft), "{error}");

    let (progress, _phases) = mpsc::channel(1);
    let load = |index: usize| {
        let source = source(&format!("m{index}"), &format!("m{index}.gguf"));
        house.pool.load_model(source, progress.clone())
    };
    for index in 1..MAX_RESIDENT_MODELS {
        load(index).await.unwrap();
    }
    let error = load(MAX_RESIDENT_MODELS).await.unwrap_err();
    assert!(matches!(error, PoolError::TooManyModels { .. }), "{error}");
    // One that is there is no further one.
    load(1).await.unwrap();
    house.pool.unload_model("m1").await.unwrap();
    load(MAX_RESIDENT_MODELS).await.unwrap();
    house.close().await;
}

async fn a_drained_worker() {
    let mut house = House::open_with(Manner::Slow, |config| {
        config.timeouts.grace = Duration::from_secs(30);
    });
    let (worker, _models) = house.ready().await;
    let pid = house.pid();
    house
        .pool
        .submit(worker, first_plan(1, 1, vec![1]))
        .unwrap();
    let pool = house.pool.clone();
    let drain = async move { pool.drain("w0").await.unwrap() };
    let watch = async {
        let event = house.event().await;
        assert!(matches!(event, PoolEvent::Draining { .. }), "{event:?}");
        let refused = house.pool.submit(worker, decode_plan(2, 1, 1));
        assert!(matches!(refused, Err(PoolError::WorkerLost(_))));
        assert_eq!(house.result().await.sequence(), 1);
        assert_eq!(house.lost().await, LossCause::Drained);
    };
    tokio::join!(drain, watch);
    assert!(!exists(pid));
    let (successor, _models) = house.ready().await;
    assert_eq!(successor.incarnation, 2);
    let nobody = house.pool.drain("w7").await.unwrap_err();
    assert_eq!(nobody.reason(), Reason::WorkerNotFound);
    house.close().await;
}

async fn shutdown_leaves_nothing() {
    for manner in [
        Manner::Honest,
        Manner::IgnoresTheSignal,
        Manner::ExitsAtOnce,
    ] {
        let mut house = House::open_with(manner, |config| config.workers = 3);
        for _slot in 0..3 {
            house.event().await;
        }
        house.close().await;
    }
}

async fn tokenizers_and_ops_are_checked() {
    let mut house = House::open(Manner::Honest);
    let (worker, _models) = house.ready().await;
    let description = house.pool.tokenizer(MODEL).await.unwrap();
    assert_eq!(description.vocab_size, VOCAB_SIZE);
    let unknown = house.pool.tokenizer("other").await.unwrap_err();
    assert_eq!(unknown.reason(), Reason::ModelNotFound);
    let request = wire::RunOpRequest {
        op: "softmax".to_owned(),
        backend: v1::Backend::Cpu.into(),
        ..Default::default()
    };
    let answer = house.pool.run_op(None, request.clone()).await.unwrap();
    assert_eq!(answer.provenance().worker(), worker);
    house.close().await;

    let mut house = House::open(Manner::DamagesTokenizer);
    house.ready().await;
    let damaged = house.pool.tokenizer(MODEL).await.unwrap_err();
    assert!(
        matches!(damaged, PoolError::DamagedTokenizer(_)),
        "{damaged}"
    );
    house.close().await;

    let mut house = House::open(Manner::LiesAboutOp);
    let (worker, _models) = house.ready().await;
    let lie = house.pool.run_op(Some(worker), request).await.unwrap_err();
    assert!(
        matches!(lie, PoolError::NotAttested(Violation::Label { .. })),
        "{lie}"
    );
    let cause = house.lost().await;
    assert!(matches!(cause, LossCause::Quarantined(_)), "{cause}");
    house.close().await;
}
