#!/usr/bin/env python3
"""Makes tests/fixtures/families: tiny random models and what Hugging Face transformers computes with them.

Needs torch, transformers, safetensors, numpy and gguf (made with torch 2.15, transformers 5.24, gguf 0.19).

Each folder holds a checkpoint and
  input.json  token ids
  logits.f32  little-endian f32 [2, tokens, vocabulary]: first with keys and values rounded to f16 as our cache
              stores them, then exact. Both from weights as stored, widened to f32, eager attention, no batch.

The *.gguf files hold the same tensors as the folder they are named after, in the layout of llama.cpp's converter:
rows of q and k inside each head reordered from half-split to interleaved.
"""

import json
import pathlib
import shutil

import gguf
import numpy
import torch
from safetensors.torch import save_file
from transformers import (
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    AutoModelForCausalLM,
)

ROOT = pathlib.Path(__file__).parent / "fixtures" / "families"
VOCABULARY = 96
TOKENS = 24
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0
)
PLAIN = dict(rope_type="default", rope_theta=10000.0)
LINEAR = dict(rope_type="linear", rope_theta=5000.0, factor=2.0)

CASES = {
    "llama-tied": (LlamaConfig, "float32", dict(tie_word_embeddings=True, rope_parameters=PLAIN)),
    "llama-untied": (LlamaConfig, "bfloat16", dict(rope_parameters=PLAIN, num_key_value_heads=4)),
    "llama-biases": (LlamaConfig, "float16", dict(attention_bias=True, mlp_bias=True, rope_parameters=PLAIN)),
    "llama-head-dim": (LlamaConfig, "bfloat16", dict(head_dim=16, rope_parameters=PLAIN)),
    "llama-rope-llama3": (LlamaConfig, "float16", dict(head_dim=16, rope_parameters=LLAMA3)),
    "llama-rope-linear": (LlamaConfig, "bfloat16", dict(rope_parameters=LINEAR)),
    "llama-rope-yarn": (LlamaConfig, "float16", dict(head_dim=16, rope_parameters=YARN)),
    "mistral-window": (MistralConfig, "bfloat16", dict(sliding_window=7, rope_parameters=PLAIN)),
    "qwen2": (Qwen2Config, "float32", dict(rope_parameters=PLAIN, tie_word_embeddings=True)),
    "qwen2-window": (
        Qwen2Config,
        "float16",
        dict(rope_parameters=PLAIN, use_sliding_window=True, sliding_window=5, max_window_layers=0),
    ),
    "qwen3": (Qwen3Config, "float16", dict(head_dim=16, rope_parameters=dict(PLAIN, rope_theta=1e6))),
}


class HalfCache(DynamicCache):
    """A cache that hands keys and values out as f16 would have kept them."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.half().float(), value_states.half().float(), *args, **kwargs)


def randomise(model, generator):
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data = 1.0 + 0.2 * values
        elif name.endswith("bias"):
            parameter.data = 0.2 * values
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.data = 0.5 * values
        else:
            parameter.data = 0.25 * values


def tokenizer():
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary.update({f"t{token}": token for token in range(3, VOCABULARY)})
    added = [
        dict(id=token, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for text, token in list(vocabulary.items())[:3]
    ]
    return dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=added,
        normalizer=None,
        pre_tokenizer=None,
        post_processor=None,
        decoder=None,
        model=dict(type="WordLevel", vocab=vocabulary, unk_token="<unk>"),
    )


def write_json(path, value):
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n")


def make(name, config_class, dtype, overrides, generator):
    folder = ROOT / name
    folder.mkdir(parents=True)
    config = config_class(**{**COMMON, **overrides})
    model = AutoModelForCausalLM.from_config(config).eval()
    randomise(model, generator)
    model.tie_weights()
    model = model.to(getattr(torch, dtype))
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))
    (folder / "model.safetensors").chmod(0o644)
    written = json.loads(config.to_json_string())
    written["architectures"] = [type(model).__name__]
    written["dtype"] = dtype
    if name == "llama-rope-linear":
        # The form of files from before transformers 5.
        written.pop("rope_parameters")
        written["rope_theta"] = LINEAR["rope_theta"]
        written["rope_scaling"] = dict(type="linear", factor=LINEAR["factor"])
    write_json(folder / "config.json", written)
    # Loaded anew: a cast of the model would round the rotary frequencies as well.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    config = model.config

    ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=generator)
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits[0]
        plain_cache = model(ids, past_key_values=DynamicCache(config=config)).logits[0]
        rounded = model(ids, past_key_values=HalfCache(config=config)).logits[0]
    assert (exact - plain_cache).abs().max() < 1e-4, name
    print(f"{name}: logits to {exact.abs().max():.2f}, f16 cache moves them by {(exact - rounded).abs().max():.2e}")

    write_json(folder / "tokenizer.json", tokenizer())
    write_json(folder / "input.json", ids[0].tolist())
    logits = torch.stack([rounded, exact]).numpy().astype("<f4")
    (folder / "logits.f32").write_bytes(logits.tobytes())
    return config, {key: value.float().numpy() for key, value in tensors.items()}


def interleave(rows, heads):
    """Row order of llama.cpp's converter: pair (i, i + half) of a head becomes (2i, 2i + 1)."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name):
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[module]}.{kind}"


def rope_divisors(config):
    """llama.cpp's converter writes the llama3 rule as one divisor per frequency."""
    rule = config.rope_parameters
    frequencies = rule["rope_theta"] ** -(numpy.arange(0, config.head_dim, 2) / config.head_dim)
    low = rule["original_max_position_embeddings"] / rule["low_freq_factor"]
    high = rule["original_max_position_embeddings"] / rule["high_freq_factor"]
    divisors = []
    for wavelength in 2 * numpy.pi / frequencies:
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(rule["factor"])
        else:
            smooth = (rule["original_max_position_embeddings"] / wavelength - rule["low_freq_factor"]) / (
                rule["high_freq_factor"] - rule["low_freq_factor"]
            )
            divisors.append(1.0 / ((1.0 - smooth) / rule["factor"] + smooth))
    return numpy.array(divisors, dtype=numpy.float32)


def make_gguf(name, config, tensors):
    writer = gguf.GGUFWriter(str(ROOT / f"{name}.gguf"), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    texts = list(tokenizer()["model"]["vocab"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([2, 3, 3] + [1] * (len(texts) - 3))
    writer.add_token_merges(["t 3"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for source, values in tensors.items():
        if "q_proj" in source:
            values = interleave(values, config.num_attention_heads)
        elif "k_proj" in source:
            values = interleave(values, config.num_key_value_heads)
        # As converters do: matrices that were 16 bit stay f16, vectors are f32.
        stored = numpy.float16 if values.ndim == 2 and name != "llama-tied" else numpy.float32
        writer.add_tensor(gguf_name(source), values.astype(stored))
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    generator = torch.Generator().manual_seed(20261130)
    made = {name: make(name, *case, generator) for name, case in CASES.items()}
    for name in ["llama-tied", "llama-biases", "llama-rope-llama3"]:
        make_gguf(name, *made[name])


if __name__ == "__main__":
    main()
