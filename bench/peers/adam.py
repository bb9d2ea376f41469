# SPDX-License-Identifier: Apache-2.0
"""usage: adam.py single|foreach|fused|deepspeed fp32|mixed THREADS SECONDS

AdamW of PyTorch, or DeepSpeed's for the CPU, on fp32 parameters, gradients and states
in tensors of 4 Mi elements, in all 32 Mi.  mixed: all that a step of parameters and
gradients in bf16 does after its backward: gradients to fp32, clipping by their norm, the
update of the fp32 parameters, their copy to bf16.  Prints a JSON object: millions of
parameters per second of each step in wall time and in CPU time of all threads, and the
version.
"""
import json
import os
import sys
import time

KIND, JOB = sys.argv[1:3]
THREADS, SECONDS = int(sys.argv[3]), float(sys.argv[4])
os.environ["OMP_NUM_THREADS"] = str(THREADS)

import torch  # noqa: E402 (reads the variable above)

SIZE, TENSORS = 1 << 22, 8
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}
TORCH = {"single": {"foreach": False}, "foreach": {"foreach": True},
         "fused": {"fused": True}}


def parameters():
    found = [torch.nn.Parameter(torch.randn(SIZE)) for _ in range(TENSORS)]
    for p in found:
        p.grad = torch.randn(SIZE)
    return found


def optimizer(params):
    """And the version of what it is from."""
    if KIND in TORCH:
        return torch.optim.AdamW(params, **OPTIONS, **TORCH[KIND]), \
            f"torch {torch.__version__}"
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return DeepSpeedCPUAdam(params, adamw_mode=True, **OPTIONS), \
        f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}"


def mixed(adam, params):
    """A step as a function."""
    half = [p.detach().bfloat16() for p in params]
    grads = [p.grad.bfloat16() for p in params]

    def step():
        for p, g in zip(params, grads):
            p.grad.copy_(g)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adam.step()
        for p, h in zip(params, half):
            h.copy_(p.detach())
    return step


def main():
    torch.set_num_threads(THREADS)
    params = parameters()
    adam, version = optimizer(params)
    step = mixed(adam, params) if JOB == "mixed" else adam.step
    step()  # makes the states
    wall_rates, cpu_rates, end = [], [], time.monotonic() + SECONDS
    while time.monotonic() < end or not wall_rates:
        cpu, wall = time.process_time(), time.monotonic()
        step()
        wall, cpu = time.monotonic() - wall, (time.process_time() - cpu) / THREADS
        wall_rates.append(SIZE * TENSORS / wall * 1e-6)
        cpu_rates.append(SIZE * TENSORS / cpu * 1e-6)
    print("\n" + json.dumps({"wall": wall_rates, "cpu": cpu_rates, "version": version}))


if __name__ == "__main__":
    main()
