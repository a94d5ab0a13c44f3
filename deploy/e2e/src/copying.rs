//! The model of `velox-fake-worker`: it copies its prompt, then ends.

/// Layers that it claims to have.
pub const LAYERS: u32 = 2;

/// Tokens of several bytes; their ids begin at 256. No text is encoded to them: a test names them by [`piece`].
pub const PIECES: [&str; 12] = [
    "ab", "bc", "abc", "cd", " the", "hello", "st", "op", "sto", "top", "ü", "日本",
];

/// Opens a turn; the first id behind the pieces.
pub const START_TOKEN: u32 = 268;

/// Ends an answer.
pub const END_TOKEN: u32 = 269;

/// What workers in the mode `dies-of-poison` die of.
pub const POISON_TOKEN: u32 = 270;

/// Width of the logits.
pub const VOCABULARY_TOKENS: u32 = 271;

/// Returns the ids of a text, one a byte.
#[must_use]
pub fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Returns the id of one of [`PIECES`].
#[must_use]
pub fn piece(text: &str) -> Option<u32> {
    PIECES
        .iter()
        .zip(256..)
        .find_map(|(&piece, id)| (piece == text).then_some(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_follow_the_pieces() {
        assert_eq!(piece("日本"), Some(START_TOKEN - 1));
        assert_eq!(piece("x"), None);
        assert_eq!(bytes("ab"), [97, 98]);
    }
}
