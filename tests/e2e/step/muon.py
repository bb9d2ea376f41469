#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerates muon.json: the losses of twenty steps of golden.py's models by
PyTorch's own Muon (2.9 or newer), and AdamW for what is no matrix of a block, in
double: with its iteration in bf16, as it is, and in double.  The tests need no PyTorch; where it is, they compute the losses anew.

usage: tests/e2e/step/muon.py"""
import json
import pathlib
import struct

import golden

FILE = pathlib.Path(__file__).with_name("muon.json")
STEPS = 20
PARAMS = {"muon_lr": 2e-3, "adam_lr": 1e-3, "momentum": 0.9, "betas": [0.9, 0.95],
          "eps": 1e-8, "weight_decay": 0.1}
# Of the run, and of torch.optim.Muon.
SCALES = {"gpt2": "original", "llama": "match_rms_adamw", "mistral": "original",
          "qwen2": "match_rms_adamw", "qwen3": "original", "qwen3_moe": "match_rms_adamw",
          "mixtral": "original"}


def leaves(torch, kind, p):
    """The matrices [out, in] that Muon updates and the other parameters; a
    function that makes a model's dictionary of them."""
    stacked = {}
    for name, a in p.items():
        block = ".h." in name or ".layers." in name
        router = name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))
        if not block or a.dim() < 2 or router:
            continue
        parts = 3 if name.endswith("c_attn.weight") else 1
        out_in = a if kind != "gpt2" else a.T
        stacked[name] = [x.clone().requires_grad_() for x in out_in.chunk(parts)]
    others = {k: a.requires_grad_() for k, a in p.items() if k not in stacked}

    def whole():
        made = {k: torch.cat(x) for k, x in stacked.items()}
        return {**others, **{k: a.T if kind == "gpt2" else a
                             for k, a in made.items()}}
    return [x for parts in stacked.values() for x in parts], list(others.values()), \
        whole


def iterate_in_double(torch, module):
    """Puts PyTorch's own iteration on numbers that are not rounded to bf16."""
    code = module._zeropower_via_newtonschulz

    class Wide:  # what it asks of torch
        bfloat16, addmm = torch.double, torch.addmm

    def wide(*args):
        return type(code)(code.__code__, {**code.__globals__, "torch": Wide})(*args)
    return wide


def train(torch, kind, exact=False):
    module = __import__("torch.optim._muon", fromlist=["muon"])
    own = module._zeropower_via_newtonschulz
    if exact:
        module._zeropower_via_newtonschulz = iterate_in_double(torch, module)
    try:
        return losses(torch, kind)
    finally:
        module._zeropower_via_newtonschulz = own


def losses(torch, kind):
    c, p = golden.config(kind), {}
    for name, (_, shape, data) in golden.tensors(kind).items():
        values = struct.unpack(f"<{len(data) // 4}f", data)
        p[name] = torch.tensor(values, dtype=torch.double).reshape(shape)
    matrices, others, whole = leaves(torch, kind, p)
    model = golden.gpt2 if kind == "gpt2" else golden.llama
    o, tokens, out = PARAMS, torch.tensor(list(golden.TEXT)), []
    muon = torch.optim.Muon(matrices, lr=o["muon_lr"], momentum=o["momentum"],
                            weight_decay=o["weight_decay"],
                            adjust_lr_fn=SCALES[kind])
    adam = torch.optim.AdamW(others, lr=o["adam_lr"], betas=o["betas"],
                             eps=o["eps"], weight_decay=o["weight_decay"])
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(
            model(torch, whole(), c, tokens[:-1]), tokens[1:])
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(matrices + others, golden.CLIP)
        muon.step()
        adam.step()
        out.append(float(loss.detach()))
    return out


if __name__ == "__main__":
    import torch
    FILE.write_text(json.dumps({k: [train(torch, k, x) for x in (False, True)]
                                for k in SCALES}, indent=1) + "\n")
