//! Numbers of tensor types.

use velox_kernels::block::BlockType;

/// Returns the block type of a number, or the name of what has no kernel here.
pub(super) fn block_type(number: u32) -> Result<BlockType, String> {
    let known = match number {
        0 => BlockType::F32,
        1 => BlockType::F16,
        2 => BlockType::Q4_0,
        3 => BlockType::Q4_1,
        6 => BlockType::Q5_0,
        7 => BlockType::Q5_1,
        8 => BlockType::Q8_0,
        10 => BlockType::Q2K,
        11 => BlockType::Q3K,
        12 => BlockType::Q4K,
        13 => BlockType::Q5K,
        14 => BlockType::Q6K,
        20 => BlockType::Iq4Nl,
        30 => BlockType::Bf16,
        _ => return Err(refused_name(number)),
    };
    Ok(known)
}

fn refused_name(number: u32) -> String {
    let name = match number {
        4 => "Q4_2 (removed from the format)",
        5 => "Q4_3 (removed from the format)",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31 => "Q4_0_4_4 (removed from the format)",
        32 => "Q4_0_4_8 (removed from the format)",
        33 => "Q4_0_8_8 (removed from the format)",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "IQ4_NL_4_4 (removed from the format)",
        37 => "IQ4_NL_4_8 (removed from the format)",
        38 => "IQ4_NL_8_8 (removed from the format)",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        42 => "Q2_0",
        _ => return format!("{number} (unknown)"),
    };
    name.to_owned()
}
