use half::f16;
use proptest::prelude::*;

use super::*;
use crate::attention::{PageLayout, PageView};

const LAYOUT: PageLayout = PageLayout {
    page_tokens: 4,
    n_kv_heads: 2,
    head_dim: 5,
};
const HEADS: usize = 4;
const WIDTH: usize = 20;

/// A cache of random keys and values; what lies beyond its length is NaN, so that reading it shows.
struct Cache {
    layout: PageLayout,
    length: usize,
    keys: Vec<Vec<f16>>,
    values: Vec<Vec<f16>>,
}

impl Cache {
    fn new(layout: PageLayout, length: usize, seed: u32) -> Self {
        let mut numbers = Numbers(seed);
        let mut pages = || -> Vec<Vec<f16>> {
            (0..length.div_ceil(layout.page_tokens))
                .map(|page| {
                    let slots = layout.n_kv_heads * layout.page_tokens;
                    (0..slots)
                        .map(|slot| page * layout.page_tokens + slot % layout.page_tokens)
                        .flat_map(|position| std::iter::repeat_n(position, layout.head_dim))
                        .map(|position| {
                            if position < length {
                                f16::from_f32(numbers.next())
                            } else {
                                f16::NAN
                            }
                        })
                        .collect()
                })
                .collect()
        };
        Self {
            layout,
            length,
            keys: pages(),
            values: pages(),
        }
    }

    fn view(&self) -> PagedView<'_> {
        let pages = self.keys.iter().zip(&self.values);
        let pages = pages.map(|(keys, values)| PageView { keys, values });
        PagedView::new(self.layout, self.length, pages.collect()).unwrap()
    }

    fn element(&self, pages: &[Vec<f16>], position: usize, kv_head: usize, index: usize) -> f64 {
        let layout = self.layout;
        let slot = kv_head * layout.page_tokens + position % layout.page_tokens;
        pages[position / layout.page_tokens][slot * layout.head_dim + index].to_f64()
    }
}

/// Numbers in [-1, 1) that look random; the same for the same seed.
struct Numbers(u32);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(u16::try_from(self.0 >> 16).unwrap()) / 32768.0 - 1.0
    }

    fn take(&mut self, count: usize) -> Vec<f32> {
        std::iter::repeat_with(|| self.next()).take(count).collect()
    }
}

fn call(queries: &[f32], start: usize) -> AttendCall<'_> {
    AttendCall {
        queries,
        start,
        n_heads: HEADS,
        sliding_window: None,
        scale: 3.0,
        statistics: StatsRequest::None,
    }
}

fn run(call: &AttendCall<'_>, view: &PagedView<'_>, threads: usize) -> (Vec<f32>, Vec<f32>) {
    let mut out = vec![f32::NAN; call.queries.len()];
    let statistics = attend(call, view, threads, &mut out).unwrap();
    (out, statistics.into_value())
}

/// The formula in f64, one query head: weights by position, and the output.
fn exact(call: &AttendCall<'_>, cache: &Cache, token: usize, head: usize) -> (Vec<f64>, Vec<f64>) {
    let layout = cache.layout;
    let kv_head = head / (call.n_heads / layout.n_kv_heads);
    let query = &call.queries[(token * call.n_heads + head) * layout.head_dim..];
    let position = call.start + token;
    let sees = |other: usize| {
        other <= position
            && call
                .sliding_window
                .is_none_or(|window| position - other < window)
    };
    let exponentials: Vec<f64> = (0..cache.length)
        .map(|other| {
            if !sees(other) {
                return 0.0;
            }
            let product: f64 = (0..layout.head_dim)
                .map(|index| {
                    f64::from(query[index]) * cache.element(&cache.keys, other, kv_head, index)
                })
                .sum();
            (product * f64::from(call.scale)).exp()
        })
        .collect();
    let sum: f64 = exponentials.iter().sum();
    let weights: Vec<f64> = exponentials.iter().map(|value| value / sum).collect();
    let output = (0..layout.head_dim)
        .map(|index| {
            (0..=position)
                .map(|other| weights[other] * cache.element(&cache.values, other, kv_head, index))
                .sum()
        })
        .collect();
    (weights, output)
}

fn assert_close(actual: f32, expected: f64) {
    assert!(
        (f64::from(actual) - expected).abs() < 2e-6,
        "{actual} instead of {expected}"
    );
}

proptest! {
    #[test]
    fn equals_the_formula(
        start in 0_usize..20,
        tokens in 0_usize..6,
        beyond in 0_usize..3,
        sliding_window in prop::option::of(1_usize..10),
        seed: u32,
    ) {
        let cache = Cache::new(LAYOUT, start + tokens + beyond, seed);
        let queries = Numbers(!seed).take(tokens * WIDTH);
        let call = AttendCall { sliding_window, ..call(&queries, start) };
        let (out, statistics) = run(&call, &cache.view(), 2);
        prop_assert!(statistics.is_empty());
        for (index, actual) in out.chunks_exact(LAYOUT.head_dim).enumerate() {
            let (_, expected) = exact(&call, &cache, index / HEADS, index % HEADS);
            for (&actual, &expected) in actual.iter().zip(&expected) {
                assert_close(actual, expected);
            }
        }
    }

    #[test]
    fn statistics_are_the_weights(
        start in 0_usize..20,
        tokens in 0_usize..6,
        sliding_window in prop::option::of(1_usize..10),
        seed: u32,
    ) {
        let cache = Cache::new(LAYOUT, start + tokens, seed);
        let queries = Numbers(!seed).take(tokens * WIDTH);
        let plain = AttendCall { sliding_window, ..call(&queries, start) };
        let positions = if tokens == 0 { 0 } else { start + tokens };
        for statistics in [StatsRequest::DecodeWeights, StatsRequest::ColumnSums] {
            let call = AttendCall { statistics, ..plain };
            let (out, actual) = run(&call, &cache.view(), 2);
            prop_assert_eq!(out, run(&plain, &cache.view(), 1).0);
            prop_assert_eq!(actual.len(), HEADS * positions);
            let first = if statistics == StatsRequest::ColumnSums { 0 } else { tokens.max(1) - 1 };
            for head in 0..if tokens == 0 { 0 } else { HEADS } {
                for position in 0..positions {
                    let expected: f64 = (first..tokens)
                        .map(|token| exact(&call, &cache, token, head).0[position])
                        .sum();
                    assert_close(actual[head * positions + position], expected);
                }
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_the_chunk(
        tokens in 1_usize..24,
        chunk in 1_usize..24,
        sliding_window in prop::option::of(1_usize..10),
        seed: u32,
    ) {
        let cache = Cache::new(LAYOUT, tokens, seed);
        let queries = Numbers(!seed).take(tokens * WIDTH);
        let whole = AttendCall { sliding_window, ..call(&queries, 0) };
        let mut parts = Vec::new();
        for (index, queries) in queries.chunks(chunk * WIDTH).enumerate() {
            let part = AttendCall { queries, start: index * chunk, ..whole };
            // A chunk is attended when the cache ends with it.
            let end = part.start + queries.len() / WIDTH;
            let view = cache.view();
            let pages = (0..end.div_ceil(LAYOUT.page_tokens))
                .map(|page| PageView { keys: &cache.keys[page], values: &cache.values[page] });
            let shorter = PagedView::new(view.layout(), end, pages.collect()).unwrap();
            parts.extend(run(&part, &shorter, 1).0);
        }
        prop_assert_eq!(run(&whole, &cache.view(), 1).0, parts);
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let layout = PageLayout {
        page_tokens: 32,
        n_kv_heads: 3,
        head_dim: 65,
    };
    let (n_heads, tokens, start) = (9, 70, 99);
    // Enough work that threads are really started.
    assert!(n_heads * tokens * 65 * (start + tokens) > 3 * MINIMUM_PER_THREAD);
    let cache = Cache::new(layout, start + tokens, 3);
    let queries = Numbers(4).take(tokens * n_heads * 65);
    let call = AttendCall {
        n_heads,
        statistics: StatsRequest::ColumnSums,
        ..call(&queries, start)
    };
    let one = run(&call, &cache.view(), 1);
    for threads in [0, 2, 3, 4, 20] {
        assert_eq!(run(&call, &cache.view(), threads), one, "{threads}");
    }
}

#[test]
fn a_call_that_does_not_fit_the_cache_is_refused() {
    let cache = Cache::new(LAYOUT, 6, 1);
    let queries = [0.0; 2 * WIDTH];
    let mut out = [7.0; 2 * WIDTH];
    assert!(attend(&call(&queries, 5), &cache.view(), 1, &mut out).is_err());
    assert!(attend(&call(&queries, 4), &cache.view(), 1, &mut out[1..]).is_err());
    assert_eq!(out, [7.0; 2 * WIDTH]);
    assert!(attend(&call(&queries, 4), &cache.view(), 1, &mut out).is_ok());
}
