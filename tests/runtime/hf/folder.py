# SPDX-License-Identifier: Apache-2.0
"""Folders in the layout of Hugging Face, read and written without its
libraries: a header of JSON behind its length, then the tensors' bytes."""
import array
import json
import math
import pathlib
import random
import struct

FAMILIES = pathlib.Path(__file__).parents[2] / "e2e/hf/families.json"
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


def read_file(path, form="pt"):
    """{name: (dtype, shape, bytes)}; checks what the format demands."""
    data = path.read_bytes()
    n, = struct.unpack("<Q", data[:8])
    assert (8 + n) % 8 == 0, "data are aligned"
    header = json.loads(data[8:8 + n])
    assert header.pop("__metadata__").get("format") == form
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


def random_tensors(shapes, dtype):
    """A model of small random numbers that are exact in all three types."""
    rng, out = random.Random(3), {}
    for name, shape in shapes.items():
        values = [rng.randrange(-127, 128) / 1024 for _ in range(math.prod(shape))]
        out[name] = dtype, shape, encode(dtype, values)
    return out


def model_of(family, sizes=None, layers=3, **changes):
    """The shapes and the config of the small model of a family (families.json), with other
    sizes in the place of these, and the first layers alone."""
    def sized(x):
        return (sizes or {}).get(x, x) if type(x) is int else x
    one = json.loads(FAMILIES.read_text())[family]
    return {k: tuple(map(sized, s)) for k, s in one["shapes"].items()
            if ".layers." not in k or int(k.split(".")[2]) < layers}, \
        {**{k: sized(v) for k, v in one["config"].items()},
         "num_hidden_layers": layers, **changes}


def scaled(tensors, by):
    """Tensors of fp32 whose numbers are all `by` times larger."""
    return {k: (t, shape, encode(t, [by * x for x in array.array("f", data)]))
            for k, (t, shape, data) in tensors.items()}
