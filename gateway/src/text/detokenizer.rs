use std::sync::Arc;

use super::{SpecialTokens, Tokenizer};

/// Turns a stream of token ids into text, piece by piece.
///
/// Emits the longest prefix of the bytes that is whole characters, so the pieces put together are the same for every
/// way to cut the stream, and equal to [`Tokenizer::decode`]. Bytes that can never become a character are replaced at
/// once: a real U+FFFD in the text does not hold anything up.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    special: SpecialTokens,
    /// Begin of a character whose rest is still to come: at most three bytes between calls.
    pending: Vec<u8>,
    /// The first space is to be dropped.
    strip_space: bool,
}

impl Detokenizer {
    /// Begins a text of its own: drops the space that the encoder of some models puts in front.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, special: SpecialTokens) -> Self {
        let strip_space = tokenizer.strips_space();
        Self {
            strip_space,
            ..Self::continuing(tokenizer, special)
        }
    }

    /// Goes on behind a prompt: a space in front is part of the text.
    #[must_use]
    pub fn continuing(tokenizer: Arc<Tokenizer>, special: SpecialTokens) -> Self {
        Self {
            tokenizer,
            special,
            pending: Vec::new(),
            strip_space: false,
        }
    }

    /// Takes the next token and returns the text that is complete now.
    pub fn push(&mut self, id: u32) -> String {
        if self.special == SpecialTokens::Hide && self.tokenizer.is_special(id) {
            return String::new();
        }
        let Some(bytes) = self.tokenizer.token_bytes(id) else {
            return String::new();
        };
        let bytes = match bytes {
            [b' ', rest @ ..] if self.strip_space => rest,
            bytes => bytes,
        };
        self.strip_space = false;
        self.pending.extend_from_slice(bytes);
        take_text(&mut self.pending)
    }

    /// Ends the text; what was begun and not finished becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        self.strip_space = false;
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }
}

/// Takes whole characters off the front; leaves the begin of one at the end.
fn take_text(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut done = 0;
    loop {
        let rest = &pending[done..];
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                pending.clear();
                return text;
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                done += valid.len();
                let Some(broken) = error.error_len() else {
                    pending.drain(..done);
                    return text;
                };
                debug_assert!(broken <= after.len());
                text.push(char::REPLACEMENT_CHARACTER);
                done += broken;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_character_over_several_pieces_waits_for_its_end() {
        let mut pending = Vec::new();
        let emoji = "a👍b".as_bytes();
        let texts: Vec<String> = emoji
            .iter()
            .map(|&byte| {
                pending.push(byte);
                take_text(&mut pending)
            })
            .collect();
        assert_eq!(texts, ["a", "", "", "", "👍", "b"]);
    }

    #[test]
    fn a_real_replacement_character_does_not_stall() {
        let mut pending = "\u{FFFD}".as_bytes().to_vec();
        assert_eq!(take_text(&mut pending), "\u{FFFD}");
    }

    proptest! {
        #[test]
        fn pieces_add_up_to_the_lossy_text(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), 0x80u8..0xC0, 0xE0u8..0xF8], 0..40),
            cut in 1usize..6,
        ) {
            let mut pending = Vec::new();
            let mut text = String::new();
            for piece in bytes.chunks(cut) {
                pending.extend_from_slice(piece);
                text.push_str(&take_text(&mut pending));
                prop_assert!(pending.len() <= 3);
            }
            text.push_str(&String::from_utf8_lossy(&pending));
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
