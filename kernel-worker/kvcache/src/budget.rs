//! The bytes that all caches of a model may hold together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::KvError;

/// A limit shared by caches. Cloning shares it.
#[derive(Debug, Clone)]
pub struct PageBudget {
    limit_bytes: u64,
    // Relaxed everywhere: the number is all there is, no other memory is published through it.
    used_bytes: Arc<AtomicU64>,
}

/// Bytes taken from a budget; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    budget: PageBudget,
    bytes: u64,
}

impl PageBudget {
    /// Makes a budget of which nothing is used.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self {
            limit_bytes,
            used_bytes: Arc::new(AtomicU64::new(0)),
        }
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Returns the bytes that caches hold.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Opens a reservation of nothing.
    #[must_use]
    pub fn reservation(&self) -> Reservation {
        Reservation {
            budget: self.clone(),
            bytes: 0,
        }
    }
}

impl Reservation {
    /// Takes more bytes.
    ///
    /// # Errors
    /// [`KvError::BudgetExceeded`]; nothing is taken then.
    pub fn grow(&mut self, bytes: u64) -> Result<(), KvError> {
        let limit = self.budget.limit_bytes;
        self.budget
            .used_bytes
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|&total| total <= limit)
            })
            .map_err(|used| KvError::BudgetExceeded {
                needed_bytes: bytes,
                available_bytes: limit.saturating_sub(used),
            })?;
        self.bytes += bytes;
        Ok(())
    }

    /// Gives bytes back, at most what it holds.
    pub fn shrink(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.bytes);
        let returned = bytes.min(self.bytes);
        self.bytes -= returned;
        self.budget
            .used_bytes
            .fetch_sub(returned, Ordering::Relaxed);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_reservation_gives_everything_back() {
        let budget = PageBudget::new(100);
        let mut first = budget.reservation();
        let mut second = budget.reservation();
        first.grow(60).unwrap();
        let refusal = second.grow(41).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "cache pages need 41 bytes, 40 are left"
        );
        second.grow(40).unwrap();
        assert_eq!(budget.used_bytes(), 100);
        first.shrink(10);
        assert_eq!(budget.used_bytes(), 90);
        drop(first);
        assert_eq!(budget.used_bytes(), 40);
        assert!(second.grow(u64::MAX).is_err());
        drop(second);
        assert_eq!(budget.used_bytes(), 0);
    }
}
