//! Health v1: a service is SERVING while it can do its work, a model while a ready worker has it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use velox_proto::v1::{
    admin_service_server, capability_service_server, inference_service_server, model_service_server,
};

use crate::catalog::Catalog;

/// Whether the gateway takes work, as the catalog and the drain say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    Closing,
}

/// Names that need a ready worker: the whole server, and inference.
const WORKER_SERVICES: [&str; 2] = ["", inference_service_server::SERVICE_NAME];

/// Names that the gateway serves alone.
const OWN_SERVICES: [&str; 3] = [
    model_service_server::SERVICE_NAME,
    capability_service_server::SERVICE_NAME,
    admin_service_server::SERVICE_NAME,
];

/// Keeps the reporter up to date until `end`.
pub async fn watch(
    mut reporter: HealthReporter,
    catalog: Arc<Catalog>,
    mut closing: watch::Receiver<Option<Duration>>,
    end: CancellationToken,
) {
    let mut changes = catalog.changes();
    let mut known = BTreeSet::new();
    loop {
        changes.mark_unchanged();
        let phase = match *closing.borrow_and_update() {
            None => Phase::Open,
            Some(_) => Phase::Closing,
        };
        report(&mut reporter, &catalog, phase, &mut known).await;
        tokio::select! {
            () = end.cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
            changed = closing.changed() => if changed.is_err() { return },
        }
    }
}

/// Sets every status; clears those of models that are gone.
async fn report(
    reporter: &mut HealthReporter,
    catalog: &Catalog,
    phase: Phase,
    known: &mut BTreeSet<String>,
) {
    let status = |works: bool| match (phase, works) {
        (Phase::Open, true) => ServingStatus::Serving,
        _ => ServingStatus::NotServing,
    };
    let models = catalog.readiness();
    let expected_ready = match catalog.default_model() {
        Some(default) => models.iter().any(|(name, ready)| name == default && *ready),
        None => !catalog.ready_workers().is_empty(),
    };
    for name in WORKER_SERVICES {
        reporter
            .set_service_status(name, status(expected_ready))
            .await;
    }
    for name in OWN_SERVICES {
        reporter.set_service_status(name, status(true)).await;
    }
    let names: BTreeSet<String> = models.iter().map(|(name, _)| name.clone()).collect();
    for gone in known.difference(&names) {
        reporter.clear_service_status(gone).await;
    }
    for (name, ready) in models {
        reporter.set_service_status(name, status(ready)).await;
    }
    *known = names;
}

#[cfg(test)]
mod tests {
    use tonic::Request;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_check_response::ServingStatus as Wire;
    use tonic_health::pb::health_server::Health as _;
    use tonic_health::server::HealthService;
    use velox_proto::v1::{self, Backend};

    use super::*;
    use crate::pool::scripted::ScriptedWorker;
    use crate::pool::{LossCause, PoolEvent, WorkerKey};

    struct Watched {
        catalog: Arc<Catalog>,
        closing: watch::Sender<Option<Duration>>,
        service: HealthService,
    }

    impl Watched {
        /// Lets the watcher see what happened, then asks as a client does.
        async fn status(&self, service: &str) -> Option<Wire> {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let request = HealthCheckRequest {
                service: service.to_owned(),
            };
            let response = self.service.check(Request::new(request)).await.ok()?;
            Some(response.into_inner().status())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn health_follows_workers_models_and_the_drain() {
        let catalog = Arc::new(Catalog::new(&["m".to_owned()]));
        let reporter = HealthReporter::new();
        let closing = watch::Sender::new(None);
        let tasks = tokio_util::task::TaskTracker::new();
        let end = CancellationToken::new();
        tasks.spawn(watch(
            reporter.clone(),
            Arc::clone(&catalog),
            closing.subscribe(),
            end.clone(),
        ));
        let house = Watched {
            catalog,
            closing,
            service: HealthService::from_health_reporter(reporter),
        };
        for name in ["", inference_service_server::SERVICE_NAME, "m"] {
            assert_eq!(house.status(name).await, Some(Wire::NotServing), "{name:?}");
        }
        let admin = admin_service_server::SERVICE_NAME;
        assert_eq!(house.status(admin).await, Some(Wire::Serving));
        assert_eq!(house.status("unknown").await, None);

        let key = WorkerKey {
            slot: 0,
            incarnation: 1,
        };
        let model = v1::Model {
            name: "m".to_owned(),
            context_length: 8,
            vocab_size: 8,
            ..v1::Model::default()
        };
        let worker = ScriptedWorker::new(key, Backend::Cpu, &[model]);
        let ready = PoolEvent::Ready {
            worker: key,
            facts: Arc::clone(&worker.facts),
            models: worker.models.values().cloned().collect(),
        };
        house.catalog.observe(&ready);
        for name in ["", inference_service_server::SERVICE_NAME, "m"] {
            assert_eq!(house.status(name).await, Some(Wire::Serving), "{name:?}");
        }
        house.catalog.observe(&PoolEvent::Lost {
            worker: key,
            cause: LossCause::Killed(9),
        });
        assert_eq!(house.status("").await, Some(Wire::NotServing));
        house.catalog.observe(&ready);
        assert_eq!(house.status("m").await, Some(Wire::Serving));

        house.closing.send_replace(Some(Duration::ZERO));
        for name in ["", admin, "m"] {
            assert_eq!(house.status(name).await, Some(Wire::NotServing), "{name:?}");
        }
        end.cancel();
        tasks.close();
        tasks.wait().await;
    }
}
