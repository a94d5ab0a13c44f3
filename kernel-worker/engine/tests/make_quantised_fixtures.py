"""Writes fixtures/quantised/llama-tied.TYPE.gguf: fixtures/families/llama-tied.gguf with its matrices as blocks.

    python -m venv venv && venv/bin/pip install gguf numpy
    venv/bin/python make_quantised_fixtures.py

The blocks come from the quantisers of the PyPI package `gguf`. A matrix whose width is no multiple of 32 stays float.
"""

import pathlib

import gguf

ROOT = pathlib.Path(__file__).parent / "fixtures"
TYPES = ["Q4_1", "Q5_1", "Q8_0"]
FLOATS = {
    gguf.GGMLQuantizationType.F32,
    gguf.GGMLQuantizationType.F16,
    gguf.GGMLQuantizationType.BF16,
}


def copy_fields(reader, writer):
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, element)


def main():
    (ROOT / "quantised").mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(ROOT / "families" / "llama-tied.gguf")
    for name in TYPES:
        wanted = gguf.GGMLQuantizationType[name]
        writer = gguf.GGUFWriter(ROOT / "quantised" / f"llama-tied.{name}.gguf", "llama")
        copy_fields(reader, writer)
        for tensor in reader.tensors:
            is_matrix = len(tensor.shape) == 2 and tensor.shape[0] % 32 == 0
            if is_matrix and tensor.tensor_type in FLOATS:
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
                writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
            else:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


if __name__ == "__main__":
    main()
