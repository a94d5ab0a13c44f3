//! Attention over pages.

use half::f16;
use velox_kernels::attention::{AttendCall, PageLayout, PageView, PagedView, StatsRequest};
use velox_kernels::cpu;
use velox_kernels::reference;

use crate::support::{Numbers, bits, on_every_set};

/// Values are within -1..1; the weights' relative error is that of the scores (f32 sums of up to 80 products below 1)
/// and of the exponential.
const TOLERANCE: f32 = 5e-6;

struct Case {
    layout: PageLayout,
    group: usize,
    window: Option<usize>,
    length: usize,
}

struct Cache {
    keys: Vec<Vec<f16>>,
    values: Vec<Vec<f16>>,
}

impl Cache {
    fn new(case: &Case) -> Self {
        let elements = case.layout.elements().unwrap();
        let pages = case.length.div_ceil(case.layout.page_tokens);
        let page = |seed| -> Vec<f16> {
            let values = Numbers::new(seed).values(elements);
            values.into_iter().map(f16::from_f32).collect()
        };
        let mut cache = Self {
            keys: (0..pages).map(page).collect(),
            values: (0..pages).map(|n| page(n + 1000)).collect(),
        };
        // What lies beyond the length must not matter.
        let layout = case.layout;
        for position in case.length..pages * layout.page_tokens {
            let (page, slot) = (position / layout.page_tokens, position % layout.page_tokens);
            for head in 0..layout.n_kv_heads {
                let from = layout.head_range(head).start + slot * layout.head_dim;
                cache.keys[page][from..from + layout.head_dim].fill(f16::NAN);
                cache.values[page][from..from + layout.head_dim].fill(f16::NAN);
            }
        }
        cache
    }

    fn view(&self, case: &Case, length: usize) -> PagedView<'_> {
        let pages = length.div_ceil(case.layout.page_tokens);
        let pages = self.keys.iter().zip(&self.values).take(pages);
        let pages = pages.map(|(keys, values)| PageView { keys, values });
        PagedView::new(case.layout, length, pages.collect()).unwrap()
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (page_tokens, n_kv_heads, head_dim, group) in [
        (64, 3, 64, 3),
        (16, 1, 80, 1),
        (5, 2, 7, 5),
        (32, 2, 16, 9),
        (300, 1, 33, 4),
    ] {
        for (window, length) in [(None, 1), (None, 700), (Some(1), 40), (Some(100), 600)] {
            cases.push(Case {
                layout: PageLayout {
                    page_tokens,
                    n_kv_heads,
                    head_dim,
                },
                group,
                window,
                length,
            });
        }
    }
    cases
}

fn call<'a>(
    case: &Case,
    queries: &'a [f32],
    start: usize,
    statistics: StatsRequest,
) -> AttendCall<'a> {
    AttendCall {
        queries,
        start,
        n_heads: case.group * case.layout.n_kv_heads,
        sliding_window: case.window,
        scale: 0.5,
        statistics,
    }
}

fn assert_close(actual: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(actual.len(), expected.len());
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        assert!(
            (actual - expected).abs() <= tolerance,
            "element {index}: {actual}, not {expected}"
        );
    }
}

#[test]
fn outputs_agree_with_the_oracle() {
    for case in cases() {
        let cache = Cache::new(&case);
        let width = case.group * case.layout.n_kv_heads * case.layout.head_dim;
        let view = cache.view(&case, case.length);
        for tokens in [0, 1, 2, 37] {
            let tokens = tokens.min(case.length);
            let queries = Numbers::new(tokens).values(tokens * width);
            let call = call(&case, &queries, case.length - tokens, StatsRequest::None);
            let mut expected = vec![0.0; queries.len()];
            let _ = reference::attend(&call, &view, 1, &mut expected).unwrap();
            on_every_set(|cpu| {
                let mut actual = vec![f32::NAN; queries.len()];
                let ran = cpu::attend(cpu, &call, &view, &mut actual).unwrap();
                assert!(ran.into_value().is_empty());
                assert_close(&actual, &expected, TOLERANCE);
            });
        }
    }
}

#[test]
fn a_query_has_the_same_bits_in_every_chunk() {
    for case in cases() {
        let cache = Cache::new(&case);
        let width = case.group * case.layout.n_kv_heads * case.layout.head_dim;
        let queries = Numbers::new(3).values(case.length * width);
        on_every_set(|cpu| {
            let whole = cache.view(&case, case.length);
            let mut at_once = vec![f32::NAN; queries.len()];
            let call_all = call(&case, &queries, 0, StatsRequest::None);
            let _ = cpu::attend(cpu, &call_all, &whole, &mut at_once).unwrap();
            for (start, tokens) in [
                (0, 1),
                (case.length / 2, 1),
                (case.length - 1, 1),
                (case.length / 3, 3),
                (case.length / 5, 21),
            ] {
                let end = case.length.min(start + tokens);
                let part = &queries[start * width..end * width];
                // As it was when these were the newest tokens.
                let view = cache.view(&case, end);
                let mut alone = vec![f32::NAN; part.len()];
                let call_part = call(&case, part, start, StatsRequest::None);
                let _ = cpu::attend(cpu, &call_part, &view, &mut alone).unwrap();
                assert_eq!(bits(&alone), bits(&at_once[start * width..end * width]));
            }
        });
    }
}

#[test]
fn rows_of_a_batch_do_not_meet() {
    let case = &cases()[1];
    let cache = Cache::new(case);
    let width = case.group * case.layout.n_kv_heads * case.layout.head_dim;
    on_every_set(|cpu| {
        let spans = [(0, 20), (300, 1), (690, 10), (5, 0)];
        let queries = Numbers::new(9).values(20 * width);
        let views = spans.map(|(start, tokens)| cache.view(case, start + tokens));
        let calls = spans.map(|(start, tokens)| {
            call(case, &queries[..tokens * width], start, StatsRequest::None)
        });
        let mut together: Vec<Vec<f32>> = spans
            .iter()
            .map(|(_, tokens)| vec![f32::NAN; tokens * width])
            .collect();
        let batch = calls.iter().zip(&views).zip(&mut together);
        let batch = batch.map(|((call, view), out)| cpu::AttendSpan {
            call: *call,
            view,
            out,
        });
        let ran = cpu::attend_all(cpu, batch.collect()).unwrap();
        assert_eq!(ran.value().len(), spans.len());
        for ((call, view), together) in calls.iter().zip(&views).zip(&together) {
            let mut alone = vec![f32::NAN; together.len()];
            let _ = cpu::attend(cpu, call, view, &mut alone).unwrap();
            assert_eq!(bits(&alone), bits(together));
        }
    });
}

#[test]
fn statistics_agree_with_the_oracle() {
    for case in cases() {
        let cache = Cache::new(&case);
        let width = case.group * case.layout.n_kv_heads * case.layout.head_dim;
        let view = cache.view(&case, case.length);
        let tokens = 9.min(case.length);
        let queries = Numbers::new(5).values(tokens * width);
        for statistics in [StatsRequest::DecodeWeights, StatsRequest::ColumnSums] {
            let call = call(&case, &queries, case.length - tokens, statistics);
            let mut out = vec![0.0; queries.len()];
            let expected = reference::attend(&call, &view, 1, &mut out)
                .unwrap()
                .into_value();
            on_every_set(|cpu| {
                let mut out = vec![0.0; queries.len()];
                let actual = cpu::attend(cpu, &call, &view, &mut out)
                    .unwrap()
                    .into_value();
                assert_close(&actual, &expected, TOLERANCE);
            });
        }
    }
}

#[test]
fn what_is_not_a_number_is_not_hidden() {
    let case = &cases()[0];
    let cache = Cache::new(case);
    let width = case.group * case.layout.n_kv_heads * case.layout.head_dim;
    on_every_set(|cpu| {
        let view = cache.view(case, case.length);
        let mut queries = vec![0.1; width];
        queries[0] = f32::NAN;
        let mut out = vec![0.0; width];
        let _ = cpu::attend(
            cpu,
            &call(case, &queries, case.length - 1, StatsRequest::None),
            &view,
            &mut out,
        )
        .unwrap();
        assert!(out[..64].iter().all(|value| value.is_nan()));
        assert!(out[64..].iter().all(|value| value.is_finite()));
        assert!(
            cpu::attend(
                cpu,
                &call(case, &queries, case.length, StatsRequest::None),
                &view,
                &mut out
            )
            .is_err()
        );
    });
}
