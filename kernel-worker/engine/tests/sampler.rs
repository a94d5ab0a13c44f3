//! The sampler against a brute-force oracle in f64.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a test fails by panicking; its numbers are small"
)]

use proptest::prelude::*;
use velox_engine::backend::ScoreRequest;
use velox_engine::error::EngineError;
use velox_engine::sampler::{SampleRequest, SampleResult, SamplingParameters, sample, score};

fn request<'a>(
    parameters: &'a SamplingParameters,
    history: &'a [u32],
    prompt_tokens: usize,
    output_index: u64,
) -> SampleRequest<'a> {
    SampleRequest {
        logits_row: 0,
        parameters,
        history,
        prompt_tokens,
        output_index,
        top_logprobs: None,
    }
}

fn choose(logits: &[f32], parameters: &SamplingParameters) -> Result<SampleResult, EngineError> {
    sample(logits, &request(parameters, &[], 0, 0))
}

/// Everything the sampler does up to the draw, by sorting everything: token and probability, best first.
fn oracle(logits: &[f32], request: &SampleRequest<'_>) -> Vec<(u32, f64)> {
    let parameters = request.parameters;
    let mut values: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&x| f64::from(x))).collect();
    if !parameters.allowed.is_empty() {
        values.retain(|(token, _)| parameters.allowed.contains(token));
    }
    let window = request
        .history
        .len()
        .saturating_sub(parameters.penalty_window_tokens);
    for (token, value) in &mut values {
        for (biased, bias) in &parameters.bias {
            if biased == token {
                *value += f64::from(*bias);
            }
        }
        if request.history[window..].contains(token) {
            let penalty = f64::from(parameters.repetition_penalty);
            *value = if *value > 0.0 {
                *value / penalty
            } else {
                *value * penalty
            };
        }
        let output = &request.history[request.prompt_tokens..];
        let count = output.iter().filter(|other| *other == token).count();
        if count > 0 {
            *value -= f64::from(parameters.frequency_penalty) * count as f64
                + f64::from(parameters.presence_penalty);
        }
    }
    values.sort_by(|left, right| right.1.total_cmp(&left.1).then(left.0.cmp(&right.0)));
    if parameters.temperature == 0.0 {
        return vec![(values[0].0, 1.0)];
    }
    if parameters.top_k > 0 {
        values.truncate(parameters.top_k);
    }
    let normalise = |values: &mut Vec<(u32, f64)>| {
        let sum: f64 = values.iter().map(|(_, weight)| weight).sum();
        values.iter_mut().for_each(|(_, weight)| *weight /= sum);
    };
    let best = values[0].1;
    for (_, value) in &mut values {
        *value = ((*value - best) / f64::from(parameters.temperature)).exp();
    }
    normalise(&mut values);
    if parameters.top_p < 1.0 {
        let mut before = 0.0;
        let kept = values
            .iter()
            .take_while(|(_, probability)| {
                let keep = before < f64::from(parameters.top_p);
                before += probability;
                keep
            })
            .count();
        values.truncate(kept);
    }
    let threshold = f64::from(parameters.min_p) * values[0].1;
    values.retain(|(_, probability)| *probability >= threshold);
    normalise(&mut values);
    values
}

/// A number in `[0, 1)` as the sampler draws it, recovered from a flat row: place of the token among `2^16`.
fn draw_of(seed: u64, output_index: u64) -> (f64, f64) {
    let flat = vec![0.0_f32; 1 << 16];
    let parameters = SamplingParameters {
        temperature: 1.0,
        seed,
        ..SamplingParameters::greedy()
    };
    let token = sample(&flat, &request(&parameters, &[], 0, output_index))
        .unwrap()
        .token_id;
    let place = f64::from(token) / 65_536.0;
    (place, place + 1.0 / 65_536.0)
}

fn parameters(vocab: u32) -> impl Strategy<Value = SamplingParameters> {
    let shape = (
        prop_oneof![Just(0.0_f32), 0.05_f32..3.0],
        prop_oneof![Just(0_usize), 1..90_usize],
        prop_oneof![Just(1.0_f32), 0.01_f32..0.999],
        prop_oneof![Just(0.0_f32), 0.0_f32..0.9],
        any::<u64>(),
    );
    let penalties = (
        prop_oneof![Just(1.0_f32), 0.5_f32..2.0],
        prop_oneof![Just(0.0_f32), -1.0_f32..1.0],
        prop_oneof![Just(0.0_f32), -1.0_f32..1.0],
        0_usize..12,
        prop::collection::vec((0..vocab, -3.0_f32..3.0), 0..4),
        prop_oneof![Just(Vec::new()), prop::collection::vec(0..vocab, 1..20)],
    );
    (shape, penalties).prop_map(|(shape, penalties)| SamplingParameters {
        temperature: shape.0,
        top_k: shape.1,
        top_p: shape.2,
        min_p: shape.3,
        seed: shape.4,
        repetition_penalty: penalties.0,
        frequency_penalty: penalties.1,
        presence_penalty: penalties.2,
        penalty_window_tokens: penalties.3,
        bias: penalties.4,
        allowed: penalties.5,
    })
}

const VOCAB: usize = 300;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn choice_equals_the_oracle(
        // Coarse values, so that ties happen.
        logits in prop::collection::vec((-24_i8..24).prop_map(|x| f32::from(x) / 4.0), VOCAB),
        parameters in parameters(300),
        history in prop::collection::vec(0_u32..300, 0..20),
        prompt_share in 0.0_f64..1.0,
        output_index in 0_u64..1000,
    ) {
        let prompt_tokens = (prompt_share * history.len() as f64) as usize;
        let request = request(&parameters, &history, prompt_tokens, output_index);
        let chosen = sample(&logits, &request).unwrap().token_id;
        let expected = oracle(&logits, &request);
        let place = expected.iter().position(|(token, _)| *token == chosen);
        prop_assert!(place.is_some(), "token {chosen} is none of {expected:?}");
        // The draw is known within 2^-16; the chosen token's share of [0, 1) must touch that interval.
        let place = place.unwrap();
        let before: f64 = expected[..place].iter().map(|(_, probability)| probability).sum();
        let (low, high) = draw_of(parameters.seed, output_index);
        let behind = before + expected[place].1;
        prop_assert!(
            parameters.temperature == 0.0 || (before <= high + 1e-9 && behind >= low - 1e-9),
            "draw in {low}..{high}, token {chosen} has {before}..{behind}"
        );
    }

    #[test]
    fn logprobs_are_those_of_the_raw_logits(
        logits in prop::collection::vec(-30.0_f32..30.0, 1..300),
        parameters in parameters(1),
        top_n in 0_usize..12,
    ) {
        let mut request = request(&parameters, &[], 0, 0);
        request.top_logprobs = Some(top_n);
        let result = sample(&logits, &request).unwrap();
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        let expected = |token: u32| f64::from(logits[token as usize]) - sum.ln();
        let found = f64::from(result.logprob.unwrap());
        prop_assert!((found - expected(result.token_id)).abs() < 1e-5);
        prop_assert_eq!(result.top.len(), top_n.min(logits.len()));
        for pair in result.top.windows(2) {
            prop_assert!(logits[pair[0].token_id as usize] >= logits[pair[1].token_id as usize]);
        }
        for alternative in &result.top {
            let difference = f64::from(alternative.logprob) - expected(alternative.token_id);
            prop_assert!(difference.abs() < 1e-5);
        }
        if let Some(best) = result.top.first() {
            prop_assert!(logits.iter().all(|&logit| logit <= logits[best.token_id as usize]));
        }
    }
}

#[test]
fn frequencies_follow_the_probabilities() {
    let logits = [2.0_f32, 0.5, -1.0, 1.5];
    let parameters = SamplingParameters {
        temperature: 0.8,
        seed: 42,
        ..SamplingParameters::greedy()
    };
    let draws = 40_000_u64;
    let mut counts = [0_u32; 4];
    for index in 0..draws {
        let result = sample(&logits, &request(&parameters, &[], 0, index)).unwrap();
        counts[result.token_id as usize] += 1;
    }
    for (token, probability) in oracle(&logits, &request(&parameters, &[], 0, 0)) {
        let share = f64::from(counts[token as usize]) / draws as f64;
        // Five standard deviations.
        let tolerance = 5.0 * (probability * (1.0 - probability) / draws as f64).sqrt();
        assert!(
            (share - probability).abs() < tolerance,
            "{token}: {share} for {probability}"
        );
    }
}

#[test]
fn ties_go_to_the_lowest_id() {
    let logits = [1.0_f32, 3.0, 3.0, 3.0, 2.0];
    assert_eq!(
        choose(&logits, &SamplingParameters::greedy())
            .unwrap()
            .token_id,
        1
    );
    let biased = SamplingParameters {
        bias: vec![(4, 1.0), (0, 2.0)],
        ..SamplingParameters::greedy()
    };
    assert_eq!(choose(&logits, &biased).unwrap().token_id, 0);
    let first_of_ties = SamplingParameters {
        temperature: 1.0,
        top_k: 1,
        ..SamplingParameters::greedy()
    };
    assert_eq!(choose(&logits, &first_of_ties).unwrap().token_id, 1);
    let negative_zero = [-0.0_f32, 0.0];
    assert_eq!(
        choose(&negative_zero, &SamplingParameters::greedy())
            .unwrap()
            .token_id,
        0
    );
    let signed = SamplingParameters {
        bias: vec![(0, 0.0)],
        ..SamplingParameters::greedy()
    };
    assert_eq!(choose(&negative_zero, &signed).unwrap().token_id, 0);
}

#[test]
fn top_p_keeps_the_token_that_crosses() {
    // Probabilities 0.5, 0.25, 0.25.
    let logits = [2.0_f32.ln(), 0.0, 0.0];
    for (top_p, kept) in [(0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3)] {
        let parameters = SamplingParameters {
            temperature: 1.0,
            top_p,
            ..SamplingParameters::greedy()
        };
        let mut seen: Vec<u32> = (0..500)
            .map(|index| {
                sample(&logits, &request(&parameters, &[], 0, index))
                    .unwrap()
                    .token_id
            })
            .collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), kept, "top-p {top_p}");
    }
}

#[test]
fn a_filter_never_leaves_nothing() {
    let logits = [0.0_f32, f32::NEG_INFINITY, -50.0];
    let narrow = SamplingParameters {
        temperature: f32::MIN_POSITIVE,
        top_k: 1,
        top_p: f32::MIN_POSITIVE,
        min_p: 1.0,
        ..SamplingParameters::greedy()
    };
    assert_eq!(choose(&logits, &narrow).unwrap().token_id, 0);
    let hot = SamplingParameters {
        temperature: f32::MAX,
        ..SamplingParameters::greedy()
    };
    for index in 0..200 {
        let token = sample(&logits, &request(&hot, &[], 0, index))
            .unwrap()
            .token_id;
        assert_ne!(token, 1, "minus infinity was drawn");
    }
}

#[test]
fn rows_that_are_no_numbers_are_errors() {
    let allowed_only_infinite = SamplingParameters {
        allowed: vec![1],
        ..SamplingParameters::greedy()
    };
    let cases: [(Vec<f32>, &SamplingParameters); 5] = [
        (vec![0.0, f32::NAN, 1.0], &SamplingParameters::greedy()),
        (vec![0.0, f32::INFINITY], &SamplingParameters::greedy()),
        (vec![f32::NEG_INFINITY; 40], &SamplingParameters::greedy()),
        (Vec::new(), &SamplingParameters::greedy()),
        (vec![0.0, f32::NEG_INFINITY], &allowed_only_infinite),
    ];
    for (logits, parameters) in cases {
        let hot = SamplingParameters {
            temperature: 1.0,
            ..parameters.clone()
        };
        for parameters in [parameters, &hot] {
            let result = choose(&logits, parameters);
            assert!(
                matches!(result, Err(EngineError::Numeric(_))),
                "{logits:?}: {result:?}"
            );
        }
    }
    let request = ScoreRequest {
        logits_row: 0,
        next_token: Some(0),
        top_n: 1,
    };
    assert!(matches!(
        score(&[f32::NAN, 0.0], &request),
        Err(EngineError::Numeric(_))
    ));
}

#[test]
fn scores_name_the_next_token_and_the_best() {
    let logits = [0.0_f32, 3.0_f32.ln(), 0.0];
    let request = ScoreRequest {
        logits_row: 0,
        next_token: Some(2),
        top_n: 2,
    };
    let result = score(&logits, &request).unwrap();
    assert!((result.next_logprob.unwrap() - 0.2_f32.ln()).abs() < 1e-6);
    assert_eq!(
        result
            .top
            .iter()
            .map(|best| best.token_id)
            .collect::<Vec<_>>(),
        [1, 0]
    );
    let beyond = ScoreRequest {
        next_token: Some(3),
        ..request
    };
    assert!(matches!(
        score(&logits, &beyond),
        Err(EngineError::InvalidPlan(_))
    ));
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let broken: [(&str, SamplingParameters); 9] = [
        (
            "temperature",
            SamplingParameters {
                temperature: -0.1,
                ..SamplingParameters::greedy()
            },
        ),
        (
            "temperature",
            SamplingParameters {
                temperature: f32::NAN,
                ..SamplingParameters::greedy()
            },
        ),
        (
            "top_p",
            SamplingParameters {
                top_p: 0.0,
                ..SamplingParameters::greedy()
            },
        ),
        (
            "min_p",
            SamplingParameters {
                min_p: 1.1,
                ..SamplingParameters::greedy()
            },
        ),
        (
            "repetition_penalty",
            SamplingParameters {
                repetition_penalty: 0.0,
                ..SamplingParameters::greedy()
            },
        ),
        (
            "frequency_penalty",
            SamplingParameters {
                frequency_penalty: f32::INFINITY,
                ..SamplingParameters::greedy()
            },
        ),
        (
            "bias",
            SamplingParameters {
                bias: vec![(1, f32::NEG_INFINITY)],
                ..SamplingParameters::greedy()
            },
        ),
        (
            "token 10",
            SamplingParameters {
                bias: vec![(10, 1.0)],
                ..SamplingParameters::greedy()
            },
        ),
        (
            "token 11",
            SamplingParameters {
                allowed: vec![11],
                ..SamplingParameters::greedy()
            },
        ),
    ];
    assert!(SamplingParameters::greedy().check(10).is_ok());
    for (name, parameters) in broken {
        let text = parameters.check(10).unwrap_err().to_string();
        assert!(text.contains(name), "{name}: {text}");
    }
}
