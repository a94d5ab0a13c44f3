#!/usr/bin/env python3
"""Makes tests/fixtures/affine: tiny random llamas quantised by MLX, and their logits by numpy.

    python -m venv venv && venv/bin/pip install 'mlx[cpu]==0.32.2' numpy
    venv/bin/python make_affine_fixtures.py

mixed    every number of bits and every group, one module that is not quantised, scales in bf16, a head of its own
uniform  4 bits in groups of 32 as the whole configuration says, scales in f32 (no f16 numbers), tied, a bias beside the
         biases of groups

Each folder holds a checkpoint and, as in fixtures/families,
  input.json  token ids
  logits.f32  little-endian f32 [2, tokens, vocabulary]: first with keys and values rounded to f16, then exact. Both
              from the weights that mlx.core.dequantize gives of the f32 scales, in float64.
"""

import json
import pathlib
import shutil

import mlx.core as mx
import numpy

ROOT = pathlib.Path(__file__).parent / "fixtures" / "affine"
VOCABULARY = 64
TOKENS = 12
ROPE_THETA = 10000.0
EPSILON = 1e-5

SELF, MLP = "self_attn.", "mlp."
CASES = {
    "mixed": dict(
        dtype=mx.bfloat16,
        sizes=dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=1, head_dim=32),
        layers=2,
        tied=False,
        bias=False,
        default=dict(group_size=64, bits=4),
        # Rows of q, k, v, gate and up have 64 elements, those of o and down 128.
        overrides={
            "model.embed_tokens": dict(group_size=32, bits=6),
            "lm_head": dict(group_size=64, bits=8, mode="affine"),
            "model.layers.0.self_attn.q_proj": dict(group_size=32, bits=2),
            "model.layers.0.self_attn.k_proj": dict(group_size=64, bits=3),
            "model.layers.0.self_attn.v_proj": dict(group_size=32, bits=8),
            "model.layers.0.self_attn.o_proj": dict(group_size=128, bits=5),
            "model.layers.0.mlp.gate_proj": dict(group_size=64, bits=6),
            "model.layers.0.mlp.up_proj": False,
            "model.layers.0.mlp.down_proj": dict(group_size=128, bits=8),
            "model.layers.1.self_attn.o_proj": dict(group_size=128, bits=3),
            "model.layers.1.mlp.up_proj": dict(bits=5, group_size=32),
            "model.layers.1.mlp.down_proj": dict(group_size=128, bits=4),
        },
    ),
    "uniform": dict(
        dtype=mx.float32,
        sizes=dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
        layers=1,
        tied=True,
        bias=True,
        default=dict(group_size=32, bits=4),
        overrides={},
    ),
}


def shapes(case):
    """Shape of every tensor, as `module.kind`."""
    sizes = case["sizes"]
    hidden, intermediate = sizes["hidden_size"], sizes["intermediate_size"]
    queries = sizes["num_attention_heads"] * sizes["head_dim"]
    keys = sizes["num_key_value_heads"] * sizes["head_dim"]
    found = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    if not case["tied"]:
        found["lm_head.weight"] = (VOCABULARY, hidden)
    for layer in range(case["layers"]):
        prefix = f"model.layers.{layer}."
        linears = {
            SELF + "q_proj": (queries, hidden),
            SELF + "k_proj": (keys, hidden),
            SELF + "v_proj": (keys, hidden),
            SELF + "o_proj": (hidden, queries),
            MLP + "gate_proj": (intermediate, hidden),
            MLP + "up_proj": (intermediate, hidden),
            MLP + "down_proj": (hidden, intermediate),
        }
        for module, shape in linears.items():
            found[f"{prefix}{module}.weight"] = shape
            if case["bias"] and module.startswith(SELF):
                found[f"{prefix}{module}.bias"] = shape[:1]
        found[prefix + "input_layernorm.weight"] = (hidden,)
        found[prefix + "post_attention_layernorm.weight"] = (hidden,)
    return found


def random(name, shape, generator):
    values = generator.standard_normal(shape)
    if "norm" in name:
        return 1.0 + 0.2 * values
    if name.endswith("bias"):
        return 0.2 * values
    return (0.5 if "embed_tokens" in name or "lm_head" in name else 0.25) * values


def quantised(case, generator):
    """Tensors as they are saved, and the weights that they stand for."""
    saved, weights = {}, {}
    for name, shape in shapes(case).items():
        values = mx.array(random(name, shape, generator).astype("f4")).astype(case["dtype"])
        module, kind = name.rsplit(".", 1)
        layout = case["overrides"].get(module, case["default"])
        if kind == "bias" or len(shape) == 1 or layout is False:
            saved[name] = values
            weights[name] = numpy.array(values.astype(mx.float32), dtype="f8")
            continue
        parts = dict(group_size=layout["group_size"], bits=layout["bits"])
        packed, scales, biases = mx.quantize(values, **parts)
        saved.update({name: packed, f"{module}.scales": scales, f"{module}.biases": biases})
        wide = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), **parts)
        weights[name] = numpy.array(wide, dtype="f8")
    return saved, weights


def norm(values, weight):
    return values / numpy.sqrt((values**2).mean(-1, keepdims=True) + EPSILON) * weight


def rotated(values):
    """[T, heads, K], element i with i + K/2."""
    tokens, _, width = values.shape
    angles = numpy.arange(tokens)[:, None] * ROPE_THETA ** (-numpy.arange(0, width, 2) / width)
    cosine, sine = numpy.cos(angles)[:, None], numpy.sin(angles)[:, None]
    first, second = numpy.split(values, 2, axis=-1)
    return numpy.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def logits(case, weights, ids, stored):
    """`stored` is what the cache makes of keys and values."""
    sizes = case["sizes"]
    heads, kv_heads, width = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    tokens = len(ids)

    def linear(values, module):
        return values @ weights[module + ".weight"].T + weights.get(module + ".bias", 0.0)

    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(case["layers"]):
        prefix = f"model.layers.{layer}."
        normed = norm(hidden, weights[prefix + "input_layernorm.weight"])
        parts = [linear(normed, prefix + SELF + name).reshape(tokens, -1, width) for name in ("q_proj", "k_proj", "v_proj")]
        queries, keys, values = rotated(parts[0]), stored(rotated(parts[1])), stored(parts[2])
        keys, values = (numpy.repeat(part, heads // kv_heads, axis=1) for part in (keys, values))
        scores = numpy.einsum("qhk,shk->hqs", queries, keys) / numpy.sqrt(width)
        scores = numpy.where(numpy.tril(numpy.ones((tokens, tokens), dtype=bool)), scores, -numpy.inf)
        scores = numpy.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        attended = numpy.einsum("hqs,shk->qhk", scores, values).reshape(tokens, -1)
        hidden = hidden + linear(attended, prefix + SELF + "o_proj")
        normed = norm(hidden, weights[prefix + "post_attention_layernorm.weight"])
        gate = linear(normed, prefix + MLP + "gate_proj")
        gated = gate / (1.0 + numpy.exp(-gate)) * linear(normed, prefix + MLP + "up_proj")
        hidden = hidden + linear(gated, prefix + MLP + "down_proj")
    hidden = norm(hidden, weights["model.norm.weight"])
    head = "model.embed_tokens" if case["tied"] else "lm_head"
    return hidden @ weights[head + ".weight"].T


def tokenizer():
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary.update({f"t{token}": token for token in range(3, VOCABULARY)})
    added = [
        dict(id=token, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for text, token in list(vocabulary.items())[:3]
    ]
    model = dict(type="WordLevel", vocab=vocabulary, unk_token="<unk>")
    absent = dict.fromkeys(["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"])
    return dict(version="1.0", added_tokens=added, model=model, **absent)


def write_json(path, value):
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n")


def make(name, case, generator):
    folder = ROOT / name
    folder.mkdir(parents=True)
    saved, weights = quantised(case, generator)
    mx.save_safetensors(str(folder / "model.safetensors"), saved, metadata=dict(format="mlx"))
    quantization = dict(case["default"], mode="affine", **case["overrides"])
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=VOCABULARY,
        num_hidden_layers=case["layers"],
        max_position_embeddings=64,
        rms_norm_eps=EPSILON,
        rope_theta=ROPE_THETA,
        attention_bias=case["bias"],
        tie_word_embeddings=case["tied"],
        bos_token_id=1,
        eos_token_id=2,
        quantization=quantization,
        quantization_config=quantization,
        **case["sizes"],
    )
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", tokenizer())
    ids = generator.integers(3, VOCABULARY, TOKENS)
    write_json(folder / "input.json", ids.tolist())
    rounded = logits(case, weights, ids, lambda values: values.astype("f2").astype("f8"))
    exact = logits(case, weights, ids, lambda values: values)
    print(f"{name}: logits to {abs(exact).max():.2f}, f16 cache moves them by {abs(exact - rounded).max():.2e}")
    (folder / "logits.f32").write_bytes(numpy.stack([rounded, exact]).astype("<f4").tobytes())


def main():
    mx.set_default_device(mx.cpu)
    shutil.rmtree(ROOT, ignore_errors=True)
    generator = numpy.random.default_rng(20261201)
    for name, case in CASES.items():
        make(name, case, generator)


if __name__ == "__main__":
    main()
