//! Breaks the worker on purpose, for the end-to-end tests. Only with the feature `fault-hooks`.

use tonic::{Request, Response, Status};
use velox_proto::worker::v1 as wire;
use velox_proto::worker::v1::fault_service_server::FaultService;

use crate::command::Command;
use crate::control::ControlService;
use crate::error::WorkerError;

/// The fault that waits for its plan.
#[derive(Debug, Default)]
pub struct Faults {
    armed: Option<Armed>,
}

#[derive(Debug)]
struct Armed {
    fault: wire::Fault,
    plans_left: u32,
}

impl Faults {
    /// Arms a fault; a former one is replaced.
    ///
    /// # Errors
    /// [`WorkerError::Invalid`] for a number that is not in the table.
    pub fn arm(&mut self, request: &wire::InjectFaultRequest) -> Result<(), WorkerError> {
        let fault = wire::Fault::try_from(request.fault)
            .ok()
            .filter(|&fault| fault != wire::Fault::Unspecified)
            .ok_or_else(|| WorkerError::Invalid {
                field: "fault",
                problem: format!("{} is not in the table", request.fault),
            })?;
        self.armed = Some(Armed {
            fault,
            plans_left: request.after_plans,
        });
        Ok(())
    }

    /// Counts a plan, and breaks when its time has come.
    ///
    /// # Panics
    /// With [`wire::Fault::Panic`], on purpose.
    pub fn before_plan(&mut self) {
        let Some(armed) = &mut self.armed else { return };
        if armed.plans_left > 0 {
            armed.plans_left -= 1;
            return;
        }
        let fault = armed.fault;
        self.armed = None;
        match fault {
            wire::Fault::Panic => panic!("injected panic"),
            wire::Fault::Wedge => loop {
                std::thread::park();
            },
            wire::Fault::OutOfMemory => {
                let layout = std::alloc::Layout::new::<[u8; 4096]>();
                std::alloc::handle_alloc_error(layout)
            }
            wire::Fault::Exit => std::process::abort(),
            wire::Fault::Unspecified => {}
        }
    }
}

#[tonic::async_trait]
impl FaultService for ControlService {
    async fn inject_fault(
        &self,
        request: Request<wire::InjectFaultRequest>,
    ) -> Result<Response<wire::InjectFaultResponse>, Status> {
        let request = request.into_inner();
        self.ask(|reply| Command::Fault { request, reply }).await?;
        Ok(Response::new(wire::InjectFaultResponse {}))
    }
}
