# SPDX-License-Identifier: Apache-2.0
"""Folders whose matrices are in 4 bits, as transformers saves those of bitsandbytes:
they are taken as they are."""
import json
import struct

import run
from run import ckpt, hf

GROUP, BLOCK = 64 * 256, 64
GROUP_BYTES = GROUP // 2 + 256 + 4 + 4
# Two matrices have two groups, and no multiple of 64 divides any.
CONFIG = hf.llama_config("llama", hidden_size=150, intermediate_size=131,
                         num_hidden_layers=2)
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
VALUES = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
          -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
          0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
          0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
          0.7229568362236023, 1.0)
LORA = {"lora": {"rank": 4, "targets": "*"}, "train_batch_size": 6}
NF4 = {"model.base_dtype": "nf4"}


def dynamic():
    """The values of all codes of a scale, from those of bitsandbytes."""
    return (run.ROOT / "tests/codelets/flat/nf4_reference.bin").read_bytes()[:4 * 256]


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
        f"{name}.quant_map": ("F32", (16,), struct.pack("<16f", *VALUES)),
        f"{name}.nested_absmax": ("F32", (len(most) // 4,), most),
        f"{name}.nested_quant_map": ("F32", (256,), dynamic()),
        f"{name}.quant_state.bitsandbytes__nf4": ("U8", (len(state),), state)}


def make(place):
    """A run from weights, and a folder with what it has in 4 bits."""
    place.use(run.built("models/llama"))
    shapes = hf.llama_shapes(CONFIG)
    weights = hf.random_tensors(shapes, "F32")
    c = {**LORA, **NF4, "model": {"seq": 16}, "run.save": True}
    plain = hf.write(place.folder / "weights", weights, CONFIG)
    r = place.good(1, {**c, "model.import": str(plain)})
    tensors, arrays = {}, run.arrays(r.output, 3)
    for layer in range(2):
        data = arrays[f"layers.{layer}.base/nf4"]
        for m in MATRICES:
            name = f"model.layers.{layer}.{m}.weight"
            size = -(-shapes[name][0] * shapes[name][1] // GROUP) * GROUP_BYTES
            tensors |= in_4_bits(name, shapes[name], data[:size])
            data = data[size:]
        assert not data
    return c, r, {**{k: t for k, t in weights.items() if k not in tensors}, **tensors}


def folder(place, tensors, name="nf4"):
    return hf.write(place.folder / name, tensors, {
        **CONFIG, "quantization_config": {
            "quant_method": "bitsandbytes", "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}}, files=2)


def test_its_bytes_are_taken(place, nvme):
    c, r, tensors = make(place)
    c["model.import"] = str(folder(place, tensors))
    again = place.good(1, c)
    assert again.numbers == r.numbers and again.files == r.files
    disk = place.good(1, {**c, **run.offload(3, "none", "nvme", nvme),
                          "run.export": str(place.folder / "merged")})
    assert disk.numbers == r.numbers and disk.files == r.files
    told = ckpt("check", c["model.import"]).out
    assert "belongs to model.layers.0.self_attn.k_proj.weight, in 4 bits" in told
    assert "can be imported" in told
    text = (place.folder / "merged" / "config.json").read_text()
    assert "use_cache" in text and "quantization_config" not in text
    many = [place.good(2, {**c, "zero_optimization.stage": 3, "model.import": str(x)})
            for x in (place.folder / "weights", place.folder / "nf4")]
    assert many[0].numbers == many[1].numbers


def test_what_it_cannot_be_is_refused_by_name(place):
    c, _, tensors = make(place)
    name = "model.layers.1.mlp.up_proj.weight"
    state = f"{name}.quant_state.bitsandbytes__nf4"

    def refused(*words, config=c, **changes):
        changed = {**tensors, **changes}
        f = folder(place, {k: t for k, t in changed.items() if t}, f"x{len(words[-1])}"
                   f"{words[-1][:3].strip()}")
        run.refused(place.launch(1, {**config, "model.import": str(f)}), name, *words)

    bits = {**c, "model.base_dtype": None}
    refused("is in 4 bits there and not in this run", config=bits)
    refused("are missing that belong", **{f"{name}.nested_absmax": None})
    refused("is missing", **{name: None})
    refused("of another shape", **{f"{name}.absmax": ("U8", (3,), b"abc")})
    refused("mean other values", **{f"{name}.quant_map": (
        "F32", (16,), struct.pack("<16f", *VALUES[::-1]))})
    text = tensors[state][2].replace(b'"blocksize": 64', b'"blocksize": 32')
    refused("but not of nf4 in blocks of 64", **{state: ("U8", (len(text),), text)})
    parts = {k: None for k in tensors if k.startswith(f"{name}.")}
    whole = hf.random_tensors({name: hf.llama_shapes(CONFIG)[name]}, "F32")
    refused("is not in 4 bits there, as others are", **parts, **whole)


def test_the_type_that_its_bytes_lie_as_does_not_matter(place):
    """bnb_4bit_quant_storage."""
    c, r, tensors = make(place)
    stored = {k: ("BF16", (len(t[2]) // 2, 1), t[2])
              if k + ".absmax" in tensors and len(t[2]) % 2 == 0 else t
              for k, t in tensors.items()}
    assert stored != tensors
    again = place.good(1, {**c, "model.import": str(folder(place, stored, "bf16"))})
    assert again.numbers == r.numbers
