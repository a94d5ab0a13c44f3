//! Everything that must be back to base when nothing runs.

use std::collections::BTreeSet;

use crate::gateway::Gateway;
use crate::process;
use crate::story::eventually;

/// Resources of a gateway at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Processes that it is the parent of.
    pub children: Option<usize>,
    /// Open descriptors of its process: connections, channels, shared segments.
    pub descriptors: Option<usize>,
    /// Named shared memory of ours on this machine.
    pub shared_memory_names: BTreeSet<String>,
    /// Rows on a worker.
    pub running: u32,
    /// Rows in the queue.
    pub waiting: u32,
    /// Bytes of caches.
    pub kv_bytes: u64,
    /// Leased bytes of shared segments.
    pub shm_leased_bytes: u64,
}

impl Snapshot {
    /// Looks once.
    ///
    /// # Errors
    /// If the gateway does not answer.
    pub async fn of(gateway: &Gateway) -> anyhow::Result<Self> {
        let pool = gateway.pool().await?;
        Ok(Self {
            children: process::children(gateway.pid()).map(|children| children.len()),
            descriptors: process::descriptors(gateway.pid()),
            shared_memory_names: process::shared_memory_names(),
            running: pool.running,
            waiting: pool.waiting,
            kv_bytes: pool.kv_bytes,
            shm_leased_bytes: pool.shm_leased_bytes,
        })
    }

    /// Waits until nothing runs, and looks then.
    ///
    /// # Errors
    /// If rows, caches or leases stay.
    pub async fn at_rest(gateway: &Gateway) -> anyhow::Result<Self> {
        eventually("the gateway to be at rest", async || {
            let now = Self::of(gateway).await?;
            let busy = u64::from(now.running) + u64::from(now.waiting);
            let held = now.kv_bytes + now.shm_leased_bytes;
            Ok((busy + held == 0).then_some(now))
        })
        .await
    }

    /// Waits until everything is as it was.
    ///
    /// # Errors
    /// If something stays; the text shows both.
    pub async fn back_to(&self, gateway: &Gateway) -> anyhow::Result<()> {
        let mut last = None;
        let reached = eventually("all resources to be back to base", async || {
            let now = Self::of(gateway).await?;
            let same = now == *self;
            last = Some(now);
            Ok(same.then_some(()))
        })
        .await;
        reached.map_err(|error| error.context(format!("base is {self:?}, now is {last:?}")))
    }
}
