//! The union of all tokens that end generation, each with the field that says so.

use crate::load::EndToken;

/// Control tokens that end a turn by their text, whatever the keys of a file say.
const END_TEXTS: [&str; 15] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<eos>",
    "<turn|>",
    "[EOS]",
    "[EOT]",
    "<|return|>",
    "<|call|>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// End tokens in the order in which sources named them; the first source of an id is kept.
#[derive(Debug, Default)]
pub(super) struct EndTokens(Vec<EndToken>);

impl EndTokens {
    /// Adds a token unless an earlier source named it.
    pub(super) fn add(&mut self, token_id: u32, text: &str, source: &str) {
        if self.0.iter().all(|known| known.token_id != token_id) {
            self.0.push(EndToken {
                token_id,
                text: text.to_owned(),
                source: source.to_owned(),
            });
        }
    }

    /// Adds the control tokens of a vocabulary whose text is known to end a turn.
    ///
    /// In the Harmony format `<|end|>` ends a message, not the turn; it is recognised by `<|return|>` and `<|call|>`.
    pub(super) fn add_by_text<'a>(
        &mut self,
        control_tokens: impl Iterator<Item = (u32, &'a str)>,
        source: &str,
    ) {
        let known: Vec<(u32, &str)> = control_tokens
            .filter(|(_, text)| END_TEXTS.contains(text))
            .collect();
        let has = |wanted| known.iter().any(|(_, text)| *text == wanted);
        let harmony = has("<|return|>") && has("<|call|>");
        for (token_id, text) in known {
            if !(harmony && text == "<|end|>") {
                self.add(token_id, text, source);
            }
        }
    }

    /// Returns them.
    pub(super) fn into_vec(self) -> Vec<EndToken> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_text(texts: &[&str]) -> Vec<String> {
        let mut ends = EndTokens::default();
        ends.add_by_text((0..).zip(texts.iter().copied()), "type and text");
        ends.into_vec().into_iter().map(|end| end.text).collect()
    }

    #[test]
    fn the_end_of_a_harmony_message_is_no_end() {
        assert_eq!(by_text(&["<|end|>", "a"]), ["<|end|>"]);
        assert_eq!(
            by_text(&["<|end|>", "<|return|>", "<|call|>"]),
            ["<|return|>", "<|call|>"]
        );
        assert_eq!(
            by_text(&["<|end|>", "<|return|>"]),
            ["<|end|>", "<|return|>"]
        );
    }

    #[test]
    fn the_first_source_of_an_id_is_kept() {
        let mut ends = EndTokens::default();
        ends.add(3, "</s>", "first");
        ends.add(3, "</s>", "second");
        ends.add(4, "x", "second");
        let ends = ends.into_vec();
        assert_eq!(ends.len(), 2);
        assert_eq!(ends[0].source, "first");
    }
}
