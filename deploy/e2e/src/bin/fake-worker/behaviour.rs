//! What the test wants, from the environment.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;

/// What is wrong with a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nothing.
    Honest,
    /// Ends before it says anything.
    ExitsAtOnce,
    /// Says that it has a backend which this system cannot have.
    ImpossibleBackend,
    /// Says that it is another process.
    WrongPid,
    /// Says that the model runs on a backend which its own probes did not find.
    UnavailableBackend,
    /// Announces another digest than that of the tokenizer it sends.
    WrongTokenizer,
    /// Labels results with another backend than the one its model was loaded on.
    WrongLabel,
    /// Counts an op once too often.
    WrongOpCounts,
    /// Returns a token more than was asked for.
    ExtraToken,
    /// Returns a token less.
    MissingToken,
    /// Returns a token that is not in the vocabulary.
    TokenOutside,
    /// Returns log-probabilities that are not numbers.
    NanLogprob,
    /// Answers for a row that the plan does not have.
    ForeignRow,
    /// Numbers its results wrongly.
    WrongSequence,
    /// Answers every plan twice.
    AnswersTwice,
    /// Announces a frame beyond the limit.
    OversizedFrame,
    /// Sends a frame that is no message.
    GarbageFrame,
    /// Ends in the middle of a frame.
    HalfFrame,
    /// Takes plans and never answers.
    Silent,
    /// Dies of every prompt that contains the poison token.
    DiesOfPoison,
}

impl Mode {
    const TABLE: [(&'static str, Mode); 20] = [
        ("honest", Self::Honest),
        ("exits-at-once", Self::ExitsAtOnce),
        ("impossible-backend", Self::ImpossibleBackend),
        ("wrong-pid", Self::WrongPid),
        ("unavailable-backend", Self::UnavailableBackend),
        ("wrong-tokenizer", Self::WrongTokenizer),
        ("wrong-label", Self::WrongLabel),
        ("wrong-op-counts", Self::WrongOpCounts),
        ("extra-token", Self::ExtraToken),
        ("missing-token", Self::MissingToken),
        ("token-outside", Self::TokenOutside),
        ("nan-logprob", Self::NanLogprob),
        ("foreign-row", Self::ForeignRow),
        ("wrong-sequence", Self::WrongSequence),
        ("answers-twice", Self::AnswersTwice),
        ("oversized-frame", Self::OversizedFrame),
        ("garbage-frame", Self::GarbageFrame),
        ("half-frame", Self::HalfFrame),
        ("silent", Self::Silent),
        ("dies-of-poison", Self::DiesOfPoison),
    ];

    fn parse(name: &str) -> anyhow::Result<Self> {
        let found = Self::TABLE.iter().find(|(known, _)| *known == name);
        found
            .map(|&(_, mode)| mode)
            .with_context(|| format!("mode {name:?} is not known"))
    }
}

/// How this process behaves.
#[derive(Debug, Clone)]
pub(crate) struct Behaviour {
    pub(crate) mode: Mode,
    /// Time that every plan takes.
    pub(crate) plan_time: Duration,
    pub(crate) max_rows: u32,
    pub(crate) context_length: u32,
}

impl Behaviour {
    /// Reads `VELOX_FAKE` (modes separated by commas: the first process of the gateway has the first one, the last
    /// one goes for all that follow), `VELOX_FAKE_STATE` (folder in which processes are counted),
    /// `VELOX_FAKE_PLAN_MS`, `VELOX_FAKE_ROWS` and `VELOX_FAKE_CONTEXT`.
    pub(crate) fn from_environment() -> anyhow::Result<Self> {
        let modes = variable("VELOX_FAKE").unwrap_or_else(|| "honest".to_owned());
        let modes: Vec<Mode> = modes
            .split(',')
            .map(Mode::parse)
            .collect::<Result<_, _>>()?;
        let index = match variable("VELOX_FAKE_STATE") {
            Some(folder) => count_process(Path::new(&folder))?,
            None => 0,
        };
        let mode = modes.get(index).or(modes.last()).copied();
        Ok(Self {
            mode: mode.unwrap_or(Mode::Honest),
            plan_time: Duration::from_millis(number("VELOX_FAKE_PLAN_MS", 0)?),
            max_rows: u32::try_from(number("VELOX_FAKE_ROWS", 64)?)?,
            context_length: u32::try_from(number("VELOX_FAKE_CONTEXT", 4096)?)?,
        })
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn number(name: &str, default: u64) -> anyhow::Result<u64> {
    match variable(name) {
        Some(value) => value
            .parse()
            .with_context(|| format!("{name} is {value:?}")),
        None => Ok(default),
    }
}

/// Returns how many processes counted themselves before this one.
fn count_process(folder: &Path) -> anyhow::Result<usize> {
    for index in 0_usize.. {
        let file = folder.join(index.to_string());
        match OpenOptions::new().write(true).create_new(true).open(file) {
            Ok(_created) => return Ok(index),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).context("this process cannot be counted"),
        }
    }
    anyhow::bail!("there are more processes than numbers")
}
