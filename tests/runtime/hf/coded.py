# SPDX-License-Identifier: Apache-2.0
"""A matrix in few bits, as others publish such, of each kind that is read.

usage: coded.py
Prints a hash of the values that torch, transformers and bitsandbytes make of each as
JSON: coded.json."""
import hashlib
import json
import random
import struct

SHAPE = ROWS, COLS = 128, 32
N = ROWS * COLS
BLOCK = [48, 20]  # of FP8: which divides neither
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
       -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
       0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
       0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)
FP4 = (0, 0.0052083333, 0.6666667, 1, 0.33333334, 0.5, 0.16666667, 0.25)
KINDS = ("nf4", "nf4 of plain scales", "fp4", "int8", "fp8", "fp8 of rows",
         "fp8 of one scale", "mxfp4")


def floats(values):
    return struct.pack(f"<{len(values)}f", *values)


def bits4(rng, name, block, values, nested, form):
    blocks = -(-N // block)
    state = {"quant_type": form, "blocksize": block, "dtype": "float32",
             "shape": list(SHAPE)}
    parts = {"quant_map": ("F32", (16,), floats(values)),
             "absmax": ("F32", (blocks,), floats([rng.random() for _ in range(blocks)]))}
    if nested:
        state |= {"nested_blocksize": nested, "nested_dtype": "float32",
                  "nested_offset": rng.random()}
        most = -(-blocks // nested)
        parts |= {"absmax": ("U8", (blocks,), rng.randbytes(blocks)),
                  "nested_absmax": ("F32", (most,), floats([rng.random()] * most)),
                  "nested_quant_map": ("F32", (256,), floats(
                      sorted(rng.uniform(-1, 1) for _ in range(256))))}
    text = json.dumps(state).encode()
    parts[f"quant_state.bitsandbytes__{form}"] = ("U8", (len(text),), text)
    return {name: ("U8", (N // 2, 1), rng.randbytes(N // 2)),
            **{f"{name}.{k}": t for k, t in parts.items()}}


def tensors(kind, name):
    """{name: (type, shape, bytes)} of a matrix NAME."""
    rng = random.Random(kind)
    start = name.removesuffix(".weight")
    if kind in ("nf4", "nf4 of plain scales"):
        return bits4(rng, name, 64, NF4, 256 if kind == "nf4" else 0, "nf4")
    if kind == "fp4":
        return bits4(rng, name, 128, FP4 + tuple(-x for x in FP4), 32, "fp4")
    if kind == "int8":
        return {name: ("I8", SHAPE, rng.randbytes(N)),
                f"{start}.SCB": ("F32", (ROWS,), floats([rng.random() for _ in range(ROWS)])),
                f"{start}.weight_format": ("U8", (), b"\0")}
    if kind == "mxfp4":
        return {f"{name}_blocks": ("U8", (ROWS, COLS // 32, 16), rng.randbytes(N // 2)),
                f"{name}_scales": ("U8", (ROWS, COLS // 32), bytes(
                    rng.randrange(100, 140) for _ in range(N // 32)))}
    codes = bytes(x for x in rng.randbytes(2 * N) if x & 127 < 127)[:N]
    scale = {"fp8": ("weight_scale_inv", "F32", [-(-n // b) for n, b in zip(SHAPE, BLOCK)]),
             "fp8 of rows": ("weight_scale", "BF16", (ROWS, 1)),
             "fp8 of one scale": ("weight_scale", "F32", ())}[kind]
    n = scale[2][0] * scale[2][1] if scale[2] else 1
    data = floats([rng.random() for _ in range(n)])
    if scale[1] == "BF16":
        data = b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))
    return {name: ("F8_E4M3", SHAPE, codes), f"{start}.{scale[0]}": (*scale[1:], data),
            f"{start}.input_scale": ("F32", (), floats([2]))}


def hashed(values):
    """Of floats; zero has one sign."""
    return hashlib.sha256(floats([x + 0.0 for x in values])).hexdigest()[:32]


def theirs(kind, tensor):
    import torch  # pylint: disable=import-outside-toplevel
    from bitsandbytes import functional  # pylint: disable=import-outside-toplevel
    from transformers.integrations import mxfp4  # pylint: disable=import-outside-toplevel
    types = {"U8": torch.uint8, "I8": torch.int8, "F32": torch.float32,
             "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
    t = {k: torch.frombuffer(bytearray(data), dtype=types[form]).reshape(shape)
         for k, (form, shape, data) in tensor.items()}
    if kind == "mxfp4":
        value = mxfp4.convert_moe_packed_tensors(
            t["x.weight_blocks"][None], t["x.weight_scales"][None],
            dtype=torch.float32)[0].T
    elif kind == "int8":
        value = t["x.weight"] * t["x.SCB"].view(-1, 1) * 7.874015718698502e-3
    elif "fp8" in kind:
        scale = next(v for k, v in t.items() if "weight_scale" in k).float()
        for dim, size in enumerate(BLOCK if kind == "fp8" else ()):
            scale = scale.repeat_interleave(size, dim)
        value = t["x.weight"].float() * (scale[:ROWS, :COLS] if scale.dim() else scale)
    else:
        state = {k.removeprefix("x.weight."): v for k, v in t.items() if k != "x.weight"}
        state = functional.QuantState.from_dict(state, torch.device("cpu"))
        state.shape = torch.Size([N])  # its kernel for a CPU takes no rows of half a block
        value = functional.dequantize_4bit(t["x.weight"], state)
    return hashed(value.float().reshape(-1).tolist())


if __name__ == "__main__":
    print(json.dumps({k: theirs(k, tensors(k, "x.weight")) for k in KINDS}, indent=1))
