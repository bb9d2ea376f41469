# SPDX-License-Identifier: Apache-2.0
"""usage: adam.py single|foreach|fused|deepspeed THREADS SECONDS

AdamW of PyTorch, or DeepSpeed's for the CPU, on fp32 parameters, gradients and states
in pieces of 4 Mi elements, in all 32 Mi.  Prints a JSON object: millions of parameters
per second of each step in wall time and in CPU time of all threads, and the version.
"""
import json
import os
import sys
import time

KIND, THREADS, SECONDS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
os.environ["OMP_NUM_THREADS"] = str(THREADS)

import torch  # noqa: E402 (reads the variable above)

PIECE, PIECES = 1 << 22, 8
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}
TORCH = {"single": {"foreach": False}, "foreach": {"foreach": True},
         "fused": {"fused": True}}


def parameters():
    found = [torch.nn.Parameter(torch.randn(PIECE)) for _ in range(PIECES)]
    for p in found:
        p.grad = torch.randn(PIECE)
    return found


def optimizer():
    """And the version of what it is from."""
    if KIND in TORCH:
        return torch.optim.AdamW(parameters(), **OPTIONS, **TORCH[KIND]), \
            f"torch {torch.__version__}"
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return DeepSpeedCPUAdam(parameters(), adamw_mode=True, **OPTIONS), \
        f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}"


def main():
    torch.set_num_threads(THREADS)
    adam, version = optimizer()
    adam.step()  # makes the states
    wall_rates, cpu_rates, end = [], [], time.monotonic() + SECONDS
    while time.monotonic() < end or not wall_rates:
        cpu, wall = time.process_time(), time.monotonic()
        adam.step()
        wall, cpu = time.monotonic() - wall, (time.process_time() - cpu) / THREADS
        wall_rates.append(PIECE * PIECES / wall * 1e-6)
        cpu_rates.append(PIECE * PIECES / cpu * 1e-6)
    print("\n" + json.dumps({"wall": wall_rates, "cpu": cpu_rates, "version": version}))


if __name__ == "__main__":
    main()
