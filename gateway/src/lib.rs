//! The gateway: public gRPC, text, scheduling and the pool of kernel workers.
//!
//! A request passes through the modules in this order:
//!
//! 1. [`listen`] accepts the connection, [`deadline`] bounds the call, [`rpc`] reads the message.
//! 2. [`request`] turns it into a [`request::ValidRequest`] with the help of [`text`] and [`catalog`].
//! 3. [`scheduler`] queues it ([`admission`]) and plans it ([`planner`]) on a worker of the [`pool`].
//! 4. [`response`] turns sampled ids into text, finds stops and reports what really ran.
//!
//! [`app`] owns every task; [`health`] says whether work gets done; [`error`] is the one error type.

#![forbid(unsafe_code)]

pub mod admission;
pub mod app;
pub mod catalog;
pub mod config;
pub mod deadline;
pub mod error;
pub mod health;
pub mod listen;
pub mod planner;
pub mod policy;
pub mod pool;
pub mod request;
pub mod response;
pub mod rpc;
pub mod scheduler;
pub mod telemetry;
pub mod text;
pub mod texts;
