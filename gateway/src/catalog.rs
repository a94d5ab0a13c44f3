//! Which models there are: what their workers say of them, and the tokenizers and templates made of that.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use velox_proto::error::ServiceFault;
use velox_proto::v1::{self, Backend};

use crate::error::GatewayError;
use crate::policy::{AUTO_ORDER, label};
use crate::pool::{ModelFacts, PoolEvent, WorkerFacts, WorkerKey};
use crate::request::ModelLimits;

/// A model on one slot of the pool.
#[derive(Debug, Clone)]
struct Host {
    worker: WorkerKey,
    model: Arc<ModelFacts>,
    facts: Arc<WorkerFacts>,
    is_ready: bool,
}

/// What is known of a name.
#[derive(Debug, Default)]
struct Entry {
    /// By slot; a lost process stays here because its successor will load the same.
    hosts: BTreeMap<u32, Host>,
    fault: Option<ServiceFault>,
}

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<String, Entry>,
    /// Ready processes and what they said.
    workers: BTreeMap<u32, (WorkerKey, Arc<WorkerFacts>)>,
    /// Processes that were lost before any was ever ready, and why the last one.
    failed_starts: (u32, String),
    was_ready: bool,
}

/// A model that at least one worker has loaded, now or before a restart.
#[derive(Debug, Clone)]
pub struct ResidentModel {
    /// What the worker said of it.
    pub facts: Arc<ModelFacts>,
    /// A worker that can be asked for the tokenizer; `None` while all restart.
    pub worker: Option<WorkerKey>,
    /// What a request may not exceed.
    pub limits: ModelLimits,
}

/// The one list of models. The scheduler feeds it, calls and health read it.
#[derive(Debug)]
pub struct Catalog {
    state: Mutex<State>,
    default_model: Option<String>,
    changes: watch::Sender<u64>,
}

impl Catalog {
    /// Makes a catalog that expects the given models; the first one is the default.
    #[must_use]
    pub fn new(expected: &[String]) -> Self {
        let entries = expected
            .iter()
            .map(|name| (name.clone(), Entry::default()))
            .collect();
        Self {
            state: Mutex::new(State {
                entries,
                ..State::default()
            }),
            default_model: expected.first().cloned(),
            changes: watch::Sender::new(0),
        }
    }

    /// Takes over what an event says about models.
    pub fn observe(&self, event: &PoolEvent) {
        let mut state = self.lock();
        match event {
            PoolEvent::Ready {
                worker,
                facts,
                models,
            } => {
                state.was_ready = true;
                state
                    .workers
                    .insert(worker.slot, (*worker, Arc::clone(facts)));
                for entry in state.entries.values_mut() {
                    // What the former process of the slot had and this one has not is gone.
                    entry.hosts.remove(&worker.slot);
                }
                for model in models {
                    state.host(*worker, model);
                }
            }
            PoolEvent::ModelLoaded { worker, model } => state.host(*worker, model),
            PoolEvent::ModelUnloaded { worker, model } => {
                if let Some(entry) = state.entries.get_mut(model) {
                    entry.hosts.remove(&worker.slot);
                    if entry.hosts.is_empty() {
                        state.entries.remove(model);
                    }
                }
            }
            PoolEvent::ModelFailed { model, fault, .. } => {
                // A name that nobody expects was asked for at run time: its caller is told.
                if let Some(entry) = state.entries.get_mut(model) {
                    entry.fault = Some(fault.clone());
                }
            }
            PoolEvent::Draining { worker } | PoolEvent::Lost { worker, .. } => {
                if let PoolEvent::Lost { cause, .. } = event
                    && !state.was_ready
                {
                    state.failed_starts.0 += 1;
                    state.failed_starts.1 = cause.to_string();
                }
                state.workers.retain(|_slot, (key, _facts)| key != worker);
                for entry in state.entries.values_mut() {
                    if let Some(host) = entry.hosts.get_mut(&worker.slot)
                        && host.worker == *worker
                    {
                        host.is_ready = false;
                    }
                }
            }
            PoolEvent::Result { .. } => return,
        }
        drop(state);
        self.changes.send_modify(|version| *version += 1);
    }

    /// Returns a receiver that sees every change.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the name that an empty one stands for: the default model, or the only one if none was expected.
    #[must_use]
    pub fn implied_model(&self) -> Option<String> {
        if let Some(default) = self.default_model() {
            return Some(default.to_owned());
        }
        let state = self.lock();
        let mut names = state.entries.keys();
        match (names.next(), names.next()) {
            (Some(only), None) => Some(only.clone()),
            _ => None,
        }
    }

    /// Returns the name of the expected default model.
    #[must_use]
    pub fn default_model(&self) -> Option<&str> {
        self.default_model.as_deref()
    }

    /// Finds a model; the empty name is the default one, or the only one. A model that is expected and not loaded yet is waited for.
    ///
    /// # Errors
    /// [`GatewayError::ModelNotFound`], the worker's fault if it could not load it, or
    /// [`GatewayError::WorkerUnavailable`] after `limit`.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn resident(
        &self,
        name: &str,
        limit: Duration,
    ) -> Result<ResidentModel, GatewayError> {
        let implied = if name.is_empty() {
            Some(self.implied_model().ok_or(GatewayError::NoDefaultModel)?)
        } else {
            None
        };
        let name = implied.as_deref().unwrap_or(name);
        let mut changes = self.changes();
        let found = tokio::time::timeout(limit, async {
            loop {
                changes.mark_unchanged();
                if let Some(found) = self.find(name) {
                    return found;
                }
                // The sender lives as long as the catalog.
                let _alive = changes.changed().await;
            }
        });
        found.await.unwrap_or_else(|_elapsed| {
            Err(GatewayError::WorkerUnavailable {
                waited: limit,
                cause: format!("model {name:?} is not loaded yet"),
                next_token_index: None,
            })
        })
    }

    /// Looks once; `None` = expected, not loaded yet.
    fn find(&self, name: &str) -> Option<Result<ResidentModel, GatewayError>> {
        let state = self.lock();
        let Some(entry) = state.entries.get(name) else {
            return Some(Err(GatewayError::ModelNotFound(name.to_owned())));
        };
        if let Some(found) = entry.resident() {
            return Some(Ok(found));
        }
        let fault = entry.fault.clone()?;
        Some(Err(fault.into()))
    }

    /// Returns every loaded model, by name.
    #[must_use]
    pub fn models(&self) -> Vec<v1::Model> {
        let implied = self.implied_model();
        let state = self.lock();
        let loaded = state.entries.values().filter_map(Entry::resident);
        loaded
            .map(|resident| v1::Model {
                is_default: implied.as_deref() == Some(resident.facts.name()),
                ..resident.facts.model().clone()
            })
            .collect()
    }

    /// Returns the digests of the tokenizers of loaded models.
    #[must_use]
    pub fn tokenizer_digests(&self) -> HashSet<String> {
        let state = self.lock();
        let hosts = state
            .entries
            .values()
            .flat_map(|entry| entry.hosts.values());
        hosts
            .map(|host| host.model.tokenizer_sha256().to_owned())
            .collect()
    }

    /// Returns every known model and whether a ready worker has it.
    #[must_use]
    pub fn readiness(&self) -> Vec<(String, bool)> {
        let state = self.lock();
        let ready = |entry: &Entry| entry.hosts.values().any(|host| host.is_ready);
        state
            .entries
            .iter()
            .map(|(name, entry)| (name.clone(), ready(entry)))
            .collect()
    }

    /// Returns why the start has failed for good, if it has: a worker could not load a model that no worker has, or
    /// `limit` processes were lost before one was ready.
    #[must_use]
    pub fn start_failure(&self, limit: u32) -> Option<GatewayError> {
        let state = self.lock();
        if state.failed_starts.0 >= limit && !state.was_ready {
            return Some(GatewayError::NoWorkerStarts(state.failed_starts.1.clone()));
        }
        let failed = state
            .entries
            .values()
            .filter(|entry| entry.hosts.is_empty())
            .find_map(|entry| entry.fault.clone())?;
        Some(failed.into())
    }

    /// Returns the processes that are ready.
    #[must_use]
    pub fn ready_workers(&self) -> Vec<WorkerKey> {
        self.lock().workers.values().map(|(key, _)| *key).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is complete before the guard goes; a panic elsewhere does not damage the list.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn host(&mut self, worker: WorkerKey, model: &Arc<ModelFacts>) {
        let Some((_, facts)) = self.workers.get(&worker.slot).cloned() else {
            return;
        };
        let entry = self.entries.entry(model.name().to_owned()).or_default();
        entry.fault = None;
        entry.hosts.insert(
            worker.slot,
            Host {
                worker,
                model: Arc::clone(model),
                facts,
                is_ready: true,
            },
        );
    }
}

impl Entry {
    fn resident(&self) -> Option<ResidentModel> {
        let ready = self.hosts.values().find(|host| host.is_ready);
        let host = ready.or_else(|| self.hosts.values().next())?;
        let model = host.model.model();
        let mut backends: Vec<Backend> = self
            .hosts
            .values()
            .map(|host| host.model.backend())
            .collect();
        backends.dedup();
        Some(ResidentModel {
            facts: Arc::clone(&host.model),
            worker: ready.map(|host| host.worker),
            limits: ModelLimits {
                name: model.name.as_str().into(),
                fingerprint: host.model.fingerprint().into(),
                context_length: model.context_length,
                vocab_size: model.vocab_size,
                kv: model.kv.clone().unwrap_or_default(),
                end_token_ids: model.end_tokens.iter().map(|end| end.token_id).collect(),
                missing: host.why_not_others(&backends),
                backends,
            },
        })
    }
}

impl Host {
    /// Says why the other backends do not run the model.
    fn why_not_others(&self, backends: &[Backend]) -> String {
        let others = AUTO_ORDER.iter().filter(|other| !backends.contains(other));
        let reasons: Vec<String> = others
            .map(|&other| {
                let wire = self.facts.wire();
                let entry = wire.backends.iter().find(|entry| entry.backend() == other);
                let why = match entry {
                    Some(entry) if entry.available => "the model is loaded on another backend",
                    Some(entry) if !entry.reason.is_empty() => &entry.reason,
                    _ => "not part of this worker",
                };
                format!("{}: {why}", label(other))
            })
            .collect();
        reasons.join("; ")
    }
}

#[cfg(test)]
mod tests;
