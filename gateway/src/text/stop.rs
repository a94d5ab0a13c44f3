//! Stop strings over a stream of text pieces.
//!
//! One Knuth-Morris-Pratt automaton a stop, fed byte by byte, so the cost is linear in the text for any stops. The
//! match that completes first in the stream wins; of several that complete at the same byte the one that began
//! first, then the one named first. Held back is only the longest end of the text that begins a stop.

/// Ends a stream of text before the first stop string.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<Automaton>,
    /// Text that may turn out to be the begin of a stop.
    held: String,
    stopped: bool,
}

/// What one piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopStep {
    /// Text that can go out now.
    pub emit: String,
    /// Index of the stop that ended the text; nothing is emitted after it.
    pub matched: Option<usize>,
}

#[derive(Debug)]
struct Automaton {
    stop: Box<[u8]>,
    /// `fallback[n]`: length of the longest proper prefix of the stop that ends its first `n + 1` bytes.
    fallback: Box<[usize]>,
    /// How many bytes of the stop the text seen so far ends with.
    reached: usize,
}

impl StopMatcher {
    /// Makes a matcher; an empty stop never matches.
    #[must_use]
    pub fn new(stops: Vec<String>) -> Self {
        Self {
            stops: stops.into_iter().map(Automaton::new).collect(),
            held: String::new(),
            stopped: false,
        }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped {
            return StopStep {
                emit: String::new(),
                matched: None,
            };
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            if let Some((index, length)) = self.step(byte) {
                self.stopped = true;
                let mut emit = std::mem::take(&mut self.held);
                // The match lies in the held text: whatever could begin it was held.
                emit.truncate((before + at + 1).saturating_sub(length));
                return StopStep {
                    emit,
                    matched: Some(index),
                };
            }
        }
        let keep = self
            .stops
            .iter()
            .map(|stop| stop.reached)
            .max()
            .unwrap_or(0);
        let tail = self.held.split_off(self.held.len().saturating_sub(keep));
        StopStep {
            emit: std::mem::replace(&mut self.held, tail),
            matched: None,
        }
    }

    /// Ends the stream and returns what was held back.
    pub fn finish(&mut self) -> String {
        self.stopped = true;
        std::mem::take(&mut self.held)
    }

    /// Returns index and length of the stop that `byte` completes.
    fn step(&mut self, byte: u8) -> Option<(usize, usize)> {
        let mut complete: Option<(usize, usize)> = None;
        for (index, stop) in self.stops.iter_mut().enumerate() {
            if stop.step(byte) && complete.is_none_or(|(_, length)| stop.stop.len() > length) {
                complete = Some((index, stop.stop.len()));
            }
        }
        complete
    }
}

// === impl Automaton ===

impl Automaton {
    fn new(stop: String) -> Self {
        let stop = stop.into_bytes().into_boxed_slice();
        let mut fallback = vec![0; stop.len()];
        let mut reached = 0;
        for at in 1..stop.len() {
            while reached > 0 && stop[at] != stop[reached] {
                reached = fallback[reached - 1];
            }
            if stop[at] == stop[reached] {
                reached += 1;
            }
            fallback[at] = reached;
        }
        Self {
            stop,
            fallback: fallback.into_boxed_slice(),
            reached: 0,
        }
    }

    /// Takes a byte; true when it completes the stop. Not called again after that.
    fn step(&mut self, byte: u8) -> bool {
        while self.reached > 0 && self.stop[self.reached] != byte {
            self.reached = self.fallback[self.reached - 1];
        }
        if self.stop.get(self.reached) == Some(&byte) {
            self.reached += 1;
        }
        !self.stop.is_empty() && self.reached == self.stop.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|&stop| stop.to_owned()).collect());
        let mut text = String::new();
        for piece in pieces {
            let step = matcher.push(piece);
            text.push_str(&step.emit);
            if step.matched.is_some() {
                return (text, step.matched);
            }
        }
        text.push_str(&matcher.finish());
        (text, None)
    }

    #[test]
    fn the_text_ends_before_the_stop_for_every_cut() {
        let text = "one END two";
        for first in 0..=text.len() {
            for second in first..=text.len() {
                let pieces = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(run(&["END"], &pieces), ("one ".to_owned(), Some(0)));
            }
        }
    }

    #[test]
    fn of_overlapping_stops_the_first_complete_one_wins() {
        assert_eq!(run(&["abc", "ab"], &["xabc"]), ("x".to_owned(), Some(1)));
        assert_eq!(run(&["bc", "abc"], &["xabc"]), ("x".to_owned(), Some(1)));
        assert_eq!(
            run(&["abc", "abc"], &["xa", "bc"]),
            ("x".to_owned(), Some(0))
        );
        assert_eq!(run(&["abcd", "bc"], &["xabce"]), ("xa".to_owned(), Some(1)));
    }

    #[test]
    fn a_stop_at_the_very_begin_leaves_nothing() {
        assert_eq!(run(&["<"], &["<tail"]), (String::new(), Some(0)));
    }

    #[test]
    fn no_more_than_the_begin_of_a_stop_is_held() {
        let mut matcher = StopMatcher::new(vec!["aab".to_owned(), "\n\n".to_owned()]);
        assert_eq!(matcher.push("xaaa").emit, "xa");
        assert_eq!(matcher.push("c\n").emit, "aac");
        assert_eq!(matcher.push("y").emit, "\ny");
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn an_unfinished_stop_is_flushed_and_nothing_follows_a_match() {
        assert_eq!(run(&["END"], &["the EN"]), ("the EN".to_owned(), None));
        let mut matcher = StopMatcher::new(vec!["b".to_owned(), String::new()]);
        assert_eq!(matcher.push("ab").matched, Some(0));
        assert_eq!(matcher.push("b").matched, None);
        assert_eq!(matcher.finish(), "");
    }

    proptest! {
        #[test]
        fn agrees_with_a_search_over_the_whole_text(
            text in "[abé]{0,24}",
            stops in proptest::collection::vec("[abé]{0,4}", 0..4),
            cuts in proptest::collection::vec(0usize..24, 0..6),
        ) {
            let mut borders: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            borders.retain(|at| cuts.contains(at));
            borders.push(text.len());
            let mut pieces = Vec::new();
            let mut from = 0;
            for to in borders {
                pieces.push(&text[from..to]);
                from = to;
            }
            let expected = stops
                .iter()
                .enumerate()
                .filter(|(_, stop)| !stop.is_empty())
                .filter_map(|(index, stop)| text.find(stop.as_str()).map(|at| (at + stop.len(), at, index)))
                .min();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let found = run(&stops, &pieces);
            match expected {
                Some((_, at, index)) => prop_assert_eq!(found, (text[..at].to_owned(), Some(index))),
                None => prop_assert_eq!(found, (text, None)),
            }
        }
    }
}
