//! The transformer, written once over the backend trait.
