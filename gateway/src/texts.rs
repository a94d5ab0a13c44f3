//! Tokenizers and chat templates of the resident models, made once for each content.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::OnceCell;
use tokio_util::task::TaskTracker;

use crate::catalog::{Catalog, ResidentModel};
use crate::error::GatewayError;
use crate::pool::{Pool, PoolError};
use crate::text::{ChatTemplates, TextError, Tokenizer};

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
    tasks: TaskTracker,
    cells: Mutex<HashMap<String, Cell>>,
}

impl Texts {
    /// Makes an empty cache that asks `pool` and builds on `tasks`.
    #[must_use]
    pub fn new(pool: Pool, tasks: TaskTracker) -> Self {
        Self {
            pool,
            tasks,
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
        Ok(Arc::new(blocking(&self.tasks, build).await??))
    }

    fn cells(&self) -> std::sync::MutexGuard<'_, HashMap<String, Cell>> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs work that takes milliseconds away from the runtime's threads.
///
/// # Errors
/// [`GatewayError::Internal`] if the work panicked.
pub async fn blocking<T: Send + 'static>(
    tasks: &TaskTracker,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, GatewayError> {
    tasks
        .spawn_blocking(work)
        .await
        .map_err(|_panicked| GatewayError::Internal("a text task panicked"))
}
