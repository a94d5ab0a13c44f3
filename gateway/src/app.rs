//! The gateway as a whole: starts its parts, owns their tasks, ends them in order.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use velox_proto::DESCRIPTORS;

use crate::catalog::Catalog;
use crate::config::{Config, ListenConfig};
use crate::deadline::DeadlineLayer;
use crate::error::GatewayError;
use crate::health;
use crate::listen::{self, SocketListener};
use crate::pool::{Pool, PoolError, WorkerKey};
use crate::rpc::{self, Context};
use crate::scheduler::{LeaseFuture, Scheduler, Workers};
use crate::texts::Texts;

/// Streams of one connection at a time.
const MAX_STREAMS_PER_CONNECTION: u32 = 1024;

/// Bytes of request headers.
const MAX_HEADER_BYTES: u32 = 32 * 1024;

/// Bytes in flight of one stream: a tensor in a few round trips.
const STREAM_WINDOW_BYTES: u32 = 2 * 1024 * 1024;

/// Bytes in flight of one connection.
const CONNECTION_WINDOW_BYTES: u32 = 8 * 1024 * 1024;

/// Silence of a connection after which it is pinged, and how long an answer may take.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// Time that connections get to close once nothing runs: streams such as Health/Watch never end by themselves.
const CONNECTION_GRACE: Duration = Duration::from_secs(1);

/// Time that workers get to end; their supervisors kill them well before.
const TASK_GRACE: Duration = Duration::from_secs(15);

/// Workers lost before the first one was ready after which the start has failed.
const MAX_FAILED_STARTS: u32 = 3;

/// Everything that runs.
#[derive(Debug)]
pub struct App {
    context: Arc<Context>,
    tasks: TaskTracker,
    /// Ends connections and what reports on them.
    servers: CancellationToken,
    /// Ends the scheduler and the workers.
    workers: CancellationToken,
    socket: Option<PathBuf>,
    address: Option<SocketAddr>,
}

impl App {
    /// Binds the listeners, starts the workers and serves. Models load meanwhile: see [`App::ready`].
    ///
    /// # Errors
    /// [`GatewayError`] if a listener cannot be bound.
    pub async fn start(config: Config) -> Result<Self, GatewayError> {
        let listeners = Listeners::bind(&config.listen).await?;
        let tasks = TaskTracker::new();
        let servers = CancellationToken::new();
        let workers = CancellationToken::new();
        let expected: Vec<String> = config
            .pool
            .models
            .iter()
            .map(|model| model.name.clone())
            .collect();
        let catalog = Arc::new(Catalog::new(&expected));
        let (pool, events) = Pool::start(config.pool, tasks.clone(), workers.clone());
        let scheduler = Scheduler::start(
            config.scheduler,
            PooledWorkers(pool.clone()),
            events,
            Arc::clone(&catalog),
            (&tasks, workers.clone()),
        );
        let texts = Arc::new(Texts::new(pool.clone()));
        let context = Arc::new(Context {
            scheduler,
            limits: config.scheduler,
            texts,
            catalog,
            pool,
            tasks: tasks.clone(),
            model_folder: config.model_folder,
            endpoints: listeners.endpoints(),
            closing: watch::Sender::new(None),
        });
        let app = Self {
            socket: config.listen.socket,
            address: listeners.address(),
            context,
            tasks,
            servers,
            workers,
        };
        app.serve(listeners)?;
        app.prepare_texts();
        Ok(app)
    }

    /// Waits until every expected model is served; without models, until a worker is ready.
    pub async fn ready(&self) {
        let catalog = &self.context.catalog;
        let mut changes = catalog.changes();
        loop {
            changes.mark_unchanged();
            let models = catalog.readiness();
            let all = models.iter().all(|(_name, ready)| *ready);
            if all && !catalog.ready_workers().is_empty() {
                return;
            }
            // The sender lives as long as the catalog.
            let _alive = changes.changed().await;
        }
    }

    /// Waits until the start has failed for good: an expected model cannot be loaded, or workers keep dying
    /// before one was ever ready. After a good start it waits for ever.
    pub async fn failure(&self) -> GatewayError {
        let catalog = &self.context.catalog;
        let mut changes = catalog.changes();
        loop {
            changes.mark_unchanged();
            if let Some(error) = catalog.start_failure(MAX_FAILED_STARTS) {
                return error;
            }
            // The sender lives as long as the catalog.
            let _alive = changes.changed().await;
        }
    }

    /// Waits until a caller asks for the end; returns the grace for running requests.
    pub async fn closing(&self) -> Duration {
        let mut closing = self.context.closing.subscribe();
        loop {
            if let Some(grace) = *closing.borrow_and_update() {
                return grace;
            }
            // The sender lives as long as the context.
            let _alive = closing.changed().await;
        }
    }

    /// Returns where the gateway serves, as one JSON object.
    #[must_use]
    pub fn announcement(&self) -> serde_json::Value {
        let socket = self.socket.as_ref().map(|path| path.display().to_string());
        let endpoint = self.address.map(|address| format!("http://{address}"));
        serde_json::json!({
            "endpoint": endpoint,
            "socket": socket,
            "pid": std::process::id(),
        })
    }

    /// Returns the loopback address in use.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Takes no new requests, lets running ones finish for `grace`, then ends everything.
    pub async fn shutdown(&self, grace: Duration) {
        self.context.closing.send_replace(Some(grace));
        let mut load = self.context.scheduler.load();
        let idle = load.wait_for(|load| load.running + load.waiting == 0);
        if tokio::time::timeout(grace, idle).await.is_err() {
            let left = *self.context.scheduler.load().borrow();
            tracing::warn!(?left, "grace is over, requests are cut off");
        }
        self.abort().await;
    }

    /// Ends everything now; what runs gets UNAVAILABLE.
    pub async fn abort(&self) {
        self.context.closing.send_replace(Some(Duration::ZERO));
        self.workers.cancel();
        self.servers.cancel();
        self.tasks.close();
        if tokio::time::timeout(TASK_GRACE, self.tasks.wait())
            .await
            .is_err()
        {
            tracing::error!(tasks = self.tasks.len(), "tasks did not end in time");
        }
    }

    fn serve(&self, listeners: Listeners) -> Result<(), GatewayError> {
        let (reporter, health_service) = tonic_health::server::health_reporter();
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let described =
            |_error| GatewayError::Internal("the descriptors of our own protos are malformed");
        let routes = rpc::routes(&self.context)
            .add_service(health_service)
            .add_service(reflection().build_v1().map_err(described)?)
            .add_service(reflection().build_v1alpha().map_err(described)?);
        self.tasks.spawn(health::watch(
            reporter,
            Arc::clone(&self.context.catalog),
            self.context.closing.subscribe(),
            self.servers.clone(),
        ));
        if let Some(socket) = listeners.socket {
            let (connections, file) = socket.connections();
            let server = serve_connections(routes.clone(), connections, self.servers.clone());
            self.tasks.spawn(async move {
                server.await;
                drop(file);
            });
        }
        if let Some(listener) = listeners.tcp {
            let connections = listen::loopback_connections(listener);
            self.tasks
                .spawn(serve_connections(routes, connections, self.servers.clone()));
        }
        Ok(())
    }

    /// Makes tokenizers as soon as their models are there, so that the first request need not wait.
    fn prepare_texts(&self) {
        let context = Arc::clone(&self.context);
        let end = self.servers.clone();
        self.tasks.spawn(async move {
            let mut changes = context.catalog.changes();
            loop {
                changes.mark_unchanged();
                for model in context.catalog.models() {
                    let limit = context.limits.worker_wait;
                    let text = context.texts.model(&context.catalog, &model.name, limit);
                    let made = tokio::select! {
                        () = end.cancelled() => return,
                        made = text => made,
                    };
                    if let Err(error) = made {
                        tracing::error!(model = model.name, %error, "model without tokenizer");
                    }
                }
                context.texts.retain(&context.catalog);
                tokio::select! {
                    () = end.cancelled() => return,
                    changed = changes.changed() => if changed.is_err() { return },
                }
            }
        });
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.servers.cancel();
        self.workers.cancel();
    }
}

/// What was bound before anything was started.
struct Listeners {
    socket: Option<SocketListener>,
    socket_path: Option<PathBuf>,
    tcp: Option<tokio::net::TcpListener>,
}

impl Listeners {
    async fn bind(config: &ListenConfig) -> Result<Self, GatewayError> {
        let socket = config
            .socket
            .as_deref()
            .map(SocketListener::bind)
            .transpose()?;
        let tcp = match config.address {
            Some(address) => Some(listen::bind_loopback(address).await?),
            None => None,
        };
        Ok(Self {
            socket,
            socket_path: config.socket.clone(),
            tcp,
        })
    }

    fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref()?.local_addr().ok()
    }

    fn endpoints(&self) -> Vec<String> {
        let socket = self.socket_path.as_ref();
        let socket = socket.map(|path| format!("unix:{}", path.display()));
        let address = self.address().map(|address| format!("http://{address}"));
        socket.into_iter().chain(address).collect()
    }
}

/// Serves until `end`, then lets connections close for a moment.
async fn serve_connections<S, C>(routes: Routes, connections: S, end: CancellationToken)
where
    S: Stream<Item = std::io::Result<C>> + Send + 'static,
    C: tokio::io::AsyncRead + tokio::io::AsyncWrite + Connected + Unpin + Send + 'static,
{
    let server = Server::builder()
        .max_concurrent_streams(MAX_STREAMS_PER_CONNECTION)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keepalive_interval(Some(KEEPALIVE.0))
        .http2_keepalive_timeout(Some(KEEPALIVE.1))
        .layer(DeadlineLayer)
        .add_routes(routes)
        .serve_with_incoming_shutdown(connections, end.clone().cancelled_owned());
    let hurry = async {
        end.cancelled().await;
        tokio::time::sleep(CONNECTION_GRACE).await;
    };
    tokio::select! {
        served = server => if let Err(error) = served {
            tracing::error!(%error, "server ended");
        },
        () = hurry => tracing::debug!("connections were still open"),
    }
}

/// The pool as the scheduler uses it.
#[derive(Debug)]
struct PooledWorkers(Pool);

impl Workers for PooledWorkers {
    fn submit(
        &self,
        worker: WorkerKey,
        plan: velox_proto::worker::v1::StepPlan,
    ) -> Result<(), PoolError> {
        self.0.submit(worker, plan)
    }

    fn lease(&self, worker: WorkerKey, byte_len: u64) -> LeaseFuture {
        let pool = self.0.clone();
        Box::pin(async move { pool.lease(worker, byte_len).await })
    }
}
