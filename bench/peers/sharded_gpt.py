# SPDX-License-Identifier: Apache-2.0
"""usage: torchrun --nproc-per-node N sharded_gpt.py deepspeed|fsdp2
              LAYERS HEADS WIDTH SEQ VOCAB BATCH STEPS THREADS [cuda]

The GPT of torch_gpt.py on N ranks with DeepSpeed's ZeRO-3 or with PyTorch's
fully_shard.  Without a GPU in fp32; on GPUs in bf16 with fp32 states, parameters and
states on the host, activations recomputed.  Rank 0 prints a JSON object: seconds of
each step, versions.
"""
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch_gpt import GPT


def with_deepspeed(model, batch, cuda):
    import deepspeed
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
        engine.backward(engine(x, y))
        engine.step()
    return step, deepspeed.__version__


def with_fsdp2(model, batch, cuda):
    from torch.distributed.fsdp import (CPUOffloadPolicy, MixedPrecisionPolicy,
                                        fully_shard)
    more = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy()} if cuda else {}
    for block in model.blocks:
        fully_shard(block, **more)
    fully_shard(model, **more)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def step(x, y):
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
    return step, torch.__version__


def main():
    layers, heads, width, seq, vocab, batch, steps, threads = map(
        int, sys.argv[2:10])
    cuda = "cuda" in sys.argv[10:]
    device = "cpu"
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    if cuda:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    # Of what is on the host, norms are gathered there.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    model = GPT(layers, heads, width, seq, vocab, recompute=cuda)
    make = {"deepspeed": with_deepspeed, "fsdp2": with_fsdp2}[sys.argv[1]]
    step, version = make(model, batch, cuda)
    seconds = []
    for _ in range(steps):
        x = torch.randint(vocab, (batch, seq + 1), device=device)
        dist.barrier()
        begin = time.perf_counter()
        step(x[:, :-1], x[:, 1:])
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print("\n" + json.dumps({"seconds": seconds, "version": version,
                                 "torch": torch.__version__}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
