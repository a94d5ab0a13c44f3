//! Bounds that both sides of a channel enforce, with units.

/// Largest tensor that travels inside a message; above it shared memory is used.
pub const MAX_INLINE_TENSOR_BYTES: usize = 64 * 1024;

/// Largest chunk of a tokenizer description in one message.
pub const MAX_TOKENIZER_CHUNK_BYTES: usize = 1024 * 1024;

/// Largest encoded tokenizer description that the gateway accepts.
pub const MAX_TOKENIZER_BYTES: usize = 128 * 1024 * 1024;

/// Largest frame of the step channel: a plan opens at most one row, whose lists of tokens are bounded by
/// [`MAX_TOKEN_LIST`]. Decoding a hostile frame of empty messages takes about a hundred times its length.
pub const MAX_STEP_FRAME_BYTES: usize = 2 * 1024 * 1024;

/// Largest message of the public API, and of the control channel.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;

/// Alignment of every slot in a shared segment: a page on Apple Silicon.
pub const SLOT_ALIGNMENT_BYTES: u64 = 16 * 1024;

/// Most dimensions of a tensor.
pub const MAX_TENSOR_RANK: usize = 8;

/// Largest shared segment.
pub const MAX_SEGMENT_BYTES: u64 = 4 * 1024 * 1024 * 1024;

/// Most alternatives reported per position.
pub const MAX_TOP_LOGPROBS: u32 = 20;

/// Most stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 16;

/// Longest stop string.
pub const MAX_STOP_STRING_BYTES: usize = 1024;

/// Most entries of `logit_bias`, `stop_token_ids` or `allowed_token_ids`.
pub const MAX_TOKEN_LIST: usize = 65_536;

/// Most decode steps of a row in one plan.
pub const MAX_DECODE_STEPS: u32 = 32;

/// Most draft tokens of a row in one plan.
pub const MAX_DRAFT_TOKENS: u32 = 32;

/// Longest n-gram that a draft is looked up by.
pub const MAX_LOOKUP_NGRAM_TOKENS: u32 = 8;

/// Most rows of one plan.
pub const MAX_PLAN_ROWS: usize = 256;
