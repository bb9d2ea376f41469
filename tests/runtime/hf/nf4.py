# SPDX-License-Identifier: Apache-2.0
"""usage: nf4.py compare BEFORE AFTER NAME...
          nf4.py write BEFORE OUT NAME...
          nf4.py same OUT AFTER NAME...

What bitsandbytes makes in 4 bits of the tensors NAME of a folder, and back in fp32.
compare: beside those of another folder.  Prints a JSON list: of each tensor the part
of its blocks of 64 whose values differ by more than rounding, and the largest
difference of a value from theirs in steps of a scale's code.
write: the folder with these tensors in 4 bits, as transformers saves them.
same: whether AFTER has the values of such a folder; a JSON list of the names of which
it has not."""
import json
import pathlib
import shutil
import sys

import torch
from bitsandbytes import functional
from safetensors import torch as st


def quantise(w):
    return functional.quantize_4bit(w, blocksize=64, quant_type="nf4",
                                    compress_statistics=True)


def tensors(folder):
    return st.load_file(f"{folder}/model.safetensors")


def compare(before, after, names):
    was, now = tensors(before), tensors(after)
    for name in names:
        q, state = quantise(was[name])
        want = functional.dequantize_4bit(q, state).reshape(-1)
        step = float(state.state2.absmax.max()) / 64
        error = (now[name].reshape(-1) - want).abs()
        n = error.numel() // 64 * 64
        far = (error > 2e-6 * want.abs())[:n].reshape(-1, 64).any(1)
        yield [float(far.double().mean()), float(error.max()) / step]


def write(before, out, names):
    pathlib.Path(out).mkdir()
    shutil.copy(f"{before}/config.json", out)
    all_of_them = tensors(before)
    for name in names:
        q, state = quantise(all_of_them[name])
        all_of_them[name] = q
        for key, t in state.as_dict(packed=True).items():
            all_of_them[f"{name}.{key}"] = t
    st.save_file(all_of_them, f"{out}/model.safetensors", metadata={"format": "pt"})
    return []


def same(out, after, names):
    packed, now = tensors(out), tensors(after)
    for name in names:
        parts = {k.removeprefix(f"{name}."): t for k, t in packed.items()
                 if k.startswith(f"{name}.")}
        state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        want = functional.dequantize_4bit(packed[name], state)
        if not torch.equal(want.float(), now[name]):
            yield name


what, a, b, *rest = sys.argv[1:]
print("\n" + json.dumps(list({"compare": compare, "write": write, "same": same}[what](
    a, b, rest))))
