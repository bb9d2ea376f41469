# SPDX-License-Identifier: Apache-2.0
"""usage: nf4.py BEFORE AFTER NAME...

What bitsandbytes makes in 4 bits, and back in fp32, of the tensors NAME of a folder,
beside those of another.  Prints a JSON list: of each tensor the part of its blocks of
64 whose values differ by more than rounding, and the largest difference of a value
from theirs in steps of a scale's code."""
import json
import sys

from bitsandbytes import functional
from safetensors import torch as st


def main():
    before, after, *names = sys.argv[1:]
    was, now = (st.load_file(f"{x}/model.safetensors") for x in (before, after))
    told = []
    for name in names:
        q, state = functional.quantize_4bit(was[name], blocksize=64, quant_type="nf4",
                                            compress_statistics=True)
        want = functional.dequantize_4bit(q, state).reshape(-1)
        step = float(state.state2.absmax.max()) / 64
        error = (now[name].reshape(-1) - want).abs()
        n = error.numel() // 64 * 64
        far = (error > 2e-6 * want.abs())[:n].reshape(-1, 64).any(1)
        told.append([float(far.double().mean()), float(error.max()) / step])
    print("\n" + json.dumps(told))


main()
