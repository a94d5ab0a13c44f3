//! Rows played by hand: what the reader sees of stops, ends, splits and slow reading.

use std::sync::Arc;

use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use velox_proto::worker::v1::{GgufVocabulary, TokenizerDescription, tokenizer_description};

use super::*;
use crate::scheduler::for_tests;

/// A byte-level vocabulary of the letters and of pieces of "é" (U+00E9: bytes C3 A9).
fn tokenizer() -> Arc<Tokenizer> {
    let mut tokens: Vec<String> = ('a'..='z').map(String::from).collect();
    tokens.extend(["Ã", "©", "<|end|>"].map(str::to_owned));
    let mut token_types = vec![1; tokens.len()];
    if let Some(last) = token_types.last_mut() {
        *last = 3;
    }
    let vocab_size = u32::try_from(tokens.len()).unwrap();
    let description = TokenizerDescription {
        source: Some(tokenizer_description::Source::Gguf(GgufVocabulary {
            model: "gpt2".to_owned(),
            pre: "gpt-2".to_owned(),
            tokens,
            token_types,
            ..GgufVocabulary::default()
        })),
        vocab_size,
        ..TokenizerDescription::default()
    };
    Arc::new(Tokenizer::from_description(&description).unwrap())
}

const E_FIRST: u32 = 26;
const E_SECOND: u32 = 27;
const END: u32 = 28;

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(|byte| u32::from(byte - b'a')).collect()
}

fn presentation(stop: &[&str]) -> Presentation {
    Presentation {
        model: "m".into(),
        stop: stop.iter().map(|&stop| stop.to_owned()).collect(),
        token_ids: true,
        logprobs: false,
        seed: 7,
        prompt_tokens: 3,
        truncated_tokens: 0,
    }
}

struct Player {
    output: mpsc::Sender<RowEvent>,
}

impl Player {
    fn begin(stop: &[&str]) -> (Self, Generation) {
        let (output, row) = for_tests::channel(Arc::new(Notify::new()));
        let generation = Generation::new(
            row,
            tokenizer(),
            Opening::Fresh,
            presentation(stop),
            LengthLimit::MaxTokens,
        );
        (Self { output }, generation)
    }

    fn step(&self, tokens: &[u32], end: Option<RowEnd>) {
        self.checked_step(tokens, (0, 0), end);
    }

    /// A step whose first `drafts.1` tokens are of a draft of `drafts.0` tokens.
    fn checked_step(&self, tokens: &[u32], drafts: (u32, usize), end: Option<RowEnd>) {
        let tokens = tokens.iter().map(|&token_id| wire::SampledToken {
            token_id,
            logprob: None,
            top: vec![],
        });
        let step = Step {
            at: Instant::now(),
            tokens: tokens.collect(),
            drafted: drafts.0,
            accepted_drafts: drafts.1,
            scores: vec![],
            logits: None,
            provenance: None,
            fallback_reason: "".into(),
            kv_bytes: (0, 0),
            recoveries: (0, ""),
            end,
        };
        self.output
            .try_send(RowEvent::Step(Box::new(step)))
            .unwrap();
    }
}

async fn text_and_finish(generation: Generation) -> (String, v1::Finish) {
    let answer = generation.whole().await.unwrap();
    (answer.text, answer.finish.unwrap())
}

#[tokio::test(start_paused = true)]
async fn several_tokens_a_step_give_the_same_text_and_no_token_behind_a_stop_counts() {
    for pieces in [1, 2, 3, 5] {
        let (player, generation) = Player::begin(&["xyz", "lo"]);
        let hello = ids("helloyhello");
        for piece in hello.chunks(pieces) {
            player.checked_step(piece, (7, pieces - 1), None);
        }
        let (text, finish) = text_and_finish(generation).await;
        assert_eq!(text, "hel", "{pieces}");
        let usage = finish.usage.unwrap();
        assert_eq!(usage.completion_tokens, 5, "{pieces}");
        let accepted = (0..5).filter(|index| index % pieces < pieces - 1).count();
        assert_eq!(
            usage.accepted_draft_tokens,
            u32::try_from(accepted).unwrap()
        );
        let steps = u32::try_from(5_usize.div_ceil(pieces)).unwrap();
        assert_eq!(usage.drafted_tokens, 7 * steps, "{pieces}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_string_ends_the_answer_and_cancels_the_row() {
    let (player, generation) = Player::begin(&["xyz", "lo"]);
    for id in ids("hello") {
        player.step(&[id], None);
    }
    let (text, finish) = text_and_finish(generation).await;
    assert_eq!(text, "hel");
    assert_eq!(finish.reason(), FinishReason::StopString);
    assert_eq!(finish.matched_stop, "lo");
    assert_eq!(finish.usage.unwrap().completion_tokens, 5);
    assert!(player.output.is_closed(), "the row is cancelled");
}

#[tokio::test(start_paused = true)]
async fn tokens_past_a_stop_in_the_same_step_are_not_counted() {
    let (player, generation) = Player::begin(&["b"]);
    player.step(&ids("abcd"), None);
    let answer = generation.whole().await.unwrap();
    assert_eq!(answer.text, "a");
    assert_eq!(answer.token_ids, ids("ab"));
    assert_eq!(answer.finish.unwrap().usage.unwrap().completion_tokens, 2);
}

#[tokio::test(start_paused = true)]
async fn an_end_token_is_counted_and_has_no_text() {
    let (player, generation) = Player::begin(&[]);
    player.step(&ids("hi"), None);
    // An end token of the caller's choice can be an ordinary letter.
    player.step(&ids("z"), Some(RowEnd::EndToken(25)));
    let (text, finish) = text_and_finish(generation).await;
    assert_eq!(text, "hi");
    assert_eq!(finish.reason(), FinishReason::StopToken);
    assert_eq!(finish.matched_stop_token_id, Some(25));
    assert_eq!(finish.usage.unwrap().completion_tokens, 3);
    assert_eq!(finish.seed, 7);
}

#[tokio::test(start_paused = true)]
async fn held_back_text_goes_out_at_the_end() {
    let (player, generation) = Player::begin(&["end"]);
    player.step(&ids("the"), None);
    player.step(&ids("en"), Some(RowEnd::Length));
    let (text, finish) = text_and_finish(generation).await;
    assert_eq!(text, "theen");
    assert_eq!(finish.reason(), FinishReason::MaxTokens);
    assert_eq!(finish.matched_stop, "");
}

#[tokio::test(start_paused = true)]
async fn a_character_is_never_split_over_two_events() {
    let (player, mut generation) = Player::begin(&[]);
    player.step(&[E_FIRST], None);
    player.step(&[END], None);
    let pending = tokio::time::timeout(std::time::Duration::from_secs(1), generation.next());
    assert!(pending.await.is_err(), "half a character is not an event");
    let (player, mut generation) = Player::begin(&[]);
    player.step(&[E_FIRST], None);
    player.step(&[E_SECOND], None);
    let event = generation.next().await.unwrap().unwrap();
    assert_eq!(event.text, "é");
    assert_eq!(event.token_ids, [E_FIRST, E_SECOND]);
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_is_late_gets_one_event_for_many_tokens() {
    let (player, mut generation) = Player::begin(&[]);
    for id in ids("late") {
        player.step(&[id], None);
    }
    assert_eq!(generation.next().await.unwrap().unwrap().text, "late");
    player.step(&ids("r"), Some(RowEnd::Length));
    let last = generation.next().await.unwrap().unwrap();
    assert_eq!(last.text, "r");
    assert!(last.finish.is_some());
    assert!(generation.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_error_is_the_last_thing_that_is_said() {
    let (player, mut generation) = Player::begin(&[]);
    player.step(&ids("a"), None);
    assert_eq!(generation.next().await.unwrap().unwrap().text, "a");
    player
        .output
        .try_send(RowEvent::Failed(GatewayError::Draining))
        .unwrap();
    assert!(matches!(
        generation.next().await,
        Some(Err(GatewayError::Draining))
    ));
    assert!(generation.next().await.is_none());
    drop(player);
    let (player, mut orphan) = Player::begin(&[]);
    drop(player);
    assert!(
        orphan.next().await.unwrap().is_err(),
        "a scheduler that vanished is an error"
    );
}

#[tokio::test(start_paused = true)]
async fn text_of_tokens_that_arrived_goes_out_before_an_error() {
    let (player, mut generation) = Player::begin(&["end"]);
    // "en" may be the begin of a stop; it is held back until the row fails.
    player.step(&ids("theen"), None);
    player
        .output
        .try_send(RowEvent::Failed(GatewayError::Draining))
        .unwrap();
    let rest = generation.next().await.unwrap().unwrap();
    assert_eq!(rest.text, "theen");
    assert_eq!(rest.token_ids, ids("theen"));
    assert!(rest.finish.is_none());
    assert!(generation.next().await.unwrap().is_err());
    assert!(generation.next().await.is_none());
}
