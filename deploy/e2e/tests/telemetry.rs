//! What a collector of spans gets, from a gateway that was built to export them.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context as _;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind};
use rustix::process::Signal;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};
use velox_e2e::ask::generate;
use velox_e2e::gateway::Plan;
use velox_e2e::story::story;
use velox_proto::trace::{TRACEPARENT, TraceContext};
use velox_proto::v1::GenerateRequest;

/// Exports that may wait to be looked at.
const EXPORTS: usize = 64;

/// The call that a client traces.
const CALLER: TraceContext = TraceContext {
    trace_id: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736,
    parent_id: 0x00f0_67aa_0ba9_02b7,
    flags: 1,
};

/// Keeps what is exported.
#[derive(Debug)]
struct Collector(mpsc::Sender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0
            .try_send(request.into_inner())
            .map_err(|error| Status::resource_exhausted(error.to_string()))?;
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// Starts a collector that lives as long as the set of its task.
async fn collector(
    tasks: &mut JoinSet<Result<(), tonic::transport::Error>>,
) -> anyhow::Result<(SocketAddr, mpsc::Receiver<ExportTraceServiceRequest>)> {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let (sender, exports) = mpsc::channel(EXPORTS);
    let server = tonic::transport::Server::builder()
        .add_service(TraceServiceServer::new(Collector(sender)))
        .serve_with_incoming(TcpListenerStream::new(listener));
    tasks.spawn(server);
    Ok((address, exports))
}

/// Asks for two tokens, as a client that has a trace of its own.
fn traced_call() -> anyhow::Result<Request<GenerateRequest>> {
    let mut request = Request::new(generate("Hello", 2));
    let value = CALLER.to_string().parse()?;
    request.metadata_mut().insert(TRACEPARENT, value);
    Ok(request)
}

fn text<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a str> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

#[test]
fn the_spans_of_a_request_reach_a_collector_before_the_gateway_ends() -> anyhow::Result<()> {
    story(|| async {
        let mut tasks = JoinSet::new();
        let (address, mut exports) = collector(&mut tasks).await?;
        let mut gateway = Plan::fake("honest")?
            .argument("--otlp-endpoint", format!("http://{address}"))
            // Whatever else makes spans, the exporter's own connection above all, stays here.
            .argument("--log", "trace")
            .start()
            .await?;
        let mut answer = gateway
            .client()
            .inference()
            .generate(traced_call()?)
            .await?
            .into_inner();
        while answer.message().await?.is_some() {}

        // A batch waits for seconds to fill up; the end of the gateway does not wait for it.
        gateway.signal(Signal::TERM)?;
        assert!(gateway.ended().await?.success());
        exports.close();
        let mut spans: Vec<Span> = Vec::new();
        while let Some(export) = exports.recv().await {
            for part in export.resource_spans {
                let resource = part.resource.context("spans without a resource")?;
                let service = text(&resource.attributes, "service.name");
                assert_eq!(service, Some("velox-gateway"));
                spans.extend(part.scope_spans.into_iter().flat_map(|scope| scope.spans));
            }
        }

        let by_name: HashMap<&str, &Span> = spans
            .iter()
            .map(|span| (span.name.as_str(), span))
            .collect();
        let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(by_name.len(), spans.len(), "{names:?}");
        let call = by_name
            .get("velox.v1.InferenceService/Generate")
            .with_context(|| format!("{names:?}"))?;
        assert_eq!(call.kind(), SpanKind::Server);
        assert_eq!(call.parent_span_id, CALLER.parent_id.to_be_bytes());
        assert_eq!(text(&call.attributes, "rpc.system.name"), Some("grpc"));
        let mut phases = Vec::new();
        for name in ["queue", "prefill", "decode"] {
            let phase = by_name.get(name).with_context(|| format!("{names:?}"))?;
            assert_eq!(phase.parent_span_id, call.span_id, "{name}");
            assert!(phase.start_time_unix_nano <= phase.end_time_unix_nano);
            phases.push(phase.start_time_unix_nano);
        }
        assert!(phases.is_sorted(), "{phases:?}");
        assert_eq!(spans.len(), 4, "{names:?}");
        for span in &spans {
            assert_eq!(
                span.trace_id,
                CALLER.trace_id.to_be_bytes(),
                "{}",
                span.name
            );
        }
        Ok(())
    })
}
