//! Which backends may answer a request, and in which order they are preferred.

use velox_proto::v1::{self, Backend, OnMissing};

use crate::error::GatewayError;

/// Every backend from strong to weak: the order of `auto`.
pub const AUTO_ORDER: [Backend; 5] = [
    Backend::Metal,
    Backend::MlxCuda,
    Backend::Cpu,
    Backend::MlxCpu,
    Backend::Reference,
];

/// Returns the label as people write it: "METAL", "MLX_CPU".
#[must_use]
pub fn label(backend: Backend) -> &'static str {
    let name = backend.as_str_name();
    name.strip_prefix("BACKEND_").unwrap_or(name)
}

/// A checked backend policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// In order of preference; empty = all in the order of `auto`.
    allowed: Vec<Backend>,
    may_fall_back: bool,
}

impl Policy {
    /// Allows every backend.
    #[must_use]
    pub fn any() -> Self {
        Self {
            allowed: Vec::new(),
            may_fall_back: true,
        }
    }

    /// Returns how much a backend is preferred, 0 = most; `None` if it may not be used.
    #[must_use]
    pub fn rank(&self, backend: Backend) -> Option<usize> {
        let strength = AUTO_ORDER.iter().position(|&known| known == backend)?;
        if self.allowed.is_empty() {
            return Some(strength);
        }
        match self.allowed.iter().position(|&allowed| allowed == backend) {
            Some(place) => Some(place),
            None if self.may_fall_back => Some(self.allowed.len() + strength),
            None => None,
        }
    }

    /// Returns the backend that was asked for first, if it is not the one that runs.
    #[must_use]
    pub fn missed(&self, backend: Backend) -> Option<Backend> {
        self.allowed
            .first()
            .copied()
            .filter(|&first| first != backend)
    }

    /// Returns the allowed labels for a message.
    #[must_use]
    pub fn allowed_labels(&self) -> String {
        let labels: Vec<&str> = self.allowed.iter().copied().map(label).collect();
        labels.join(", ")
    }
}

impl TryFrom<Option<v1::BackendPolicy>> for Policy {
    type Error = GatewayError;

    fn try_from(wire: Option<v1::BackendPolicy>) -> Result<Self, GatewayError> {
        let Some(wire) = wire else {
            return Ok(Self::any());
        };
        if wire.allowed.len() > AUTO_ORDER.len() {
            return Err(GatewayError::invalid(
                "policy.allowed",
                format!(
                    "policy names {} backends, limit is {}",
                    wire.allowed.len(),
                    AUTO_ORDER.len()
                ),
            ));
        }
        let allowed = wire
            .allowed
            .iter()
            .map(|&value| {
                Backend::try_from(value)
                    .ok()
                    .filter(|backend| AUTO_ORDER.contains(backend))
                    .ok_or_else(|| {
                        GatewayError::invalid(
                            "policy.allowed",
                            format!("backend {value} is not known"),
                        )
                    })
            })
            .collect::<Result<_, _>>()?;
        let on_missing = OnMissing::try_from(wire.on_missing).map_err(|_unknown| {
            GatewayError::invalid(
                "policy.on_missing",
                format!("on_missing {} is not known", wire.on_missing),
            )
        })?;
        Ok(Self {
            allowed,
            may_fall_back: on_missing == OnMissing::Fallback,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(allowed: &[Backend], on_missing: OnMissing) -> Policy {
        Policy::try_from(Some(v1::BackendPolicy {
            allowed: allowed.iter().map(|&backend| backend.into()).collect(),
            on_missing: on_missing.into(),
        }))
        .unwrap()
    }

    #[test]
    fn the_caller_s_order_comes_before_strength() {
        let strict = policy(&[Backend::Reference, Backend::Cpu], OnMissing::Error);
        assert_eq!(strict.rank(Backend::Reference), Some(0));
        assert_eq!(strict.rank(Backend::Cpu), Some(1));
        assert_eq!(strict.rank(Backend::Metal), None);
        assert_eq!(strict.missed(Backend::Cpu), Some(Backend::Reference));
        assert_eq!(strict.missed(Backend::Reference), None);
    }

    #[test]
    fn a_fallback_takes_the_strongest_after_the_allowed() {
        let lenient = policy(&[Backend::Metal], OnMissing::Fallback);
        assert!(lenient.rank(Backend::Metal) < lenient.rank(Backend::Cpu));
        assert!(lenient.rank(Backend::Cpu) < lenient.rank(Backend::Reference));
    }

    #[test]
    fn unspecified_means_error_and_nothing_means_any() {
        let unspecified = policy(&[Backend::Metal], OnMissing::Unspecified);
        assert_eq!(unspecified.rank(Backend::Cpu), None);
        assert_eq!(Policy::any().rank(Backend::Metal), Some(0));
        assert_eq!(Policy::any().missed(Backend::Cpu), None);
    }

    #[test]
    fn unknown_values_are_refused() {
        for (allowed, on_missing) in [(vec![0], 0), (vec![77], 0), (vec![3], 9), (vec![3; 9], 0)] {
            let wire = v1::BackendPolicy {
                allowed,
                on_missing,
            };
            assert!(Policy::try_from(Some(wire)).is_err());
        }
    }
}
