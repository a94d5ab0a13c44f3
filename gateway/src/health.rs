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
