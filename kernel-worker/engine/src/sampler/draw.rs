//! One token from one row of logits.

use std::collections::BTreeMap;

use super::exponential::{exp, sum_of_exponentials};
use super::random::uniform;
use super::ranking::{Ranked, best, maximum};
use super::{SampleRequest, SamplingParameters};
use crate::error::EngineError;

/// How many of the best candidates are ranked at first, when no top-k says it.
const FIRST_RANKED: usize = 64;
/// Factor by which the ranked prefix grows when it was too short.
const GROWTH: usize = 8;

/// Chooses a token. `logits` holds no NaN and no positive infinity.
pub(super) fn choose(logits: &[f32], request: &SampleRequest<'_>) -> Result<u32, EngineError> {
    let parameters = request.parameters;
    let greedy = parameters.temperature == 0.0;
    if greedy && !changes_logits(parameters) {
        let best = maximum(logits);
        let found = (0_u32..).zip(logits).find(|(_, logit)| **logit == best);
        return found.map(|(token_id, _)| token_id).ok_or_else(no_candidate);
    }
    let values = processed(logits, request);
    if greedy {
        let found = best(values.iter().copied(), 1);
        return found
            .first()
            .map(|ranked| ranked.token_id)
            .ok_or_else(no_candidate);
    }
    let draw = uniform(parameters.seed, request.output_index);
    Candidates::new(&values, parameters)?.choose(parameters, draw)
}

fn no_candidate() -> EngineError {
    EngineError::Numeric("no allowed token has a finite logit".to_owned())
}

fn changes_logits(parameters: &SamplingParameters) -> bool {
    !parameters.allowed.is_empty()
        || !parameters.bias.is_empty()
        || parameters.repetition_penalty != 1.0
        || parameters.frequency_penalty != 0.0
        || parameters.presence_penalty != 0.0
}

/// Applies allowed set, bias and penalties; a token outside the allowed set becomes minus infinity.
fn processed(logits: &[f32], request: &SampleRequest<'_>) -> Vec<f64> {
    let parameters = request.parameters;
    let mut values: Vec<f64> = if parameters.allowed.is_empty() {
        logits.iter().copied().map(f64::from).collect()
    } else {
        let mut values = vec![f64::NEG_INFINITY; logits.len()];
        for token_id in &parameters.allowed {
            change(&mut values, *token_id, |value| {
                *value = f64::from(logits[*token_id as usize]);
            });
        }
        values
    };
    for (token_id, bias) in &parameters.bias {
        change(&mut values, *token_id, |value| *value += f64::from(*bias));
    }
    if parameters.repetition_penalty != 1.0 {
        let window = request
            .history
            .len()
            .saturating_sub(parameters.penalty_window_tokens);
        let penalty = f64::from(parameters.repetition_penalty);
        for token_id in occurrences(&request.history[window..]).into_keys() {
            change(&mut values, token_id, |value| {
                if *value > 0.0 {
                    *value /= penalty;
                } else {
                    *value *= penalty;
                }
            });
        }
    }
    if parameters.frequency_penalty != 0.0 || parameters.presence_penalty != 0.0 {
        let output = request.history.get(request.prompt_tokens..).unwrap_or(&[]);
        for (token_id, count) in occurrences(output) {
            let penalty = f64::from(parameters.frequency_penalty) * f64::from(count)
                + f64::from(parameters.presence_penalty);
            change(&mut values, token_id, |value| *value -= penalty);
        }
    }
    values
}

/// Changes a token's value; a token that is no row of the head has none.
fn change(values: &mut [f64], token_id: u32, change: impl FnOnce(&mut f64)) {
    if let Some(value) = values.get_mut(token_id as usize) {
        change(value);
    }
}

fn occurrences(token_ids: &[u32]) -> BTreeMap<u32, u32> {
    let mut counts = BTreeMap::new();
    for token_id in token_ids {
        *counts.entry(*token_id).or_insert(0) += 1;
    }
    counts
}

/// The candidates in order of probability, ranked only as far as somebody looks.
///
/// Top-k, top-p and min-p each keep a prefix of that order, so together they keep the shortest of three prefixes.
struct Candidates<'a> {
    values: &'a [f64],
    maximum: f64,
    temperature: f64,
    ranked: Vec<Ranked>,
    /// Candidates after top-k.
    limit: usize,
}

impl<'a> Candidates<'a> {
    fn new(values: &'a [f64], parameters: &SamplingParameters) -> Result<Self, EngineError> {
        let limit = match parameters.top_k {
            0 => values.len(),
            top_k => top_k.min(values.len()),
        };
        let first = match parameters.top_k {
            0 => FIRST_RANKED.min(limit),
            _ => limit,
        };
        let ranked = best(values.iter().copied(), first);
        let maximum = ranked.first().ok_or_else(no_candidate)?.value;
        Ok(Self {
            values,
            maximum,
            temperature: f64::from(parameters.temperature),
            ranked,
            limit,
        })
    }

    /// Returns a value's probability in units of the best one.
    fn weight(&self, value: f64) -> f64 {
        exp((value - self.maximum) / self.temperature)
    }

    /// Returns the candidate at a place of the order with its weight; `None` behind the last one that has any.
    fn at(&mut self, place: usize) -> Option<(u32, f64)> {
        if place >= self.limit {
            return None;
        }
        if place >= self.ranked.len() {
            let wanted = self
                .ranked
                .len()
                .saturating_mul(GROWTH)
                .clamp(place + 1, self.limit);
            self.ranked = best(self.values.iter().copied(), wanted);
        }
        let ranked = *self.ranked.get(place)?;
        let weight = self.weight(ranked.value);
        (weight > 0.0).then_some((ranked.token_id, weight))
    }

    fn total_weight(&self, parameters: &SamplingParameters) -> f64 {
        if parameters.top_k == 0 {
            sum_of_exponentials(self.values, self.maximum, self.temperature)
        } else {
            self.ranked
                .iter()
                .map(|ranked| self.weight(ranked.value))
                .sum()
        }
    }

    fn choose(mut self, parameters: &SamplingParameters, draw: f64) -> Result<u32, EngineError> {
        let total = self.total_weight(parameters);
        let (kept, kept_weight) = self.kept(parameters, total);
        let target = draw * kept_weight;
        let mut cumulative = 0.0;
        let mut chosen = None;
        for place in 0..kept {
            // Rounding can leave the sum of all weights a little below the target: the last candidate takes it.
            let Some((token_id, weight)) = self.at(place) else {
                break;
            };
            chosen = Some(token_id);
            cumulative += weight;
            if cumulative > target {
                break;
            }
        }
        chosen.ok_or_else(no_candidate)
    }

    /// Returns how many candidates all filters keep, and their weight.
    fn kept(&mut self, parameters: &SamplingParameters, total: f64) -> (usize, f64) {
        if parameters.top_p >= 1.0 && parameters.min_p <= 0.0 {
            return (self.limit, total);
        }
        let mass = f64::from(parameters.top_p) * total;
        let min_p = f64::from(parameters.min_p);
        let mut cumulative = 0.0;
        let mut place = 0;
        while let Some((_, weight)) = self.at(place) {
            if weight < min_p {
                break;
            }
            cumulative += weight;
            place += 1;
            if parameters.top_p < 1.0 && cumulative >= mass {
                break;
            }
        }
        (place, cumulative)
    }
}
