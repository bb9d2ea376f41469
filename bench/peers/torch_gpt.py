# SPDX-License-Identifier: Apache-2.0
"""usage: torch_gpt.py LAYERS HEADS WIDTH SEQ VOCAB BATCH STEPS THREADS
           eager|compile fp32|bf16

Trains the GPT of models/gpt2.c with PyTorch: the same shapes, AdamW, gradient clipping,
fp32 or autocast to bf16, random tokens.  Prints a JSON object: seconds of each step, and versions.
"""
import json
import math
import re
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width, heads, seq):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        mask = torch.ones(seq, seq, dtype=torch.bool).tril()
        self.register_buffer("mask", mask)

    def attention(self, x):
        n, t, c = x.shape
        q, k, v = (y.view(n, t, self.heads, c // self.heads).transpose(1, 2)
                   for y in self.qkv(x).split(c, 2))
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            a = q @ k.transpose(2, 3) / math.sqrt(c // self.heads)
            y = a.masked_fill(~self.mask[:t, :t], -math.inf).softmax(3) @ v
        return self.proj(y.transpose(1, 2).reshape(n, t, c))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers, heads, width, seq, vocab, recompute=False):
        super().__init__()
        self.recompute = recompute  # a block's activations in its backward
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.randn(seq, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, seq)
                                    for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x, y):
        h = self.tokens(x) + self.positions[:x.shape[1]]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute \
                else block(h)
        logits = self.norm(h) @ self.tokens.weight.t()
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def main():
    layers, heads, width, seq, vocab, batch, steps, threads = map(
        int, sys.argv[1:9])
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = GPT(layers, heads, width, seq, vocab)
    step_of = torch.compile(model) if "compile" in sys.argv[9:] else model
    version = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    kind = {"fused": True} if version >= (2, 4) else {}
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4, **kind)
    seconds = []
    for _ in range(steps):
        x = torch.randint(vocab, (batch, seq + 1))
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, "bf16" in sys.argv[9:]):
            loss = step_of(x[:, :-1], x[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds, "torch": torch.__version__,
                      "python": sys.version.split()[0],
                      "loss": float(loss.detach())}))


if __name__ == "__main__":
    main()
