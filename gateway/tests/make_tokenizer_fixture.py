#!/usr/bin/env python3
"""Writes fixtures/smollm2_vocabulary.txt from a GGUF file of SmolLM2 (needs the PyPI package gguf).

In this vocabulary the token that a merge makes has the next free id, so tokens that no merge makes, followed by all
merges, say everything in half the bytes. Lines: "#" comment; "C token" control; "T token" normal; "M left right" merge.

    make_tokenizer_fixture.py MODEL.gguf > fixtures/smollm2_vocabulary.txt
"""

import sys

import gguf

reader = gguf.GGUFReader(sys.argv[1])
field = lambda name: reader.fields["tokenizer.ggml." + name].contents()
tokens, types, merges = field("tokens"), field("token_type"), field("merges")
assert field("model") == "gpt2" and field("pre") == "smollm"

base = len(tokens) - len(merges)
made = [merge.replace(" ", "", 1) for merge in merges]
assert made == tokens[base:], "a merge does not make the next token"
assert all(kind == 1 for kind in types[base:])
assert set(types) <= {1, 3} and all(merge.count(" ") == 1 for merge in merges)
assert not any("\n" in token for token in tokens)

out = open(1, "w", encoding="utf-8", newline="\n")
out.write("# Vocabulary of SmolLM2-135M-Instruct (Apache-2.0), written by make_tokenizer_fixture.py\n")
for token, kind in zip(tokens[:base], types[:base]):
    out.write(f"{'C' if kind == 3 else 'T'} {token}\n")
for merge in merges:
    out.write(f"M {merge}\n")
