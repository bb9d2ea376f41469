# SPDX-License-Identifier: Apache-2.0
"""usage: gpt.py eager|compile|deepspeed|fsdp2 LAYERS HEADS WIDTH SEQ VOCAB BATCH STEPS
           THREADS [bf16] [cuda]

Trains the GPT of models/gpt2.c with PyTorch, or under torchrun on N ranks with DeepSpeed's
ZeRO-3 or PyTorch's fully_shard: the same shapes, AdamW, gradient clipping, random tokens,
fp32.  bf16: autocast to it (eager, compile).  cuda: on a GPU; with deepspeed and fsdp2 in
bf16 with fp32 states, parameters and states on the host, activations recomputed.  Rank 0
prints a JSON object: seconds of each step, number of parameters, GiB of the GPU, and
versions.
"""
import contextlib
import json
import math
import os
import re
import sys
import time

import torch
import torch.distributed as dist
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
    def __init__(self, layers, heads, width, seq, vocab, recompute):
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


def step_of(model, parameters, options, autocast=False):
    """A step as a function of inputs and targets, that returns the loss."""
    adam = torch.optim.AdamW(parameters, lr=3e-4, **options)

    def step(x, y):
        with torch.autocast(x.device.type, torch.bfloat16, autocast):
            loss = model(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss
    return step


def with_torch(model, batch, flags):
    version = [int(n) for n in re.findall(r"\d+", torch.__version__)[:2]]
    called = torch.compile(model) if "compile" in flags and "cuda" not in flags else model
    if called is model and "compile" in flags:  # whole, 48 layers take minutes
        for block in model.blocks:
            block.compile()
    return step_of(called, list(model.parameters()),
                   {"fused": True} if version >= [2, 4] else {},
                   "bf16" in flags), torch.__version__


def with_deepspeed(model, batch, flags):
    import deepspeed
    cuda = "cuda" in flags
    host = {"device": "cpu", "pin_memory": cuda}
    zero = {"stage": 3, "offload_optimizer": host}
    if cuda:
        zero["offload_param"] = host
        model = model.bfloat16()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config={"train_micro_batch_size_per_gpu": batch,
                "gradient_clipping": 1.0, "bf16": {"enabled": cuda},
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
                "zero_optimization": zero})

    def step(x, y):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss
    return step, deepspeed.__version__


def with_fsdp2(model, batch, flags):
    from torch.distributed.fsdp import (CPUOffloadPolicy, MixedPrecisionPolicy,
                                        fully_shard)
    more = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy()} if "cuda" in flags else {}
    for block in model.blocks:
        fully_shard(block, **more)
    fully_shard(model, **more)
    return step_of(model, list(model.parameters()), {"fused": True}), torch.__version__


MAKE = {"eager": with_torch, "compile": with_torch, "deepspeed": with_deepspeed,
        "fsdp2": with_fsdp2}


def main():
    kind, flags = sys.argv[1], sys.argv[1:2] + sys.argv[10:]
    *shape, batch, steps, threads = map(int, sys.argv[2:10])
    sharded, cuda = kind in ("deepspeed", "fsdp2"), "cuda" in flags
    device = "cpu"
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    if cuda:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if sharded:  # of what is on the host, norms are gathered there
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    with torch.device(device) if cuda else contextlib.nullcontext():
        model = GPT(*shape, recompute=sharded and cuda)
    if sharded:
        model = model.to("cpu")
    parameters = sum(p.numel() for p in model.parameters())
    step, version = MAKE[kind](model, batch, flags)
    seconds = []
    for _ in range(steps):
        x = torch.randint(shape[4], (batch, shape[3] + 1), device=device)
        if sharded:
            dist.barrier()
        begin = time.perf_counter()
        loss = step(x[:, :-1], x[:, 1:])
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    if not sharded or dist.get_rank() == 0:
        print("\n" + json.dumps({"seconds": seconds, "version": version,
                                 "torch": torch.__version__,
                                 "parameters": parameters,
                                 "gpu_gib": torch.cuda.max_memory_allocated() / 2**30
                                 if cuda else 0,
                                 "python": sys.version.split()[0],
                                 "loss": float(loss.detach())}))
    if sharded:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
