//! Choice of tokens on the device: the sampler's filters as ops on rows of sorted logits.
//!
//! The rules are those of `velox_engine::sampler`: top-k, top-p and min-p each keep a prefix of the candidates in order
//! of probability, and the uniform number picks by inverse cumulative distribution. Sums are f32 here and f64 there, so
//! a draw on the border of two candidates may fall to either side.

use mlx_rs::{Array, ops};

use super::error::MlxError;
use super::tensor::{Tensor, int};

/// What a device reports in place of a token whose logits have no meaningful maximum.
const BROKEN_ROW: u32 = u32::MAX;

/// How a row's token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawRule {
    /// 0 = the most likely token, whatever the rest says.
    pub temperature: f32,
    /// Keeps as many; 0 = all.
    pub top_k: usize,
    /// Keeps the smallest set that reaches it; 1 = all.
    pub top_p: f32,
    /// Keeps what has at least this share of the best one's probability.
    pub min_p: f32,
    /// In `[0, 1)`.
    pub uniform: f32,
}

/// Tokens that the device chooses.
#[derive(Debug)]
pub struct Drawn {
    /// `[rows]`, u32: always rows of the embedding, so that they can be fed unseen.
    tokens: Tensor,
    /// `[rows]`, u32: the tokens, or the mark of a broken row.
    report: Tensor,
}

impl Drawn {
    /// Chooses a token of each row of logits `[rows, V]`, f32; there are as many rules.
    ///
    /// # Errors
    /// As MLX says.
    pub fn record(logits: &Tensor, rules: &[DrawRule]) -> Result<Self, MlxError> {
        let logits = &logits.0;
        let best = ops::indexing::argmax_axis(logits, -1, false)?;
        let tokens = if rules.iter().all(|rule| rule.temperature == 0.0) {
            best
        } else {
            let greedy: Vec<bool> = rules.iter().map(|rule| rule.temperature == 0.0).collect();
            let greedy = Array::from_slice(&greedy, &[int(greedy.len())?]);
            ops::select(&greedy, &best, draw(logits, rules)?)?
        };
        // As the sampler does: a row with a NaN or an infinity is an error, never a silent choice.
        let infinity = Array::from_f32(f32::INFINITY);
        let maximum = ops::select(ops::is_nan(logits)?, &infinity, logits)?.max_axis(-1, false)?;
        let broken = Array::from_slice(&[BROKEN_ROW], &[1]);
        let report = ops::select(ops::is_inf(&maximum)?, &broken, &tokens)?;
        Ok(Self {
            tokens: Tensor(tokens),
            report: Tensor(report),
        })
    }

    /// Returns the tokens, `[rows]`, u32.
    #[must_use]
    pub fn tokens(&self) -> &Tensor {
        &self.tokens
    }

    /// Returns what is read back, to have it computed.
    #[must_use]
    pub fn report(&self) -> &Tensor {
        &self.report
    }

    /// Waits for the tokens; `None` for a row that holds NaN or infinity, or nothing finite.
    ///
    /// # Errors
    /// As MLX says.
    pub fn read(&self) -> Result<Vec<Option<u32>>, MlxError> {
        let tokens = self.report.to_u32()?;
        let read = tokens.into_iter();
        Ok(read
            .map(|token| (token != BROKEN_ROW).then_some(token))
            .collect())
    }
}

/// `[rows]` tokens by inverse cumulative distribution over what the filters keep.
fn draw(logits: &Array, rules: &[DrawRule]) -> Result<Array, MlxError> {
    let vocabulary = logits.shape().last().copied().unwrap_or(0);
    let rows = int(rules.len())?;
    let column = |value: &dyn Fn(&DrawRule) -> f32| {
        let values: Vec<f32> = rules.iter().map(value).collect();
        Array::from_slice(&values, &[rows, 1])
    };
    let limits: Vec<i32> = rules
        .iter()
        .map(|rule| match i32::try_from(rule.top_k) {
            Ok(top_k) if top_k > 0 => top_k.min(vocabulary),
            _ => vocabulary,
        })
        .collect();
    let limits = Array::from_slice(&limits, &[rows, 1]);
    // A greedy row takes part for the sake of the shape; its draw is not used.
    let temperature = column(&|rule| {
        if rule.temperature == 0.0 {
            1.0
        } else {
            rule.temperature
        }
    });
    let order = ops::argsort_axis(ops::negative(logits)?, -1)?;
    let sorted = ops::indexing::take_along_axis(logits, &order, -1)?;
    let top = sorted.max_axis(-1, true)?;
    let zero = Array::from_f32(0.0);
    let weights = ops::exp(ops::divide(ops::subtract(&sorted, &top)?, &temperature)?)?;
    let places = ops::arange::<i32, i32>(0, vocabulary, 1)?;
    let weights = ops::select(ops::lt(&places, &limits)?, &weights, &zero)?;
    let cumulative = weights.cumsum(-1, false, true)?;
    // A top-p of 1 must not cut off what rounding puts behind the total.
    let mass = ops::multiply(
        weights.sum_axis(-1, true)?,
        column(&|rule| {
            if rule.top_p < 1.0 {
                rule.top_p
            } else {
                f32::INFINITY
            }
        }),
    )?;
    let before = ops::subtract(&cumulative, &weights)?;
    let likely = ops::ge(&weights, column(&|rule| rule.min_p.max(f32::MIN_POSITIVE)))?;
    let kept = ops::logical_and(ops::lt(&before, &mass)?, &likely)?;
    let kept_weight = ops::select(&kept, &weights, &zero)?.sum_axis(-1, true)?;
    let target = ops::multiply(kept_weight, column(&|rule| rule.uniform))?;
    let passed = ops::logical_and(&kept, ops::le(&cumulative, &target)?)?;
    let one = Array::from_int(1);
    let last = ops::subtract(count(&kept)?, &one)?;
    let place = ops::minimum(count(&passed)?, &last)?;
    Ok(ops::indexing::take_along_axis(&order, &place, -1)?.squeeze_axes(&[-1])?)
}

/// `[rows, 1]` i32: how many of each row are true.
fn count(flags: &Array) -> Result<Array, MlxError> {
    let ones = flags.as_dtype(mlx_rs::Dtype::Int32)?;
    Ok(ones.sum_axis(-1, true)?)
}
