#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes nf4_reference.bin: what bitsandbytes makes of a matrix in 4 bits, and back, as
struct reference of test_quant.c has it.  Needs torch and bitsandbytes; it was 0.50.2 with
torch 2.15.0+cu132."""
import pathlib

import torch
from bitsandbytes import functional

N = 7 * 64 + 14  # the last block is not whole


def weight(i):
    """As nf4_weight in test_quant.c: blocks of different magnitude."""
    u = (i * 2654435761 + 12345) % 2**32 >> 8
    return (u / 2**24 - 0.5) / (1 + i // 64)


def raw(t):
    return bytes(t.reshape(-1).contiguous().view(torch.uint8).tolist())


def main():
    w = torch.tensor([weight(i) for i in range(N)], dtype=torch.float32)
    q, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4",
                                        compress_statistics=True)
    out = raw(state.state2.code) + raw(state.state2.absmax[:1]) + raw(state.offset.reshape(1))
    for state.dtype in (torch.float32, torch.bfloat16, torch.float16):
        out += raw(functional.dequantize_4bit(q, state))
    out += raw(state.absmax) + raw(q) + b"\0"
    pathlib.Path(__file__).with_name("nf4_reference.bin").write_bytes(out)


main()
