# SPDX-License-Identifier: Apache-2.0
"""Folders whose matrices are in few bits: those in 4, as transformers saves those of
bitsandbytes, are taken as they are, all are read."""
import json
import os
import random
import struct

import pytest

import coded
import families
import rows
import run
from run import ckpt, hf

GROUP, BLOCK = 64 * 256, 64
GROUP_BYTES = GROUP // 2 + 256 + 4 + 4
# Two matrices have two groups, and no multiple of 64 divides any.
MODEL = hf.model_of("llama", {32: 150, 44: 131}, 2)
EXPERTS = hf.model_of("qwen3_moe", {32: 150, 20: 131}, 1, mlp_only_layers=[])
MATRICES = (*(f"self_attn.{x}_proj" for x in "qkvo"),
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
# As they lie in a unit: of each expert its gate and up.
OF_EXPERTS = (*MATRICES[:4],
              *(f"mlp.experts.{i}.{x}_proj" for i in range(6) for x in ("gate", "up")),
              *(f"mlp.experts.{i}.down_proj" for i in range(6)))
LORA = {"lora": {"rank": 4, "targets": "*"}, "train_batch_size": 6}
NF4 = {"model.base_dtype": "nf4"}
# The values of all codes of a scale, from those of bitsandbytes.
DYNAMIC = (run.ROOT / "tests/codelets/flat/nf4_reference.bin").read_bytes()[:4 * 256]


def in_4_bits(name, shape, data):
    """The six tensors of a matrix, from the groups of a checkpoint."""
    n = shape[0] * shape[1]
    code, scale, most, mean = b"", b"", b"", None
    for i in range(0, len(data), GROUP_BYTES):
        g = data[i:i + GROUP_BYTES]
        code, scale = code + g[:GROUP // 2], scale + g[GROUP // 2:-8]
        most, mean = most + g[-8:-4], g[-4:]
    blocks = -(-n // BLOCK)
    state = json.dumps({
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape,
        "nested_blocksize": 256, "nested_dtype": "float32",
        "nested_offset": struct.unpack("<f", mean)[0]}).encode()
    return {
        name: ("U8", ((n + 1) // 2, 1), code[:(n + 1) // 2]),
        f"{name}.absmax": ("U8", (blocks,), scale[:blocks]),
        f"{name}.quant_map": ("F32", (16,), coded.floats(coded.NF4)),
        f"{name}.nested_absmax": ("F32", (len(most) // 4,), most),
        f"{name}.nested_quant_map": ("F32", (256,), DYNAMIC),
        f"{name}.quant_state.bitsandbytes__nf4": ("U8", (len(state),), state)}


def make(place, model=MODEL, matrices=MATRICES):
    """A run from weights, and a folder with what it has in 4 bits."""
    shapes, config = model
    place.use(rows.program_of(config["model_type"]))
    weights = hf.random_tensors(shapes, "F32")
    c = {**LORA, **NF4, "model": {"seq": 16}, "run.save": True}
    plain = hf.write(place.folder / "weights", weights, config)
    r = place.good(1, {**c, "model.import": str(plain)})
    tensors, arrays = {}, run.arrays(r.output, 3)
    for layer in range(config["num_hidden_layers"]):
        data = arrays[f"layers.{layer}.base/nf4"]
        for m in matrices:
            name = f"model.layers.{layer}.{m}.weight"
            size = -(-shapes[name][0] * shapes[name][1] // GROUP) * GROUP_BYTES
            tensors |= in_4_bits(name, shapes[name], data[:size])
            data = data[size:]
        assert not data
    return c, r, {**{k: t for k, t in weights.items() if k not in tensors}, **tensors}


ENDS = [f".{x}" for x in ("absmax", "nested_absmax", "quant_map", "nested_quant_map",
                          "quant_state.bitsandbytes__nf4")]


def join(name, parts):
    """The six tensors of those one below the other, which have one mean."""
    code, scale, most, *rest = parts
    data = [b"".join(t[2] for t in x) for x in (code, scale, most)]
    return {name: ("U8", (len(data[0]), 1), data[0]),
            name + ENDS[0]: ("U8", (len(data[1]),), data[1]),
            name + ENDS[1]: ("F32", (len(data[2]) // 4,), data[2]),
            **{name + end: x[0] for end, x in zip(ENDS[2:], rest)}}


def folder(place, tensors, name="nf4", config=MODEL[1]):
    return hf.write(place.folder / name, tensors, {
        **config, "quantization_config": {
            "quant_method": "bitsandbytes", "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}}, files=2)


def test_its_bytes_are_taken(place, nvme):
    c, r, tensors = make(place)
    c["model.import"] = str(folder(place, tensors))
    again = place.good(1, c)
    assert again.numbers == r.numbers and again.files == r.files
    stored = {k: ("BF16", (len(t[2]) // 2, 1), t[2])  # bnb_4bit_quant_storage
              if k + ".absmax" in tensors and len(t[2]) % 2 == 0 else t
              for k, t in tensors.items()}
    assert stored != tensors
    again = place.good(1, {**c, "model.import": str(folder(place, stored, "bf16"))})
    assert again.numbers == r.numbers
    disk = place.good(1, {**c, **run.offload(3, "none", "nvme", nvme),
                          "run.export": str(place.folder / "merged")})
    assert disk.numbers == r.numbers and disk.files == r.files
    told = ckpt("check", c["model.import"]).out
    assert "belongs to model.layers.0.self_attn.k_proj.weight, in 4 bits" in told
    assert "can be imported" in told
    text = (place.folder / "merged" / "config.json").read_text()
    assert "use_cache" in text and "quantization_config" not in text
    for more in ({}, {"zero_optimization.stage": 3}):  # their values
        values = place.good(1, {**c, **more, "model.base_dtype": None})
        assert values.bits == r.bits
    many = [place.good(2, {**c, "zero_optimization.stage": 3, "model.import": str(x)})
            for x in (place.folder / "weights", place.folder / "nf4")]
    assert many[0].numbers == many[1].numbers


@pytest.mark.parametrize("per_unit, ranks", ((0, 1), (4, 3)))
def test_those_of_experts_are_taken(per_unit, ranks, place):
    """However a block is cut, and not quantised again: ours would have other scales."""
    c, _, tensors = make(place, EXPERTS, OF_EXPERTS)
    most = next(k for k in tensors if k.endswith("experts.1.up_proj.weight.nested_absmax"))
    tensors[most] = *tensors[most][:2], coded.floats([0.125, 0.25])
    packed = folder(place, tensors, config=EXPERTS[1])
    c["model.experts_per_unit"] = per_unit
    plain = place.folder / "plain"
    place.good(1, {"model": {"import": str(packed), "seq": 16}, "run.steps": 0,
                   "run.export": str(plain)})
    runs = [place.good(ranks, {**c, "model.import": str(x), "model.base_dtype": form,
                               "zero_optimization.stage": 3}).bits
            for x, form in ((packed, "nf4"), (plain, None), (plain, "nf4"))]
    assert runs[0] == runs[1] != runs[2]


def test_a_tensor_of_several_matrices_is_taken(place):
    """Each begins with a group."""
    model = hf.model_of("llama", {32: 128, 44: 128, 12: 32, 48: 128, 24: 128}, 2,
                        num_key_value_heads=4)
    c, _, tensors = make(place, model)
    for layer in range(2):
        for name, parts in (("self_attn.qkv_proj", MATRICES[:3]),
                            ("mlp.gate_up_proj", MATRICES[4:6])):
            of = [[tensors.pop(f"model.layers.{layer}.{x}.weight{end}") for x in parts]
                  for end in ("", *ENDS)]
            tensors |= join(f"model.layers.{layer}.{name}.weight", of)
    packed = folder(place, tensors, config={**model[1], "model_type": "phi3"})
    c["model.import"] = str(packed)
    assert place.good(2, c).bits == place.good(2, {**c, "model.base_dtype": None}).bits


def test_what_it_cannot_be_is_refused_by_name(place):
    c, _, tensors = make(place)
    name = "model.layers.1.mlp.up_proj.weight"
    state = f"{name}.quant_state.bitsandbytes__nf4"

    text = tensors[state][2].replace(b'"blocksize": 64', b'"blocksize": 32')
    parts = {k: None for k in tensors if k.startswith(f"{name}.")}
    whole = hf.random_tensors({name: MODEL[0][name]}, "F32")
    for words, changes in (
            ("are missing that belong", {f"{name}.nested_absmax": None}),
            ("is missing", {name: None}),
            ("of another shape", {f"{name}.absmax": ("U8", (3,), b"abc")}),
            ("mean other values", {f"{name}.quant_map": (
                "F32", (16,), coded.floats(coded.NF4[::-1]))}),
            ("of another shape or type", {state: ("U8", (len(text),), text)}),
            ("is not in 4 bits there, as others are", {**parts, **whole})):
        changed = {k: t for k, t in {**tensors, **changes}.items() if t}
        r = place.launch(1, {**c, "model.import": str(folder(place, changed, words))})
        run.refused(r, name, words)


# ---- kinds that are read as values ----

PYTHON = os.environ.get("IZ_TEST_PYTHON")
HASHES = json.loads((run.ROOT / "tests/runtime/hf/coded.json").read_text())
ROWS, COLS = coded.SHAPE
# A matrix of each program that has the shape, and the model.
GPT2 = {**run.MODEL, "width": COLS, "heads": 4, "layers": 2}
HOLDERS = {
    "gpt2": ("transformer.h.1.mlp.c_fc.weight", hf.gpt2_shapes(GPT2), hf.gpt2_config(GPT2)),
    "llama": ("model.layers.1.mlp.gate_proj.weight", *hf.model_of("llama", {44: ROWS}, 2)),
    "moe": ("model.layers.2.mlp.experts.3.gate_proj.weight",
            *hf.model_of("qwen3_moe", {20: ROWS}))}


def held(place, program, kind, change=None):
    """The name of a matrix, and a folder that has it so; None: it lacks a tensor."""
    name, shapes, config = HOLDERS[program]
    place.use(run.built(f"models/{program}"))
    tensors = hf.random_tensors(shapes, "F32")
    del tensors[name]
    tensors |= {**coded.tensors(kind, name), **(change or {})}
    return name, hf.write(place.folder / "in", {k: t for k, t in tensors.items() if t}, {
        **config, "quantization_config": {"weight_block_size": coded.BLOCK}}, files=2)


@pytest.mark.skipif(not PYTHON or run.call(
    PYTHON, "-c", "import bitsandbytes, transformers").rc != 0,
    reason="IZ_TEST_PYTHON: a Python with bitsandbytes and transformers")
def test_the_hashes_are_of_their_values():
    r = run.call(PYTHON, run.ROOT / "tests/runtime/hf/coded.py", timeout_s=600)
    assert json.loads(r.out) == HASHES, str(r)


@pytest.mark.parametrize("kind, program, ranks", (
    *((kind, "llama", 1) for kind in coded.KINDS),
    ("nf4", "gpt2", 2), ("int8", "gpt2", 1), ("fp8", "moe", 3), ("nf4", "moe", 1)))
def test_values_are_theirs(kind, program, ranks, place):
    """bitsandbytes has GPT-2's the other way round."""
    name, folder = held(place, program, kind)
    out = place.folder / "out"
    place.good(ranks, {"model": {"import": str(folder), "seq": 16}, "run.steps": 0,
                       "zero_optimization.stage": 3, "train_batch_size": 6,
                       "run.export": str(out)})
    _, shape, data = hf.read(out)[name]
    values = struct.unpack(f"<{ROWS * COLS}f", data)
    if program == "gpt2":
        values = [values[i * ROWS + k] for k in range(ROWS) for i in range(COLS)]
    assert shape == coded.SHAPE[::-1 if program == "gpt2" else 1]
    assert coded.hashed(values) == HASHES[kind]
    assert ckpt("check", folder).out.count(f"belongs to {name}") >= 1


@pytest.mark.parametrize("form", ("nf4", "int8"))
@pytest.mark.parametrize("kind, program", (("fp8", "moe"), ("int8", "llama")))
def test_values_are_quantised_as_others(kind, program, form, place):
    _, folder = held(place, program, kind)
    plain = place.folder / "plain"
    c = {"model": {"import": str(folder), "seq": 16}}
    place.good(1, {**c, "run.steps": 0, "run.export": str(plain)})
    runs = [place.good(2, {**c, **LORA, "model.import": str(x), "model.base_dtype": form})
            for x in (folder, plain)]
    assert runs[0].numbers == runs[1].numbers


@pytest.mark.sanitized
@pytest.mark.parametrize("kind, program, form, change, words", (
    ("nf4 of plain scales", "llama", "nf4", {}, "blocks of 64"),
    ("nf4", "gpt2", "nf4", {}, "not by groups of this run"),
    ("fp8", "llama", None, {".weight_scale_inv": ("F32", (1, 2), bytes(8))}, "of its rows"),
    ("fp8", "llama", None, {".weight_scale_inv": None}, "are missing that belong"),
    ("fp8", "llama", "int8", {".weight": ("F8_E4M3", (ROWS, COLS), b"\x7f" * ROWS * COLS)},
     "not finite"),
    ("int8", "llama", None, {".weight_format": ("U8", (), b"\2")}, "row after row"),
    ("int8", "llama", None, {".SCB": None}, "are missing that belong"),
    ("mxfp4", "llama", None, {".weight_blocks": None}, "is missing"),
    ("mxfp4", "llama", None, {".weight_scales": ("U8", (ROWS,), bytes(ROWS - 1) + b"\xff")},
     "not finite"),
    ("mxfp4", "llama", None, {".weight_scales": ("U8", (2,), bytes(2))}, "of another shape")))
def test_what_is_not_read_is_refused_by_name(kind, program, form, change, words, place):
    name = HOLDERS[program][0]
    change = {name.removesuffix(".weight") + k: t for k, t in change.items()}
    _, folder = held(place, program, kind, change)
    r = place.launch(1, {**LORA, "model": {"import": str(folder), "seq": 16,
                                           "base_dtype": form}})
    run.refused(r, name, words)


# ---- experts of gpt-oss ----

E2M1 = (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)


def mxfp4(rng, name, shape):
    """Of experts [n, inputs, outputs]: what is published, by output, and the values."""
    n, w, f = shape
    codes = [rng.randrange(16) for _ in range(n * f * w)]
    scales = [rng.randrange(118, 124) for _ in range(n * f * w // 32)]
    values = [(-1.0) ** (c // 8) * E2M1[c % 8] * 2.0 ** (scales[i // 32] - 127)
              for i, c in enumerate(codes)]
    return {f"{name}_blocks": ("U8", (n, f, w // 32, 16), bytes(
                a | b << 4 for a, b in zip(codes[::2], codes[1::2]))),
            f"{name}_scales": ("U8", (n, f, w // 32), bytes(scales))}, {
        name: ("F32", shape, coded.floats([values[(e * f + o) * w + i] for e in range(n)
                                           for i in range(w) for o in range(f)]))}


@pytest.mark.parametrize("form, ranks", ((None, 2), ("nf4", 1), ("int8", 3)))
def test_experts_in_mxfp4_are_their_values(form, ranks, place):
    place.use(run.built("models/moe"))
    # rows of whole blocks
    shapes, config = hf.model_of("gpt_oss", {44: 64, 88: 128})
    packed = families.tensors(shapes, "gpt_oss")
    plain = dict(packed)
    for name in [k for k, s in shapes.items() if len(s) == 3]:
        blocks, values = mxfp4(random.Random(name), name, shapes[name])
        del packed[name]
        packed, plain = {**packed, **blocks}, {**plain, **values}
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    folders = [hf.write(place.folder / name, tensors, {**config, **more})
               for name, tensors, more in (("packed", packed, quantised), ("plain", plain, {}))]
    runs = [place.good(ranks, {"model": {"import": str(x), "seq": 16, "base_dtype": form},
                               "lora": {"rank": 4, "targets": "*self_attn*"},
                               "zero_optimization.stage": 3, "train_batch_size": 6})
            for x in folders]
    assert runs[0].numbers == runs[1].numbers
