//! Writes GGUF files, also broken ones.

use std::path::PathBuf;

/// A value of a pair or of an array.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    U8(u8),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    U64(u64),
    Text(String),
    Texts(Vec<String>),
    U32s(Vec<u32>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    /// Type number and bytes as they are.
    Raw(u32, Vec<u8>),
}

impl Value {
    pub(crate) fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    fn write(&self, out: &mut Vec<u8>) {
        let array = |element: u32, count: usize, body: Vec<u8>| {
            let mut bytes = element.to_le_bytes().to_vec();
            bytes.extend(u64::try_from(count).unwrap().to_le_bytes());
            bytes.extend(body);
            (9, bytes)
        };
        let (kind, bytes): (u32, Vec<u8>) = match self {
            Self::U8(value) => (0, vec![*value]),
            Self::U32(value) => (4, value.to_le_bytes().to_vec()),
            Self::I32(value) => (5, value.to_le_bytes().to_vec()),
            Self::F32(value) => (6, value.to_le_bytes().to_vec()),
            Self::Bool(value) => (7, vec![u8::from(*value)]),
            Self::U64(value) => (10, value.to_le_bytes().to_vec()),
            Self::Text(text) => (8, string(text.as_bytes())),
            Self::Texts(texts) => {
                let body = texts.iter().flat_map(|text| string(text.as_bytes()));
                array(8, texts.len(), body.collect())
            }
            Self::U32s(values) => {
                let body = values.iter().flat_map(|value| value.to_le_bytes());
                array(4, values.len(), body.collect())
            }
            Self::I32s(values) => {
                let body = values.iter().flat_map(|value| value.to_le_bytes());
                array(5, values.len(), body.collect())
            }
            Self::F32s(values) => {
                let body = values.iter().flat_map(|value| value.to_le_bytes());
                array(6, values.len(), body.collect())
            }
            Self::Raw(kind, bytes) => (*kind, bytes.clone()),
        };
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    }
}

/// Length and bytes.
pub(crate) fn string(text: &[u8]) -> Vec<u8> {
    let mut bytes = u64::try_from(text.len()).unwrap().to_le_bytes().to_vec();
    bytes.extend(text);
    bytes
}

/// One entry of the tensor table.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Fastest first, as in the file.
    pub(crate) dims: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) offset: u64,
}

/// A file in the making; every field may be made wrong.
#[derive(Debug, Clone)]
pub(crate) struct File {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) pair_count: Option<u64>,
    pub(crate) pairs: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) data: Vec<u8>,
}

/// Padding of [`File::bytes`], whatever `general.alignment` claims.
const ALIGNMENT: usize = 32;
pub(crate) const VOCABULARY: usize = 6;

impl File {
    /// A Llama with hidden size 8, 2 heads, 1 layer and 6 tokens.
    pub(crate) fn tiny() -> Self {
        let mut file = Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            pair_count: None,
            pairs: Vec::new(),
            tensors: Vec::new(),
            data: Vec::new(),
        };
        let texts = ["<unk>", "<s>", "</s>", "a", "b", "<|im_end|>"];
        for (key, value) in [
            ("general.architecture", Value::text("llama")),
            ("llama.context_length", Value::U32(32)),
            ("llama.embedding_length", Value::U32(8)),
            ("llama.block_count", Value::U32(1)),
            ("llama.feed_forward_length", Value::U32(12)),
            ("llama.attention.head_count", Value::U32(2)),
            ("llama.attention.head_count_kv", Value::U32(1)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
            ("tokenizer.ggml.model", Value::text("gpt2")),
            ("tokenizer.ggml.pre", Value::text("gpt-2")),
            (
                "tokenizer.ggml.tokens",
                Value::Texts(texts.map(str::to_owned).to_vec()),
            ),
            (
                "tokenizer.ggml.token_type",
                Value::I32s(vec![2, 3, 3, 1, 1, 3]),
            ),
            (
                "tokenizer.ggml.merges",
                Value::Texts(vec!["a b".to_owned()]),
            ),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
            ("tokenizer.ggml.eos_token_id", Value::U32(4)),
        ] {
            file.pairs.push((key.to_owned(), value));
        }
        for (name, dims) in [
            ("token_embd.weight", vec![8, 6]),
            ("blk.0.attn_norm.weight", vec![8]),
            ("blk.0.attn_q.weight", vec![8, 8]),
            ("blk.0.attn_k.weight", vec![8, 4]),
            ("blk.0.attn_v.weight", vec![8, 4]),
            ("blk.0.attn_output.weight", vec![8, 8]),
            ("blk.0.ffn_norm.weight", vec![8]),
            ("blk.0.ffn_gate.weight", vec![8, 12]),
            ("blk.0.ffn_up.weight", vec![8, 12]),
            ("blk.0.ffn_down.weight", vec![12, 8]),
            ("output_norm.weight", vec![8]),
        ] {
            file.add_f32(name, dims);
        }
        file
    }

    /// Adds an f32 tensor with data behind the others.
    pub(crate) fn add_f32(&mut self, name: &str, dims: Vec<u64>) {
        let elements: u64 = dims.iter().product();
        self.data
            .resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        self.tensors.push(Tensor {
            name: name.to_owned(),
            dims,
            kind: 0,
            offset: u64::try_from(self.data.len()).unwrap(),
        });
        for _ in 0..elements {
            self.data.extend(0.5_f32.to_le_bytes());
        }
    }

    /// Sets a pair, in its old place if there is one.
    pub(crate) fn set(&mut self, key: &str, value: Value) {
        match self.pairs.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.pairs.push((key.to_owned(), value)),
        }
    }

    /// Removes a pair.
    pub(crate) fn unset(&mut self, key: &str) {
        self.pairs.retain(|(known, _)| known != key);
    }

    /// Finds a tensor.
    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors
            .iter_mut()
            .find(|tensor| tensor.name == name)
            .unwrap()
    }

    /// Returns the file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(&self.data);
        out
    }

    /// Returns everything before the padding.
    pub(crate) fn header(&self) -> Vec<u8> {
        let count = |given: Option<u64>, length: usize| {
            given
                .unwrap_or_else(|| u64::try_from(length).unwrap())
                .to_le_bytes()
        };
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(count(self.tensor_count, self.tensors.len()));
        out.extend(count(self.pair_count, self.pairs.len()));
        for (key, value) in &self.pairs {
            out.extend(string(key.as_bytes()));
            value.write(&mut out);
        }
        for tensor in &self.tensors {
            out.extend(string(tensor.name.as_bytes()));
            out.extend(u32::try_from(tensor.dims.len()).unwrap().to_le_bytes());
            for dimension in &tensor.dims {
                out.extend(dimension.to_le_bytes());
            }
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out
    }
}

/// A file on disk that vanishes with the value.
pub(crate) struct OnDisk {
    folder: tempfile::TempDir,
    name: String,
}

impl OnDisk {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Self::named("model.gguf", bytes)
    }

    pub(crate) fn named(name: &str, bytes: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(name), bytes).unwrap();
        Self {
            folder,
            name: name.to_owned(),
        }
    }

    pub(crate) fn add(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.folder.path().join(name), bytes).unwrap();
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join(&self.name)
    }
}
