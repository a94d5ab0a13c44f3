//! The device's choice of tokens against the engine's own sampler, an independent path in f64.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::print_stderr,
    reason = "a test fails by panicking and says what it measured; numbers are small"
)]

mod devices;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use velox_engine::sampler::{SampleRequest, SamplingParameters, sample};
use velox_mlx::ffi::{DeviceStream, DrawRule, Drawn, MlxDevice, Tensor};

use devices::on_every_device;

const VOCAB: usize = 300;
/// Share of draws that may fall to the other side of a border: sums are f32 on the device and f64 in the sampler.
const BORDER_SHARE: f64 = 0.002;

on_every_device!(
    the_device_draws_what_the_sampler_draws,
    equal_logits_give_the_lowest_token_and_broken_rows_none,
);

fn rule(parameters: &SamplingParameters, uniform: f64) -> DrawRule {
    DrawRule {
        temperature: parameters.temperature,
        top_k: parameters.top_k,
        top_p: parameters.top_p,
        min_p: parameters.min_p,
        uniform: uniform as f32,
    }
}

/// Tokens that device and sampler choose; `None` for a row that is refused.
fn choose<D: MlxDevice>(
    device: &DeviceStream<D>,
    logits: &[Vec<f32>],
    parameters: &[SamplingParameters],
    output_index: u64,
) -> (Vec<Option<u32>>, Vec<Option<u32>>) {
    let requests: Vec<SampleRequest<'_>> = parameters
        .iter()
        .enumerate()
        .map(|(logits_row, parameters)| SampleRequest {
            logits_row,
            parameters,
            history: &[],
            prompt_tokens: 0,
            output_index,
            top_logprobs: None,
        })
        .collect();
    let rules: Vec<DrawRule> = requests
        .iter()
        .map(|request| rule(request.parameters, request.uniform()))
        .collect();
    let expected = requests
        .iter()
        .zip(logits)
        .map(|(request, row)| sample(row, request).ok().map(|sample| sample.token_id))
        .collect();
    let found = device.record(|| {
        let tensor = Tensor::of_f32(&logits.concat(), &[logits.len(), VOCAB])?;
        Drawn::record(&tensor, &rules)?.read()
    });
    (found.unwrap().into_value(), expected)
}

fn parameters() -> impl Strategy<Value = SamplingParameters> {
    let temperature = prop_oneof![Just(0.0_f32), 0.05_f32..3.0];
    let top_k = prop_oneof![Just(0_usize), 1_usize..400];
    let top_p = prop_oneof![Just(1.0_f32), 0.01_f32..1.0];
    let min_p = prop_oneof![Just(0.0_f32), 0.0_f32..0.5];
    (temperature, top_k, top_p, min_p, any::<u64>()).prop_map(
        |(temperature, top_k, top_p, min_p, seed)| SamplingParameters {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            ..SamplingParameters::greedy()
        },
    )
}

fn rows() -> impl Strategy<Value = Vec<(Vec<f32>, SamplingParameters)>> {
    let logit = prop_oneof![20 => -12.0_f32..12.0, 1 => Just(f32::NEG_INFINITY)];
    let row = prop::collection::vec(logit, VOCAB);
    prop::collection::vec((row, parameters()), 1..9)
}

fn the_device_draws_what_the_sampler_draws<D: MlxDevice>() {
    let device = DeviceStream::<D>::open().unwrap();
    let (mut drawn, mut differing) = (0_u32, 0_u32);
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for output_index in 0..300 {
        let rows = rows().new_tree(&mut runner).unwrap().current();
        let (logits, parameters): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
        let (found, expected) = choose(&device, &logits, &parameters, output_index);
        for ((found, expected), parameters) in found.iter().zip(&expected).zip(&parameters) {
            drawn += 1;
            if found != expected {
                assert!(parameters.temperature > 0.0, "greedy rows have no border");
                differing += 1;
            }
        }
    }
    eprintln!("{differing} of {drawn} draws fell to the other side of a border");
    assert!(drawn > 1000);
    assert!(f64::from(differing) <= BORDER_SHARE * f64::from(drawn));
}

fn equal_logits_give_the_lowest_token_and_broken_rows_none<D: MlxDevice>() {
    let device = DeviceStream::<D>::open().unwrap();
    let flat = vec![1.5; VOCAB];
    let spoiled = |token: usize, logit: f32| {
        let mut row = flat.clone();
        row[token] = logit;
        row
    };
    let logits = [
        flat.clone(),
        spoiled(70, f32::NAN),
        spoiled(299, f32::INFINITY),
        vec![f32::NEG_INFINITY; VOCAB],
        spoiled(0, f32::NEG_INFINITY),
    ];
    let warm = SamplingParameters {
        temperature: 1.0,
        top_k: 1,
        ..SamplingParameters::greedy()
    };
    for parameters in [SamplingParameters::greedy(), warm] {
        let all = vec![parameters; logits.len()];
        let (found, expected) = choose(&device, &logits, &all, 0);
        assert_eq!(expected, [Some(0), None, None, None, Some(1)]);
        assert_eq!(found, expected);
    }
}
