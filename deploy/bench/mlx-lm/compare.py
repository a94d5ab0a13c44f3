#!/usr/bin/env python3
"""Prefill and decode of Velox and mlx-lm, interleaved: each round starts each of them once.

Three ways: Velox's engine in its bench (its own process, no gateway), Velox through the whole gateway as the gateway
itself timed the stream, and mlx-lm's generate_step. Engine and mlx-lm get the same token ids, so their greedy tokens are
compared; the gateway gets a text of about as many tokens. A round's figure is the median of the runs in it, the
first of which warms up where there are several; the table has medians over the rounds. Needs only Python's own library.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def run(command, **options):
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def engine(arguments):
    output = run([arguments.programs / "examples" / "bench_mlx", arguments.model, arguments.backend, arguments.threads,
                  arguments.runs, arguments.prompt, arguments.output])
    speeds = {name: float(median) for name, median in re.findall(r"^(prefill|decode) \d+ +([\d.]+)", output, re.M)}
    tokens = re.search(r"^tokens ([\d ]+)$", output, re.M)
    return speeds | {"tokens": [int(token) for token in tokens[1].split()], "label": output.splitlines()[0]}


def peer(arguments):
    found = json.loads(run([arguments.python, HERE / "peer.py", "measure", arguments.folder, arguments.runs,
                            arguments.prompt, arguments.output]))
    return {"prefill": statistics.median(found["prefill"]), "decode": statistics.median(found["decode"]),
            "tokens": found["tokens"], "label": f"mlx-lm on {found['device']}, MLX {found['mlx']}"}


def gateway(arguments):
    prefill, decode = [], []
    with tempfile.TemporaryDirectory(prefix="velox-bench.") as folder:
        client = [arguments.programs / "velox-client", "--endpoint", f"unix:{folder}/gateway.sock"]
        run([*client, "up", "--model", arguments.model, "--backend", arguments.backend, "--threads", arguments.threads])
        try:
            for index in range(arguments.runs):
                # Another beginning each time: nothing may be taken from what the last run left.
                text = f"{index}" + " time" * (arguments.prompt - 1)
                lines = run([*client, "generate", text, "--json", "--ignore-eos", "--max-tokens", arguments.output])
                done = json.loads(lines.splitlines()[-1])
                prefill.append(1e3 * done["usage"]["prompt_tokens"] / done["timings"]["prefill_ms"])
                decode.append(done["timings"]["decode_tokens_per_s"])
            tokens = done["usage"]["prompt_tokens"]
        finally:
            run([*client, "down"])
    return {"prefill": statistics.median(prefill), "decode": statistics.median(decode),
            "label": f"gateway, {tokens} prompt tokens"}


def agreement(ours, theirs):
    """Tokens up to the first that differs."""
    same = 0
    for our, their in zip(ours, theirs):
        if our != their:
            break
        same += 1
    return same


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="interpreter that has mlx-lm")
    parser.add_argument("--programs", required=True, type=pathlib.Path, help="folder of our programs, release form")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--folder", required=True, help="the same weights for mlx-lm")
    parser.add_argument("--backend", required=True, help="of Velox; mlx-lm takes MLX's default device")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=1, help="in a round; 3 or more where code is compiled at first use")
    arguments = parser.parse_args()
    ways = {"engine": engine, "mlx-lm": peer, "gateway": gateway}
    found = {name: [] for name in ways}
    for round_number in range(arguments.rounds):
        for name, way in ways.items():
            found[name].append(way(arguments))
            figures = {key: round(found[name][-1][key], 2) for key in ("prefill", "decode")}
            print(f"round {round_number + 1}  {name:<8} {figures}", flush=True)
    print()
    print(f"prompt {arguments.prompt}, output {arguments.output}, {arguments.rounds} rounds of {arguments.runs} runs")
    for name, rounds in found.items():
        print(f"{name:<8} {rounds[0]['label']}")
    print(f"{'tokens/s':<10}" + "".join(f"{name:>12}" for name in ways) + f"{'engine/peer':>14}{'gateway/peer':>14}")
    for what in ("prefill", "decode"):
        median = {name: statistics.median(one[what] for one in rounds) for name, rounds in found.items()}
        print(f"{what:<10}" + "".join(f"{median[name]:>12.2f}" for name in ways)
              + f"{median['engine'] / median['mlx-lm']:>13.2f}x{median['gateway'] / median['mlx-lm']:>13.2f}x")
    same = [agreement(ours["tokens"], theirs["tokens"]) for ours, theirs in zip(found["engine"], found["mlx-lm"])]
    print(f"greedy tokens that agree from the start: {min(same)} of {arguments.output + 1}")


if __name__ == "__main__":
    main()
