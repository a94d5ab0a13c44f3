"""Writes fixtures/dequantise/TYPE.bin with the independent decoder of the PyPI package `gguf`;
Q8_AFFINE, which is ours, with numpy.

    python -m venv venv && venv/bin/pip install gguf numpy
    venv/bin/python make_dequantise_fixtures.py

A file holds a u32 (little-endian) number of blocks, the blocks, then their f32 values as that package decodes them.
Blocks are random, with scale fields from extreme to ordinary; the first ones have all bits clear or set. Where the
package can quantise, half of the blocks are its own quantised normal numbers.
"""

import pathlib
import struct

import gguf
import numpy as np

# Type: byte offsets of its f16 fields.
HALF_FIELDS = {
    "F32": [],
    "F16": [],
    "BF16": [],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
}
CAN_QUANTISE = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
# No infinity and no NaN: a product with them has no single bit pattern to compare.
HALVES = [0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 2.0**-24, -(2.0**-24), 2.0**-14, 0.1]


def random_blocks(name, qtype, random):
    elements, size = gguf.GGML_QUANT_SIZES[qtype]
    count = {1: 256, 32: 48, 256: 16}[elements]
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    blocks[0] = 0
    blocks[1] = 255
    for position, offset in enumerate(HALF_FIELDS[name]):
        for block in range(count):
            if block < 2 * len(HALVES) and block % 2 == 0:
                value = HALVES[(block // 2 + 3 * position) % len(HALVES)]
            else:
                value = random.normal() * 10.0 ** random.uniform(-4, 1)
            blocks[block, offset : offset + 2] = np.array([value], "<f2").view(np.uint8)
    if name in CAN_QUANTISE:
        values = random.normal(size=(count // 2, elements)).astype(np.float32)
        blocks[count // 2 :] = gguf.quantize(values, qtype)[:, :size]
    if elements == 1:
        values = blocks.view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[name])
        if name == "BF16":
            values[values & 0x7F80 == 0x7F80] = 0x3F80
        else:
            values[~np.isfinite(values)] = 1.0
    return blocks


def affine_blocks(random):
    """d f32, m f32, 32 u8."""
    blocks = np.zeros(48, dtype=[("d", "<f4"), ("m", "<f4"), ("q", "u1", 32)])
    for name in ["d", "m"]:
        blocks[name] = random.normal(size=48) * 10.0 ** random.uniform(-6, 3, 48)
        blocks[name][: len(HALVES)] = random.permutation(HALVES)
    blocks["q"] = random.integers(0, 256, (48, 32))
    blocks["q"][:2] = [[0], [255]]
    return blocks, blocks["d"][:, None] * blocks["q"].astype("f4") + blocks["m"][:, None]


def main():
    folder = pathlib.Path(__file__).parent / "fixtures" / "dequantise"
    folder.mkdir(parents=True, exist_ok=True)
    for name in HALF_FIELDS:
        qtype = gguf.GGMLQuantizationType[name]
        blocks = random_blocks(name, qtype, np.random.default_rng(sum(name.encode())))
        values = gguf.dequantize(blocks.copy(), qtype).astype("<f4")
        data = struct.pack("<I", len(blocks)) + blocks.tobytes() + values.tobytes()
        (folder / f"{name}.bin").write_bytes(data)
    blocks, values = affine_blocks(np.random.default_rng(40))
    data = struct.pack("<I", len(blocks)) + blocks.tobytes() + values.astype("<f4").tobytes()
    (folder / "Q8_AFFINE.bin").write_bytes(data)


if __name__ == "__main__":
    main()
