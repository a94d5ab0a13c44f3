//! Logs on standard error, spans for every call, and the W3C trace context that ties them together.

use std::io::IsTerminal as _;

use tracing::Span;
#[cfg(feature = "otlp")]
use tracing_subscriber::Layer as _;
#[cfg(feature = "otlp")]
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, fmt};
use velox_proto::trace::{TRACEPARENT, TraceContext};

use crate::config::Arguments;
use crate::error::GatewayError;

/// How the targets of our own spans begin.
#[cfg(feature = "otlp")]
const OUR_TARGETS: &str = "velox_";

/// Keeps telemetry alive until [`Telemetry::end`].
#[derive(Debug)]
pub struct Telemetry {
    #[cfg(feature = "otlp")]
    provider: Option<opentelemetry_sdk::trace::SdkTracerProvider>,
}

impl Telemetry {
    /// Starts logging, and exporting if it was asked for. Runs in a runtime: it drives the collector's connection.
    ///
    /// # Errors
    /// [`GatewayError::Config`] if the filter or the collector's address is malformed.
    pub fn start(arguments: &Arguments) -> Result<Self, GatewayError> {
        let filter = EnvFilter::try_new(&arguments.log)
            .map_err(|error| GatewayError::Config(format!("log filter: {error}")))?;
        let subscriber = tracing_subscriber::registry().with(filter).with(
            fmt::layer()
                .with_ansi(std::io::stderr().is_terminal())
                .with_writer(std::io::stderr),
        );
        #[cfg(feature = "otlp")]
        {
            // An empty variable is none.
            let endpoint = arguments.otlp_endpoint.as_deref();
            let provider = match endpoint.filter(|endpoint| !endpoint.is_empty()) {
                Some(endpoint) => Some(otlp::provider(endpoint)?),
                None => None,
            };
            // The exporter's own connection makes spans too: exporting those would make more of them.
            let ours = filter_fn(|metadata| metadata.target().starts_with(OUR_TARGETS));
            let exported = provider.as_ref().map(otlp::layer);
            subscriber
                .with(exported.map(|layer| layer.with_filter(ours)))
                .try_init()
                .map_err(|error| GatewayError::Config(error.to_string()))?;
            Ok(Self { provider })
        }
        #[cfg(not(feature = "otlp"))]
        {
            subscriber
                .try_init()
                .map_err(|error| GatewayError::Config(error.to_string()))?;
            Ok(Self {})
        }
    }

    /// Sends what was not exported yet, for a few seconds at most.
    pub async fn end(self) {
        #[cfg(feature = "otlp")]
        if let Some(provider) = self.provider {
            // The call blocks until the export is over, and the export needs this thread: it drives the connection.
            let flushed = tokio::task::spawn_blocking(move || {
                provider.shutdown_with_timeout(otlp::FLUSH_LIMIT)
            });
            match flushed.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(%error, "spans were lost"),
                Err(error) => tracing::warn!(%error, "spans were lost"),
            }
        }
    }
}

/// Reads the caller's trace context; a malformed one counts as none, as the specification wants.
#[must_use]
pub fn caller(metadata: &tonic::metadata::MetadataMap) -> Option<TraceContext> {
    metadata.get(TRACEPARENT)?.to_str().ok()?.parse().ok()
}

/// Opens the span of a call below the caller's.
#[must_use]
pub fn call_span(method: &'static str, caller: Option<TraceContext>) -> Span {
    let span = tracing::info_span!(
        "rpc",
        otel.name = method,
        otel.kind = "server",
        rpc.system.name = "grpc",
        rpc.method = method,
        trace_id = tracing::field::Empty,
    );
    if let Some(caller) = caller {
        span.record("trace_id", format!("{:032x}", caller.trace_id));
        #[cfg(feature = "otlp")]
        otlp::adopt(&span, caller);
    }
    span
}

/// Returns the trace context for the worker's spans: our own span if it is exported, else the caller's.
#[must_use]
pub fn traceparent(span: &Span, caller: Option<TraceContext>) -> String {
    #[cfg(feature = "otlp")]
    if let Some(own) = otlp::context(span) {
        return own.to_string();
    }
    // Without an exporter the span has no id of its own.
    let _unexported = span;
    caller
        .map(|context| context.to_string())
        .unwrap_or_default()
}

#[cfg(feature = "otlp")]
mod otlp {
    use std::time::Duration;

    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState,
        TracerProvider as _,
    };
    use opentelemetry_otlp::WithExportConfig as _;
    use opentelemetry_sdk::trace::{SdkTracerProvider, Tracer};
    use tracing::Span;
    use tracing_opentelemetry::{OpenTelemetryLayer, OpenTelemetrySpanExt as _};
    use velox_proto::trace::TraceContext;

    use crate::error::GatewayError;

    /// What the last export gets: a collector that does not answer must not keep the process.
    pub(super) const FLUSH_LIMIT: Duration = Duration::from_secs(5);

    pub(super) fn provider(endpoint: &str) -> Result<SdkTracerProvider, GatewayError> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .build()
            .map_err(|error| GatewayError::Config(format!("otlp endpoint: {error}")))?;
        let resource = opentelemetry_sdk::Resource::builder()
            .with_service_name("velox-gateway")
            .build();
        Ok(SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(resource)
            .build())
    }

    pub(super) fn layer<S>(provider: &SdkTracerProvider) -> OpenTelemetryLayer<S, Tracer>
    where
        S: tracing::Subscriber + for<'span> tracing_subscriber::registry::LookupSpan<'span>,
    {
        tracing_opentelemetry::layer().with_tracer(provider.tracer("velox-gateway"))
    }

    pub(super) fn adopt(span: &Span, caller: TraceContext) {
        let remote = SpanContext::new(
            TraceId::from_bytes(caller.trace_id.to_be_bytes()),
            SpanId::from_bytes(caller.parent_id.to_be_bytes()),
            TraceFlags::new(caller.flags),
            true,
            TraceState::default(),
        );
        let parent = opentelemetry::Context::new().with_remote_span_context(remote);
        if let Err(error) = span.set_parent(parent) {
            tracing::debug!(%error, "span without its parent");
        }
    }

    pub(super) fn context(span: &Span) -> Option<TraceContext> {
        let context = span.context();
        let own = context.span().span_context().clone();
        own.is_valid().then(|| TraceContext {
            trace_id: u128::from_be_bytes(own.trace_id().to_bytes()),
            parent_id: u64::from_be_bytes(own.span_id().to_bytes()),
            flags: own.trace_flags().to_u8(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_s_context_is_passed_on_and_nonsense_is_not() {
        let example = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let mut metadata = tonic::metadata::MetadataMap::new();
        metadata.insert(TRACEPARENT, example.parse().unwrap());
        let context = caller(&metadata);
        assert_eq!(traceparent(&call_span("test", context), context), example);
        metadata.insert(TRACEPARENT, "nonsense".parse().unwrap());
        assert_eq!(caller(&metadata), None);
        assert_eq!(traceparent(&call_span("test", None), None), "");
    }
}
