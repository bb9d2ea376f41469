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
        for _ in range(2 if b.quick else 5):
            bare.append(gemm(b, vocab, accum))
            runs = [b.train(gpt_config(MICRO, accum, zero, steps,
                                       {"vocab": vocab}))
                    for zero in ({"stage": 0}, OFFLOAD)]
            plain.append(runs[0].median("gflop_per_s"))
            tokens.append(runs[0].median("tokens_per_s"))
            offload.append(runs[1].median("gflop_per_s"))
        b.figure(f"bare products, {name}", bare, "GFLOP/s")
        b.figure(f"stage 0, {name}", tokens, "tokens/s")
        b.figure(f"stage 0 / bare products, {name}",
                 [x / y for x, y in zip(plain, bare)], "ratio", 0.9)
        b.figure(f"ZeRO-3 offload / stage 0, {name}",
                 [x / y for x, y in zip(offload, plain)], "ratio", 0.97)
