//! Names for objects that must have one for a moment.

use std::hash::{BuildHasher as _, RandomState};

/// macOS allows 31 bytes, the slash included.
pub(super) const MAX_NAME_BYTES: usize = 30;

/// Returns a name that nobody can guess.
pub(super) fn random() -> String {
    // The standard library seeds the state from the system's random source, and no two states are the same.
    let number = RandomState::new().hash_one(std::process::id());
    let name = format!("/velox-{number:016x}");
    debug_assert!(name.len() <= MAX_NAME_BYTES);
    name
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_short_and_all_different() {
        let names: HashSet<String> = (0..1000).map(|_| random()).collect();
        assert_eq!(names.len(), 1000);
        for name in names {
            assert!(name.len() <= MAX_NAME_BYTES, "{name}");
            assert!(name.starts_with('/') && !name[1..].contains('/'), "{name}");
        }
    }
}
