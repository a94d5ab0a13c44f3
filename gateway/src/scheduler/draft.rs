//! Prompt lookup: a guess of what comes next, made of what came before.

use crate::request::PromptLookup;

/// How far back an earlier occurrence is looked for: it bounds the time of a look-up, a few microseconds.
const LOOK_BACK_TOKENS: usize = 8192;

/// Returns the tokens that followed the latest earlier occurrence of the last `ngram_tokens` tokens of prompt and
/// output, at most `max_draft_tokens`; none if there is no such place.
///
/// An occurrence close to the end is followed by fewer tokens than wanted; the draft then goes on with itself, as a text
/// does that repeats a line or a single token.
pub(super) fn draft((prompt, output): (&[u32], &[u32]), lookup: PromptLookup) -> Vec<u32> {
    let too_old = (prompt.len() + output.len()).saturating_sub(LOOK_BACK_TOKENS);
    let known: Vec<u32> = prompt.iter().chain(output).skip(too_old).copied().collect();
    let length = lookup.ngram_tokens.max(1);
    // An occurrence may overlap the tail, but the tail itself is none.
    let (Some(tail), Some((_last, before))) = (
        known.len().checked_sub(length).map(|start| &known[start..]),
        known.split_last(),
    ) else {
        return Vec::new();
    };
    let Some(place) = before.windows(length).rposition(|window| window == tail) else {
        return Vec::new();
    };
    known
        .iter()
        .skip(place + length)
        .copied()
        .cycle()
        .take(lookup.max_draft_tokens)
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drafted(known: &[u32], ngram_tokens: usize, max_draft_tokens: usize) -> Vec<u32> {
        let lookup = PromptLookup {
            ngram_tokens,
            max_draft_tokens,
        };
        let (prompt, output) = known.split_at(known.len() / 2);
        draft((prompt, output), lookup)
    }

    #[test]
    fn the_table() {
        let text = [1, 2, 3, 4, 5, 9, 1, 2, 3];
        for (name, known, ngram, most, expected) in [
            ("what followed", &text[..], 3, 2, &[4, 5][..]),
            ("no longer than there is", &text[..], 3, 3, &[4, 5, 9][..]),
            ("exactly the n-gram", &text[..], 4, 8, &[][..]),
            (
                "the latest place",
                &[1, 2, 7, 1, 2, 8, 1, 2][..],
                2,
                1,
                &[8][..],
            ),
            ("a run goes on", &[6, 6, 6][..], 2, 4, &[6, 6, 6, 6][..]),
            (
                "a period goes on",
                &[1, 2, 1, 2, 1][..],
                2,
                5,
                &[2, 1, 2, 1, 2][..],
            ),
            ("the tail is no occurrence", &[1, 2, 3][..], 3, 8, &[][..]),
            ("too short", &[1][..], 3, 8, &[][..]),
            ("nothing", &[][..], 1, 8, &[][..]),
        ] {
            assert_eq!(drafted(known, ngram, most), expected, "{name}");
        }
    }

    #[test]
    fn the_look_back_is_bounded() {
        let mut known = vec![1, 2, 3];
        known.extend((10..).take(LOOK_BACK_TOKENS - 5));
        known.extend([1, 2]);
        assert_eq!(drafted(&known, 2, 1), [3]);
        known.splice(2..2, [5; 3]);
        assert!(drafted(&known, 2, 1).is_empty());
    }

    proptest! {
        #[test]
        fn a_draft_follows_an_earlier_occurrence(
            known in prop::collection::vec(0_u32..4, 0..60), ngram in 1_usize..9, most in 1_usize..33,
        ) {
            let found = drafted(&known, ngram, most);
            let occurs = known.len() > ngram
                && known[..known.len() - 1].windows(ngram).any(|window| window == &known[known.len() - ngram..]);
            prop_assert_eq!(found.len(), if occurs { most } else { 0 });
        }
    }
}
