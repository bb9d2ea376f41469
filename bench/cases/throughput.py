# SPDX-License-Identifier: Apache-2.0
"""Training of one rank against the rate of its bare matrix products, and ZeRO-3 with
offload against stage 0.  A round's figure of a run is the median of its steps; ratios
are taken within a round."""
import os

from harness import GPT, OFFLOAD, gpt_config

ABOUT = "training on one rank: against bare matrix products, offload against stage 0"

MICRO = 4
CASES = ((256, 1), (256, 4), (50304, 1))  # vocabulary, micro-batches a step


def gemm(b, vocab, accum):
    """GFLOP/s of the products of a step's tasks, and nothing else."""
    threads = len(os.sched_getaffinity(0))
    # A micro-batch is cut until every worker has a task.
    rows = MICRO * GPT["seq"] // max(1, threads // accum)
    out = b.call([b.program("bench/bench_gemm"), threads, GPT["layers"],
                  GPT["width"], rows, vocab, 2 if b.quick else 3])
    return float(out.split()[0])


def run(b):
    for vocab, accum in CASES:
        steps = max(5, (8 if b.quick else 14) // (1 if vocab == 256 else 2) // accum)
        name = f"vocabulary {vocab}, {MICRO * accum} samples"
        bare, plain, offload, tokens = [], [], [], []

        def stage_0():
            t = b.train(gpt_config(MICRO, accum, {"stage": 0}, steps,
                                   {"vocab": vocab}))
            plain.append(t.median("gflop_per_s"))
            tokens.append(t.median("tokens_per_s"))

        def stage_3():
            t = b.train(gpt_config(MICRO, accum, OFFLOAD, steps,
                                   {"vocab": vocab}))
            offload.append(t.median("gflop_per_s"))
        sides = [lambda: bare.append(gemm(b, vocab, accum)), stage_0, stage_3]
        # Every second round in the other order, so that a machine which slows
        # down or speeds up favours none.
        for i in range(2 if b.quick else 5):
            for side in sides[::-1] if i % 2 else sides:
                side()
        b.figure(f"bare products, {name}", bare, "GFLOP/s")
        b.figure(f"stage 0, {name}", tokens, "tokens/s")
        b.figure(f"stage 0 / bare products, {name}",
                 [x / y for x, y in zip(plain, bare)], "ratio", 0.9)
        b.figure(f"ZeRO-3 offload / stage 0, {name}",
                 [x / y for x, y in zip(offload, plain)], "ratio", 0.97)
