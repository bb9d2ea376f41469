#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerates reference.json: the losses and gradient norms of a small run, from
the independent model of golden.py, PyTorch's gradients and a plain AdamW, all in
double precision.  Needs PyTorch, which the tests do not.

usage: tests/e2e/step/reference.py

The initial weights are read from a checkpoint of the program after one update with
learning rate 0, which is how the schedule begins."""
import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import golden  # noqa: E402
import run  # noqa: E402
from test_reference import SETTINGS, STEPS, TEXT, settings

import torch

M = SETTINGS["model"]
HEADS = {"n_head": M["heads"], "n_embd": M["width"], "n_layer": M["layers"]}


def initial_weights(folder):
    data = folder / "text"
    data.write_bytes(TEXT)
    config = run.merge(run.base_config(data, folder / "out"), settings(data))
    config["run"].update(steps=1, save=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    subprocess.run([run.PROGRAM, path], check=True, stdout=subprocess.DEVNULL)
    saved = folder / "out/checkpoints/step-00000001"
    index = json.loads((saved / "index.json").read_text())
    raw = (saved / "rank-00000-of-00001.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8:8 + n])
    out = {}
    for p in index["parameters"]:
        rows, cols = p["shape"]
        begin = head[p["array"] + "/master"]["data_offsets"][0]
        values = struct.unpack_from(f"<{rows * cols}f", raw,
                                    8 + n + begin + 4 * p["offset"])
        a = torch.tensor(values, dtype=torch.double)
        out["transformer." + p["name"]] = a.reshape(rows, cols) if rows > 1 else a
    return out


def learning_rate(t):
    """Of update t (0-based): the log warm-up and the cosine, as DeepSpeed has
    them, whose first update runs before its schedule does."""
    s = SETTINGS["scheduler"]["params"]
    w, n = s["warmup_num_steps"], s["total_num_steps"]
    if t == 0:
        return 0.0
    i = t - 1
    if i < w:
        ratio = math.log(i + 1) / math.log(w)
    else:
        x = (i - w + 1) / (n - w)
        ratio = 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * x)) / 2
    return SETTINGS["optimizer"]["params"]["lr"] * ratio


def train(p):
    o = SETTINGS["optimizer"]["params"]
    b1, b2 = o["betas"]
    tokens = torch.tensor(list(TEXT))
    m = {k: torch.zeros_like(a) for k, a in p.items()}
    v = {k: torch.zeros_like(a) for k, a in p.items()}
    out = []
    for t in range(STEPS):
        for a in p.values():
            a.requires_grad_()
        loss = torch.nn.functional.cross_entropy(
            golden.gpt2(torch, p, HEADS, tokens[:-1]), tokens[1:])
        grad = dict(zip(p, torch.autograd.grad(loss, list(p.values()))))
        norm = math.sqrt(sum(float((g * g).sum()) for g in grad.values()))
        lr = learning_rate(t)
        out.append({"loss": float(loss), "grad_norm": norm, "lr": lr})
        clip = min(1, SETTINGS["gradient_clipping"] / (norm + 1e-6))
        for k in p:
            g = grad[k] * clip
            m[k] = b1 * m[k] + (1 - b1) * g
            v[k] = b2 * v[k] + (1 - b2) * g * g
            step = m[k] / (1 - b1 ** (t + 1)) / (
                (v[k] / (1 - b2 ** (t + 1))).sqrt() + o["eps"])
            p[k] = p[k].detach() * (1 - lr * o["weight_decay"]) - lr * step
    return out


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        result = train(initial_weights(pathlib.Path(d)))
    here = pathlib.Path(__file__).resolve().parent
    (here / "reference.json").write_text(json.dumps(result, indent=1) + "\n")
