"""mlx-lm's half of the comparison; runs where mlx-lm is installed.

    peer.py convert MODEL.gguf FOLDER f32|f16     writes a Llama of Q4_1 blocks as a folder quantised by MLX, bit by bit
    peer.py measure FOLDER RUNS PROMPT OUTPUT     prints one JSON object: speeds of the runs and the tokens of the last
"""

import json
import pathlib
import sys
import time

import mlx.core as mx

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def checkpoint_name(name):
    module, kind = name.rsplit(".", 1)
    if module.startswith("blk."):
        _, layer, module = module.split(".", 2)
        return f"model.layers.{layer}.{LAYER_NAMES[module]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def halves_apart(rows, heads):
    """GGUF has the rows of a rotated pair side by side, a checkpoint the first halves of all pairs in front."""
    parts = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return parts.swapaxes(1, 2).reshape(rows.shape)


def convert(model, folder, scales):
    tensors, facts = mx.load(model, return_metadata=True)
    dtype = {"f32": mx.float32, "f16": mx.float16}[scales]

    def fact(name):
        return facts[f"llama.{name}"].item()

    heads = {"attn_q": fact("attention.head_count"), "attn_k": fact("attention.head_count_kv")}
    saved = {}
    for name, values in tensors.items():
        module = name.rsplit(".", 2)[-2]
        if module in heads:
            values = halves_apart(values, heads[module])
        if values.dtype != mx.uint32:
            values = values.astype(dtype)
        saved[checkpoint_name(name)] = values
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), saved, {"format": "mlx"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": fact("embedding_length"),
        "num_hidden_layers": fact("block_count"),
        "intermediate_size": fact("feed_forward_length"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "rope_theta": fact("rope.freq_base"),
        "max_position_embeddings": fact("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "quantization": {"group_size": 32, "bits": 4},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def measure(folder, runs, prompt_tokens, output_tokens):
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, config = load_model(folder)
    # As the bench of the engine makes it.
    prompt = mx.array([place * 7919 % config["vocab_size"] for place in range(prompt_tokens)], mx.uint32)
    prefill, decode = [], []
    for _ in range(runs):
        begun = time.perf_counter()
        steps = generate_step(prompt, model, max_tokens=output_tokens + 1, prefill_step_size=prompt_tokens)
        tokens = [int(next(steps)[0])]
        prefilled = time.perf_counter()
        tokens += [int(token) for token, _ in steps]
        ended = time.perf_counter()
        prefill.append(prompt_tokens / (prefilled - begun))
        decode.append(output_tokens / (ended - prefilled))
    print(json.dumps({"device": str(mx.default_device()), "mlx": mx.__version__, "prefill": prefill, "decode": decode,
                      "tokens": tokens}))


def main():
    match sys.argv[1:]:
        case ["convert", model, folder, ("f32" | "f16") as scales]:
            convert(model, pathlib.Path(folder), scales)
        case ["measure", folder, runs, prompt, output]:
            measure(pathlib.Path(folder), int(runs), int(prompt), int(output))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
