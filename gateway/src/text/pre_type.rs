//! How a byte-level vocabulary wants text split before merging: the values of `tokenizer.ggml.pre`.
//!
//! The patterns are those of each family's published tokenizer.json. An unknown name is refused: another rule
//! gives ids that look right and make the model worse.

use super::TextError;

/// One splitting rule with the habits that come with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PreType {
    /// Patterns, applied one after the other; what they match and what lies between are pieces.
    pub(super) splits: &'static [&'static str],
    /// A piece that is in the vocabulary as a whole is not merged from its parts.
    pub(super) ignore_merges: bool,
    /// Puts BOS in front unless the file says otherwise.
    pub(super) add_bos: bool,
    /// Brings text to Unicode normal form C first.
    pub(super) compose: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl PreType {
    /// Finds the rule of a name in a model file.
    pub(super) fn named(pre: &str) -> Result<Self, TextError> {
        let rule = |splits| Self {
            splits,
            ignore_merges: false,
            add_bos: false,
            compose: false,
        };
        Ok(match pre {
            "" => return Err(TextError::MissingPreType),
            "gpt-2" | "gpt2" | "phi-2" | "exaone4" => rule(&[GPT2]),
            "smollm" | "starcoder" => rule(&[r"\p{N}", GPT2]),
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "lfm2" => {
                Self {
                    ignore_merges: true,
                    add_bos: true,
                    ..rule(&[LLAMA3])
                }
            }
            "qwen2" | "deepseek-r1-qwen" | "megrez" => Self {
                compose: true,
                ..rule(&[QWEN2])
            },
            "qwen35" => Self {
                compose: true,
                ..rule(&[QWEN35])
            },
            "minicpm5" => Self {
                ignore_merges: true,
                ..rule(&[r"\p{N}{1,3}", MINICPM5])
            },
            "tekken" => Self {
                ignore_merges: true,
                add_bos: true,
                ..rule(&[TEKKEN])
            },
            "gpt-4o" => rule(&[GPT4O]),
            "glm4" | "glm5" | "chatglm-bpe" => Self {
                ignore_merges: true,
                ..rule(&[LLAMA3])
            },
            unknown => return Err(TextError::UnsupportedPreType(unknown.to_owned())),
        })
    }
}
