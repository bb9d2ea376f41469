# SPDX-License-Identifier: Apache-2.0
"""usage: torchrun --nproc-per-node N sharded_gpt.py deepspeed|fsdp2
              LAYERS HEADS WIDTH SEQ VOCAB BATCH STEPS THREADS

The GPT of torch_gpt.py on N ranks without a GPU, with DeepSpeed's ZeRO-3 or with
PyTorch's fully_shard.  Rank 0 prints a JSON object: seconds of each step, versions.
"""
import json
import sys
import time

import torch
import torch.distributed as dist
from torch_gpt import GPT


def with_deepspeed(model, batch):
    import deepspeed
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(),
        config={"train_micro_batch_size_per_gpu": batch,
                "gradient_clipping": 1.0,
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
                "zero_optimization": {"stage": 3,
                                      "offload_optimizer": {"device": "cpu"}}})

    def step(x, y):
        engine.backward(engine(x, y))
        engine.step()
    return step, deepspeed.__version__


def with_fsdp2(model, batch):
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(x, y):
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
    return step, torch.__version__


def main():
    layers, heads, width, seq, vocab, batch, steps, threads = map(
        int, sys.argv[2:10])
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    model = GPT(layers, heads, width, seq, vocab)
    make = {"deepspeed": with_deepspeed, "fsdp2": with_fsdp2}[sys.argv[1]]
    step, version = make(model, batch)
    seconds = []
    for _ in range(steps):
        x = torch.randint(vocab, (batch, seq + 1))
        dist.barrier()
        begin = time.perf_counter()
        step(x[:, :-1], x[:, 1:])
        seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print("\n" + json.dumps({"seconds": seconds, "version": version,
                                 "torch": torch.__version__}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
