//! The public services. Handlers read the message, hand over to the modules below and turn errors into status.

mod admin;
mod capabilities;
#[cfg(feature = "fault-hooks")]
mod fault;
mod inference;
mod models;

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_util::task::TaskTracker;
use tonic::codec::CompressionEncoding;
use tonic::service::Routes;
use tonic::{Request, Status};
use velox_proto::error::to_status;
use velox_proto::limits::MAX_MESSAGE_BYTES;
use velox_proto::v1::admin_service_server::AdminServiceServer;
use velox_proto::v1::capability_service_server::CapabilityServiceServer;
use velox_proto::v1::inference_service_server::InferenceServiceServer;
use velox_proto::v1::model_service_server::ModelServiceServer;

use crate::catalog::Catalog;
use crate::error::GatewayError;
use crate::pool::Pool;
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::telemetry;
use crate::texts::Texts;

/// A streamed answer.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What every handler may use.
#[derive(Debug)]
pub struct Context {
    /// Runs rows.
    pub scheduler: Scheduler,
    /// Bounds of the scheduler, for the capability table.
    pub limits: SchedulerConfig,
    /// Knows models.
    pub catalog: Arc<Catalog>,
    /// Knows tokenizers and templates.
    pub texts: Arc<Texts>,
    /// Runs workers.
    pub pool: Pool,
    /// Owns tasks.
    pub tasks: TaskTracker,
    /// Folder of models that are given by name.
    pub model_folder: PathBuf,
    /// Where the gateway listens, as clients write it.
    pub endpoints: Vec<String>,
    /// Open until somebody asks for the end; then the grace for running requests.
    pub closing: watch::Sender<Option<Duration>>,
}

impl Context {
    /// Refuses new work once the gateway goes down.
    fn admit(&self) -> Result<(), GatewayError> {
        if self.closing.borrow().is_some() {
            return Err(GatewayError::Draining);
        }
        Ok(())
    }
}

/// A call's message, with the span and the trace context of the call.
#[derive(Debug)]
struct Call<T> {
    message: T,
    span: tracing::Span,
    traceparent: String,
}

impl<T> Call<T> {
    fn new(method: &'static str, request: Request<T>) -> Self {
        let caller = telemetry::caller(request.metadata());
        let span = telemetry::call_span(method, caller);
        Self {
            message: request.into_inner(),
            traceparent: telemetry::traceparent(&span, caller),
            span,
        }
    }
}

/// Turns an error into a status where it leaves the gateway, and logs those that are faults of ours.
fn refuse(error: GatewayError) -> Status {
    let status = to_status(&error);
    match status.code() {
        tonic::Code::Internal | tonic::Code::Unknown => tracing::error!(%error, "call failed"),
        _ => tracing::debug!(%error, "call refused"),
    }
    status
}

/// Makes the routes of all services.
#[must_use]
pub fn routes(context: &Arc<Context>) -> Routes {
    macro_rules! sized {
        ($server:ident, $service:expr) => {
            $server::new($service)
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES)
                .accept_compressed(CompressionEncoding::Gzip)
        };
    }
    let inference = inference::Inference::new(Arc::clone(context));
    let models = models::Models::new(Arc::clone(context));
    let capabilities = capabilities::Capabilities::new(Arc::clone(context));
    let admin = admin::Admin::new(Arc::clone(context));
    let routes = Routes::new(sized!(InferenceServiceServer, inference))
        .add_service(sized!(ModelServiceServer, models))
        .add_service(sized!(CapabilityServiceServer, capabilities))
        .add_service(sized!(AdminServiceServer, admin));
    #[cfg(feature = "fault-hooks")]
    let routes = routes.add_service(fault::server(Arc::clone(context)));
    routes
}
