//! Client library of Velox: endpoints, connections, typed errors and streams of answers. No terminal code.
//!
//! ```no_run
//! # async fn example() -> Result<(), velox_client::error::ClientError> {
//! use velox_client::{Client, endpoint::Endpoint};
//! use velox_proto::v1::GenerateRequest;
//!
//! let mut client = Client::connect(&Endpoint::default_candidates()).await?;
//! let mut answer = client.generate(GenerateRequest::default(), None).await?;
//! while let Some(event) = answer.next().await? {
//!     let _text = event.text;
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod answer;
pub mod connection;
pub mod endpoint;
pub mod error;
pub mod local;
pub mod trace;

pub use connection::Client;
