//! What is known of models while workers come and go.

use super::*;
use crate::pool::LossCause;
use crate::pool::scripted::ScriptedWorker;
use velox_proto::error::{Reason, ServiceError as _};

const WAIT: Duration = Duration::from_secs(5);

fn worker(incarnation: u32, models: &[&str]) -> ScriptedWorker {
    let key = WorkerKey {
        slot: 0,
        incarnation,
    };
    let models: Vec<v1::Model> = models
        .iter()
        .map(|name| v1::Model {
            name: (*name).to_owned(),
            context_length: 8,
            vocab_size: 8,
            ..v1::Model::default()
        })
        .collect();
    ScriptedWorker::new(key, Backend::Cpu, &models)
}

fn ready(catalog: &Catalog, worker: &ScriptedWorker) {
    catalog.observe(&PoolEvent::Ready {
        worker: worker.key,
        facts: Arc::clone(&worker.facts),
        models: worker.models.values().cloned().collect(),
    });
}

fn lose(catalog: &Catalog, worker: &ScriptedWorker) {
    catalog.observe(&PoolEvent::Lost {
        worker: worker.key,
        cause: LossCause::Killed(9),
    });
}

#[tokio::test(start_paused = true)]
async fn an_expected_model_is_waited_for_and_an_unknown_one_is_not() {
    let catalog = Catalog::new(&["m".to_owned()]);
    let error = catalog.resident("other", WAIT).await.unwrap_err();
    assert_eq!(error.reason(), Reason::ModelNotFound);
    let error = catalog.resident("m", WAIT).await.unwrap_err();
    assert_eq!(error.reason(), Reason::WorkerUnavailable);

    let first = worker(1, &["m"]);
    let (found, ()) = tokio::join!(catalog.resident("", WAIT), async {
        ready(&catalog, &first)
    });
    let found = found.unwrap();
    assert_eq!(found.facts.name(), "m");
    assert!(
        found.limits.missing.contains("METAL: "),
        "{}",
        found.limits.missing
    );
    assert!(catalog.models()[0].is_default);
}

#[tokio::test(start_paused = true)]
async fn a_model_stays_known_while_its_worker_restarts() {
    let catalog = Catalog::new(&["m".to_owned()]);
    let first = worker(1, &["m"]);
    ready(&catalog, &first);
    assert_eq!(catalog.readiness(), [("m".to_owned(), true)]);
    lose(&catalog, &first);
    assert_eq!(catalog.readiness(), [("m".to_owned(), false)]);
    assert!(catalog.ready_workers().is_empty());
    assert_eq!(catalog.resident("m", WAIT).await.unwrap().worker, None);

    let second = worker(2, &["m"]);
    ready(&catalog, &second);
    // What is said of a process that is long gone changes nothing.
    lose(&catalog, &first);
    assert_eq!(catalog.ready_workers(), [second.key]);
    assert_eq!(catalog.readiness(), [("m".to_owned(), true)]);
}

#[tokio::test(start_paused = true)]
async fn a_model_that_cannot_be_loaded_says_why() {
    let catalog = Catalog::new(&["m".to_owned()]);
    let bare = worker(1, &["other"]);
    catalog.observe(&PoolEvent::ModelFailed {
        worker: bare.key,
        model: "m".to_owned(),
        fault: ServiceFault::new(Reason::InvalidModel, "file is cut off"),
    });
    let error = catalog.resident("m", WAIT).await.unwrap_err();
    assert_eq!(error.reason(), Reason::InvalidModel);
    assert!(
        catalog
            .start_failure(3)
            .unwrap()
            .to_string()
            .contains("cut off")
    );
}

#[test]
fn workers_that_die_before_one_was_ready_are_a_failed_start() {
    let catalog = Catalog::new(&["m".to_owned()]);
    for incarnation in 1..4 {
        assert!(catalog.start_failure(3).is_none());
        lose(&catalog, &worker(incarnation, &["m"]));
    }
    let error = catalog.start_failure(3).unwrap();
    assert!(error.to_string().contains("signal 9"), "{error}");

    let survivor = worker(4, &["m"]);
    ready(&catalog, &survivor);
    lose(&catalog, &survivor);
    assert!(catalog.start_failure(3).is_none(), "it had started well");
}

#[test]
fn an_unloaded_model_is_forgotten() {
    let catalog = Catalog::new(&[]);
    let first = worker(1, &["m"]);
    ready(&catalog, &first);
    assert_eq!(catalog.tokenizer_digests().len(), 1);
    catalog.observe(&PoolEvent::ModelUnloaded {
        worker: first.key,
        model: "m".to_owned(),
    });
    assert!(catalog.models().is_empty());
    assert!(catalog.tokenizer_digests().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_only_model_needs_no_name() {
    let catalog = Catalog::new(&[]);
    let error = catalog.resident("", WAIT).await.unwrap_err();
    assert!(matches!(error, GatewayError::NoDefaultModel), "{error}");
    ready(&catalog, &worker(1, &["m"]));
    assert_eq!(catalog.resident("", WAIT).await.unwrap().facts.name(), "m");
    assert!(catalog.models()[0].is_default);
    ready(&catalog, &worker(2, &["m", "n"]));
    let error = catalog.resident("", WAIT).await.unwrap_err();
    assert!(matches!(error, GatewayError::NoDefaultModel), "{error}");
}
