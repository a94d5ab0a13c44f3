"""Writes fixtures/quantise/TYPE.bin with the quantisers of the PyPI package `gguf`.

    python -m venv venv && venv/bin/pip install gguf numpy
    venv/bin/python make_quantise_fixtures.py

A file holds a u32 (little-endian) number of blocks, their f32 values, then the blocks as that package makes them.
Blocks are normal numbers of many sizes; the first ones are constant, of one sign, with ties between two codes, with
one outlier, or so small that their f16 scale is 0 or subnormal.
"""

import pathlib
import struct

import gguf
import numpy as np

TYPES = ["Q4_1", "Q5_1", "Q8_0"]
ELEMENTS = 32


def values(random):
    ramp = np.arange(ELEMENTS, dtype=np.float64)
    special = [
        np.zeros(ELEMENTS),
        -np.zeros(ELEMENTS),
        np.full(ELEMENTS, 0.75),
        np.full(ELEMENTS, -3.0),
        ramp,
        -ramp - 1,
        np.minimum(ramp / 2, 15),
        np.where(ramp == 0, 127, ramp - 15.5),
        np.where(ramp == 7, 1000, ramp / 1000),
        np.where(ramp == 7, -1000, ramp / 1000),
        ramp * 2.0**-30,
        (ramp - 11) * 2.0**-20,
        (ramp - 16) * 2000,
    ]
    normal = [
        random.normal(loc=random.normal(), size=ELEMENTS) * 10.0 ** random.uniform(-5, 3)
        for _ in range(50)
    ]
    return np.array(special + normal, dtype="<f4")


def main():
    folder = pathlib.Path(__file__).parent / "fixtures" / "quantise"
    folder.mkdir(parents=True, exist_ok=True)
    for name in TYPES:
        rows = values(np.random.default_rng(sum(name.encode())))
        blocks = gguf.quantize(rows, gguf.GGMLQuantizationType[name])
        data = struct.pack("<I", len(rows)) + rows.tobytes() + blocks.tobytes()
        (folder / f"{name}.bin").write_bytes(data)


if __name__ == "__main__":
    main()
