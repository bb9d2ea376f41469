# SPDX-License-Identifier: Apache-2.0
"""Folders in the layout of Hugging Face, read and written without its
libraries: a header of JSON behind its length, then the tensors' bytes."""
import array
import json
import random
import struct

SIZE = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F64": 8}


def write_file(path, tensors, pad=b""):
    """tensors: {name: (dtype, shape, bytes)}, in this order."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape),
                        "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode() + pad
    path.write_bytes(struct.pack("<Q", len(text)) + text +
                     b"".join(t[2] for t in tensors.values()))


def read_file(path):
    """{name: (dtype, shape, bytes)}; checks what the format demands."""
    data = path.read_bytes()
    n, = struct.unpack("<Q", data[:8])
    assert (8 + n) % 8 == 0, "data are aligned"
    header = json.loads(data[8:8 + n])
    assert header.pop("__metadata__")["format"] == "pt"
    body, end, out = data[8 + n:], 0, {}
    for name, t in header.items():
        a, b = t["data_offsets"]
        assert a == end, f"{name}: a hole before it"
        size = SIZE[t["dtype"]]
        for s in t["shape"]:
            size *= s
        assert b - a == size, name
        out[name], end = (t["dtype"], tuple(t["shape"]), body[a:b]), b
    assert end == len(body)
    return out


def read(folder):
    """All tensors of a folder, through the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_file(folder / "model.safetensors")
    doc, out = json.loads(index.read_text()), {}
    for name in sorted(set(doc["weight_map"].values())):
        for key, t in read_file(folder / name).items():
            assert doc["weight_map"].pop(key) == name and key not in out
            out[key] = t
    assert not doc["weight_map"]
    assert doc["metadata"]["total_size"] == sum(len(t[2]) for t in out.values())
    return out


def write(folder, tensors, config, files=1, pad=b""):
    """Tensors round-robin in some files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_file(folder / "model.safetensors", tensors, pad)
        return folder
    where = {}
    for i in range(files):
        name = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = {k: t for j, (k, t) in enumerate(tensors.items())
                if j % files == i}
        write_file(folder / name, part, pad)
        where.update({k: name for k in part})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def encode(dtype, values):
    """Numbers that each type holds exactly, as bytes."""
    if dtype == "F32":
        return struct.pack(f"<{len(values)}f", *values)
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    assert dtype == "BF16"
    f32 = struct.pack(f"<{len(values)}f", *values)
    return b"".join(f32[i + 2:i + 4] for i in range(0, len(f32), 4))


def numbers(rng, n):
    """Small dyadic ones: exact in all three types."""
    return [rng.randrange(-127, 128) / 1024 for _ in range(n)]


def gpt2_config(m):
    """What transformers writes for this shape, and what it adds to it."""
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
            "activation_function": "gelu_new", "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5, "n_ctx": m["seq"],
            "n_embd": m["width"], "n_head": m["heads"], "n_inner": None,
            "n_layer": m["layers"], "n_positions": m["seq"],
            "scale_attn_weights": True, "use_cache": True,
            "vocab_size": m["vocab"], "transformers_version": "4.57.0"}


def gpt2_shapes(m, prefix="transformer."):
    c = m["width"]
    shapes = {"wte.weight": (m["vocab"], c), "wpe.weight": (m["seq"], c)}
    for i in range(m["layers"]):
        for name, shape in {
                "ln_1.weight": (c,), "ln_1.bias": (c,),
                "attn.c_attn.weight": (c, 3 * c), "attn.c_attn.bias": (3 * c,),
                "attn.c_proj.weight": (c, c), "attn.c_proj.bias": (c,),
                "ln_2.weight": (c,), "ln_2.bias": (c,),
                "mlp.c_fc.weight": (c, 4 * c), "mlp.c_fc.bias": (4 * c,),
                "mlp.c_proj.weight": (4 * c, c),
                "mlp.c_proj.bias": (c,)}.items():
            shapes[f"h.{i}.{name}"] = shape
    shapes |= {"ln_f.weight": (c,), "ln_f.bias": (c,)}
    return {prefix + k: v for k, v in shapes.items()}


def random_tensors(shapes, dtype, seed=3):
    """A model of random numbers."""
    rng, out = random.Random(seed), {}
    for name, shape in shapes.items():
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        out[name] = (dtype, shape, encode(dtype, numbers(rng, n)))
    return out


def gpt2_tensors(m, dtype, prefix="transformer.", seed=3):
    return random_tensors(gpt2_shapes(m, prefix), dtype, seed)


# Of each type of the Llama family: its architecture, and a small shape with what
# it has beside the others; groups of heads and widths that nothing divides.
LLAMA_SHAPE = {"num_hidden_layers": 3, "num_attention_heads": 6,
               "num_key_value_heads": 2, "hidden_size": 24,
               "intermediate_size": 20, "vocab_size": 256,
               "max_position_embeddings": 64, "hidden_act": "silu",
               "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
               "tie_word_embeddings": False}
LLAMA = {
    "llama": ("LlamaForCausalLM",
              {"attention_bias": False, "mlp_bias": False, "head_dim": 4,
               "pretraining_tp": 1, "bos_token_id": 1, "eos_token_id": [2, 3],
               "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 32,
                                "rope_type": "llama3"}}),
    "mistral": ("MistralForCausalLM",
                {"sliding_window": 16, "rope_theta": 1e6, "head_dim": None,
                 "num_key_value_heads": 3}),
    "qwen2": ("Qwen2ForCausalLM",
              {"use_sliding_window": False, "sliding_window": 8,
               "max_window_layers": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM",
              {"attention_bias": False, "head_dim": 6, "rope_scaling": None,
               "use_sliding_window": False, "eos_token_id": 7}),
}
# Mixtures of experts of the same shape.
MOE = {
    "qwen3_moe": ("Qwen3MoeForCausalLM",
                  {"attention_bias": False, "head_dim": 6, "mlp_only_layers": [1],
                   "decoder_sparse_step": 1, "num_experts": 5,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                   "norm_topk_prob": True, "router_aux_loss_coef": 0.01,
                   "output_router_logits": False, "use_sliding_window": False}),
    "mixtral": ("MixtralForCausalLM",
                {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": None,
                 "sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
                 "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0}),
}


def llama_config(kind, **changes):
    """What transformers writes for a small model of this type."""
    architecture, own = {**LLAMA, **MOE}[kind]
    return {"architectures": [architecture], "model_type": kind,
            "attention_dropout": 0.0, "initializer_range": 0.02,
            "use_cache": True, "torch_dtype": "float64", "transformers_version": "4.57.0",
            **LLAMA_SHAPE, **own, **changes}


def experts(c):
    """The tensors of a block's router and experts."""
    w, theirs = c["hidden_size"], c["model_type"] == "mixtral"
    n = c["num_local_experts" if theirs else "num_experts"]
    f = c["intermediate_size" if theirs else "moe_intermediate_size"]
    head = "block_sparse_moe." if theirs else "mlp."
    gate, up, down = ("w1", "w3", "w2") if theirs else \
        ("gate_proj", "up_proj", "down_proj")
    shapes = {head + "gate.weight": (n, w)}
    for i in range(n):
        shapes |= {f"{head}experts.{i}.{name}.weight": shape for name, shape in
                   ((gate, (f, w)), (up, (f, w)), (down, (w, f)))}
    return shapes


def llama_shapes(c, prefix="model."):
    """The tensors of a config of the Llama family."""
    w, f = c["hidden_size"], c["intermediate_size"]
    heads, kind = c["num_attention_heads"], c["model_type"]
    d = c.get("head_dim") or w // heads
    q, kv = heads * d, c["num_key_value_heads"] * d
    shapes = {"embed_tokens.weight": (c["vocab_size"], w)}
    for i in range(c["num_hidden_layers"]):
        block = {"input_layernorm.weight": (w,),
                 "post_attention_layernorm.weight": (w,),
                 "self_attn.q_proj.weight": (q, w),
                 "self_attn.k_proj.weight": (kv, w),
                 "self_attn.v_proj.weight": (kv, w),
                 "self_attn.o_proj.weight": (w, q),
                 "mlp.gate_proj.weight": (f, w), "mlp.up_proj.weight": (f, w),
                 "mlp.down_proj.weight": (w, f)}
        if kind == "qwen2":
            block |= {"self_attn.q_proj.bias": (q,),
                      "self_attn.k_proj.bias": (kv,),
                      "self_attn.v_proj.bias": (kv,)}
        if kind == "mixtral" or kind == "qwen3_moe" and i not in c["mlp_only_layers"]:
            block = {k: s for k, s in block.items() if "mlp." not in k} | experts(c)
        if kind in ("qwen3", "qwen3_moe"):
            block |= {"self_attn.q_norm.weight": (d,),
                      "self_attn.k_norm.weight": (d,)}
        shapes |= {f"layers.{i}.{k}": s for k, s in block.items()}
    shapes["norm.weight"] = (w,)
    shapes = {prefix + k: s for k, s in shapes.items()}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], w)
    return shapes


def scaled(tensors, by):
    """Tensors of fp32 whose numbers are all `by` times larger."""
    return {k: (t, shape, encode(t, [by * x for x in array.array("f", data)]))
            for k, (t, shape, data) in tensors.items()}
