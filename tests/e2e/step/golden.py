#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerates golden.json: losses and gradient norms of ten AdamW steps of tiny
GPT-2, Llama, Mistral, Qwen 2 and 3, Qwen3-MoE and Mixtral, in double precision.
The models are those of transformers where it is installed, else, and always
those with experts, written out below with PyTorch; the gradients are PyTorch's.
The tests need neither.

usage: tests/e2e/step/golden.py"""
import json
import math
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "runtime/hf"))
import folder as hf  # noqa: E402

FILE = pathlib.Path(__file__).with_name("golden.json")
STEPS = 10
# One window: every sample is the same, so the order of samples plays no part.
TEXT = b"It was the best of times, it was."
SEQ = len(TEXT) - 1
ADAM = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
CLIP = 0.5
GPT2 = {"layers": 2, "heads": 3, "width": 24, "seq": SEQ, "vocab": 256}
KINDS = ("gpt2", *hf.LLAMA, *hf.MOE)


def config(kind):
    if kind == "gpt2":
        return hf.gpt2_config(GPT2)
    # Few positions turn far only with a small base.
    change = {"rope_theta": 100.0}
    if kind == "llama":
        change["head_dim"] = 8
    if kind in hf.MOE:
        change["router_aux_loss_coef"] = 0
    if kind == "mistral":
        change["sliding_window"] = SEQ
    return hf.llama_config(kind, **change)


def tensors(kind):
    """Weights in the layout of a published file: fp32, exact in decimal too.
    Those of norms are near 1; embeddings, and what scores come from, are large
    enough to matter."""
    shapes = hf.gpt2_shapes(GPT2) if kind == "gpt2" else \
        hf.llama_shapes(config(kind))
    out = hf.random_tensors(shapes, "F32", seed=len(kind))
    for name, (dtype, shape, data) in out.items():
        values = struct.unpack(f"<{len(data) // 4}f", data)
        if "norm" in name or (".ln_" in name and name.endswith("weight")):
            out[name] = dtype, shape, hf.encode(dtype, [1 + x for x in values])
        elif any(x in name for x in ("embed", "wte", "mlp.gate.", "moe.gate.", "q_proj.w", "k_proj.w",
                                     "c_attn.w")):
            out[name] = dtype, shape, hf.encode(dtype, [8 * x for x in values])
    return out


# ---- the models, written out ----

def gpt2(torch, p, c, x):
    f = torch.nn.functional
    heads, w = c["n_head"], c["n_embd"]
    t = len(x)

    def norm(h, name):
        return f.layer_norm(h, (w,), p[name + ".weight"], p[name + ".bias"],
                            1e-5)

    def linear(h, name):  # Conv1D: [in, out]
        return h @ p[name + ".weight"] + p[name + ".bias"]
    h = p["transformer.wte.weight"][x] + p["transformer.wpe.weight"][:t]
    for i in range(c["n_layer"]):
        b = f"transformer.h.{i}."
        qkv = linear(norm(h, b + "ln_1"), b + "attn.c_attn")
        q, k, v = (a.reshape(t, heads, w // heads).transpose(0, 1)
                   for a in qkv.split(w, -1))
        h = h + linear(attend(torch, q, k, v), b + "attn.c_proj")
        m = linear(norm(h, b + "ln_2"), b + "mlp.c_fc")
        m = 0.5 * m * (1 + torch.tanh(math.sqrt(2 / math.pi) *
                                      (m + 0.044715 * m ** 3)))
        h = h + linear(m, b + "mlp.c_proj")
    return norm(h, "transformer.ln_f") @ p["transformer.wte.weight"].T


def attend(torch, q, k, v):
    """Causal attention of [heads, t, d]."""
    t, d = q.shape[1:]
    s = q @ k.transpose(1, 2) / math.sqrt(d)
    s = s.masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf)
    return (s.softmax(-1) @ v).transpose(0, 1).reshape(t, -1)


def frequencies(torch, c, d):
    """Turns per position of each pair of columns, times 2 pi."""
    w = c["rope_theta"] ** -(torch.arange(0, d, 2, dtype=torch.double) / d)
    s = c.get("rope_scaling")
    if not s:
        return w
    turns = s["original_max_position_embeddings"] * w / (2 * math.pi)
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return w * (keep + (1 - keep) / s["factor"])


def experts(torch, p, c, n, b):
    """The mean of each token's experts by their weights, for the block b."""
    theirs = c["model_type"] == "mixtral"
    head = b + ("block_sparse_moe." if theirs else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if theirs else \
        ("gate_proj", "up_proj", "down_proj")
    weight, chosen = (n @ p[head + "gate.weight"].T).softmax(-1).topk(
        c["num_experts_per_tok"], -1)
    weight, out = weight / weight.sum(-1, keepdim=True), []
    for token, own, those in zip(n, weight, chosen.tolist()):
        y = 0
        for w, i in zip(own, those):
            e = f"{head}experts.{i}."
            a = torch.nn.functional.silu(p[e + gate + ".weight"] @ token)
            y = y + w * (p[e + down + ".weight"] @ (a * (p[e + up + ".weight"] @ token)))
        out.append(y)
    return torch.stack(out)


def llama(torch, p, c, x):
    t, heads, kv = len(x), c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or c["hidden_size"] // heads
    angle = torch.arange(t, dtype=torch.double)[:, None] * \
        frequencies(torch, c, d)
    cos, sin = (torch.cat([a, a], -1) for a in (angle.cos(), angle.sin()))

    def norm(h, name):
        r = (h * h).mean(-1, keepdim=True) + c["rms_norm_eps"]
        return h / r.sqrt() * p[name + ".weight"]

    def linear(h, name):
        y = h @ p[name + ".weight"].T
        return y + p[name + ".bias"] if name + ".bias" in p else y

    def turn(a):  # [heads, t, d]
        first, second = a.split(d // 2, -1)
        return a * cos + torch.cat([-second, first], -1) * sin

    def project(h, name, n, norm_name):
        a = linear(h, name).reshape(t, n, d)
        return turn((norm(a, norm_name) if norm_name + ".weight" in p else a)
                    .transpose(0, 1))
    h = p["model.embed_tokens.weight"][x]
    for i in range(c["num_hidden_layers"]):
        b = f"model.layers.{i}."
        a, n = b + "self_attn.", norm(h, b + "input_layernorm")
        q = project(n, a + "q_proj", heads, a + "q_norm")
        k = project(n, a + "k_proj", kv, a + "k_norm")
        v = linear(n, a + "v_proj").reshape(t, kv, d).transpose(0, 1)
        k, v = (z.repeat_interleave(heads // kv, 0) for z in (k, v))
        h = h + linear(attend(torch, q, k, v), a + "o_proj")
        n = norm(h, b + "post_attention_layernorm")
        if b + "mlp.gate_proj.weight" in p:
            gate = torch.nn.functional.silu(linear(n, b + "mlp.gate_proj"))
            h = h + linear(gate * linear(n, b + "mlp.up_proj"), b + "mlp.down_proj")
        else:
            h = h + experts(torch, p, c, n, b)
    head = p.get("lm_head.weight", p["model.embed_tokens.weight"])
    return norm(h, "model.norm") @ head.T


def of_transformers(torch, kind, p, c):
    """The logits of transformers' own model, whose parameters become p."""
    import transformers
    made = transformers.AutoConfig.for_model(kind, **{
        k: v for k, v in c.items() if k not in ("architectures", "model_type")})
    made.attn_pdrop = made.embd_pdrop = made.resid_pdrop = 0.0
    made._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(made).double().eval()
    model.load_state_dict(p, strict=False)
    p.clear()
    p.update(model.named_parameters())
    return lambda x: model(x[None]).logits[0]


# ---- ten steps ----

def train(torch, kind, transformers):
    c, p = config(kind), {}
    for name, (_, shape, data) in tensors(kind).items():
        values = struct.unpack(f"<{len(data) // 4}f", data)
        p[name] = torch.tensor(values, dtype=torch.double).reshape(shape)
    if transformers:
        logits = of_transformers(torch, kind, p, c)
    else:
        model = gpt2 if kind == "gpt2" else llama

        def logits(x):
            return model(torch, p, c, x)
    for a in p.values():
        a.requires_grad_().grad = torch.zeros_like(a)
    tokens = torch.tensor(list(TEXT))
    adam = torch.optim.AdamW(p.values(), lr=ADAM["lr"], betas=ADAM["betas"],
                             eps=ADAM["eps"],
                             weight_decay=ADAM["weight_decay"])
    out = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(logits(tokens[:-1]),
                                                 tokens[1:])
        adam.zero_grad(set_to_none=False)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(p.values(), CLIP)
        adam.step()
        out.append({"loss": float(loss), "grad_norm": float(norm)})
    return out


def main():
    import torch
    try:
        import transformers
        source = "transformers " + transformers.__version__
    except ImportError:
        transformers, source = None, "golden.py"
    print(f"models of {source}, torch {torch.__version__}")
    FILE.write_text(json.dumps(
        {k: train(torch, k, None if k in hf.MOE else transformers)
         for k in KINDS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
