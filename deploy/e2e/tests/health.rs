//! Health and reflection tell the truth.

use anyhow::Context as _;
use rustix::process::Signal;
use tokio_stream::StreamExt as _;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use velox_e2e::ask::still_works;
use velox_e2e::gateway::{MODEL, Plan};
use velox_e2e::process::signal;
use velox_e2e::story::{eventually, story};

/// Services that cannot work without a worker.
const NEED_A_WORKER: [&str; 2] = ["", "velox.v1.InferenceService"];

/// Services that the gateway answers alone.
const NEED_NONE: [&str; 3] = [
    "velox.v1.ModelService",
    "velox.v1.CapabilityService",
    "velox.v1.AdminService",
];

async fn status(channel: &Channel, service: &str) -> anyhow::Result<ServingStatus> {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let response = HealthClient::new(channel.clone()).check(request).await?;
    Ok(response.into_inner().status())
}

async fn becomes(channel: &Channel, service: &str, wanted: ServingStatus) -> anyhow::Result<()> {
    eventually(&format!("{service:?} to be {wanted:?}"), async || {
        Ok((status(channel, service).await? == wanted).then_some(()))
    })
    .await
}

#[test]
fn health_follows_the_only_worker() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let channel = gateway.channel();
        for service in NEED_A_WORKER
            .iter()
            .chain(&NEED_NONE)
            .copied()
            .chain([MODEL])
        {
            assert_eq!(
                status(&channel, service).await?,
                ServingStatus::Serving,
                "{service}"
            );
        }
        let unknown = HealthCheckRequest {
            service: "velox.v1.Nobody".to_owned(),
        };
        let unknown = HealthClient::new(channel.clone()).check(unknown).await;
        assert_eq!(
            unknown.err().context("nobody is healthy")?.code(),
            tonic::Code::NotFound
        );

        // Somebody watches while the worker hangs: it hears of both changes.
        let request = HealthCheckRequest {
            service: MODEL.to_owned(),
        };
        let mut watched = HealthClient::new(channel.clone())
            .watch(request)
            .await?
            .into_inner();
        let first = watched.next().await.context("no first status")??;
        assert_eq!(first.status(), ServingStatus::Serving);

        // It hangs without having anything to do: only a ping can find that.
        signal(gateway.ready_worker().await?.pid, Signal::STOP)?;
        let second = watched.next().await.context("no second status")??;
        assert_eq!(second.status(), ServingStatus::NotServing);
        // The gateway itself is as well as before.
        for service in NEED_NONE {
            assert_eq!(
                status(&channel, service).await?,
                ServingStatus::Serving,
                "{service}"
            );
        }
        for service in NEED_A_WORKER.into_iter().chain([MODEL]) {
            becomes(&channel, service, ServingStatus::Serving).await?;
        }
        let third = watched.next().await.context("no third status")??;
        assert_eq!(third.status(), ServingStatus::Serving);
        assert_eq!(gateway.ready_worker().await?.restarts, 1);
        still_works(&gateway.client()).await
    })
}

#[test]
fn without_a_worker_only_the_gateway_s_own_services_are_healthy() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest,exits-at-once")?.start().await?;
        let channel = gateway.channel();
        signal(gateway.ready_worker().await?.pid, Signal::KILL)?;
        for service in NEED_A_WORKER.into_iter().chain([MODEL]) {
            becomes(&channel, service, ServingStatus::NotServing).await?;
        }
        for service in NEED_NONE {
            assert_eq!(
                status(&channel, service).await?,
                ServingStatus::Serving,
                "{service}"
            );
        }
        Ok(())
    })
}

/// Asks for the list of services in both versions of reflection, whose messages are alike but not the same.
macro_rules! listed_services {
    ($version:ident, $channel:expr) => {{
        use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
        use tonic_reflection::pb::$version::server_reflection_request::MessageRequest;
        use tonic_reflection::pb::$version::server_reflection_response::MessageResponse;
        let request = tonic_reflection::pb::$version::ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let responses = ServerReflectionClient::new($channel)
            .server_reflection_info(tokio_stream::once(request))
            .await?;
        match responses
            .into_inner()
            .next()
            .await
            .context("no answer")??
            .message_response
        {
            Some(MessageResponse::ListServicesResponse(list)) => {
                let names = list.service.into_iter().map(|service| service.name);
                names.collect::<Vec<String>>()
            }
            other => anyhow::bail!("not a list of services: {other:?}"),
        }
    }};
}

#[test]
fn reflection_lists_every_service_in_both_versions() -> anyhow::Result<()> {
    story(|| async {
        let gateway = Plan::fake("honest")?.start().await?;
        let new = listed_services!(v1, gateway.channel());
        let old = listed_services!(v1alpha, gateway.channel());
        for names in [new, old] {
            for service in NEED_NONE
                .into_iter()
                .chain([NEED_A_WORKER[1], "grpc.health.v1.Health"])
            {
                assert!(
                    names.iter().any(|name| name == service),
                    "{service} is not in {names:?}"
                );
            }
        }
        Ok(())
    })
}
