//! A stream of tokens becomes the text that the whole makes, however it is cut.

use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use velox_gateway::text::{Bos, Detokenizer, Markup, SpecialTokens, StopMatcher, Tokenizer};

use crate::support::{smollm2, tokenizer};

static SMOLLM2: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| tokenizer(&smollm2()));

fn stream(ids: &[u32], special: SpecialTokens) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(Arc::clone(&SMOLLM2), special);
    let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    pieces.push(detokenizer.finish());
    pieces
}

/// Scripts and sequences that servers have cut in the middle.
fn difficult_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[ a-zA-Z.,\n]{1,8}",
        "[\u{4e00}-\u{4fff}]{1,4}",
        "[\u{5d0}-\u{5ea} ]{1,6}",
        "[\u{600}-\u{6ff}]{1,4}",
        "[\u{1f300}-\u{1f64f}]{1,3}",
        Just("👩‍👩‍👧‍👦".to_owned()),
        Just("🏳️‍🌈".to_owned()),
        Just("e\u{301}\u{328}".to_owned()),
        Just("\u{FFFD}".to_owned()),
        "\\PC{1,4}",
        any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn pieces_of_any_text_add_up_to_it(text in difficult_text()) {
        let ids = SMOLLM2.encode(&text, Markup::Plain, Bos::Omit).unwrap();
        let whole = SMOLLM2.decode(&ids, SpecialTokens::Hide);
        let pieces = stream(&ids, SpecialTokens::Hide);
        prop_assert_eq!(pieces.concat(), whole.as_str());
        // A piece never has a replacement character that the text lacks.
        prop_assert_eq!(pieces.concat().matches('\u{FFFD}').count(), whole.matches('\u{FFFD}').count());
    }

    #[test]
    fn pieces_of_any_ids_add_up_to_the_lossy_text(
        ids in proptest::collection::vec(prop_oneof![0u32..49_200, 17u32..260, Just(u32::MAX)], 0..40),
        special in prop_oneof![Just(SpecialTokens::Hide), Just(SpecialTokens::Show)],
    ) {
        prop_assert_eq!(stream(&ids, special).concat(), SMOLLM2.decode(&ids, special));
    }

    #[test]
    fn a_text_cut_short_loses_at_most_its_last_character(text in difficult_text(), keep in 0usize..40) {
        let mut ids = SMOLLM2.encode(&text, Markup::Plain, Bos::Omit).unwrap();
        ids.truncate(keep);
        let found = stream(&ids, SpecialTokens::Hide).concat();
        let whole = SMOLLM2.decode(&SMOLLM2.encode(&text, Markup::Plain, Bos::Omit).unwrap(), SpecialTokens::Hide);
        let stable = found.strip_suffix('\u{FFFD}').unwrap_or(&found);
        prop_assert!(whole.starts_with(stable));
    }

    #[test]
    fn a_stop_is_found_across_any_tokens(before in difficult_text(), after in "[a-z ]{0,8}", at in 0usize..3) {
        let stops = ["END", "\n\nUser:", "💥"].map(str::to_owned);
        let text = format!("{before}{}{after}", stops[at]);
        let ids = SMOLLM2.encode(&text, Markup::Plain, Bos::Omit).unwrap();
        let whole = SMOLLM2.decode(&ids, SpecialTokens::Hide);
        let mut detokenizer = Detokenizer::new(Arc::clone(&SMOLLM2), SpecialTokens::Hide);
        let mut matcher = StopMatcher::new(stops.to_vec());
        let (mut found, mut matched) = (String::new(), None);
        for &id in &ids {
            let step = matcher.push(&detokenizer.push(id));
            found.push_str(&step.emit);
            if step.matched.is_some() {
                matched = step.matched;
                break;
            }
        }
        let first = (0..3).filter_map(|stop| Some((whole.find(&stops[stop])? + stops[stop].len(), stop))).min();
        prop_assert_eq!(matched, first.map(|(_, stop)| stop));
        if let Some((end, stop)) = first {
            prop_assert_eq!(found, &whole[..end - stops[stop].len()]);
        }
    }
}

#[test]
fn a_replacement_character_in_the_text_comes_out_at_once() {
    let ids = SMOLLM2
        .encode("a\u{FFFD}b", Markup::Plain, Bos::Omit)
        .unwrap();
    let pieces = stream(&ids, SpecialTokens::Hide);
    assert_eq!(pieces.concat(), "a\u{FFFD}b");
    assert_eq!(pieces.last().map(String::as_str), Some(""));
    assert_eq!(pieces[ids.len() - 1], "b");
}

#[test]
fn control_tokens_are_hidden_or_shown() {
    let ids = SMOLLM2
        .encode("<|im_start|>hi<|im_end|>", Markup::Special, Bos::Omit)
        .unwrap();
    assert_eq!(stream(&ids, SpecialTokens::Hide).concat(), "hi");
    assert_eq!(
        stream(&ids, SpecialTokens::Show).concat(),
        "<|im_start|>hi<|im_end|>"
    );
}
