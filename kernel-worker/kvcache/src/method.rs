//! Names of KV methods and what the gateway must know of each.

use velox_kernels::attention::PageLayout;
use velox_kernels::error::OpError;

use crate::error::KvError;

/// Characters of an unknown name that an error repeats.
const SHOWN_NAME_CHARACTERS: usize = 64;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvMethod {
    /// `none`: f16, uncompressed.
    None,
}

/// How a lost row's continuation relates to the one it would have had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReplayClass {
    /// Prefilling prompt and generated tokens gives the very same cache.
    Exact,
    /// It gives a cache within the method's tolerance.
    Equivalent,
    /// Generated tokens are replayed one by one as forced decode steps.
    Forced,
}

impl ReplayClass {
    /// Returns the name as replies write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Equivalent => "equivalent",
            Self::Forced => "forced",
        }
    }
}

/// Sizes of a model that its caches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Transformer blocks.
    pub n_layers: usize,
    /// `G`.
    pub n_kv_heads: usize,
    /// `K`.
    pub head_dim: usize,
}

/// What a method costs for a model, told to the gateway at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGeometry {
    /// Tokens of a page; a row's memory grows by whole pages.
    pub page_tokens: usize,
    /// Bytes of a full page's keys over all layers, by token.
    pub key_bytes_per_token: u64,
    /// Bytes of a full page's values over all layers, by token.
    pub value_bytes_per_token: u64,
    /// Whether rows share the pages of a common prefix.
    pub shareable: bool,
    /// What replay of a lost row gives.
    pub replay: ReplayClass,
}

impl KvMethod {
    /// Every method.
    pub const ALL: [Self; 1] = [Self::None];

    /// Finds a method by its name.
    ///
    /// # Errors
    /// [`KvError::UnknownMethod`].
    pub fn parse(name: &str) -> Result<Self, KvError> {
        Self::ALL
            .into_iter()
            .find(|method| method.name() == name)
            .ok_or_else(|| KvError::UnknownMethod {
                name: name.chars().take(SHOWN_NAME_CHARACTERS).collect(),
                known: "none",
            })
    }

    /// Returns the name as people and scripts write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
        }
    }

    /// Returns the tokens of a page.
    #[must_use]
    pub const fn page_tokens(self) -> usize {
        match self {
            Self::None => 32,
        }
    }

    /// Returns what the method costs for a model.
    ///
    /// # Errors
    /// [`KvError::Shape`] if a size is 0 or a product overflows.
    pub fn geometry(self, shape: KvShape) -> Result<KvGeometry, KvError> {
        match self {
            Self::None => {
                let bytes_per_token = f16_bytes_per_token(shape)?;
                Ok(KvGeometry {
                    page_tokens: self.page_tokens(),
                    key_bytes_per_token: bytes_per_token,
                    value_bytes_per_token: bytes_per_token,
                    shareable: false,
                    replay: ReplayClass::Exact,
                })
            }
        }
    }
}

/// Returns the bytes of a token's keys over all layers. A page of 32 tokens of f16 is whole cache lines for any
/// shape, so an allocation adds nothing to it.
fn f16_bytes_per_token(shape: KvShape) -> Result<u64, KvError> {
    let layout = PageLayout {
        page_tokens: 1,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
    };
    let overflow = OpError::Overflow { what: "cache" };
    let bytes = layout
        .elements()?
        .checked_mul(size_of::<half::f16>())
        .and_then(|bytes| bytes.checked_mul(shape.n_layers))
        .ok_or(overflow)?;
    Ok(u64::try_from(bytes).map_err(|_| overflow)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_unknown_ones_named() {
        for method in KvMethod::ALL {
            assert_eq!(KvMethod::parse(method.name()).unwrap(), method);
        }
        let error = KvMethod::parse("kivi").unwrap_err();
        assert_eq!(
            error.to_string(),
            "kv method \"kivi\" is not known; known are none"
        );
        let long = KvMethod::parse(&"x".repeat(100_000)).unwrap_err();
        assert!(long.to_string().len() < 200);
    }

    #[test]
    fn geometry_counts_all_layers() {
        let shape = KvShape {
            n_layers: 30,
            n_kv_heads: 3,
            head_dim: 64,
        };
        let geometry = KvMethod::None.geometry(shape).unwrap();
        assert_eq!(geometry.key_bytes_per_token, 30 * 3 * 64 * 2);
        assert_eq!(geometry.value_bytes_per_token, 30 * 3 * 64 * 2);
        let huge = KvShape {
            n_kv_heads: usize::MAX / 64,
            ..shape
        };
        assert!(KvMethod::None.geometry(huge).is_err());
    }
}
