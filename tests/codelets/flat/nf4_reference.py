#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes nf4_reference.h: what bitsandbytes makes of a matrix in 4 bits, and back.
Needs torch and bitsandbytes; the header says which versions."""
import pathlib

import bitsandbytes
import torch
from bitsandbytes import functional

N = 7 * 64 + 14  # the last block is not whole


def weight(i):
    """As nf4_weight in test_nf4.c: blocks of different magnitude."""
    u = (i * 2654435761 + 12345) % 2**32 >> 8
    return (u / 2**24 - 0.5) / (1 + i // 64)


def rows(values, text, per):
    lines = [", ".join(map(text, values[i:i + per])) for i in range(0, len(values), per)]
    return ",\n    ".join(lines)


def bits(t):
    kind = torch.int32 if t.dtype == torch.float32 else torch.int16
    return [v % 2**(8 * t.element_size()) for v in t.view(kind).tolist()]


def main():
    w = torch.tensor([weight(i) for i in range(N)], dtype=torch.float32)
    q, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4",
                                        compress_statistics=True)
    out = {}
    for t in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = t
        out[t] = bits(functional.dequantize_4bit(q, state).reshape(-1))
    code = state.state2.code
    text = f"""/* SPDX-License-Identifier: Apache-2.0 */
/* Written by nf4_reference.py with bitsandbytes {bitsandbytes.__version__} and torch
 * {torch.__version__}. */
#pragma once

#include <stdint.h>

enum {{ REFERENCE_N = {N} }};

static const uint8_t reference_code[] = {{
    {rows(q.reshape(-1).tolist(), "0x{:02x}".format, 12)}}};
static const uint8_t reference_scale[] = {{
    {rows(state.absmax.tolist(), "0x{:02x}".format, 12)}}};
/* Bits of fp32. */
static const uint32_t reference_most = 0x{bits(state.state2.absmax)[0]:08x};
static const uint32_t reference_mean = 0x{bits(state.offset.reshape(1))[0]:08x};
/* All values of a scale's code. */
static const uint32_t reference_dynamic[256] = {{
    {rows(bits(code), "0x{:08x}".format, 6)}}};
static const uint32_t reference_fp32[] = {{
    {rows(out[torch.float32], "0x{:08x}".format, 6)}}};
static const uint16_t reference_bf16[] = {{
    {rows(out[torch.bfloat16], "0x{:04x}".format, 8)}}};
static const uint16_t reference_fp16[] = {{
    {rows(out[torch.float16], "0x{:04x}".format, 8)}}};
"""
    pathlib.Path(__file__).with_name("nf4_reference.h").write_text(text)


main()
