//! Which models every worker should have, and the calls that change that.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use velox_proto::worker::v1 as wire;

use super::board::LiveWorker;
use super::config::ModelSource;
use super::error::PoolError;
use super::event::{LoadEvent, PoolEvent};
use super::facts::ModelFacts;
use super::{Shared, Slot};

/// Most models of a pool: each maps its weights and keeps a tokenizer.
pub const MAX_RESIDENT_MODELS: usize = 16;

/// Loads and unloads that may wait while one is at work.
const MAX_WAITING_CHANGES: usize = 8;

/// The models that a worker loads before it is ready.
#[derive(Debug)]
pub(super) struct ModelList {
    sources: Mutex<Vec<ModelSource>>,
    /// Held by a call that changes the list and the workers, which takes as long as loading takes.
    changes: tokio::sync::Mutex<()>,
    /// One for every such call that works or waits.
    places: Semaphore,
}

impl ModelList {
    pub(super) fn new(sources: Vec<ModelSource>) -> Self {
        Self {
            sources: Mutex::new(sources),
            changes: tokio::sync::Mutex::default(),
            places: Semaphore::new(MAX_WAITING_CHANGES + 1),
        }
    }

    pub(super) fn sources(&self) -> Vec<ModelSource> {
        self.lock().clone()
    }

    /// Calls `declare` if the models of the list were tried, and no others. The list cannot change meanwhile, so a change
    /// finds the worker either still loading (and it will look again) or ready.
    pub(super) fn if_exactly_tried<T>(
        &self,
        tried: &HashSet<ModelSource>,
        declare: impl FnOnce() -> T,
    ) -> Option<T> {
        let sources = self.lock();
        let all = sources.iter().all(|source| tried.contains(source));
        (all && tried.len() == sources.len()).then(declare)
    }

    /// Takes a place in the queue of calls that change the list; kept to the end of the call.
    fn queue(&self) -> Result<SemaphorePermit<'_>, PoolError> {
        self.places
            .try_acquire()
            .map_err(|_full| PoolError::TooManyLoads {
                depth: MAX_WAITING_CHANGES,
                limit: MAX_WAITING_CHANGES,
            })
    }

    fn check_room(&self) -> Result<(), PoolError> {
        let models = self.lock().len();
        if models >= MAX_RESIDENT_MODELS {
            let limit = MAX_RESIDENT_MODELS;
            return Err(PoolError::TooManyModels { models, limit });
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Option<ModelSource> {
        let sources = self.lock();
        sources.iter().find(|source| source.name == name).cloned()
    }

    fn add(&self, source: ModelSource) {
        self.lock().push(source);
    }

    fn remove(&self, name: &str) {
        self.lock().retain(|source| source.name != name);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ModelSource>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Loads a model on every ready worker, then lets later workers load it.
    pub(super) async fn load_everywhere(
        self: Arc<Self>,
        source: ModelSource,
        progress: mpsc::Sender<LoadEvent>,
    ) -> Result<Arc<ModelFacts>, PoolError> {
        let _place = self.models.queue()?;
        // Nobody is left to use a model whose caller went away while others loaded.
        let _changing = tokio::select! {
            biased;
            () = progress.closed() => return Err(PoolError::CallerLeft),
            changing = self.models.changes.lock() => changing,
        };
        if let Some(present) = self.models.find(&source.name) {
            if present != source {
                return Err(PoolError::ModelExists(source.name));
            }
            if let Ok((_live, facts)) = self.worker_with(&source.name) {
                return Ok(facts);
            }
        } else {
            self.models.check_room()?;
        }

        let workers = self.ready_workers();
        let loads: Vec<_> = workers
            .iter()
            .map(|live| {
                let (shared, live) = (Arc::clone(&self), Arc::clone(live));
                let (source, progress) = (source.clone(), progress.clone());
                let load = async move { shared.load_on(&live, &source, &progress).await };
                self.tracker.spawn(load)
            })
            .collect();
        let mut loaded = None;
        let mut refusal = None;
        for load in loads {
            match load.await? {
                Ok(facts) => loaded = Some(facts),
                // Lost meanwhile: its successor loads the model.
                Err(PoolError::WorkerLost(_)) => {}
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        if let Some(error) = refusal {
            for live in &workers {
                self.unload_from(live, &source.name).await?;
            }
            return Err(error);
        }
        let facts = loaded.ok_or(PoolError::NoWorkerReady)?;
        if self.models.find(&source.name).is_none() {
            self.models.add(source.clone());
        }
        self.load_on_latecomers(&source, &workers, &progress).await;
        Ok(facts)
    }

    /// Workers that became ready while the others loaded did not see the list's new entry.
    async fn load_on_latecomers(
        &self,
        source: &ModelSource,
        served: &[Arc<LiveWorker>],
        progress: &mpsc::Sender<LoadEvent>,
    ) {
        let served: HashSet<_> = served.iter().map(|live| live.key).collect();
        for slot in &self.slots {
            let Some(live) = slot.board.ready_worker() else {
                continue;
            };
            if served.contains(&live.key) || slot.board.model(live.key, &source.name).is_some() {
                continue;
            }
            if let Err(error) = self.load_on(&live, source, progress).await {
                self.report_failed_load(&live, &source.name, error).await;
            }
        }
    }

    async fn report_failed_load(&self, live: &LiveWorker, model: &str, error: PoolError) {
        match error {
            PoolError::Refused(fault) => {
                let (worker, model) = (live.key, model.to_owned());
                self.emit(PoolEvent::ModelFailed {
                    worker,
                    model,
                    fault,
                })
                .await;
            }
            // A process that leaves is reported by its supervisor.
            other => tracing::warn!(worker = %live.key, model, error = %other, "model not loaded"),
        }
    }

    /// Loads a model on one worker and lets rows of it open.
    async fn load_on(
        &self,
        live: &LiveWorker,
        source: &ModelSource,
        progress: &mpsc::Sender<LoadEvent>,
    ) -> Result<Arc<ModelFacts>, PoolError> {
        let worker = live.key;
        let report = |event: &wire::LoadModelResponse| {
            let event = LoadEvent {
                worker,
                phase: event.phase.clone(),
                done_bytes: event.done_bytes,
                total_bytes: event.total_bytes,
            };
            // A slow reader of progress must not slow the loading down.
            let _full = progress.try_send(event);
        };
        let config = &self.config;
        let load = live
            .control
            .load(source, config.backend, config.kv_method.as_deref(), report);
        let wire = live
            .on_tensor_thread("LoadModel", config.timeouts.load, load)
            .await?;
        let facts = Arc::new(ModelFacts::try_from_wire(wire, &source.name, &live.facts)?);
        let slot = self.slot_of(live);
        slot.board.add_model(worker, Arc::clone(&facts))?;
        self.emit(PoolEvent::ModelLoaded {
            worker,
            model: Arc::clone(&facts),
        })
        .await;
        Ok(facts)
    }

    /// Unloads a model from every worker; from none if one of them has rows of it.
    pub(super) async fn unload_everywhere(&self, name: &str) -> Result<(), PoolError> {
        let _place = self.models.queue()?;
        let _changing = self.models.changes.lock().await;
        let source = self.models.find(name);
        let source = source.ok_or_else(|| PoolError::UnknownModel(name.to_owned()))?;
        // First of all: a worker that becomes ready from now on does not have it.
        self.models.remove(name);
        let workers = self.ready_workers();
        let mut closed = Vec::new();
        for live in &workers {
            match self.slot_of(live).board.remove_model(live.key, name) {
                Ok(Some(facts)) => closed.push((live, facts)),
                Ok(None) | Err(PoolError::WorkerLost(_)) => {}
                Err(busy) => {
                    for (live, facts) in closed {
                        // A worker that was lost meanwhile has no rows to open.
                        let _lost = self.slot_of(live).board.add_model(live.key, facts);
                    }
                    self.models.add(source);
                    return Err(busy);
                }
            }
        }
        for (live, _facts) in closed {
            self.unload_closed(live, name).await?;
        }
        Ok(())
    }

    /// Unloads a model from one worker, if it has it.
    async fn unload_from(&self, live: &LiveWorker, name: &str) -> Result<(), PoolError> {
        match self.slot_of(live).board.remove_model(live.key, name) {
            Ok(Some(_facts)) => self.unload_closed(live, name).await,
            Ok(None) | Err(PoolError::WorkerLost(_)) => Ok(()),
            Err(busy) => Err(busy),
        }
    }

    /// Unloads a model of which no rows can open any more.
    async fn unload_closed(&self, live: &LiveWorker, name: &str) -> Result<(), PoolError> {
        let limit = self.config.timeouts.load;
        let unload = live.control.unload(name);
        let unloaded = live.on_tensor_thread("UnloadModel", limit, unload).await;
        let worker = live.key;
        let model = name.to_owned();
        self.emit(PoolEvent::ModelUnloaded { worker, model }).await;
        match unloaded {
            Err(_) if self.slot_of(live).board.live(worker).is_err() => Ok(()),
            answer => answer,
        }
    }

    /// Returns a worker that has a model.
    pub(super) fn worker_with(
        &self,
        model: &str,
    ) -> Result<(Arc<LiveWorker>, Arc<ModelFacts>), PoolError> {
        self.slots
            .iter()
            .find_map(|slot| {
                let live = slot.board.ready_worker()?;
                let facts = slot.board.model(live.key, model)?;
                Some((live, facts))
            })
            .ok_or_else(|| PoolError::UnknownModel(model.to_owned()))
    }

    pub(super) fn ready_workers(&self) -> Vec<Arc<LiveWorker>> {
        let slots = self.slots.iter();
        slots.filter_map(|slot| slot.board.ready_worker()).collect()
    }

    /// The slot of a process that was once ready, so it exists.
    pub(super) fn slot_of(&self, live: &LiveWorker) -> &Slot {
        usize::try_from(live.key.slot)
            .ok()
            .and_then(|index| self.slots.get(index))
            .expect("a process belongs to the slot whose supervisor spawned it")
    }
}

#[cfg(test)]
mod tests {
    use velox_proto::error::{Reason, ServiceError as _};

    use super::super::config::LoadShape;
    use super::*;

    #[test]
    fn few_changes_wait() {
        let list = ModelList::new(Vec::new());
        let mut places: Vec<_> = (0..=MAX_WAITING_CHANGES)
            .map(|_| list.queue().unwrap())
            .collect();
        let error = list.queue().unwrap_err();
        assert_eq!(error.reason(), Reason::QueueFull);
        assert!(error.retry_delay().is_some());
        places.pop();
        assert!(list.queue().is_ok());
    }

    #[test]
    fn few_models_are_resident() {
        let list = ModelList::new(Vec::new());
        for index in 0..MAX_RESIDENT_MODELS {
            list.check_room().unwrap();
            list.add(ModelSource {
                name: format!("model {index}"),
                path: "/nowhere/model.gguf".into(),
                shape: LoadShape::default(),
            });
        }
        let error = list.check_room().unwrap_err();
        assert_eq!(error.reason().name(), "TOO_MANY_MODELS");
        assert_eq!(error.reason().code(), tonic::Code::ResourceExhausted);
        assert_eq!(
            error.to_string(),
            "16 models are loaded, limit is 16; unload one first"
        );
        assert_eq!(error.metadata()["models_limit"], "16");
        list.remove("model 3");
        assert!(list.check_room().is_ok());
    }
}
