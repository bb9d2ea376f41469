#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerates reference.json: the losses and gradient norms of a small run, from
an independent model in JAX with automatic differentiation and a plain AdamW,
all in double precision.  Needs jax and numpy, which the tests do not.

usage: tests/e2e/reference.py

The initial weights are read from a checkpoint of the program after one update with
learning rate 0, which is how the schedule begins."""
import json
import pathlib
import subprocess
import tempfile

import run
from test_reference import SETTINGS, STEPS, TEXT, settings

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
M = SETTINGS["model"]
T, C, H = M["seq"], M["width"], M["heads"]


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

    def array(name):
        a, b = head[name]["data_offsets"]
        return np.frombuffer(raw[8 + n + a:8 + n + b], "<f4").astype(float)
    out = {}
    for p in index["parameters"]:
        shape = tuple(p["shape"])
        flat = array(p["array"] + "/master")[p["offset"]:]
        out[p["name"]] = flat[:shape[0] * shape[1]].reshape(shape)
    return out


def layer_norm(x, p, name):
    d = x - x.mean(-1, keepdims=True)
    s = jnp.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)
    return d / s * p[name + ".weight"] + p[name + ".bias"]


def linear(x, p, name):
    return x @ p[name + ".weight"] + p[name + ".bias"]


def loss(p, x, y):
    h = p["wte.weight"][x] + p["wpe.weight"]
    for i in range(M["layers"]):
        b = f"h.{i}."
        qkv = linear(layer_norm(h, p, b + "ln_1"), p, b + "attn.c_attn")
        q, k, v = (t.reshape(T, H, C // H).transpose(1, 0, 2)
                   for t in jnp.split(qkv, 3, -1))
        s = q @ k.transpose(0, 2, 1) / np.sqrt(C // H)
        s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf)
        o = (jax.nn.softmax(s, -1) @ v).transpose(1, 0, 2).reshape(T, C)
        h = h + linear(o, p, b + "attn.c_proj")
        m = linear(layer_norm(h, p, b + "ln_2"), p, b + "mlp.c_fc")
        h = h + linear(jax.nn.gelu(m, approximate=True), p, b + "mlp.c_proj")
    logits = layer_norm(h, p, "ln_f") @ p["wte.weight"].T
    return -jax.nn.log_softmax(logits, -1)[jnp.arange(T), y].mean()


def learning_rate(t):
    """Of update t (0-based): the log warm-up and the cosine, as DeepSpeed has
    them, whose first update runs before its schedule does."""
    s = SETTINGS["scheduler"]["params"]
    w, n = s["warmup_num_steps"], s["total_num_steps"]
    if t == 0:
        return 0.0
    i = t - 1
    if i < w:
        ratio = np.log(i + 1) / np.log(w)
    else:
        x = (i - w + 1) / (n - w)
        ratio = 1e-4 + (1 - 1e-4) * (1 + np.cos(np.pi * x)) / 2
    return SETTINGS["optimizer"]["params"]["lr"] * ratio


def train(p):
    o = SETTINGS["optimizer"]["params"]
    b1, b2 = o["betas"]
    tokens = np.frombuffer(TEXT, np.uint8).astype(int)
    f = jax.jit(jax.value_and_grad(loss))
    m = {k: 0 * a for k, a in p.items()}
    v = {k: 0 * a for k, a in p.items()}
    out = []
    for t in range(STEPS):
        value, g = f(p, tokens[:T], tokens[1:])
        norm = float(np.sqrt(sum((np.asarray(a) ** 2).sum()
                                 for a in g.values())))
        lr = learning_rate(t)
        out.append({"loss": float(value), "grad_norm": norm, "lr": lr})
        clip = min(1, SETTINGS["gradient_clipping"] / (norm + 1e-6))
        for k in p:
            d = np.asarray(g[k]) * clip
            m[k] = b1 * m[k] + (1 - b1) * d
            v[k] = b2 * v[k] + (1 - b2) * d * d
            step = m[k] / (1 - b1 ** (t + 1)) / (
                np.sqrt(v[k] / (1 - b2 ** (t + 1))) + 1e-8)
            p[k] = p[k] * (1 - lr * o["weight_decay"]) - lr * step
    return out


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as d:
        result = train(initial_weights(pathlib.Path(d)))
    here = pathlib.Path(__file__).resolve().parent
    (here / "reference.json").write_text(json.dumps(result, indent=1) + "\n")
