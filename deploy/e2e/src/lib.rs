//! Starts the real binaries and breaks them.
//!
//! * [`story`]: runs one test with a limit of time, alone on the machine, and shows the gateways' logs if it fails.
//! * [`gateway`]: starts `velox-gateway` with real or fake workers, and ends it whatever happens.
//! * [`ask`]: short ways to say what a client says.
//! * [`command_line`]: calls of `velox-client` as scripts make them.
//! * [`process`] and [`snapshot`]: what an operating system and a gateway count, to be compared with a base.
//! * [`copying`]: what tests and `velox-fake-worker` agree on.
//! * [`golden`]: what an independent engine said.
//!
//! Nothing here waits for a time and then asserts: [`story::eventually`] asks until the answer is right.

#![forbid(unsafe_code)]

pub mod ask;
pub mod command_line;
pub mod copying;
pub mod gateway;
pub mod golden;
pub mod process;
pub mod programs;
pub mod snapshot;
pub mod story;
