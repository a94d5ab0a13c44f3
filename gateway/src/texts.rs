//! Tokenizers and chat templates of the resident models, made once for each content.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OnceCell, Semaphore};
use tokio_util::task::TaskTracker;

use crate::catalog::{Catalog, ResidentModel};
use crate::error::GatewayError;
use crate::pool::{Pool, PoolError};
use crate::text::{ChatTemplates, TextError, Tokenizer};

/// Callers that may wait for a thread of text work: as many as the queue of requests behind it holds by default, since
/// a burst that fits there must get there. What waits is only a text, whose length is bounded.
const MAX_WAITING: usize = 256;

/// What turns messages into tokens and tokens into text for one model.
#[derive(Debug)]
pub struct ModelText {
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat templates.
    pub templates: ChatTemplates,
}

type Cell = Arc<OnceCell<Arc<ModelText>>>;

/// The cache, by digest of the description. Content comes from a model file: it is built on a blocking thread.
#[derive(Debug)]
pub struct Texts {
    pool: Pool,
    threads: TextThreads,
    cells: Mutex<HashMap<String, Cell>>,
}

impl Texts {
    /// Makes an empty cache that asks `pool`.
    #[must_use]
    pub fn new(pool: Pool) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            pool,
            threads: TextThreads::new(cores),
            cells: Mutex::new(HashMap::new()),
        }
    }

    /// Finds a model with its text, and waits up to `limit` for a worker that has it.
    ///
    /// # Errors
    /// As [`Catalog::resident`]; the fault of the tokenizer's description.
    ///
    /// # Cancel safety
    /// Nothing is half done: the next caller starts over.
    pub async fn model(
        &self,
        catalog: &Catalog,
        name: &str,
        limit: Duration,
    ) -> Result<(ResidentModel, Arc<ModelText>), GatewayError> {
        let attempt = async {
            loop {
                let mut changes = catalog.changes();
                let resident = catalog.resident(name, limit).await?;
                match self.of(&resident).await {
                    Ok(text) => return Ok((resident, text)),
                    // The worker was lost meanwhile; its successor will say the same.
                    Err(GatewayError::Pool(
                        PoolError::UnknownModel(_)
                        | PoolError::WorkerLost(_)
                        | PoolError::NoWorkerReady,
                    )) => {
                        // The catalog lives as long as this call.
                        let _alive = changes.changed().await;
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        tokio::time::timeout(limit, attempt)
            .await
            .unwrap_or_else(|_elapsed| {
                Err(GatewayError::WorkerUnavailable {
                    waited: limit,
                    cause: "no worker could be asked for the tokenizer".to_owned(),
                    next_token_index: None,
                })
            })
    }

    /// Runs a caller's work on text, which takes milliseconds and more, away from the runtime's threads.
    ///
    /// # Errors
    /// [`GatewayError::QueueFull`] if too many callers wait, [`GatewayError::Internal`] if the work panicked.
    ///
    /// # Cancel safety
    /// Work that has not begun never will.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GatewayError> {
        self.threads.run(work).await
    }

    /// Forgets what no resident model uses.
    pub fn retain(&self, catalog: &Catalog) {
        let used = catalog.tokenizer_digests();
        self.cells().retain(|digest, _cell| used.contains(digest));
    }

    async fn of(&self, model: &ResidentModel) -> Result<Arc<ModelText>, GatewayError> {
        let digest = model.facts.tokenizer_sha256().to_owned();
        let cell = Arc::clone(self.cells().entry(digest).or_default());
        let text = cell
            .get_or_try_init(|| self.build(model.facts.name()))
            .await?;
        Ok(Arc::clone(text))
    }

    async fn build(&self, name: &str) -> Result<Arc<ModelText>, GatewayError> {
        let description = self.pool.tokenizer(name).await?;
        let build = move || -> Result<ModelText, TextError> {
            let tokenizer = Tokenizer::from_description(&description)?;
            let templates = ChatTemplates::from_description(&description, &tokenizer)?;
            Ok(ModelText {
                tokenizer: Arc::new(tokenizer),
                templates,
            })
        };
        Ok(Arc::new(self.threads.run_own(build).await??))
    }

    fn cells(&self) -> std::sync::MutexGuard<'_, HashMap<String, Cell>> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads for text work: as many as there are cores, and a bounded number of callers that wait for one.
///
/// Text comes from outside and its work cannot be interrupted. A caller that leaves while it waits takes its work
/// along; work that has begun keeps its thread until it is done, also without a caller.
#[derive(Debug)]
struct TextThreads {
    free: Arc<Semaphore>,
    /// One for every caller that runs or waits.
    places: Arc<Semaphore>,
    /// Nobody waits for these at the end: what they compute, nobody would read.
    tasks: TaskTracker,
}

impl TextThreads {
    fn new(threads: usize) -> Self {
        Self {
            free: Arc::new(Semaphore::new(threads)),
            places: Arc::new(Semaphore::new(threads.saturating_add(MAX_WAITING))),
            tasks: TaskTracker::new(),
        }
    }

    /// Runs work of a caller, or refuses it.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GatewayError> {
        let place = Arc::clone(&self.places).try_acquire_owned();
        let place = place.map_err(|_full| GatewayError::QueueFull {
            depth: MAX_WAITING,
            limit: MAX_WAITING,
        })?;
        self.run_own(move || {
            let _until_done = place;
            work()
        })
        .await
    }

    /// Runs work of ours, of which there is little: it may wait as long as it takes.
    async fn run_own<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GatewayError> {
        let thread = Arc::clone(&self.free).acquire_owned().await;
        let thread = thread.map_err(|_closed| GatewayError::Internal("text threads are closed"))?;
        let work = move || {
            let _until_done = thread;
            work()
        };
        let done = self.tasks.spawn_blocking(work).await;
        done.map_err(|_panicked| GatewayError::Internal("a text task panicked"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use velox_proto::error::{Reason, ServiceError as _};

    use super::*;

    #[tokio::test]
    async fn work_has_few_threads_and_a_bounded_queue() {
        let threads = Arc::new(TextThreads::new(1));
        let callers = TaskTracker::new();
        let (release, gate) = mpsc::channel::<()>();
        let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
        let spawn = |work: Box<dyn FnOnce() + Send>| {
            let threads = Arc::clone(&threads);
            callers.spawn(async move { threads.run(work).await })
        };
        let first = begun.clone();
        let running = spawn(Box::new(move || {
            first.send("first").unwrap();
            // Ends when the test lets go of the other end.
            let _gone = gate.recv();
        }));
        assert_eq!(begins.recv().await, Some("first"));
        let waiting: Vec<_> = (0..MAX_WAITING)
            .map(|_| {
                let begun = begun.clone();
                spawn(Box::new(move || begun.send("waited").unwrap()))
            })
            .collect();
        while threads.places.available_permits() > 0 {
            tokio::task::yield_now().await;
        }
        let refused = threads.run(|| ()).await.unwrap_err();
        assert_eq!(refused.reason(), Reason::QueueFull);
        assert!(refused.retry_delay().is_some());

        // Running work keeps its thread when its caller leaves; waiting work goes with its caller.
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        assert_eq!(threads.free.available_permits(), 0);
        for caller in waiting {
            caller.abort();
            assert!(caller.await.unwrap_err().is_cancelled());
        }
        assert_eq!(threads.places.available_permits(), MAX_WAITING);
        drop(release);
        threads.run(|| ()).await.unwrap();
        drop(begun);
        assert_eq!(begins.recv().await, None, "abandoned work never began");
    }
}
