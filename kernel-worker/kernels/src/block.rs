//! Element and block types of stored matrices, with the byte layouts of GGUF and one of our own.

/// How a matrix is stored. Every row is a whole number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// Upper half of binary32.
    Bf16,
    /// 18 bytes: d f16, 16 nibble bytes; `d (q - 8)`.
    Q4_0,
    /// 20 bytes: d f16, m f16, 16 nibble bytes; `d q + m`.
    Q4_1,
    /// 22 bytes: d f16, fifth bits u32, 16 nibble bytes; `d (q - 16)`.
    Q5_0,
    /// 24 bytes: d f16, m f16, fifth bits u32, 16 nibble bytes; `d q + m`.
    Q5_1,
    /// 34 bytes: d f16, 32 i8; `d q`.
    Q8_0,
    /// 84 bytes per 256.
    Q2K,
    /// 110 bytes per 256.
    Q3K,
    /// 144 bytes per 256.
    Q4K,
    /// 176 bytes per 256.
    Q5K,
    /// 210 bytes per 256.
    Q6K,
    /// 18 bytes: d f16, 16 nibble bytes; `d table[q]`.
    Iq4Nl,
    /// 40 bytes: d f32, m f32, 32 u8; `d q + m`. In no file: what becomes of MLX's groups that fit no other type.
    Q8Affine,
}

impl BlockType {
    /// Every type.
    pub const ALL: [Self; 15] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Q8Affine,
    ];

    /// Returns the elements of one block.
    #[must_use]
    pub const fn elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0
            | Self::Q4_1
            | Self::Q5_0
            | Self::Q5_1
            | Self::Q8_0
            | Self::Iq4Nl
            | Self::Q8Affine => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Returns the bytes of one block.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::Q8Affine => 40,
        }
    }

    /// Returns the name, as GGUF tools write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Q8Affine => "Q8_AFFINE",
        }
    }

    /// Returns the bytes of a row of `columns` elements, or `None` if that is no whole number of blocks or overflows.
    #[must_use]
    pub const fn row_bytes(self, columns: usize) -> Option<usize> {
        if !columns.is_multiple_of(self.elements()) {
            return None;
        }
        (columns / self.elements()).checked_mul(self.bytes())
    }
}
