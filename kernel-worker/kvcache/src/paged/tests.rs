use proptest::prelude::*;

use super::*;

const SHAPE: KvShape = KvShape {
    n_layers: 3,
    n_kv_heads: 2,
    head_dim: 5,
};
const WIDTH: usize = 10;

fn cache(capacity_tokens: usize, budget: &PageBudget) -> PagedCache {
    PagedCache::new(SHAPE, capacity_tokens, budget).unwrap()
}

/// Distinct numbers per layer, position and column, all exact in f16.
fn rows(layer: usize, positions: Range<usize>) -> Vec<f32> {
    positions
        .flat_map(|position| (0..WIDTH).map(move |column| (position, column)))
        .map(|(position, column)| {
            let number = (layer * 7 + position * WIDTH + column) % 2048;
            f32::from(u16::try_from(number).unwrap())
        })
        .collect()
}

fn append_all(cache: &mut PagedCache, tokens: usize) -> Result<(), KvError> {
    let start = cache.length_tokens();
    for layer in 0..SHAPE.n_layers {
        let keys = rows(layer, start..start + tokens);
        let values: Vec<f32> = keys.iter().map(|key| -key).collect();
        cache.append(layer, &keys, &values)?;
    }
    Ok(())
}

/// Reads a layer back as `[T, G*K]` keys and values.
fn read(cache: &PagedCache, layer: usize) -> (Vec<f32>, Vec<f32>) {
    let view = cache.view(layer).unwrap();
    let layout = view.layout();
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for position in 0..view.length_tokens() {
        let page = position / layout.page_tokens;
        let from = position % layout.page_tokens * layout.head_dim;
        for head in 0..layout.n_kv_heads {
            let row = from..from + layout.head_dim;
            keys.extend(
                view.keys(page, head)[row.clone()]
                    .iter()
                    .map(|x| x.to_f32()),
            );
            values.extend(view.values(page, head)[row].iter().map(|x| x.to_f32()));
        }
    }
    (keys, values)
}

fn assert_holds(cache: &PagedCache, tokens: usize) {
    assert_eq!(cache.length_tokens(), tokens);
    for layer in 0..SHAPE.n_layers {
        let (keys, values) = read(cache, layer);
        let expected = rows(layer, 0..tokens);
        assert_eq!(keys, expected);
        assert_eq!(values, expected.iter().map(|key| -key).collect::<Vec<_>>());
    }
}

fn page_bytes(tokens: usize) -> u64 {
    let geometry = KvMethod::None.geometry(SHAPE).unwrap();
    (tokens.next_multiple_of(geometry.page_tokens) as u64) * geometry.key_bytes_per_token
}

#[test]
fn tokens_are_read_back_where_they_were_put() {
    let budget = PageBudget::new(1 << 20);
    let mut cache = cache(100, &budget);
    assert_holds(&cache, 0);
    for tokens in [0, 1, 31, 1, 33] {
        append_all(&mut cache, tokens).unwrap();
    }
    assert_holds(&cache, 66);
}

#[test]
fn values_are_rounded_to_nearest_even() {
    let budget = PageBudget::new(1 << 20);
    let mut cache = cache(1, &budget);
    // 2048 is where f16 steps by 2: 2049 and 2051 are ties.
    let keys = [
        2049.0, 2051.0, 65519.0, -65519.0, 1e-9, -0.0, 0.1, 5.97e-8, 1.0, 0.0,
    ];
    cache.append(0, &keys, &keys).unwrap();
    let expected = [2048.0, 2052.0, 65504.0, -65504.0, 0.0, -0.0];
    let (stored, _) = read(&cache, 0);
    assert_eq!(stored[..6], expected);
    assert_eq!(stored[6], f16::from_f32(0.1).to_f32());
    assert_eq!(stored[7], f16::MIN_POSITIVE_SUBNORMAL.to_f32());
}

#[test]
fn numbers_beyond_f16_are_refused_and_change_nothing() {
    let budget = PageBudget::new(1 << 20);
    let mut cache = cache(10, &budget);
    for bad in [65520.0, -1e30, f32::INFINITY, f32::NAN] {
        let mut values = [1.0; WIDTH];
        values[7] = bad;
        let refusal = cache.append(0, &[1.0; WIDTH], &values).unwrap_err();
        assert!(matches!(
            refusal,
            KvError::OutOfRange {
                what: "value",
                layer: 0,
                ..
            }
        ));
        assert!(cache.append(0, &values, &[1.0; WIDTH]).is_err());
    }
    assert_eq!(cache.allocated_bytes(), AllocatedBytes::default());
    append_all(&mut cache, 1).unwrap();
}

#[test]
fn layers_go_in_step() {
    let budget = PageBudget::new(1 << 20);
    let mut cache = cache(10, &budget);
    let one = [0.0; WIDTH];
    let two = [0.0; 2 * WIDTH];
    assert!(matches!(
        cache.append(1, &one, &one),
        Err(KvError::LayerOutOfStep {
            layer: 1,
            tokens: 1,
            expected_tokens: 0
        })
    ));
    cache.append(0, &one, &one).unwrap();
    assert!(matches!(
        cache.append(0, &one, &one),
        Err(KvError::LayerOutOfStep {
            layer: 0,
            tokens: 2,
            expected_tokens: 1
        })
    ));
    assert!(cache.append(1, &two, &two).is_err());
    assert!(cache.append(2, &one, &one).is_err());
    cache.append(1, &one, &one).unwrap();
    assert_eq!(cache.length_tokens(), 0);
    cache.append(2, &one, &one).unwrap();
    assert_eq!(cache.length_tokens(), 1);
    assert!(matches!(
        cache.append(3, &one, &one),
        Err(KvError::NoSuchLayer {
            layer: 3,
            n_layers: 3
        })
    ));
    assert!(cache.view(3).is_err());
}

#[test]
fn a_pass_given_up_half_way_is_taken_back() {
    let budget = PageBudget::new(1 << 20);
    let mut cache = cache(100, &budget);
    append_all(&mut cache, 20).unwrap();
    let chunk = rows(0, 20..60);
    cache.append(0, &chunk, &chunk).unwrap();
    assert_eq!(cache.view(0).unwrap().length_tokens(), 60);
    assert_eq!(cache.truncate(20), 20);
    assert_holds(&cache, 20);
    append_all(&mut cache, 40).unwrap();
    assert_holds(&cache, 60);
}

#[test]
fn shapes_are_checked() {
    let budget = PageBudget::new(1 << 20);
    let mut cache = cache(10, &budget);
    assert!(matches!(
        cache.append(0, &[0.0; 11], &[0.0; 11]),
        Err(KvError::Shape(OpError::PartialRow {
            row: 10,
            actual: 11,
            ..
        }))
    ));
    assert!(matches!(
        cache.append(0, &[0.0; 10], &[0.0; 20]),
        Err(KvError::Shape(OpError::Length {
            expected: 10,
            actual: 20,
            ..
        }))
    ));
    for shape in [
        KvShape {
            n_layers: 0,
            ..SHAPE
        },
        KvShape {
            n_kv_heads: 0,
            ..SHAPE
        },
        KvShape {
            head_dim: 0,
            ..SHAPE
        },
        KvShape {
            head_dim: usize::MAX / 2,
            ..SHAPE
        },
        KvShape {
            n_layers: 1,
            n_kv_heads: 1,
            head_dim: usize::MAX / 64,
        },
    ] {
        assert!(PagedCache::new(shape, 10, &budget).is_err(), "{shape:?}");
    }
}

#[test]
fn a_row_beyond_its_capacity_is_refused() {
    let budget = PageBudget::new(1 << 20);
    let mut cache = cache(40, &budget);
    append_all(&mut cache, 40).unwrap();
    let refusal = append_all(&mut cache, 1).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "cache would hold 41 tokens, its capacity is 40"
    );
    assert!(cache.reserve(1).is_err());
    assert!(cache.reserve(usize::MAX).is_err());
    assert_holds(&cache, 40);
}

#[test]
fn caches_share_a_budget_and_give_it_back() {
    let page_of_all_layers = 2 * page_bytes(1);
    let budget = PageBudget::new(3 * page_of_all_layers);
    let mut first = cache(100, &budget);
    let mut second = cache(100, &budget);
    first.reserve(64).unwrap();
    assert_eq!(budget.used_bytes(), 2 * page_of_all_layers);
    match second.reserve(33).unwrap_err() {
        KvError::BudgetExceeded {
            needed_bytes,
            available_bytes,
        } => {
            assert_eq!(needed_bytes, 2 * page_of_all_layers);
            assert_eq!(available_bytes, page_of_all_layers);
        }
        other => panic!("{other}"),
    }
    assert_eq!(second.allocated_bytes(), AllocatedBytes::default());
    append_all(&mut second, 32).unwrap();
    assert!(append_all(&mut second, 1).is_err());
    assert_holds(&second, 32);
    // What was reserved is there, whatever others take.
    append_all(&mut first, 64).unwrap();
    drop(first);
    append_all(&mut second, 1).unwrap();
    assert_holds(&second, 33);
    drop(second);
    assert_eq!(budget.used_bytes(), 0);
}

#[derive(Debug, Clone)]
enum Action {
    Append(usize),
    Reserve(usize),
    Truncate(usize),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0_usize..70).prop_map(Action::Append),
        1 => (0_usize..70).prop_map(Action::Reserve),
        2 => (0_usize..200).prop_map(Action::Truncate),
    ]
}

proptest! {
    #[test]
    fn bytes_and_length_agree_after_any_sequence(actions in prop::collection::vec(action(), 0..12)) {
        let capacity_tokens = 200;
        let budget = PageBudget::new(1 << 20);
        let mut cache = cache(capacity_tokens, &budget);
        let (mut length, mut reserved) = (0, 0);
        for action in actions {
            match action {
                Action::Append(tokens) if length + tokens > capacity_tokens => {
                    prop_assert!(append_all(&mut cache, tokens).is_err());
                }
                Action::Append(tokens) => {
                    append_all(&mut cache, tokens).unwrap();
                    length += tokens;
                }
                Action::Reserve(tokens) => {
                    if cache.reserve(tokens).is_ok() {
                        reserved = reserved.max(length + tokens);
                    } else {
                        prop_assert!(length + tokens > capacity_tokens);
                    }
                }
                Action::Truncate(tokens) => {
                    length = length.min(tokens);
                    reserved = 0;
                    prop_assert_eq!(cache.truncate(tokens), length);
                }
            }
            let expected = page_bytes(length.max(reserved));
            let allocated = cache.allocated_bytes();
            prop_assert_eq!(allocated, AllocatedBytes { keys: expected, values: expected });
            prop_assert_eq!(budget.used_bytes(), 2 * expected);
            assert_holds(&cache, length);
        }
    }

    #[test]
    fn two_appends_equal_one(first in 0_usize..80, second in 0_usize..80) {
        let budget = PageBudget::new(1 << 20);
        let (mut whole, mut parts) = (cache(160, &budget), cache(160, &budget));
        append_all(&mut whole, first + second).unwrap();
        append_all(&mut parts, first).unwrap();
        append_all(&mut parts, second).unwrap();
        for layer in 0..SHAPE.n_layers {
            prop_assert_eq!(read(&whole, layer), read(&parts, layer));
        }
        prop_assert_eq!(whole.allocated_bytes(), parts.allocated_bytes());
    }
}
