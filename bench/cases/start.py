# SPDX-License-Identifier: Apache-2.0
"""From the command to the first step, without training."""
import os

from harness import gpt_config

ABOUT = "start of a large model: memory, initial weights"

MODELS = {"350M": {"layers": 24, "heads": 16, "width": 1024},
          "1.5B": {"layers": 48, "heads": 25, "width": 1600}}


def parameters(m, vocab, seq):
    c = m["width"]
    return m["layers"] * (12 * c * c + 13 * c) + (vocab + seq + 2) * c


def run(b):
    cores = len(os.sched_getaffinity(0))
    limits = b.call_json([b.program("bench/bench_touch"), cores, 1024,
                          3 if b.quick else 7])
    fill = b.figure("filling new memory with a constant, all cores",
                    [r["constant"] for r in limits], "GB/s")
    b.figure("making the numbers in the cache, all cores",
             [r["in_cache"] for r in limits], "GB/s")
    reach = b.figure("filling new memory with the numbers, all cores",
                     [r["normal"] for r in limits], "GB/s")
    for name, shape in MODELS.items():
        model = {**shape, "seq": 1024, "vocab": 50257}
        # Only the weights are touched; states are zero pages until step 1.
        config = gpt_config(1, steps=0, model=model,
                            memory_limit_bytes=10 ** 13)
        starts = [b.train(config).last("start")
                  for _ in range(2 if b.quick else 4)]
        gb = parameters(shape, 50257, 1024) * 4e-9
        b.figure(f"initial weights, {name} fp32",
                 [gb / s["weights_s"] for s in starts], "GB/s",
                 note=f"{gb:.1f} GB")
        b.figure(f"initial weights, {name} / filling with the numbers",
                 [gb / s["weights_s"] / reach for s in starts], "ratio", 0.8)
        b.figure(f"initial weights, {name} / filling with a constant",
                 [gb / s["weights_s"] / fill for s in starts], "ratio")
        b.figure(f"memory and StarPU, {name}", [s["open_s"] for s in starts],
                 "s", better="less")
