//! KV methods: how keys and values of a row are stored, and what that costs.
//!
//! * [`method`]: names of methods and what the gateway must know of each.
//! * [`budget`]: the bytes that all caches of a model may hold together.
//! * [`paged`]: the store of 16-bit keys and values in pages.
//! * [`error`]: why a cache refuses.
//!
//! What a cache says it holds is summed from its allocations. What attention reads is what is stored: the query at
//! position `p` reads token `j` in the same form whether both came in one chunk or not.
#![forbid(unsafe_code)]

pub mod budget;
pub mod error;
pub mod method;
pub mod paged;

pub use budget::{PageBudget, Reservation};
pub use error::KvError;
pub use method::{KvGeometry, KvMethod, KvShape, ReplayClass};
pub use paged::{AllocatedBytes, PagedCache};
