//! What was typed. No I/O here.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use velox_client::endpoint::Endpoint;

/// Longest time limit: a year. The header that carries it has no room for just any number.
const MAX_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Bits of a quantised weight unless told otherwise.
const DEFAULT_BITS: u32 = 4;

/// Talks to a Velox gateway.
#[derive(Debug, Parser)]
#[command(name = "velox-client", version, propagate_version = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) target: Target,

    /// Print one JSON object a line on standard output, nothing else
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Which gateway answers.
#[derive(Debug, Clone, Args)]
pub(crate) struct Target {
    /// unix:PATH or http://HOST:PORT; default: the user's socket, then 127.0.0.1:50151
    #[arg(long, global = true, value_name = "URL", conflicts_with = "local")]
    pub(crate) endpoint: Option<Endpoint>,

    /// Start a gateway and workers for this one command and stop them after it
    #[arg(long, global = true)]
    pub(crate) local: bool,

    /// Model: the path of a GGUF file or of a Hugging Face folder, or a name
    #[arg(long, global = true, value_name = "PATH|NAME", env = "VELOX_MODEL")]
    pub(crate) model: Option<String>,

    /// Worker processes of the started gateway
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) workers: Option<u32>,

    /// Compute threads of each worker of the started gateway
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) threads: Option<u32>,

    /// Backend of the started gateway, and the only one that may answer
    #[arg(long, global = true, value_enum)]
    pub(crate) backend: Option<BackendChoice>,

    /// KV cache method of the started gateway
    #[arg(long, global = true, value_name = "METHOD")]
    pub(crate) kv: Option<String>,

    #[command(flatten)]
    pub(crate) load: LoadShape,

    /// Give up a call, or the start of a gateway, after this many seconds
    #[arg(long, global = true, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) timeout: Option<Duration>,
}

/// What is made of a model's file when it is loaded.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct LoadShape {
    /// Quantise float weights when a model is loaded (by --local, up or models load); quantised ones stay as they are
    #[arg(long, global = true)]
    pub(crate) quantize: bool,

    /// Bits of a quantised weight: 4, 5 or 8 [default: 4]
    #[arg(long, global = true, value_name = "BITS", requires = "quantize")]
    pub(crate) bits: Option<u32>,

    /// Most tokens of prompt and answer together, for a model that is loaded; 0 or less: its own limit, never exceeded
    #[arg(
        long,
        global = true,
        value_name = "TOKENS",
        allow_negative_numbers = true
    )]
    pub(crate) max_context: Option<i64>,
}

impl LoadShape {
    /// Returns the bits to quantise to.
    pub(crate) fn quantize_bits(&self) -> Option<u32> {
        self.quantize.then(|| self.bits.unwrap_or(DEFAULT_BITS))
    }

    /// Returns the limit of the context; what is 0 or less is none.
    pub(crate) fn max_context_tokens(&self) -> Option<u32> {
        let tokens = u32::try_from(self.max_context?).ok()?;
        (tokens > 0).then_some(tokens)
    }
}

impl Target {
    /// Returns the model; an empty VELOX_MODEL is none.
    pub(crate) fn model(&self) -> Option<&str> {
        self.model.as_deref().filter(|model| !model.is_empty())
    }
}

/// Reads a time limit: more than nothing, at most [`MAX_TIMEOUT`].
fn seconds(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|limit| !limit.is_zero() && *limit <= MAX_TIMEOUT)
        .ok_or_else(|| {
            format!(
                "not a number of seconds above 0 and up to {}",
                MAX_TIMEOUT.as_secs()
            )
        })
}

/// Backends by their names on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    /// The strongest that is ready
    Auto,
    /// MLX on the Apple GPU
    Metal,
    /// MLX on its CPU device
    MlxCpu,
    /// MLX on an NVIDIA GPU
    MlxCuda,
    /// SIMD kernels
    Cpu,
    /// The readable oracle
    Reference,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Chat with a model; without PROMPT interactively
    Chat(ChatArguments),
    /// Continue a prompt as it is, without a chat template
    Generate(GenerateArguments),
    /// Turn text into token ids
    Tokenize(TokenizeArguments),
    /// Perplexity of a model on a text
    Eval(EvalArguments),
    /// Resident models
    #[command(subcommand)]
    Models(ModelsCommand),
    /// What gateway and workers can do, as probed on their machine
    Capabilities,
    /// Check the installation and say what to install for a better backend
    Doctor,
    /// Start a gateway that stays
    Up,
    /// Stop it
    Down(DownArguments),
    /// What it is doing
    Status,
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// How tokens are chosen and when to stop.
#[derive(Debug, Clone, Args)]
pub(crate) struct Sampling {
    /// Most tokens to generate
    #[arg(long, value_name = "N")]
    pub(crate) max_tokens: Option<u32>,

    /// 0 = always the most likely token
    #[arg(
        long,
        visible_alias = "temperature",
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub(crate) temp: f32,

    /// Choose among the K most likely tokens
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,

    /// Choose among the tokens that together reach probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,

    /// Drop tokens below P times the best probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,

    /// The same seed gives the same answer
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,

    /// Divide (or multiply, if negative) logits of recent tokens by this
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,

    /// Subtract this per occurrence in the answer
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,

    /// Subtract this once if the token is in the answer
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,

    /// End before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,

    /// Print token ids, too
    #[arg(long)]
    pub(crate) token_ids: bool,

    /// Do not end at the model's end-of-generation tokens
    #[arg(long)]
    pub(crate) ignore_eos: bool,

    /// Drop the beginning of a prompt that is longer than the context
    #[arg(long)]
    pub(crate) truncate: bool,

    /// Keep the first N tokens of a truncated prompt and drop those behind them; the answer itself still ends at the
    /// context's end
    #[arg(long, value_name = "N", requires = "truncate")]
    pub(crate) sink_tokens: Option<u32>,

    /// Tokens that a worker computes at most before the gateway looks at them: the same answer, fewer round trips,
    /// larger pieces [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32))]
    pub(crate) tokens_per_eval: Option<u32>,

    /// Check what followed earlier in prompt and answer as a draft: faster where text repeats, and the same answer
    /// where logits do not depend on the batch (CPU, REFERENCE)
    #[arg(long)]
    pub(crate) ngram: bool,

    /// Tokens that must have occurred before, exactly so many, for a draft
    #[arg(long, value_name = "N", requires = "ngram", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub(crate) ngram_n: u32,

    /// Longest draft
    #[arg(long, value_name = "K", requires = "ngram", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub(crate) ngram_k: u32,
}

/// Arguments of `chat`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ChatArguments {
    /// What to say; without it the chat is interactive
    pub(crate) prompt: Option<String>,

    /// The same as PROMPT
    #[arg(long = "prompt", value_name = "PROMPT", conflicts_with = "prompt")]
    pub(crate) prompt_option: Option<String>,

    /// System message in front of the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,

    #[command(flatten)]
    pub(crate) sampling: Sampling,
}

/// Arguments of `generate`.
#[derive(Debug, Clone, Args)]
pub(crate) struct GenerateArguments {
    /// Text to continue
    #[arg(required_unless_present = "prompt_option")]
    pub(crate) prompt: Option<String>,

    /// The same as PROMPT
    #[arg(long = "prompt", value_name = "PROMPT", conflicts_with = "prompt")]
    pub(crate) prompt_option: Option<String>,

    /// Read markup such as <|im_start|> as control tokens
    #[arg(long)]
    pub(crate) special: bool,

    #[command(flatten)]
    pub(crate) sampling: Sampling,
}

/// Arguments of `tokenize`.
#[derive(Debug, Clone, Args)]
pub(crate) struct TokenizeArguments {
    /// Text to tokenize
    #[arg(required_unless_present = "jsonl")]
    pub(crate) text: Option<String>,

    /// File of JSON objects with "text", one a line
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    pub(crate) jsonl: Option<PathBuf>,

    /// Read markup such as <|im_start|> as control tokens
    #[arg(long)]
    pub(crate) special: bool,
}

/// Arguments of `eval`.
#[derive(Debug, Clone, Args)]
pub(crate) struct EvalArguments {
    /// UTF-8 text; its bytes are used as they are
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,

    /// Tokens of a window; the second half is scored
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..=1_048_576))]
    pub(crate) window: u32,

    /// Windows to score, from the beginning
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_windows: Option<u32>,
}

/// What to do with models.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum ModelsCommand {
    /// List resident models
    List,
    /// Load a model on every worker
    Load {
        /// Path on the gateway's machine, or a name in its model folder
        source: String,
        /// Name to serve it under
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
    /// Unload a model
    Unload {
        /// Its name
        name: String,
    },
}

/// Arguments of `down`.
#[derive(Debug, Clone, Args)]
pub(crate) struct DownArguments {
    /// Seconds that running requests get
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) grace: u32,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn flags_may_stand_behind_the_command() {
        let typed = Arguments::try_parse_from([
            "velox-client",
            "chat",
            "hi",
            "--local",
            "--model",
            "m.gguf",
            "--backend",
            "mlx-cpu",
            "--json",
            "--temp",
            "0.5",
        ])
        .unwrap();
        assert!(typed.json && typed.target.local);
        assert_eq!(typed.target.backend, Some(BackendChoice::MlxCpu));
    }

    #[test]
    fn time_limits_are_finite_and_positive() {
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        for text in ["0", "-1", "NaN", "inf", "1e30", "1e-30", "soon", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn negative_numbers_are_values() {
        let typed = [
            "velox-client",
            "generate",
            "x",
            "--temp",
            "-1",
            "--presence-penalty",
            "-0.5",
        ];
        let typed = Arguments::try_parse_from(typed).unwrap();
        let Command::Generate(generate) = typed.command else {
            panic!("another command");
        };
        assert_eq!(generate.sampling.temp, -1.0);
        assert_eq!(generate.sampling.presence_penalty, Some(-0.5));
        let refused = Arguments::try_parse_from(["velox-client", "--timeout", "-1", "status"]);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("above 0"), "{refused}");
    }

    #[test]
    fn contradictions_are_refused() {
        for typed in [
            &["velox-client", "chat", "a", "--prompt", "b"][..],
            &["velox-client", "tokenize"],
            &["velox-client", "chat", "a", "--ngram-n", "2"],
            &["velox-client", "chat", "a", "--ngram-k", "2"],
            &["velox-client", "chat", "a", "--ngram", "--ngram-n", "9"],
            &["velox-client", "chat", "a", "--ngram", "--ngram-k", "33"],
            &["velox-client", "chat", "a", "--tokens-per-eval", "33"],
            &["velox-client", "chat", "a", "--tokens-per-eval", "0"],
            &["velox-client", "--local", "--endpoint", "unix:/x", "status"],
            &["velox-client", "--endpoint", "https://x", "status"],
            &["velox-client", "eval", "--text", "t", "--max-windows", "0"],
        ] {
            assert!(Arguments::try_parse_from(typed).is_err(), "{typed:?}");
        }
    }
}
